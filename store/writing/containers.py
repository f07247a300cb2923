"""Writing containers: a file taken whole, or the new pieces of one import behind each other."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.files import FileStatus, Handle
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.tables import ALIGNMENT, PLAIN, Record, Table
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.writing.hashing import Hashed, Hasher, ProgressListener, Range, changed
from tensor_dedup.store.writing.sources import ImportFile, Segment

# Below this a piece shares a pack with others: 4 KiB alignment would cost more than it gives.
PACK_BELOW = 64 << 10
_COPY_STEP = 256 << 20


def kind_for(nbytes: int) -> str:
    """Which kind of container a single piece goes to."""
    return "pack" if nbytes < PACK_BELOW else "slab"


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece to write: where it lies in its source, and the digest it had when it was hashed."""

    start: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SealedContainer:
    """A container that is whole, in a file that is neither durable nor has its name yet."""

    container: ContainerId
    table: Table
    handle: Handle
    file_bytes: int


class ContainerWriter:
    """One slab, pack or delta while it is written. One thread; finish() or abandon() ends it."""

    def __init__(self, objects: Objects, hasher: Hasher, kind: str) -> None:
        self._objects = objects
        self._hasher = hasher
        self._kind = kind
        self._handle: Handle | None = None
        self._records: list[Record] = []
        self._end = 0

    def add(self, source: Handle, pieces: Sequence[NewPiece]) -> None:
        """Copy pieces of one open file. ChangedFileError: one has another digest by now."""
        if not pieces:
            return
        handle = self._opened()
        ranges = [Range(p.start, p.nbytes, self._reserve(p.nbytes)) for p in pieces]
        copied = self._hasher.hash(source, ranges, target=handle)
        for piece, where, hashed in zip(pieces, ranges, copied, strict=True):
            if hashed.digest != piece.digest:
                raise changed(source, f"its bytes at {piece.start} were written while it was read")
            self._records.append(record_of(where.target, piece.nbytes, hashed))

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
        """Write the table, make it durable, give it its name; None when nothing was added."""
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

    def seal(self) -> "SealedContainer | None":
        """Write the table; None when nothing was added. What is durable of it, the caller says.

        The open file is the caller's from then on.
        """
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
        """Remove what was written, if it is not finished."""
        if self._handle is not None:
            discard(self._objects, self._handle)
            self._handle = None


class Copied:
    """A private copy of a whole file, before it is known whether it stays as a `raw` container."""

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
        check_space(self._objects, self._nbytes)
        for start in range(0, self._nbytes, _COPY_STEP):
            step = min(_COPY_STEP, self._nbytes - start)
            if files.copy_range(source, self.handle, start, step) != step:
                raise changed(source, f"it has no longer {self._nbytes} bytes")

    def keep(self, segments: Sequence[Segment], hashed: Sequence[Hashed]) -> ContainerId:
        """Make the copy a container: its data first, then the table that makes it one."""
        files, layout = self._objects.files, self._objects.layout
        records = [
            record_of(segment.start, segment.nbytes, found)
            for segment, found in zip(segments, hashed, strict=True)
            if segment.nbytes
        ]
        name, blob = tables.encode(Table("raw", self._nbytes, records, None))
        files.fsync(self.handle)
        files.close(self.handle)
        self._objects.place(self.handle.path, layout.container(name, "raw"))
        self._objects.publish(blob, layout.table(name, "raw"))
        return ContainerId(name, "raw")

    def discard(self) -> None:
        """Remove the copy."""
        discard(self._objects, self.handle)


def hash_copy(
    hasher: Hasher, handle: Handle, segments: Sequence[Segment], progress: ProgressListener | None
) -> list[Hashed]:
    """The digest of each segment of an open file."""
    ranges = [Range(segment.start, segment.nbytes) for segment in segments]
    return hasher.hash(handle, ranges, progress=progress)


def discard(objects: Objects, handle: Handle) -> None:
    """Close and remove a file that was being written; what cannot be removed, gc removes."""
    objects.files.close(handle)
    with suppress(OSError):
        objects.files.unlink(handle.path)


def check_space(objects: Objects, nbytes: int) -> None:
    """NoSpaceError when so many bytes do not fit, before any is written."""
    free = objects.files.free_bytes(objects.layout.root)
    if nbytes > free:
        raise NoSpaceError.at(
            objects.layout.root, f"{nbytes} bytes to write, {free} free", nbytes=nbytes, free=free
        )


def record_of(offset: int, nbytes: int, hashed: Hashed) -> Record:
    """Bytes that are stored as they are."""
    return Record(hashed.digest, offset, nbytes, nbytes, PLAIN, None, hashed.leaves)


def data_path(objects: Objects, container: ContainerId) -> Path:
    """The file with a container's data."""
    return objects.layout.container(container.name, container.kind)


def index_in_place(
    objects: Objects, file: ImportFile, status: FileStatus, hashed: Sequence[Hashed]
) -> ContainerId:
    """Make a file whose segments have these digests a container, durably; it is only read.

    `status` is what the file was before and after it was hashed.
    """
    records = [
        record_of(segment.start, segment.nbytes, found)
        for segment, found in zip(file.segments, hashed, strict=True)
        if segment.nbytes
    ]
    origin = ExternalFile.of(file.path.absolute(), status)
    name, blob = tables.encode(Table(EXTERNAL, status.size, records, origin.to_texts()))
    objects.publish(blob, objects.layout.container(name, EXTERNAL))
    return ContainerId(name, EXTERNAL)
