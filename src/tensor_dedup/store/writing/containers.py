"""Writing of containers, the files that hold a store's pieces, from files and from memory.

A container can be made in three ways. `ContainerWriter` appends new pieces one by one. `Copied`
turns a copy of a whole file into a container. `index_in_place` leaves a file where it is and stores
only a table. The bytes in a container match its digests, even if a file or a model changes during
the write.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests
from tensor_dedup.store.buffers import PAGE, address, allocate, copy
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.direct import DIRECT_BYTES, DirectFile
from tensor_dedup.store.errors import ChangedModelError, NoSpaceError
from tensor_dedup.store.files import FileStatus, Handle
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import ALIGNMENT, PLAIN, Record, Table
from tensor_dedup.store.gathered import FlatBytes
from tensor_dedup.store.hashing import (
    Hashed,
    Hasher,
    ProgressListener,
    Range,
    change_hash,
    change_hash_of_leaf,
    change_hash_of_leaves,
    changed,
    settle,
)
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.sources import ImportFile, Segment

if TYPE_CHECKING:
    from concurrent.futures import Future

# Below this a piece shares a pack with others: 4 KiB alignment would cost more than it gives.
PACK_BELOW = 64 << 10
_COPY_STEP = 256 << 20
# Small pieces in memory are put together until there is this much: one system call for many.
_TOGETHER = 1 << 20
# Handing a smaller one to a thread takes longer than hashing it.
_HANDED_OVER = 256 << 10
# The disk begins with so much while more is encoded.
_BEGUN = 4 << 20
# So much is written at a time past the page cache, so many at once.
_DIRECT_STEP = 8 << 20
_AT_ONCE = 8
# Direct writes that extend a file take turns in ext4: it is extended by so much ahead of them.
_GROWN = 64 << 20


def kind_for(nbytes: int) -> str:
    """Return the kind of container for an unencoded piece of `nbytes`: "pack" or "slab"."""
    return "pack" if nbytes < PACK_BELOW else "slab"


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece to copy from a file: where it is in the file, and its digest."""

    start: int
    nbytes: int
    digest: bytes


class Want(NamedTuple):
    """A piece in memory that is to be stored.

    `name` is for messages, and `dtype` is None unless the piece is a tensor. If `private` is True,
    no other code writes to the memory until the piece is stored.
    """

    name: str
    dtype: str | None
    view: FlatBytes
    private: bool = False


