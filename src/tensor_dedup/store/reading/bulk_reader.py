"""Reading of many pieces at once into large regions of memory, verified leaf by leaf.

Pieces that are close together in a container form a span. Several threads read a span in large
parts into a region of memory that has the container's layout. The thread that reads the last bytes
of a leaf (2 MiB) hashes the leaf while it is in the processor's cache. Bytes in the page cache are
read from there. Other bytes are read with O_DIRECT where the file system supports it, because
filling the page cache would cost more than reading the disk.
"""

import errno
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from blake3 import blake3

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.buffers import ALIGNMENT, BufferPool, allocate, bring_in
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import PAGE, Files, Handle
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.reading.handle_cache import HandleCache, spare_handles
from tensor_dedup.store.reading.reader import StoredPieces

# Long beside the cost of a request, short beside the time a disk takes for all of it.
BLOCK_BYTES: Final = 4 * LEAF_BYTES
# Reading a gap costs less than another request.
_GAP: Final = 256 << 10
# Smaller pieces get no mapping of their own: a process may have some 65,000.
_SMALL: Final = 4 << 20
# Containers that can only be changed by who changes the store itself.
_IMMUTABLE: Final = frozenset({"raw", "slab", "pack"})


@dataclass(eq=False)
class _Leaf:
    """A leaf of a record, and how many blocks it still waits for."""

    record: Record
    number: int
    start: int
    stop: int
    missing: int = 0
    lost: bool = False


@dataclass(eq=False)
class _Block:
    """What one request reads: whole pages; leaves it holds any byte of."""

    start: int
    stop: int
    leaves: list[_Leaf] = field(default_factory=list)


