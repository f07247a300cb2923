"""The digest that identifies a tensor's bytes everywhere: a hash tree over leaves of 2 MiB.

leaf   = BLAKE3-256 of one piece of at most 2 MiB, at offsets that are multiples of 2 MiB
digest = BLAKE3-256 in derive-key mode over u64le(nbytes) and the leaf digests, at every size

The two are different modes of BLAKE3, so a leaf digest never equals a digest. Bytes are raw,
contiguous and little-endian. Algorithms other than BLAKE3 have no leaves: they hash u64le(nbytes)
and the bytes. Their digests begin with the algorithm's name, so they never equal a BLAKE3 digest.

A root is one digest of many tensors: `checkpoint_root` and `weights_root`.

One thread pool serves the whole process. Work in the pool never waits for other work in the pool,
so it cannot deadlock however many callers there are.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Protocol, TypeVar

import xxhash
from blake3 import blake3

from tensor_dedup.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Fill = Callable[[memoryview, int], bytes | None]
_Out = TypeVar("_Out")
LEAF_BYTES = 2 << 20
CONTEXT = "tensor-dedup digest v1"
CHECKPOINT_CONTEXT = "tensor-dedup checkpoint digest v1"
WEIGHTS_CONTEXT = "tensor-dedup weights digest v1"
ALGORITHMS = ("blake3", "blake2b", "xxh3_128", "xxhash64")

_LEAF_DIGEST_BYTES = 32
_ROOT_JSON = json.JSONEncoder(separators=(",", ":"))
# A chunk of 8 leaves takes about 4 ms: long beside the cost of handing it to a thread (tens of
# microseconds), short enough that the tail of one tensor does not leave the other threads idle.
_MAX_CHUNK_LEAVES = 8
# Below this, hashing in the calling thread takes less than handing the work over (about 50 us).
_INLINE_BYTES = 128 << 10


def digest(data: "Buffer", algorithm: str = "blake3") -> str:
    """Return the digest of all of `data` as text; large data is hashed on the thread pool.

    `data` is any C-contiguous buffer that is not written to during the call. `algorithm` is one of
    the hashes of `TensorDedupConfig.hash_algorithm`. Any thread may call this function, including
    threads of the pool.

    Raises:
        ConfigError: The algorithm is unknown.
        TypeError: `data` is not a C-contiguous buffer.
    """
    _check(algorithm)
    if not _splits(memoryview(data).nbytes, algorithm) or _in_pool():
        with _bytes_of(data) as view:
            return _serial(view, algorithm)
    return submit(data, algorithm).result()


def submit(
    data: "Buffer",
    algorithm: str = "blake3",
    fill: Fill | None = None,
    leaves: list[bytes] | None = None,
) -> "Future[str]":
    """Start hashing `data` on the thread pool; the future's result is `digest(data, algorithm)`.

    If `fill` is given, `data` need not be filled yet: `fill(piece, offset)` writes the bytes at
    `offset` of `data` into `piece` just before they are hashed. With blake3, `fill` is called once
    for each leaf, from several threads at once and in any order. If it returns the leaf's 32-byte
    digest, the leaf is not hashed. With other algorithms, `fill` is called once for all of `data`.
    An error in `fill` is raised by this call or by the future.

    If the list `leaves` is given, the leaf digests are added to it in order, before the result is
    set. It stays empty in these cases:

    * The algorithm is not blake3.
    * `data` is a single leaf.
    * A thread of the pool calls this function.

    `data` is released before the result is set. If it is an mmap, it may be closed as soon as
    result() has returned. If a thread of the pool calls this function, `data` is hashed before the
    call returns, so the thread may wait for the result. The future cannot be cancelled. In a forked
    child, futures of the parent never complete.
    """
    _check(algorithm)
    if _in_pool() or memoryview(data).nbytes <= _INLINE_BYTES:
        return _done(data, algorithm, fill)
    return _Job(_Lying(_bytes_of(data)), algorithm, _POOL.executor(), fill, leaves).future


def hand(pool: ThreadPoolExecutor, work: Callable[[], _Out]) -> "Future[_Out]":
    """Run `work` on `pool` and return its future.

    If the pool takes no work, because the interpreter is exiting or no thread can be started,
    `work` runs in the calling thread.
    """
    done: Future[_Out] = Future()
    turn = threading.Lock()

    def run() -> None:
        if not turn.acquire(blocking=False) or not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            done.set_exception(error)

    try:
        # Who waits for it learns that a pool was shut down before it came to it.
        pool.submit(run).add_done_callback(lambda turn_: turn_.cancelled() and done.cancel())
    except RuntimeError:
        # Pools take nothing more then, and what goes on in the background goes on alone. Where it
        # was a thread too many, a thread may have begun with it already.
        run()
    return done


def stream(nbytes: int, fill: Fill, leaves: list[bytes] | None = None) -> "Future[str]":
    """Start the BLAKE3 digest of `nbytes` bytes that are never in memory as a whole.

    `fill(piece, offset)` writes the bytes at `offset` into the buffer `piece`, which is reused for
    other leaves. If the bytes are needed later, `fill` must also copy them elsewhere. Otherwise
    `fill`, `leaves` and the future work as for `submit`. A thread of the pool must not wait for the
    result.
    """
    return _Job(_Passing(nbytes), "blake3", _POOL.executor(), fill, leaves).future


def leaf_digests(data: "Buffer") -> list[bytes]:
    """Return the 32-byte leaf digests of `data`, in order, computed in the calling thread."""
    with _bytes_of(data) as view:
        return _leaves(view)


def on_pool(work: Callable[[], _Out]) -> "Future[_Out]":
    """Run `work` on the thread pool, as one task in one thread, and return its future.

    If a thread of the pool calls this function, `work` runs before it returns. `work` must not wait
    for other work of the pool.
    """
    if _in_pool():
        future: Future[_Out] = Future()
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            future.set_exception(error)
        return future
    return hand(_POOL.executor(), work)


def submit_leaves(data: "Buffer") -> "Future[list[bytes]]":
    """Start `leaf_digests(data)` on the thread pool, as one task in one thread.

    If a thread of the pool calls this function, the digests are computed before it returns.
    """
    return on_pool(lambda: leaf_digests(data))


def task_ranges(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, stop) into which `nbytes` bytes are divided for the thread pool.

    Each is one task. All begin at a multiple of LEAF_BYTES and have at most 16 MiB.
    """
    leaves = -(-nbytes // LEAF_BYTES)
    step = max(min(-(-leaves // _thread_count()), _MAX_CHUNK_LEAVES), 1) * LEAF_BYTES
    for start in range(0, nbytes, step):
        yield start, min(start + step, nbytes)


def combine(nbytes: int, leaves: Sequence[bytes]) -> str:
    """Return the digest of `nbytes` bytes, computed from their leaf digests.

    Raises:
        IntegrityError: The number of leaves does not match `nbytes`, or a leaf is not 32 bytes
            long.
    """
    if nbytes < 0 or len(leaves) != -(-nbytes // LEAF_BYTES):
        raise IntegrityError(
            f"{nbytes} bytes cannot have {len(leaves)} leaves; hash the bytes again",
            nbytes=nbytes,
            leaves=len(leaves),
        )
    if any(len(leaf) != _LEAF_DIGEST_BYTES for leaf in leaves):
        raise IntegrityError("a leaf digest is not 32 bytes; hash the bytes again", nbytes=nbytes)
    tree = blake3(nbytes.to_bytes(8, "little"), derive_key_context=CONTEXT)
    tree.update(b"".join(leaves))
    return tree.hexdigest()


def checkpoint_root(tensors: Iterable[Sequence[object]]) -> str:
    """Return the digest of a checkpoint: one digest of all of its tensors, in any order.

    Each tensor is a list of its name, its dtype (a safetensors name or GGUF type), its shape (a
    list) and the digest of its bytes. For a view in a torch.save file, these are the dtype and
    shape of the view and the digest of the tensor that contains it. Its first byte there, its
    stride in elements, and whether it must still be conjugated or negated, follow.

    The result is the BLAKE3-256, in derive-key mode, of the JSON text of the list of all tensors,
    without white space and in ASCII. The list is sorted by name (by code points), and tensors of
    one name by their JSON text.
    """
    return _root(CHECKPOINT_CONTEXT, tensors)


def weights_root(tensors: Iterable[Sequence[object]]) -> str:
    """Return the digest of a model's weights: one digest of all of its tensors, in any order.

    Each tensor is a list of its name in the model, its dtype, its shape (a list) and the digest of
    its bytes in memory order. The stride (a list, in elements) follows if the tensor is not
    contiguous. Otherwise the result is made as by `checkpoint_root`, with another context.
    """
    return _root(WEIGHTS_CONTEXT, tensors)


def _root(context: str, tensors: Iterable[Sequence[object]]) -> str:
    ordered = sorted(tensors, key=itemgetter(0))
    if len({each[0] for each in ordered}) < len(ordered):
        ordered.sort(key=lambda each: (each[0], _ROOT_JSON.encode(each)))
    text = _ROOT_JSON.encode(ordered)
    return blake3(text.encode("ascii"), derive_key_context=context).hexdigest()


def leaf_places(start: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the offset and size of each leaf of the `nbytes` bytes at offset `start`.

    The result is empty for a single leaf (`nbytes` of at most LEAF_BYTES).
    """
    if nbytes <= LEAF_BYTES:
        return []
    return [(start + at, min(LEAF_BYTES, nbytes - at)) for at in range(0, nbytes, LEAF_BYTES)]


def digests_by_place(
    start: int, nbytes: int, leaves: Sequence[bytes]
) -> dict[tuple[int, int], str]:
    """Return a dict from (offset, size) to digest, for a range of bytes and for each of its leaves.

    The range is the `nbytes` bytes at offset `start`, and `leaves` are its leaf digests. The dict
    does not hold these leaf digests. For each leaf, it holds what `digest` returns for the leaf's
    bytes. If the range is a single leaf, the dict has one entry.

    Raises:
        IntegrityError: The number of leaves does not match `nbytes`, or a leaf digest is not 32
            bytes long.
    """
    found = {(start, nbytes): combine(nbytes, leaves)}
    for place, leaf in zip(leaf_places(start, nbytes), leaves, strict=False):
        found[place] = combine(place[1], [leaf])
    return found


class StreamDigest:
    """The digest of bytes that arrive in pieces of any size. For one thread at a time.

    `nbytes` is the total size. It is optional for blake3. The other algorithms require it, because
    they hash the size first.

    Raises:
        ConfigError: The algorithm is unknown, or it needs `nbytes`.
    """

    def __init__(self, algorithm: str = "blake3", nbytes: int | None = None) -> None:
        _check(algorithm)
        self._algorithm = algorithm
        self._declared = nbytes
        self._seen = 0
        self._leaves: list[bytes] = []
        self._leaf = blake3()
        self._flat = None if algorithm == "blake3" else _flat(algorithm, nbytes)

    def update(self, data: "Buffer") -> None:
        """Add the bytes of `data`, any C-contiguous buffer; no reference to `data` is kept."""
        with _bytes_of(data) as view:
            if self._flat is not None:
                self._flat.update(view)
                self._seen += view.nbytes
            else:
                self._update_leaves(view)

    def _update_leaves(self, view: memoryview) -> None:
        start = 0
        while start < view.nbytes:
            room = LEAF_BYTES - self._seen % LEAF_BYTES
            with view[start : start + room] as piece:
                self._leaf.update(piece)
                start += piece.nbytes
                self._seen += piece.nbytes
            if self._seen % LEAF_BYTES == 0:
                self._leaves.append(self._leaf.digest())
                self._leaf = blake3()

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far as text; more bytes may be added afterwards.

        Raises:
            IntegrityError: `nbytes` was given, and another number of bytes was added.
        """
        if self._declared not in (None, self._seen):
            raise IntegrityError(
                f"{self._declared} bytes were announced, {self._seen} came; read the tensor again",
                announced=self._declared,
                came=self._seen,
            )
        if self._flat is not None:
            return f"{self._algorithm}:{self._flat.hexdigest()}"
        return combine(self._seen, self.leaves())

    def leaves(self) -> list[bytes]:
        """Return the leaf digests of all bytes so far. Call it for blake3 only."""
        return self._leaves + ([self._leaf.digest()] if self._seen % LEAF_BYTES else [])


class _Hasher(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Lying:
    """Bytes in the caller's memory."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.nbytes = view.nbytes

    def leaves(self, start: int, stop: int, fill: Fill | None) -> list[bytes]:
        with self._view[start:stop] as piece:
            return _leaves(piece, fill, start)

    def serial(self, algorithm: str, fill: Fill | None) -> str:
        return _serial(self._view, algorithm, fill)

    def release(self) -> None:
        self._view.release()


class _Passing:
    """Bytes that pass through a buffer of the thread that hashes them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def leaves(self, start: int, stop: int, fill: Fill | None) -> list[bytes]:
        found = []
        with memoryview(_POOL.buffer()) as buffer:
            for at in range(start, stop, LEAF_BYTES):
                with buffer[: min(LEAF_BYTES, stop - at)] as piece:
                    found += _leaves(piece, fill, at)
        return found

    def serial(self, algorithm: str, fill: Fill | None) -> str:
        assert algorithm == "blake3"
        return combine(self.nbytes, self.leaves(0, self.nbytes, fill))

    def release(self) -> None:
        pass


class _Job:
    """One digest on the pool. Chunks hash; whichever ends last combines and sets the future."""

    def __init__(
        self,
        data: _Lying | _Passing,
        algorithm: str,
        pool: ThreadPoolExecutor,
        fill: Fill | None,
        leaves: list[bytes] | None = None,
    ) -> None:
        self.future: Future[str] = Future()
        # Running from the start: a cancelled future would refuse the result that is on its way.
        self.future.set_running_or_notify_cancel()
        self._data = data
        self._fill = fill
        self._leaves = leaves
        self._lock = threading.Lock()
        self._chunks: list[Future[list[bytes]]] = []
        work: list[Callable[[], list[bytes]]]
        has_leaves = algorithm == "blake3" and data.nbytes > LEAF_BYTES
        if has_leaves and (leaves is not None or _splits(data.nbytes, algorithm)):
            work = [self._hasher(start, stop) for start, stop in task_ranges(data.nbytes)]
        else:
            work = [lambda: [data.serial(algorithm, fill).encode()]]
            has_leaves = False
        self._combine = has_leaves
        self._pending = len(work)
        self._chunks = [hand(pool, task) for task in work]
        for chunk in self._chunks:
            chunk.add_done_callback(self._ended)

    def _hasher(self, start: int, stop: int) -> Callable[[], list[bytes]]:
        def task() -> list[bytes]:
            return self._data.leaves(start, stop, self._fill)

        return task

    def _ended(self, _: "Future[list[bytes]]") -> None:
        with self._lock:
            self._pending -= 1
            if self._pending:
                return
        self._data.release()
        # Chunks lead back to this, and `fill` to memory that would wait for a collection.
        chunks, self._chunks, self._fill = self._chunks, [], None
        errors = [error for chunk in chunks if (error := chunk.exception()) is not None]
        if errors:
            self.future.set_exception(errors[0])
            return
        parts = [part for chunk in chunks for part in chunk.result()]
        if self._leaves is not None and self._combine:
            self._leaves += parts
        self.future.set_result(
            combine(self._data.nbytes, parts) if self._combine else parts[0].decode()
        )


class _Pool:
    """The process's threads, made when first needed and made again in a forked child."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        # After a fork only the forking thread lives: the parent's workers are gone and its lock
        # may be held by a thread that no longer exists.
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._mark = threading.local()

    def executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    _thread_count(), "tensor-dedup-digest", initializer=self._enter
                )
            return self._executor

    def _enter(self) -> None:
        self._mark.inside = True

    def inside(self) -> bool:
        return getattr(self._mark, "inside", False)

    def buffer(self) -> bytearray:
        """A leaf's memory of the calling thread's."""
        found: bytearray | None = getattr(self._mark, "buffer", None)
        if found is None:
            found = self._mark.buffer = bytearray(LEAF_BYTES)
        return found


def _thread_count() -> int:
    return len(os.sched_getaffinity(0))


def _in_pool() -> bool:
    return _POOL.inside()


def _done(data: "Buffer", algorithm: str, fill: Fill | None) -> "Future[str]":
    future: Future[str] = Future()
    with _bytes_of(data) as view:
        future.set_result(_serial(view, algorithm, fill))
    return future


def _check(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"no hash algorithm {algorithm!r}; use one of {', '.join(ALGORITHMS)}",
            algorithm=algorithm,
        )


def _bytes_of(data: "Buffer") -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise TypeError("only C-contiguous bytes have a digest; copy the tensor first")
    # memoryview.cast refuses empty shapes and the formats of ctypes ("<B"); this does not.
    return PickleBuffer(data).raw()


def _splits(nbytes: int, algorithm: str) -> bool:
    return algorithm == "blake3" and nbytes > LEAF_BYTES and _thread_count() > 1


def _leaves(view: memoryview, fill: Fill | None = None, offset: int = 0) -> list[bytes]:
    found = []
    known = None
    for start in range(0, view.nbytes, LEAF_BYTES):
        with view[start : start + LEAF_BYTES] as piece:
            if fill is not None:
                known = fill(piece, offset + start)
            if known and len(known) != _LEAF_DIGEST_BYTES:
                raise IntegrityError(
                    f"{len(known)} bytes are no leaf digest; hash the bytes again",
                    nbytes=len(piece),
                )
            found.append(known or blake3(piece).digest())
    return found


def _serial(view: memoryview, algorithm: str, fill: Fill | None = None) -> str:
    if algorithm == "blake3":
        return combine(view.nbytes, _leaves(view, fill))
    if fill is not None:
        fill(view, 0)
    hasher = _flat(algorithm, view.nbytes)
    hasher.update(view)
    return f"{algorithm}:{hasher.hexdigest()}"


def _flat(algorithm: str, nbytes: int | None) -> _Hasher:
    if nbytes is None:
        raise ConfigError(
            f"{algorithm} hashes the size first: say nbytes, or use blake3", algorithm=algorithm
        )
    make: dict[str, Callable[[], _Hasher]] = {
        "blake2b": lambda: hashlib.blake2b(digest_size=32),
        "xxh3_128": xxhash.xxh3_128,
        "xxhash64": xxhash.xxh64,
    }
    hasher = make[algorithm]()
    hasher.update(nbytes.to_bytes(8, "little"))
    return hasher


_POOL = _Pool()
