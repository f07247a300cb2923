"""Parallel hashing of file ranges and memory. File ranges can be copied at the same time.

Each range is read once, through a buffer of the thread that hashes it. With a single worker,
everything happens in the calling thread.

Besides the digest (BLAKE3, computed from leaves of 2 MiB) there is the change hash, a fast 128-bit
hash that only tells whether bytes have changed. Its seed is random in each process, and it is never
written to disk. The change hash of bytes with more than one leaf is computed from the change hashes
of the leaves.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from xxhash import xxh3_128_digest

from tensor_dedup.digest import LEAF_BYTES, combine, hand, leaf_digests
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.store.errors import is_unreadable
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.gathered import FlatBytes, Gathered, flat_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Whole leaves; long beside the cost of a system call, short beside a processor's cache.
PIECE_BYTES = 2 * LEAF_BYTES
_AHEAD = 4
_WRITERS = 4
# Seed the change hash, and that of more than one leaf.
SEED, _SEED_OF_LEAVES = secrets.randbits(64), secrets.randbits(64)
# A large one takes long enough to be handed to a thread, so much at once. Of many, most are small.
_LARGE = 1 << 20
_HANDED = 8 * LEAF_BYTES
_MANY = 4096
# Bytes, and where whole leaves of them begin and end.
_Part: TypeAlias = tuple[FlatBytes, int, int]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class ProgressListener(Protocol):
    """A receiver of the progress of a long operation. Several threads may call `advance`."""

    def start(self, total_bytes: int) -> None:
        """Receive the total number of bytes to process, before the first `advance`."""

    def advance(self, nbytes: int) -> None:
        """Receive the number of bytes processed since the previous call."""


class SilentListener:
    """A ProgressListener that does nothing."""

    def start(self, total_bytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file. If the range is copied to another file, `target` is its offset there."""

    start: int
    nbytes: int
    target: int = 0


@dataclass(frozen=True, slots=True)
class Hashed:
    """The hashes of some bytes: their digest (32 bytes) and their concatenated leaf digests."""

    digest: bytes
    leaves: bytes

    @property
    def leaf_list(self) -> list[bytes]:
        """The leaf digests as a list."""
        return [self.leaves[at : at + 32] for at in range(0, len(self.leaves), 32)]