@dataclass(eq=False)
class ReadSpan:
    """A span: pieces of one container that lie close together and are read as one region.

    `records` are the pieces' entries in the container's table, by offset.
    """

    container: ContainerId
    records: list[Record]

    @property
    def start(self) -> int:
        """The offset in the container that corresponds to the start of the span's memory.

        It is a multiple of PAGE.
        """
        return self.records[0].offset // PAGE * PAGE

    @property
    def stop(self) -> int:
        """The offset in the container that corresponds to the end of the span's memory.

        It is a multiple of PAGE and may lie beyond the end of the file.
        """
        return -(-_end(self.records[-1]) // PAGE) * PAGE


@dataclass(frozen=True)
class Filled:
    """A span that was read into `memory`. Each record begins at `record.offset - span.start`."""

    span: ReadSpan
    memory: memoryview


def plan(pieces: StoredPieces, digests: Collection[bytes], span_bytes: int) -> list[ReadSpan]:
    """Group the pieces with these digests into spans, ordered by container and offset. No I/O.

    A span has at most `span_bytes`, but a larger piece forms a span of its own. A piece without an
    unencoded copy in the store is left out; read it with `BulkReader.read`.
    """
    places = [found[0] for digest in digests if (found := pieces.plain_places(digest))]
    places.sort(key=lambda place: (place[0], place[1].offset))
    spans: list[ReadSpan] = []
    for container, group in groupby(places, key=lambda place: place[0]):
        last: ReadSpan | None = None
        for _, record in group:
            if last is None or _apart(last, record, span_bytes):
                last = ReadSpan(container, [])
                spans.append(last)
            last.records.append(record)
    return spans


def _apart(span: ReadSpan, record: Record, span_bytes: int) -> bool:
    far = record.offset - _end(span.records[-1]) > _GAP
    return far or _end(record) - span.records[0].offset > span_bytes


def _end(record: Record) -> int:
    return record.offset + record.nbytes


class BulkReader:
    """A reader that fills spans with several threads. Use it from one thread at a time.

    Close the reader, or use it as a context manager. Without `verify`, unencoded pieces are not
    compared with their digests.

    With `mapped`, containers are mapped into memory instead of copied:

    - If verification finds a page that the disk cannot read, intact copies of the pieces are read
      into other memory.
    - The kernel may drop pages and read them again later. They are then not verified again.
    - Later, an access to a page that the disk cannot read ends the process (SIGBUS).
    - Each mapped span takes a file descriptor. If two thirds of the free descriptors are in use,
      further spans are copied.
    """

    def __init__(
        self, pieces: StoredPieces, threads: int, pool: BufferPool, *, verify: bool, mapped: bool
    ) -> None:
        self._pieces = pieces
        self._pool = pool
        self._verify = verify
        self._mapped = mapped
        spare = spare_handles(pieces.disk)
        self._direct = HandleCache(pieces.disk, self._open_direct, spare)
        # Python's mmap keeps a descriptor for as long as the mapping is there.
        self._mappings = pieces.disk.free_handles() * 2 // 3
        self._bypasses: dict[ContainerId, bool] = {}
        self._shared = memoryview(b"")
        self._undo = ExitStack()
        self._undo.callback(self._direct.close)
        # Threads of its own: they wait for the disk, so there are more than hash.
        self._threads = ThreadPoolExecutor(threads, "tensor-dedup-read")
        self._undo.callback(self._threads.shutdown, cancel_futures=True)

    def __enter__(self) -> "BulkReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads, then close the files."""
        self._undo.close()

    def fill(self, spans: Sequence[ReadSpan], ahead: int | None = None) -> Iterator[Filled]:
        """Read `spans`; yield each of them in memory, in order.

        Up to `ahead` spans are read in advance; None means all.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of a piece is in the store.
            StoreIOError: The disk failed.
        """
        waiting = list(reversed(spans))
        started: deque[tuple[_Work, list[Future[None]]]] = deque()
        while waiting or started:
            while waiting and (ahead is None or len(started) <= ahead):
                started.append(self._start(waiting.pop()))
            yield self._finished(*started.popleft())

    def read(
        self, pieces: Sequence[tuple[bytes, int]], ahead_bytes: int | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Read the pieces that `plan` leaves out; yield the digest and the bytes of each, in order.

        `pieces` has the digest and size of each piece. The bytes are decoded and always verified.
        The yielded memory may be larger than the piece. Up to `ahead_bytes` are read in advance;
        None means all.

        Raises:
            CorruptTensorError, MissingObjectError: No intact copy of a piece is in the store.
            StoreIOError: The disk failed.
        """
        waiting = deque(pieces)
        started: deque[tuple[bytes, int, memoryview, list[Future[None]]]] = deque()
        flying = 0
        while waiting or started:
            while waiting and (ahead_bytes is None or not started or flying < ahead_bytes):
                started.append(self._start_piece(*waiting.popleft()))
                flying += started[-1][1]
            flying -= started[0][1]
            yield self._read_piece(*started.popleft())

    def _start_piece(
        self, digest: bytes, nbytes: int
    ) -> tuple[bytes, int, memoryview, list[Future[None]]]:
        memory = self._pool.take(nbytes) if nbytes >= _SMALL else self._carve(nbytes)

        def read(start: int) -> None:
            with memory[start : min(start + LEAF_BYTES, nbytes)] as view:
                self._pieces.read_piece_into(digest, start, view, nbytes)

        # Leaf by leaf: one is decoded by the thread that has read it, while others read.
        starts = range(0, nbytes, LEAF_BYTES)
        return digest, nbytes, memory, [self._threads.submit(read, start) for start in starts]

    def _carve(self, nbytes: int) -> memoryview:
        """Return untouched memory, a part of what several pieces share.

        So a thread that fills it touches it first, not all of it the thread that hands out.
        """
        if self._shared.nbytes < nbytes:
            self._shared = allocate(_SMALL)
        memory = self._shared[:nbytes]
        self._shared = self._shared[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return memory

    def _read_piece(
        self, digest: bytes, nbytes: int, memory: memoryview, futures: Sequence[Future[None]]
    ) -> tuple[bytes, memoryview]:
        with os_errors(Path(self._pieces.name)):
            for future in futures:
                future.result()
        return digest, memory

    def _finished(self, work: "_Work", futures: Sequence[Future[None]]) -> Filled:
        # In a function: this generator, which waits meanwhile, must not hold the memory.
        for future in futures:
            future.result()
        with os_errors(work.path):
            return work.finish()

    def _start(self, span: ReadSpan) -> "tuple[_Work, list[Future[None]]]":
        memory = self._map(span)
        mapped = memory is not None
        if memory is None:
            memory = self._pool.take(span.stop - span.start)
        direct = self._direct if not mapped and self._can_bypass(span.container) else None
        work = _Work(
            self._pieces, span, memory, direct, mapped=mapped, verify=self._verify, pool=self._pool
        )
        if mapped and not self._verify:
            return work, []
        return work, [self._threads.submit(work.run, block) for block in work.blocks]

    def _map(self, span: ReadSpan) -> memoryview | None:
        if self._mapped and self._mappings and span.container.kind in _IMMUTABLE:
            nbytes = _end(span.records[-1]) - span.start
            # Cut short, or on a file system that maps nothing: read it.
            with suppress(OSError), self._pieces.container(span.container) as handle:
                memory = self._pieces.disk.map(handle, span.start, nbytes)
                self._mappings -= 1
                return memory
        return None

    def _can_bypass(self, container: ContainerId) -> bool:
        """Whether a container can be read past the page cache."""
        if container not in self._bypasses:
            try:
                with self._direct.using(container):
                    self._bypasses[container] = True
            except OSError:  # a file system that cannot, or gc took the name meanwhile
                self._bypasses[container] = False
        return self._bypasses[container]

    def _open_direct(self, container: ContainerId) -> Handle:
        files, path = self._pieces.disk, self._pieces.path(container)
        handle = files.open(path, "direct")
        try:
            with self._pieces.container(container) as same:
                if files.status_of(handle) != files.status_of(same):
                    raise FileNotFoundError(errno.ENOENT, "it is another file by now", str(path))
        except BaseException:
            files.close(handle)
            raise
        return handle


class _Work:
    """One span on its way into memory."""

    def __init__(
        self,
        pieces: StoredPieces,
        span: ReadSpan,
        memory: memoryview,
        direct: "HandleCache[ContainerId] | None",
        *,
        mapped: bool,
        verify: bool,
        pool: BufferPool,
    ) -> None:
        self._pool = pool
        self.blocks = _blocks(span)
        self.path = pieces.path(span.container)
        self._pieces = pieces
        self._span = span
        self._memory = memory
        self._direct = direct
        self._mapped = mapped
        self._verify = verify
        self._lock = threading.Lock()
        self._wrong: dict[int, Record] = {}
        self._torn = False

    def run(self, block: _Block) -> None:
        """Read a block, and hash what is complete now."""
        whole = self._bring_in(block) if self._mapped else self._read(block)
        ready = []
        with self._lock:
            for leaf in block.leaves:
                leaf.missing -= 1
                if not whole:
                    self._wrong[leaf.record.offset] = leaf.record
                    leaf.lost = True
                elif not leaf.missing and not leaf.lost:
                    ready.append(leaf)
        if self._verify:
            self._compare(ready)

    def _bring_in(self, block: _Block) -> bool:
        # Threads that fault page by page spoil each other's read-ahead.
        start = block.start - self._span.start
        nbytes = min(block.stop - block.start, len(self._memory) - start)
        if bring_in(self._memory, start, nbytes):
            return True
        self._torn = True
        return False

    def _read(self, block: _Block) -> bool:
        span, disk = self._span, self._pieces.disk
        needed = min(block.stop, _end(span.records[-1])) - block.start
        with (
            self._memory[block.start - span.start : block.stop - span.start] as view,
            suppress(OSError),  # what failed once is read again
            self._pieces.container(span.container) as handle,
        ):
            if self._direct is not None and not _is_cached(disk, handle, block):
                # It can after all not read past the cache.
                with suppress(OSError), self._direct.using(span.container) as direct:
                    if disk.pread(direct, view, block.start) >= needed:
                        return True
            with view[:needed] as part:
                return disk.pread(handle, part, block.start) == needed
        return False

    def _compare(self, leaves: Sequence[_Leaf]) -> None:
        for leaf in leaves:
            with self._memory[leaf.start - self._span.start : leaf.stop - self._span.start] as view:
                found = blake3(view).digest()
            if found != leaf.record.leaves[leaf.number * 32 : leaf.number * 32 + 32]:
                with self._lock:
                    self._wrong[leaf.record.offset] = leaf.record

    def finish(self) -> Filled:
        """When all blocks ran: read again, another way, what was not as it should be."""
        again: Iterable[Record] = self._wrong.values()
        memory = self._memory
        if self._torn:
            # A page that cannot be read cannot be written either, so all goes to other memory.
            memory, again = self._pool.take(self._span.stop - self._span.start), self._span.records
        for record in again:
            at = record.offset - self._span.start
            with memory[at : at + record.nbytes] as view:
                self._pieces.read_piece_into(record.digest, 0, view, record.nbytes)
        return Filled(self._span, memory)


def _is_cached(files: Files, handle: Handle, block: _Block) -> bool:
    nbytes = block.stop - block.start
    found = files.cached_bytes(handle, block.start, nbytes)
    return found is None or found * 2 > nbytes


def _blocks(span: ReadSpan) -> list[_Block]:
    """Cut a span at pages near the ends of leaves, so that few leaves lie in two blocks."""
    leaves = [
        _Leaf(
            record, number, record.offset + at, min(record.offset + at + LEAF_BYTES, _end(record))
        )
        for record in span.records
        for number, at in enumerate(range(0, record.nbytes, LEAF_BYTES))
    ]
    blocks = [_Block(span.start, span.start)]
    for leaf in leaves:
        cut = leaf.stop // PAGE * PAGE
        block = blocks[-1]
        block.leaves.append(leaf)
        leaf.missing += 1
        if cut - block.start >= BLOCK_BYTES:
            block.stop = cut
            blocks.append(_Block(cut, cut))
            if leaf.stop > cut:
                blocks[-1].leaves.append(leaf)
                leaf.missing += 1
    blocks[-1].stop = span.stop
    return [block for block in blocks if block.stop > block.start]
