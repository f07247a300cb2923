"""Which bytes of a Hugging Face cache a store holds, too, and how both become one copy on disk.

Only whole files are made one copy: a blob of the cache, and a `raw` container of the store with the
same pieces at the same places. The kernel compares the two before it lets the blob share the
container's disk space, so a digest or an index that errs costs time and nothing else. Neither file
is opened for writing, and the blob keeps its inode and its times, which remembered digests and
files indexed in place rely on. The container is durable since its import was committed.
"""

import errno
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tensor_dedup.errors import CheckpointError, StoreError
from tensor_dedup.formats.links import ANYWHERE, LinkBoundary
from tensor_dedup.libc import DiskExtent
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.files import Files, FileStatus, Handle
from tensor_dedup.store.format.manifests import FileEntry, Piece
from tensor_dedup.store.hashing import ProgressListener
from tensor_dedup.store.index import PieceLocation, StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.sources import HubSnapshot

# Btrfs takes so much at a time. It is a multiple of every block size.
_STEP = 16 << 20
_CANNOT_SHARE = "its file system cannot let files share space (XFS and Btrfs can)"
_OTHER_FILE_SYSTEM = "the cache and the store are on different file systems"
_NOT_OWNED = "it belongs to another user"
_WHY: Mapping[int | None, str] = {
    errno.EOPNOTSUPP: _CANNOT_SHARE,
    errno.ENOTTY: _CANNOT_SHARE,
    errno.ENOSYS: _CANNOT_SHARE,
    errno.EXDEV: _OTHER_FILE_SYSTEM,
    errno.EPERM: _NOT_OWNED,
    errno.EACCES: "it cannot be read",
}
_IN_PARTS = "the store holds it among other pieces, and only whole files can become one copy"
_DIFFERS = "its bytes are not those in the store: run `tensor-dedup verify --full`"
_STOPPED = "the file system shared only a part"
_CHANGED = "it changed meanwhile: import it again"


@dataclass(frozen=True, slots=True)
class CacheCopies:
    """What a Hugging Face cache and a store both hold. All sizes are in bytes.

    - `twice_bytes` is the size of the pieces that lie in files of the cache and in containers of
      the store, and take space on the disk for both. A piece counts once, however many files of the
      cache have it.
    - `deduped_files` and `deduped_bytes` say how many files of the cache were made one copy with
      the store now, and how much of them took space of its own before.
    - `not_deduped` maps each reason for which the rest was not made one copy to its size. The sizes
      add up to `twice_bytes`. It is empty if nothing was to be made one copy.
    """

    twice_bytes: int
    deduped_files: int
    deduped_bytes: int
    not_deduped: Mapping[str, int]

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


class _Place(NamedTuple):
    """Where a piece is in its file."""

    digest: bytes
    start: int
    nbytes: int


@dataclass(slots=True)
class _CacheFile:
    """A file of the cache, the pieces of it that the store holds, and what is one copy already.

    `shared` are ranges (start, end) of the file that lie on the disk once.
    """

    path: Path
    links: LinkBoundary
    status: FileStatus
    held: Sequence[_Place]
    whole: ContainerId | None
    shared: list[tuple[int, int]]
    why: str = ""

    def twice(self) -> Iterator[tuple[bytes, int]]:
        """How many bytes of each piece lie on the disk twice."""
        for piece in self.held:
            yield piece.digest, piece.nbytes - self._once(piece)

    def _once(self, piece: _Place) -> int:
        end = piece.start + piece.nbytes
        parts = ((max(start, piece.start), min(stop, end)) for start, stop in self.shared)
        return sum(max(0, stop - start) for start, stop in parts)

    @property
    def twice_bytes(self) -> int:
        """How many bytes of the file lie on the disk twice."""
        return sum(nbytes for _, nbytes in self.twice())


def cache_copies(
    objects: Objects,
    index: StoreIndex,
    snapshots: Iterable[HubSnapshot],
    *,
    dedup: bool,
    follow_links: bool,
    progress: ProgressListener,
) -> CacheCopies:
    """Measure what the files of `snapshots` and the store both hold; with `dedup`, make it one.

    Snapshots whose name the store lacks, and files that are gone or have another size, are left
    out. With `follow_links`, links in a snapshot may lead anywhere. Call it inside
    `with locks.session(...):`.
    """
    found = list(_files(objects, index, snapshots, follow_links))
    deduped: list[int] = []
    if dedup:
        able = [each for each in found if each.whole is not None and each.twice_bytes]
        progress.start(sum(each.status.size for each in able))
        for each in able:
            before = each.twice_bytes
            _share(objects, each, progress)
            deduped.append(before - each.twice_bytes)
    twice: dict[bytes, tuple[int, str]] = {}
    for each in found:
        for digest, nbytes in each.twice():
            # Of two files with one piece, the one that says why it is no copy counts: "" is less.
            twice[digest] = max((nbytes, each.why), twice.get(digest, (0, "")))
    reasons = Counter[str]()
    for nbytes, why in twice.values():
        reasons[why or _IN_PARTS] += nbytes
    return CacheCopies(
        twice_bytes=reasons.total(),
        deduped_files=sum(map(bool, deduped)),
        deduped_bytes=sum(deduped),
        not_deduped={why: nbytes for why, nbytes in reasons.items() if nbytes and dedup},
    )