class Hasher:
    """A pool of threads that hash ranges of open files. Use it from one thread at a time."""

    def __init__(self, files: Files, workers: int) -> None:
        self._files = files
        self._workers = workers
        self._pool = self._writers = None
        if workers > 1:
            # Not the digest's pool: each thread reads into a buffer, which goes with the store.
            self._pool = ThreadPoolExecutor(workers, "tensor-dedup-store")
            # Who waits for the disk hashes nothing. None of these threads begins before its work.
            self._writers = ThreadPoolExecutor(_WRITERS, "tensor-dedup-write")
        self._local = threading.local()

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads. Work in progress is finished; work that has not begun is cancelled.

        With `wait`, return only when the threads have ended.
        """
        for pool in (self._pool, self._writers):
            if pool is not None:
                pool.shutdown(wait, cancel_futures=True)

    def hash(
        self,
        source: Handle,
        ranges: Sequence[Range],
        *,
        target: Handle | None = None,
        progress: ProgressListener | None = None,
    ) -> list[Hashed]:
        """Return the hashes of `ranges` of the file `source`, in order.

        If `target` is given, the ranges are also copied to that file.

        Raises:
            ChangedFileError: The file ends within a range.
        """

        def work(piece: Range) -> list[bytes]:
            return self._hash_piece(source, piece, target, progress)

        pieces = [piece for wanted in ranges for piece in _cut(wanted)]
        found = self.each(work, pieces)
        return [_joined(wanted.nbytes, found) for wanted in ranges]

    def hash_readable(
        self, source: Handle, ranges: Sequence[Range], progress: ProgressListener | None = None
    ) -> list[Hashed | None]:
        """Return the hashes of `ranges` of the file `source`, or None for each unreadable range.

        A range is unreadable if the disk cannot read all of it.

        Raises:
            ChangedFileError: The file ends within a range.
        """

        def work(piece: Range) -> list[bytes] | None:
            try:
                return self._hash_piece(source, piece, None, progress)
            except OSError as error:
                if not is_unreadable(error):
                    raise
                return None

        found = self.each(work, [piece for wanted in ranges for piece in _cut(wanted)])
        hashed: list[Hashed | None] = []
        for wanted in ranges:
            parts = [next(found) for _ in _cut(wanted)]
            read = [part for part in parts if part is not None]
            hashed.append(_joined(wanted.nbytes, iter(read)) if len(read) == len(parts) else None)
        return hashed

    def _hash_piece(
        self,
        source: Handle,
        piece: Range,
        target: Handle | None,
        progress: ProgressListener | None,
    ) -> list[bytes]:
        view = self._buffer()[: piece.nbytes]
        if self._files.pread(source, view, piece.start) != piece.nbytes:
            raise changed(source, f"it ends before {piece.start + piece.nbytes}")
        if target is not None:
            self._files.pwrite(target, view, piece.target)
        leaves = leaf_digests(view)
        if progress is not None:
            progress.advance(piece.nbytes)
        return leaves

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(PIECE_BYTES))
        buffer: memoryview = self._local.buffer
        return buffer

    def each(self, work: Callable[[_In], _Out], pieces: Iterable[_In]) -> Iterator[_Out]:
        """Yield `work(piece)` for each of `pieces`, in order.

        Several threads compute the results in advance.
        """
        if self._pool is None:
            yield from map(work, pieces)
            return
        waiting: deque[Future[_Out]] = deque()
        try:
            for piece in pieces:
                waiting.append(self.hand(work, piece))
                if len(waiting) > _AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            settle(waiting)

    def hand(
        self, work: Callable[[_In], _Out], piece: _In, *, waits: bool = False
    ) -> "Future[_Out]":
        """Run `work(piece)` in another thread; return its future.

        If there is only one worker, the work runs in the calling thread. Set `waits` for work that
        mostly waits for the disk, so that it occupies no hashing thread. Wait for the future before
        you close files that `work` uses, even after an error.
        """
        pool = self._writers if waits else self._pool
        if pool is None:
            done: Future[_Out] = Future()
            done.set_result(work(piece))
            return done
        return hand(pool, partial(work, piece))


def settle(waiting: Iterable["Future[Any]"]) -> None:
    """Cancel the futures in `waiting`, and wait for those that are running already.

    Their results and errors are ignored. Afterwards, files that the work used can be closed.
    """
    for future in waiting:
        if not future.cancel():
            future.exception()


def _cut(wanted: Range) -> Iterator[Range]:
    for done in range(0, wanted.nbytes, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, wanted.nbytes - done)
        yield Range(wanted.start + done, nbytes, wanted.target + done)


def _joined(nbytes: int, found: Iterator[list[bytes]]) -> Hashed:
    leaves: list[bytes] = []
    for _ in range(0, nbytes, PIECE_BYTES):
        leaves += next(found)
    return Hashed(bytes.fromhex(combine(nbytes, leaves)), b"".join(leaves))


def changed(source: Handle, how: str) -> ChangedFileError:
    """Return a ChangedFileError for the caller to raise: `source` changed during the operation.

    `how` describes the change.
    """
    return ChangedFileError(
        f"{source.path}: {how}; import it again when nobody writes it", path=str(source.path)
    )


def change_hash(data: "Buffer | Gathered") -> bytes:
    """Return the change hash (16 bytes) of `data`. Safe from any thread.

    A change hash is a fast hash that only tells whether bytes have changed.
    """
    view = flat_bytes(data)
    if view.nbytes <= LEAF_BYTES:
        return change_hash_of_leaf(view[:])
    return change_hash_of_leaves(_change_hashes_of_leaves((view, 0, view.nbytes)))


def change_hash_of_leaf(leaf: memoryview) -> bytes:
    """Return the change hash of `leaf`, which has at most 2 MiB."""
    return xxh3_128_digest(leaf, SEED)


def change_hash_of_leaves(leaves: Sequence[bytes]) -> bytes:
    """Combine the change hashes of leaves into the change hash of all their bytes.

    `leaves` has the change hash of each leaf, in order. A change hash only tells whether bytes have
    changed.
    """
    return leaves[0] if len(leaves) == 1 else xxh3_128_digest(b"".join(leaves), _SEED_OF_LEAVES)


def _change_hashes_of_leaves(part: _Part) -> list[bytes]:
    view, start, stop = part
    return [
        change_hash_of_leaf(view[at : at + LEAF_BYTES]) for at in range(start, stop, LEAF_BYTES)
    ]


def change_hashes(hasher: Hasher, data: "Sequence[Buffer | Gathered]") -> list[bytes]:
    """Return the change hash of each item of `data`, in order.

    Several threads hash a large item.
    """
    parts: dict[int, list[_Part]] = {}
    if len(data) <= _MANY:
        parts = {
            number: _handed(view)
            for number, view in enumerate(map(flat_bytes, data))
            if view.nbytes >= _LARGE
        }
    work = [part for each in parts.values() for part in each]
    if len(work) < 2:
        return [change_hash(each) for each in data]
    done = hasher.each(_change_hashes_of_leaves, work)
    found = {
        number: change_hash_of_leaves([leaf for _ in each for leaf in next(done)])
        for number, each in parts.items()
    }
    return [found.get(number) or change_hash(each) for number, each in enumerate(data)]


def _handed(view: FlatBytes) -> list[_Part]:
    # No slices, which of gathered bytes are copies.
    return [(view, at, min(at + _HANDED, view.nbytes)) for at in range(0, view.nbytes, _HANDED)]
