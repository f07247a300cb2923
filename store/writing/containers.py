"""Writing containers, from files and from memory.

There are three ways to make one. A `ContainerWriter` appends new pieces one after the other; a
`Copied` file becomes a container as a whole; a file can stay where it is, and only its table is
stored. A container never holds bytes that do not match their digest: what is written is exactly
what was hashed, or a copy that is compared with it, even if a file or a model changes meanwhile.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests
from tensor_dedup.store.errors import ChangedModelError, NoSpaceError
from tensor_dedup.store.files import FileStatus, Handle
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import ALIGNMENT, PLAIN, Record, Table
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.writing.hashing import (
    Hashed,
    Hasher,
    ProgressListener,
    Range,
    change_hasher,
    change_hashes,
    changed,
)
from tensor_dedup.store.writing.sources import ImportFile, Segment

# Below this a piece shares a pack with others: 4 KiB alignment would cost more than it gives.
PACK_BELOW = 64 << 10
_COPY_STEP = 256 << 20
# Small pieces in memory are put together until there is this much: one system call for many.
_TOGETHER = 1 << 20
# Handing a smaller one to a thread takes longer than hashing it.
_HANDED_OVER = 256 << 10
# The disk begins with so much while more is encoded.
_BEGUN = 4 << 20


def kind_for(nbytes: int) -> str:
    """Return the kind of container for an unencoded piece of this size."""
    return "pack" if nbytes < PACK_BELOW else "slab"


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece of a file to write: its place there, and the digest it had when it was hashed."""

    start: int
    nbytes: int
    digest: bytes


Want: TypeAlias = tuple[str, str | None, memoryview]
"""A piece in memory: a name for messages, the dtype of a tensor, its bytes, flat."""
Wanted: TypeAlias = Mapping[bytes, Want]
"""Pieces in memory, by change hash."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A piece in memory to write: its flat bytes, with change hash, digest and leaf digests."""

    name: str
    dtype: str | None
    view: memoryview
    change_hash: bytes
    hashed: Hashed


@dataclass(frozen=True, slots=True)
class SealedContainer:
    """A complete container in a file that is not yet durable and has no final name."""

    container: ContainerId
    table: Table
    handle: Handle
    file_bytes: int


class ContainerWriter:
    """A slab or pack that is being written. One thread; end it by finish, seal or abandon.

    No file is created before the first piece.
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

    def add(self, source: Handle, pieces: Sequence[NewPiece]) -> None:
        """Copy pieces of one open file, on all threads.

        Raises:
            ChangedFileError: a piece no longer has its digest.
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
        """Store a piece from memory that somebody else owns and may be writing to.

        Raises:
            ChangedModelError: it has changed since it was hashed.
        """
        start = self._reserve(piece.view.nbytes)
        check = change_hasher()
        for at in range(0, piece.view.nbytes, LEAF_BYTES):
            part = bytes(piece.view[at : at + LEAF_BYTES])
            check.update(part)
            self._write(part, start + at)
        if check.digest() != piece.change_hash:
            raise changed_in_memory(piece.name)
        self._records.append(record_of(start, piece.view.nbytes, piece.hashed))

    def _write(self, part: bytes, at: int) -> None:
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
        """Write the table, and make the container durable under its name; None if it is empty."""
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
        """Write the table, and hand over the open file; None if the container is empty.

        Nothing is durable yet: the caller must sync, name and close the file.
        """
        self._flush()
        if self._handle is None or not self._records:
            self.abandon()
            return None
        table = Table(self._kind, self._end, self._records, None)
        name, blob = tables.encode(table)
        ending = blob + tables.tail(self._end)
        self._objects.files.pwrite(self._handle, ending, self._end)
        handle, self._handle = self._handle, None
        return SealedContainer(
            ContainerId(name, self._kind), table, handle, self._end + len(ending)
        )

    def abandon(self) -> None:
        """Remove what was written, unless it was sealed."""
        if self._handle is not None:
            discard(self._objects, self._handle)
            self._handle = None


def hash_pieces(hasher: Hasher, wanted: Wanted) -> list[Fresh]:
    """Hash pieces in memory with BLAKE3, large ones on all threads.

    Raises:
        ChangedModelError: a piece no longer has its change hash.
    """
    parts = [
        (view[at : at + LEAF_BYTES], key)
        for key, (_, _, view) in wanted.items()
        for at in range(0, view.nbytes, LEAF_BYTES)
    ]
    leaves: dict[bytes, list[bytes]] = {key: [] for key in wanted}
    large = [(view, key) for view, key in parts if view.nbytes >= _HANDED_OVER]
    each = hasher.each if len(large) > 1 else map
    found = each(leaf_digests, (view for view, _ in large))
    for (_, key), digests in zip(large, found, strict=True):
        leaves[key] += digests
    for view, key in parts:
        if view.nbytes < _HANDED_OVER:  # the last of its piece
            leaves[key] += leaf_digests(view)
    pieces = []
    now = change_hashes(hasher, [view for _, _, view in wanted.values()])
    for (was, (name, dtype, view)), is_now in zip(wanted.items(), now, strict=True):
        if is_now != was:
            raise changed_in_memory(name)
        digest = bytes.fromhex(combine(view.nbytes, leaves[was]))
        pieces.append(Fresh(name, dtype, view, was, Hashed(digest, b"".join(leaves[was]))))
    return pieces


def changed_in_memory(name: str) -> ChangedModelError:
    """Return the error for a tensor that has changed since its save began."""
    return ChangedModelError.at(f"tensor {name!r}", "it was written to while it was saved")


class Copied:
    """A private copy of a whole file, which may become a `raw` container."""

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
        """Turn the copy into a container, durably: its data first, then the table."""
        files, layout = self._objects.files, self._objects.layout
        records = _records(segments, hashed)
        name, blob = tables.encode(Table("raw", self._nbytes, records, None))
        files.fsync(self.handle)
        files.close(self.handle)
        self._objects.place(self.handle.path, layout.container(name, "raw"))
        self._objects.publish(blob, layout.table(name, "raw"))
        return ContainerId(name, "raw")

    def discard(self) -> None:
        """Remove the copy."""
        discard(self._objects, self.handle)


def index_in_place(
    objects: Objects, file: ImportFile, status: FileStatus, hashed: Sequence[Hashed]
) -> ContainerId:
    """Make a file whose segments have these digests an external container, durably.

    The file is only read. `status` is its status, equal before and after it was hashed.
    """
    origin = ExternalFile.of(file.path.absolute(), status)
    records = _records(file.segments, hashed)
    name, blob = tables.encode(Table(EXTERNAL, status.size, records, origin.to_texts()))
    objects.publish(blob, objects.layout.container(name, EXTERNAL))
    return ContainerId(name, EXTERNAL)


def hash_copy(
    hasher: Hasher, handle: Handle, segments: Sequence[Segment], progress: ProgressListener | None
) -> list[Hashed]:
    """Hash each segment of an open file."""
    ranges = [Range(segment.start, segment.nbytes) for segment in segments]
    return hasher.hash(handle, ranges, progress=progress)


def discard(objects: Objects, handle: Handle) -> None:
    """Close and remove a file that was being written; gc removes it if that fails."""
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
    """Return the record of an unencoded piece."""
    return Record(hashed.digest, offset, nbytes, nbytes, PLAIN, None, hashed.leaves)


def _records(segments: Sequence[Segment], hashed: Sequence[Hashed]) -> list[Record]:
    return [
        record_of(segment.start, segment.nbytes, found)
        for segment, found in zip(segments, hashed, strict=True)
        if segment.nbytes
    ]