def _files(
    objects: Objects, index: StoreIndex, snapshots: Iterable[HubSnapshot], follow_links: bool
) -> Iterator[_CacheFile]:
    """Every file of the cache that the store holds something of, each inode once."""
    seen = set[tuple[int, int]]()
    names = set(objects.names())
    for snapshot in snapshots:
        if snapshot.name not in names:
            continue
        # Of several models in a repository each is imported by the path of a file.
        status = objects.files.status(snapshot.path)
        is_folder = status is not None and status.kind == "folder"
        folder = snapshot.path if is_folder else snapshot.path.parent
        links = ANYWHERE if follow_links else LinkBoundary.around(folder)
        try:
            manifest_name = objects.ref(snapshot.name)
            manifest = objects.manifest(manifest_name)
            pieces = iter(objects.pieces(manifest_name, manifest))
        except StoreError:  # damage: `list` and `verify` name it
            continue
        for entry in manifest.files:
            own = _places(next(pieces) for _ in range(entry.pieces))
            file = _file(objects, index, folder / entry.path, links, entry, own)
            if file is not None and (file.status.device, file.status.inode) not in seen:
                seen.add((file.status.device, file.status.inode))
                yield file


def _places(pieces: Iterable[Piece]) -> list[_Place]:
    found, at = list[_Place](), 0
    for piece in pieces:
        if piece.nbytes:
            found.append(_Place(piece.digest, at, piece.nbytes))
        at += piece.nbytes
    return found


def _file(
    objects: Objects,
    index: StoreIndex,
    path: Path,
    links: LinkBoundary,
    entry: FileEntry,
    own: Sequence[_Place],
) -> _CacheFile | None:
    held = index.find({piece.digest for piece in own})
    if not held:
        return None
    try:
        status = objects.files.status(path)
    except OSError:
        return None
    if status is None or status.kind != "file" or status.size != entry.nbytes:
        return None
    there = [piece for piece in own if piece.digest in held]
    found = _CacheFile(path, links, status, there, _whole(index, own, held, entry.nbytes), [])
    try:
        if found.whole is not None:
            with _opened(objects, found) as (container, blob):
                if objects.files.status_of(container).device == status.device:
                    extents = (objects.files.extents(each) for each in (container, blob))
                    found.shared = list(_common(*extents))
    except CheckpointError:  # a link that leads elsewhere now: the file is not that of the import
        return None
    except OSError as error:
        found.why = _reason(error)
    return found


def _whole(
    index: StoreIndex,
    own: Sequence[_Place],
    held: Mapping[bytes, Sequence[PieceLocation]],
    nbytes: int,
) -> ContainerId | None:
    """The container that is a copy of a file: with the same pieces, at the same places."""
    largest = max(own, key=lambda piece: piece.nbytes)
    for place in held.get(largest.digest, ()):
        if place.container.kind == "raw" and place.file_bytes == nbytes:
            entries = index.places(place.container)
            if {entry[:3] for entry in entries} == {(d, start, size) for d, start, size in own}:
                return place.container
    return None


@contextmanager
def _opened(objects: Objects, file: _CacheFile) -> Iterator[tuple[Handle, Handle]]:
    """The container and the blob, opened for reading while active."""
    assert file.whole is not None
    files = objects.files
    container = files.open(objects.layout.container(file.whole.name, file.whole.kind), "read")
    try:
        blob = files.open(file.path, "read")
        try:
            file.links.check_open(file.path, blob.fd)
            yield container, blob
        finally:
            files.close(blob)
    finally:
        files.close(container)


def _common(one: Sequence[DiskExtent], other: Sequence[DiskExtent]) -> Iterator[tuple[int, int]]:
    """The ranges of two files of one file system that are the same space on the disk."""
    others = list(other)
    for a in one:
        while others and others[0].start + others[0].nbytes <= a.start:
            others.pop(0)
        for b in others:
            start, stop = max(a.start, b.start), min(a.start + a.nbytes, b.start + b.nbytes)
            if start >= stop:
                break
            if a.place - a.start == b.place - b.start:
                yield start, stop


def _share(objects: Objects, file: _CacheFile, progress: ProgressListener) -> None:
    """Make a file of the cache share the space of its container, as far as the kernel does."""
    try:
        with _opened(objects, file) as (container, blob):
            if objects.files.status_of(blob) != file.status:
                file.why = _CHANGED
                return
            done, file.why = _share_all(objects.files, container, blob, file.status.size, progress)
            file.shared = [(0, done), *((max(a, done), b) for a, b in file.shared if b > done)]
            if objects.files.status_of(blob) != file.status:
                file.why = _CHANGED
    except CheckpointError as error:
        file.why = str(error)
    except OSError as error:
        file.why = _reason(error)


def _share_all(
    files: Files, container: Handle, blob: Handle, nbytes: int, progress: ProgressListener
) -> tuple[int, str]:
    """How many bytes from the start are one copy now, and why it was not all of them."""
    done = 0
    while done < nbytes:
        try:
            count = files.dedupe(container, blob, done, min(_STEP, nbytes - done))
        except OSError as error:
            return done, _reason(error)
        if not count:
            return done, _DIFFERS if count is None else _STOPPED
        done += count
        progress.advance(count)
    return done, ""


def _reason(error: OSError) -> str:
    return _WHY.get(error.errno, f"the file system refuses it ({error.strerror})")
