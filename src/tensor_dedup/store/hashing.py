"""Hashing ranges of files and memory on all threads, optionally copying files meanwhile.

A range is read once. Memory is bounded by one buffer per thread. With one worker everything happens
in the calling thread, so that a test can count operations.

Beside the digest there is a change hash, which only tells whether bytes have changed. It has 128
bits and is seeded at random in each process, so that nobody can prepare two tensors that collide;
it names nothing and is never written to disk. Of more than one leaf it is the hash of the leaves'
hashes, so that each leaf can be checked by itself, by any thread.
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
    """A listener to the progress of a long operation. `advance` is called from several threads."""

    def start(self, total_bytes: int) -> None:
        """Receive the number of bytes that will be processed."""

    def advance(self, nbytes: int) -> None:
        """Receive the number of further bytes that are done."""


class SilentListener:
    """A ProgressListener that does nothing."""

    def start(self, total_bytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file: `nbytes` at `start`, copied to offset `target` if there is a target."""

    start: int
    nbytes: int
    target: int = 0


@dataclass(frozen=True, slots=True)
class Hashed:
    """The digest (32 bytes) of a range, and its concatenated leaf digests."""

    digest: bytes
    leaves: bytes

    @property
    def leaf_list(self) -> list[bytes]:
        """The leaf digests as a list."""
        return [self.leaves[at : at + 32] for at in range(0, len(self.leaves), 32)]


class Hasher:
    """Hashes ranges of open files. One caller at a time; `close` ends its threads."""

    def __init__(self, files: Files, workers: int) -> None:
        self._files = files
        self._workers = workers
        self._pool = self._writers = None
        if workers > 1:
            self._pool = ThreadPoolExecutor(workers, "tensor-dedup-store")
            # Who waits for the disk hashes nothing. None of these threads begins before its work.
            self._writers = ThreadPoolExecutor(_WRITERS, "tensor-dedup-write")
        self._local = threading.local()

    def close(self, *, wait: bool = True) -> None:
        """End the threads, after the work they are doing, and wait until they have ended."""
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
        """Return the digests of each range, in order; copy each to `target` if there is one.

        Raises:
            ChangedFileError: the file is shorter than its ranges.
        """

        def work(piece: Range) -> list[bytes]:
            return self._hash_piece(source, piece, target, progress)

        pieces = [piece for wanted in ranges for piece in _cut(wanted)]
        found = self.each(work, pieces)
        return [_joined(wanted.nbytes, found) for wanted in ranges]

    def hash_readable(
        self, source: Handle, ranges: Sequence[Range], progress: ProgressListener | None = None
    ) -> list[Hashed | None]:
        """Return the digests of each range as `hash`, or None where the disk cannot read it all."""

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
        """Yield the result of `work` for each piece, in order.

        Several pieces are processed at once, a few ahead of the caller.
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
        """Have one piece processed by a thread, or here where there is one worker only.

        `waits` says that the work is mostly waiting for the disk: others hash meanwhile. The caller
        must wait for the result, whatever happens, before it closes what `work` uses.
        """
        pool = self._writers if waits else self._pool
        if pool is None:
            done: Future[_Out] = Future()
            done.set_result(work(piece))
            return done
        return hand(pool, partial(work, piece))


def settle(waiting: Iterable["Future[Any]"]) -> None:
    """Wait, after an error, until no thread uses a file that is about to be closed."""
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
    """Return the error for a file that has changed since the operation began."""
    return ChangedFileError(
        f"{source.path}: {how}; import it again when nobody writes it", path=str(source.path)
    )


def change_hash(data: "Buffer | Gathered") -> bytes:
    """Return the change hash (16 bytes) of some bytes. Safe from any thread."""
    view = flat_bytes(data)
    if view.nbytes <= LEAF_BYTES:
        return change_hash_of_leaf(view[:])
    return change_hash_of_leaves(_change_hashes_of_leaves((view, 0, view.nbytes)))


def change_hash_of_leaf(leaf: memoryview) -> bytes:
    """Return the change hash of one leaf, or of anything that is no larger."""
    return xxh3_128_digest(leaf, SEED)


def change_hash_of_leaves(leaves: Sequence[bytes]) -> bytes:
    """Return the change hash of what has leaves with these change hashes."""
    return leaves[0] if len(leaves) == 1 else xxh3_128_digest(b"".join(leaves), _SEED_OF_LEAVES)


def _change_hashes_of_leaves(part: _Part) -> list[bytes]:
    view, start, stop = part
    return [
        change_hash_of_leaf(view[at : at + LEAF_BYTES]) for at in range(start, stop, LEAF_BYTES)
    ]


def change_hashes(hasher: Hasher, data: "Sequence[Buffer | Gathered]") -> list[bytes]:
    """Return the change hash of each, in order; large ones are hashed on all threads."""
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