Wanted: TypeAlias = Mapping[bytes, Want]
"""Pieces in memory, by change hash."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A piece in memory to write: its bytes, change hash, digest and leaf digests.

    If `private` is True, no other code writes to the memory. Otherwise the bytes are checked again
    when they are written, and `leaf_changes` has the change hash of each leaf. A change hash is a
    fast hash that only shows whether bytes changed.
    """

    name: str
    dtype: str | None
    view: FlatBytes
    change_hash: bytes
    hashed: Hashed
    private: bool = False
    leaf_changes: Sequence[bytes] = ()

    @property
    def nbytes(self) -> int:
        """The size of the piece in bytes."""
        return self.view.nbytes

    @property
    def leaves(self) -> bytes:
        """The concatenated leaf digests of the piece."""
        return self.hashed.leaves

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes of the piece from `start` to `stop`."""
        return self.view[start:stop]


@dataclass(frozen=True, slots=True)
class SealedContainer:
    """A container that is completely written, but not yet published.

    Its file is still open, is not durable and does not have its final name.
    """

    container: ContainerId
    table: Table
    handle: Handle
    file_bytes: int


class ContainerWriter:
    """A writer for a container of unencoded pieces (slab or pack). Use it from one thread.

    End it with `finish`, `seal` or `abandon`. No file is created before the first piece.
    """

    def __init__(self, objects: Objects, hasher: Hasher, kind: str) -> None:
        self._objects = objects
        self._hasher = hasher
        self._kind = kind
        self._handle: Handle | None = None
        self._records: list[Record] = []
        self._end = 0
        # Small pieces that were put and are not written yet, and where they begin in the file.
        self._buffer: bytearray | None = None
        self._buffer_at = 0
        self._begun = 0
        self._direct = _DirectWriter(objects, hasher)

    def add(self, source: Handle, pieces: Sequence[NewPiece]) -> None:
        """Copy `pieces` from the open file `source`, with several threads.

        Raises:
            ChangedFileError: A piece no longer has its digest.
        """
        if not pieces:
            return
        handle = self._opened()
        ranges = [Range(p.start, p.nbytes, self._reserve(p.nbytes)) for p in pieces]
        copied = self._hasher.hash(source, ranges, target=handle)
        for piece, where, hashed in zip(pieces, ranges, copied, strict=True):
            if hashed.digest != piece.digest:
                raise changed(source, f"its bytes at {piece.start} were written while it was read")
            self._records.append(record_of(where.target, piece.nbytes, hashed))

    def put(self, piece: Fresh) -> None:
        """Append a piece from memory.

        A large piece is written in the background. Its memory must not change before `seal` or
        `finish` returns. If it does, `seal` or `finish` may raise the error instead.

        Raises:
            ChangedModelError: The piece has changed since it was hashed.
        """
        start, view = self._reserve(piece.view.nbytes), piece.view
        large = view.nbytes >= DIRECT_BYTES
        if large and not piece.private:
            self._flush()  # it would fill the place of this piece with zeros
            for at, expected in zip(_leaf_starts(view), piece.leaf_changes, strict=True):
                part = _LeafToCopy(view, at, expected, piece.name)
                self._direct.write(self._opened(), part, start + at)
        elif large and isinstance(view, memoryview) and address(view) % PAGE == 0:
            self._flush()
            for at in range(0, view.nbytes, _DIRECT_STEP):
                self._direct.write(self._opened(), view[at : at + _DIRECT_STEP], start + at)
        elif piece.private:
            for at in _leaf_starts(view):
                self._write(view[at : at + LEAF_BYTES], start + at)
        else:
            copied = bytes(view[:])
            if change_hash_of_leaf(memoryview(copied)) != piece.change_hash:
                raise changed_in_memory(piece.name)
            self._write(copied, start)
        self._records.append(record_of(start, view.nbytes, piece.hashed))

    def _write(self, part: bytes | memoryview, at: int) -> None:
        if self._buffer is None:
            self._buffer, self._buffer_at = bytearray(), at
        gap = at - self._buffer_at - len(self._buffer)
        if len(part) >= _TOGETHER or gap + len(self._buffer) + len(part) > _TOGETHER:
            self._flush()
            self._pwrite(part, at)
            self._buffer = None
            return
        self._buffer += bytes(gap)
        self._buffer += part

    def _flush(self) -> None:
        if self._buffer:
            self._pwrite(memoryview(self._buffer), self._buffer_at)
        self._buffer = None

    def _pwrite(self, data: bytes | memoryview, at: int) -> None:
        files, handle, end = self._objects.files, self._opened(), at + len(data)
        files.pwrite(handle, data, at)
        if end - self._begun >= _BEGUN:
            files.begin_writing(handle, self._begun, end - self._begun)
            self._begun = end

    def _opened(self) -> Handle:
        if self._handle is None:
            self._handle = self._objects.files.open(self._objects.tmp_path(), "create")
        return self._handle

    def _reserve(self, nbytes: int) -> int:
        step = ALIGNMENT[self._kind]
        start = -(-self._end // step) * step
        self._end = start + nbytes
        return start

    def finish(self) -> ContainerId | None:
        """Write the table and make the container durable under its name; return its identity.

        If the container is empty, delete its file and return None.

        Raises:
            ChangedModelError: A piece that was written in the background has changed since it was
                hashed.
        """
        sealed = self.seal()
        if sealed is None:
            return None
        files, handle, container = self._objects.files, sealed.handle, sealed.container
        try:
            files.fsync(handle)
        except BaseException:
            discard(self._objects, handle)
            raise
        files.close(handle)
        place = self._objects.layout.container(container.name, container.kind)
        self._objects.place(handle.path, place)
        return container

    def seal(self) -> SealedContainer | None:
        """Write the table and hand over the open file. Return None if the container is empty.

        Nothing is durable yet; the caller must sync, rename and close the file.

        Raises:
            ChangedModelError: A piece that was written in the background has changed since it was
                hashed.
        """
        self._flush()
        grown = self._direct.finish()
        if self._handle is None or not self._records:
            self.abandon()
            return None
        table = Table(self._kind, self._end, self._records, None)
        name, blob = tables.encode(table)
        ending = blob + tables.tail(self._end)
        self._objects.files.pwrite(self._handle, ending, self._end)
        if grown > self._end + len(ending):
            self._objects.files.truncate(self._handle, self._end + len(ending))
        handle, self._handle = self._handle, None
        return SealedContainer(
            ContainerId(name, self._kind), table, handle, self._end + len(ending)
        )

    def abandon(self) -> None:
        """Delete the unfinished file. After `seal` or `finish`, the call has no effect."""
        self._direct.abandon()
        if self._handle is not None:
            discard(self._objects, self._handle)
            self._handle = None


@dataclass(frozen=True, slots=True)
class _LeafToCopy:
    """A leaf in memory that others may write to: it is written from a copy, which is compared."""

    view: FlatBytes
    at: int
    expected: bytes
    name: str

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return min(LEAF_BYTES, self.view.nbytes - self.at)

    def copied(self, into: memoryview) -> memoryview:
        """Return a copy of it, with the change hash that is expected."""
        found = into[: self.nbytes]
        copy(self.view[self.at : self.at + LEAF_BYTES], found)
        if change_hash_of_leaf(found) != self.expected:
            raise changed_in_memory(self.name)
        return found


class _DirectWriter:
    """Writes large pieces past the page cache, on the hasher's threads, while more is hashed.

    What a training saves is read at its next start.
    """

    def __init__(self, objects: Objects, hasher: Hasher) -> None:
        self._files, self._hasher = objects.files, hasher
        self._file: DirectFile | None = None
        self._grown = 0
        self._writing: deque[Future[None]] = deque()
        self._local = threading.local()  # each thread's memory for one leaf

    def write(self, buffered: Handle, data: memoryview | _LeafToCopy, at: int) -> None:
        """Begin to write to a file what begins a page of memory and of the file.

        It must stay as it is until `finish`, but for a leaf that is copied.
        """
        if self._file is None:
            self._file = DirectFile(self._files, buffered)
        if len(self._writing) >= _AT_ONCE:
            self._writing.popleft().result()
        end = at + data.nbytes
        if end > self._grown:
            self._grown = end + min(end, _GROWN)
            self._files.grow(buffered, self._grown)
        file = self._file

        def work(data: memoryview | _LeafToCopy) -> None:
            view = data if isinstance(data, memoryview) else data.copied(self._scratch())
            file.write(view, at)

        self._writing.append(self._hasher.hand(work, data, waits=True))

    def _scratch(self) -> memoryview:
        if not hasattr(self._local, "memory"):
            self._local.memory = allocate(LEAF_BYTES, huge=True)
        memory: memoryview = self._local.memory
        return memory

    def finish(self) -> int:
        """Wait until all is written; return the size that the file was extended to, or 0.

        Raises the error of a write that failed.
        """
        try:
            while self._writing:
                self._writing.popleft().result()
            if self._file is not None:
                self._file.finish()
        finally:
            self.abandon()
        return self._grown

    def abandon(self) -> None:
        """Wait for the threads, and let go of the file and of all memory."""
        settle(self._writing)
        self._writing.clear()
        self._local = threading.local()
        if self._file is not None:
            self._file.close()
            self._file = None


def hash_pieces(hasher: Hasher, wanted: Wanted) -> Iterator[Fresh]:
    """Hash the pieces in `wanted` with BLAKE3; yield each of them with its hashes.

    The keys of `wanted` are change hashes, which tell whether bytes have changed. Small pieces come
    first, then large ones. Several threads hash the large pieces, in advance.

    Raises:
        ChangedModelError: A piece has changed since its change hash was computed.
    """
    large = {key: want for key, want in wanted.items() if want.view.nbytes >= _HANDED_OVER}
    for key, want in wanted.items():
        if key not in large:
            leaf = want.view[:]
            changes = [] if want.private else [change_hash(leaf)]
            yield _fresh(key, want, leaf_digests(leaf), changes)
    work = [(want, at) for want in large.values() for at in _leaf_starts(want.view)]
    found = iter(hasher.each(_leaf_hashes, work) if len(work) > 1 else map(_leaf_hashes, work))
    for key, want in large.items():
        both = [next(found) for _ in _leaf_starts(want.view)]
        changes = [change for _, change in both if change is not None]
        yield _fresh(key, want, [digest for digest, _ in both], changes)


def _leaf_starts(view: FlatBytes) -> range:
    return range(0, view.nbytes, LEAF_BYTES)


def _leaf_hashes(which: tuple[Want, int]) -> tuple[bytes, bytes | None]:
    """The digest of a leaf, and its change hash if others can write to it."""
    want, at = which
    leaf = want.view[at : at + LEAF_BYTES]
    return leaf_digests(leaf)[0], None if want.private else change_hash_of_leaf(leaf)


def _fresh(key: bytes, want: Want, leaves: Sequence[bytes], changes: Sequence[bytes]) -> Fresh:
    if not want.private and change_hash_of_leaves(changes) != key:
        raise changed_in_memory(want.name)
    digest = bytes.fromhex(combine(want.view.nbytes, leaves))
    hashed = Hashed(digest, b"".join(leaves))
    return Fresh(want.name, want.dtype, want.view, key, hashed, want.private, changes)


def changed_in_memory(name: str) -> ChangedModelError:
    """Return a ChangedModelError about the tensor `name`, for the caller to raise."""
    return ChangedModelError.at(f"tensor {name!r}", "it was written to while it was saved")


class Copied:
    """A temporary copy of a whole file. `keep` turns it into a `raw` container."""

    def __init__(self, objects: Objects, source: Handle, nbytes: int) -> None:
        self._objects = objects
        self._nbytes = nbytes
        files = objects.files
        self.handle = files.open(objects.tmp_path(), "create")
        try:
            self._fill(source)
        except BaseException:
            self.discard()
            raise

    def _fill(self, source: Handle) -> None:
        files = self._objects.files
        if files.clone(source, self.handle):
            if files.status_of(self.handle).size != self._nbytes:
                raise changed(source, f"it has no longer {self._nbytes} bytes")
            return
        _check_space(self._objects, self._nbytes)
        for start in range(0, self._nbytes, _COPY_STEP):
            step = min(_COPY_STEP, self._nbytes - start)
            if files.copy_range(source, self.handle, start, step) != step:
                raise changed(source, f"it has no longer {self._nbytes} bytes")

    def keep(self, segments: Sequence[Segment], hashed: Sequence[Hashed]) -> ContainerId:
        """Turn the copy into a durable container. `hashed` has the hashes of its `segments`."""
        files, layout = self._objects.files, self._objects.layout
        records = _records(segments, hashed)
        name, blob = tables.encode(Table("raw", self._nbytes, records, None))
        files.fsync(self.handle)
        files.close(self.handle)
        self._objects.place(self.handle.path, layout.container(name, "raw"))
        self._objects.publish(blob, layout.table(name, "raw"))
        return ContainerId(name, "raw")

    def discard(self) -> None:
        """Delete the copy."""
        discard(self._objects, self.handle)


def index_in_place(
    objects: Objects, file: ImportFile, status: FileStatus, hashed: Sequence[Hashed]
) -> ContainerId:
    """Create an external container: a durable table of a file that stays where it is.

    `hashed` has the hashes of the file's segments. `status` is the status of the file, which must
    have been the same before and after the file was hashed.
    """
    origin = ExternalFile.of(file.path.absolute(), status)
    records = _records(file.segments, hashed)
    name, blob = tables.encode(Table(EXTERNAL, status.size, records, origin.to_texts()))
    objects.publish(blob, objects.layout.container(name, EXTERNAL))
    return ContainerId(name, EXTERNAL)


def hash_copy(
    hasher: Hasher, handle: Handle, segments: Sequence[Segment], progress: ProgressListener | None
) -> list[Hashed]:
    """Return the hashes of `segments` of an open file, in order."""
    ranges = [Range(segment.start, segment.nbytes) for segment in segments]
    return hasher.hash(handle, ranges, progress=progress)


def discard(objects: Objects, handle: Handle) -> None:
    """Close and delete a temporary file. If it cannot be deleted, `gc` deletes it later."""
    objects.files.close(handle)
    with suppress(OSError):
        objects.files.unlink(handle.path)


def _check_space(objects: Objects, nbytes: int) -> None:
    """Refuse before any byte is written that does not fit."""
    free = objects.files.free_bytes(objects.layout.root)
    if nbytes > free:
        raise NoSpaceError.at(
            objects.layout.root, f"{nbytes} bytes to write, {free} free", nbytes=nbytes, free=free
        )


def record_of(offset: int, nbytes: int, hashed: Hashed) -> Record:
    """Return the entry in a container's table for an unencoded piece at `offset`."""
    return Record(hashed.digest, offset, nbytes, nbytes, PLAIN, None, hashed.leaves)


def _records(segments: Sequence[Segment], hashed: Sequence[Hashed]) -> list[Record]:
    return [
        record_of(segment.start, segment.nbytes, found)
        for segment, found in zip(segments, hashed, strict=True)
        if segment.nbytes
    ]
