"""Importing of a checkpoint: new tensors are written, known tensors are only referred to.

The parts become durable in this order: containers, index, manifest with its pages, reference. A
session is held throughout. Just before the manifest is written, all pieces that it leads to are
looked up once more.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tensor_dedup.digest import digests_by_place
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.checkpoint import check_text
from tensor_dedup.formats.left_out import LeftOut, NotIndexed
from tensor_dedup.formats.markers import in_files
from tensor_dedup.formats.weights import read_header
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import LostFilesError, LostHitError, NameTakenError
from tensor_dedup.store.files import Files, FileStatus, Handle
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.manifests import FileEntry, Piece
from tensor_dedup.store.format.names import check_name
from tensor_dedup.store.hashing import (
    Hashed,
    Hasher,
    ProgressListener,
    SilentListener,
    changed,
)
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import (
    ContainerWriter,
    Copied,
    NewPiece,
    hash_copy,
    index_in_place,
    kind_for,
)
from tensor_dedup.store.writing.deltas import (
    Anchor,
    EncodedWriter,
    LeafSharing,
    Plan,
    own_bytes,
    plan_of,
)
from tensor_dedup.store.writing.sources import (
    ImportFile,
    ImportSource,
    Segment,
    notes_of,
    segments_of,
)
from tensor_dedup.store.writing.transaction import OrderedTransaction

if TYPE_CHECKING:
    from tensor_dedup.store.writing.encoder import Encoder

# A file stays whole when at most this part of it is in the store already: bytes that are stored
# twice count against the promise that a fine-tune costs what differs and 0.1 %.
KNOWN_SHARE = 1 / 2000
# Smaller ones share containers: two files and four syncs for each would cost more than it gives.
RAW_FROM = 1 << 20
_SAMPLE_SHARE = 1 / 32
_SAMPLE_TENSORS = 4
_SHOWN = 5

KnownDigests: TypeAlias = Callable[[Path, int], Mapping[tuple[int, int], str]]
"""Gives the digests that are known of an open file (path, descriptor), by (start, nbytes)."""


class ImportListener(Protocol):
    """A receiver of the digests of each imported file, while the file is still open."""

    def imported(
        self, fd: int, before: FileStatus, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Receive the digests of a file's tensors and leaves, by (start, nbytes). Must not raise.

        `fd` is the open file. `before` is its status, which did not change while it was hashed.
        `began_ns` is the time at which hashing began, in ns since 1970.
        """


class NullListener:
    """An ImportListener that ignores everything."""

    def imported(
        self, fd: int, before: FileStatus, began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import. All sizes are in bytes and count headers, tensors and small files.

    - `new_bytes` is the size of the pieces that the store did not have.
    - `known_bytes` is the size of the pieces that the store had already, or that occurred twice.
    - `leaf_shared_bytes` is the part of `new_bytes` that took no space, because stored tensors
      have the same leaves.
    - `stored_bytes` is the space that the import took on disk, with metadata.
    - `encoded_tensors` is the number of encoded tensors, and `saved_bytes` is what encoding saved.
    - `base` is the name of the checkpoint against which new tensors could be encoded. It is None if
      there was no such checkpoint, or no tensor was encoded.
    - `external_bytes` is the size of the files that were indexed in place.
    - `unchanged` is True if the checkpoint had the same files before, so nothing was written.
    - `left_out` has the files of the folder that were not imported, and why.
    - `not_indexed` has the copies of tensors that the index does not name. They are in the files of
      the checkpoint, and not in `tensors`.
    - `done` is False for a dry run: nothing was written. `stored_bytes` is then 0, and what sharing
      of leaves and encoding would save is not known.
    """

    name: str
    manifest: str
    files: int
    tensors: int
    new_tensors: int
    new_bytes: int
    known_bytes: int
    stored_bytes: int
    containers: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    encoded_tensors: int = 0
    saved_bytes: int = 0
    external_bytes: int = 0
    leaf_shared_bytes: int = 0
    base: str | None = None
    unchanged: bool = False
    not_indexed: tuple[NotIndexed, ...] = ()
    done: bool = True

    @property
    def skipped(self) -> tuple[str, ...]:
        """The paths of the files that were not imported."""
        return tuple(each.path for each in self.left_out)

    def to_dict(self) -> dict[str, object]:
        """Return all fields, and `skipped`, as a dict for JSON."""
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names} | {
            "skipped": self.skipped,
            "left_out": [each.to_dict() for each in self.left_out],
            "not_indexed": [each.to_dict() for each in self.not_indexed],
        }


class Import:
    """An import in progress, which adds files to a transaction.

    Use it inside `with locks.session(...):`.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        hasher: Hasher,
        transaction: OrderedTransaction,
        progress: ProgressListener,
        hints: ImportListener,
        encoder: "Encoder | None",
        in_place: bool,
    ) -> None:
        self._encoder = encoder
        self._in_place = in_place
        self._objects = objects
        self._index = index
        self._hasher = hasher
        self._progress = progress
        self._hints = hints
        self._fresh: set[bytes] = set()
        self._transaction = transaction
        self._writers = {
            kind: transaction.own(ContainerWriter(objects, hasher, kind))
            for kind in ("slab", "pack")
        }
        self.encoded = transaction.own(EncodedWriter(objects, hasher))
        self._sharing = LeafSharing(objects, index)
        self.files: list[FileEntry] = []
        self.pieces: list[Piece] = []
        self.new_tensors = 0
        self.new_bytes = 0
        self.external_bytes = 0

    def add(self, file: ImportFile) -> None:
        """Hash a file and store its new pieces.

        Raises:
            ChangedFileError: The file was modified during the import.
            CheckpointFilesError: A link in the file's path now leads out of the checkpoint.
        """
        files = self._objects.files
        handle = file.open_with(files)
        try:
            before, began_ns = files.status_of(handle), time.time_ns()
            self._check_unchanged(handle, file, before)
            in_place = self._in_place and file.weights
            hashed = self._hash(handle, file) if in_place else self._store(handle, file)
            if files.status_of(handle) != before:
                raise changed(handle, "it was written while it was read")
            if in_place:
                container = index_in_place(self._objects, file, before, hashed)
                self._transaction.add_container(container)
                self.external_bytes += file.nbytes
            self._remember(handle, file, before, began_ns, hashed)
        finally:
            files.close(handle)
        self.files.append(FileEntry(file.stored_as, file.nbytes, len(hashed), file.prefix))
        self.pieces += [
            Piece(found.digest, part.nbytes, part.name, part.dtype, part.shape)
            for part, found in zip(file.segments, hashed, strict=True)
        ]

    def _remember(
        self,
        handle: Handle,
        file: ImportFile,
        before: FileStatus,
        began_ns: int,
        hashed: Sequence[Hashed],
    ) -> None:
        digests: dict[tuple[int, int], str] = {}
        for part, found in zip(file.segments, hashed, strict=True):
            if part.name is not None:
                digests |= digests_by_place(part.start, part.nbytes, found.leaf_list)
        if digests:
            self._hints.imported(handle.fd, before, began_ns, digests)

    def _check_unchanged(self, handle: Handle, file: ImportFile, now: FileStatus) -> None:
        if now.kind != "file" or now.size != file.nbytes:
            raise changed(handle, f"it has no longer {file.nbytes} bytes")
        # Its header was read through another descriptor, some time ago.
        if file.weights and segments_of(read_header(file.path, fd=handle.fd)) != file.segments:
            raise changed(handle, "its header is another one now")

    def _hash(self, handle: Handle, file: ImportFile) -> list[Hashed]:
        return hash_copy(self._hasher, handle, file.segments, self._progress)

    def _store(self, handle: Handle, file: ImportFile) -> list[Hashed]:
        if self._encoder is not None and file.weights:
            return self._encode(self._encoder, handle, file)
        if self._may_stay_whole(handle, file):
            return self._copy_whole(handle, file.segments)
        hashed = hash_copy(self._hasher, handle, file.segments, self._progress)
        news = self._news(file.segments, hashed)
        self._write(handle, news, self._by_leaf(news))
        return hashed

    def _may_stay_whole(self, handle: Handle, file: ImportFile) -> bool:
        large = file.weights and file.nbytes >= RAW_FROM
        return large and self._looks_new(handle, file.segments)

    def _encode(self, encoder: "Encoder", handle: Handle, file: ImportFile) -> list[Hashed]:
        """Store the new tensors that this makes smaller encoded, the rest as ever."""
        # Progress is that of encoding, which takes several times as long as hashing.
        hashed = hash_copy(self._hasher, handle, file.segments, SilentListener())
        known = self._index.find({found.digest for found in hashed})
        new = [
            (part, found)
            for part, found in zip(file.segments, hashed, strict=True)
            if found.digest not in known
        ]
        alike = self._alike(new, readable=True)
        plans = {}
        for part, found in new:
            plan = encoder.plan(handle, part, file.prefix, found, alike.get(found.digest))
            if plan is not None:
                plans[found.digest] = plan
        if not plans and self._may_stay_whole(handle, file):
            return self._copy_whole(handle, file.segments)
        news = self._news(file.segments, hashed)
        self._progress.advance(file.nbytes - sum(new.nbytes for new, _ in news))
        self._write(handle, news, plans, self._progress)
        return hashed

    def _alike(
        self, pieces: Sequence[tuple[Segment | NewPiece, Hashed]], *, readable: bool = False
    ) -> dict[bytes, Anchor]:
        """The anchors that have leaves in common with new pieces, by the digests of these."""
        return self._sharing.find(
            ((found, part.nbytes) for part, found in pieces), readable=readable
        )

    def _by_leaf(self, news: Sequence[tuple[NewPiece, Hashed]]) -> dict[bytes, Plan]:
        """How to store the pieces that have leaves in common with what is stored."""
        alike = self._alike(news)
        plans = {
            found.digest: plan_of(None, alike[found.digest], new.nbytes, found.leaves)
            for new, found in news
            if found.digest in alike
        }
        return {digest: plan for digest, plan in plans.items() if plan is not None}

    def _looks_new(self, handle: Handle, segments: Sequence[Segment]) -> bool:
        """Whether nothing of the largest tensors is known: copying the file is then not in vain."""
        enough = sum(part.nbytes for part in segments) * _SAMPLE_SHARE
        sample: list[Segment] = []
        for part in sorted(segments, key=lambda part: -part.nbytes)[:_SAMPLE_TENSORS]:
            if sum(chosen.nbytes for chosen in sample) < enough:
                sample.append(part)
        hashed = hash_copy(self._hasher, handle, sample, None)
        digests = {found.digest for found in hashed}
        if self._index.find(digests) or digests & self._fresh:
            return False
        return not self._alike(list(zip(sample, hashed, strict=True)))

    def _copy_whole(self, handle: Handle, segments: Sequence[Segment]) -> list[Hashed]:
        nbytes = sum(part.nbytes for part in segments)
        copy = Copied(self._objects, handle, nbytes)
        try:
            # What is hashed is the copy: whatever was written to the source meanwhile, the
            # container holds what its table says.
            hashed = hash_copy(self._hasher, copy.handle, segments, self._progress)
            news = self._news(segments, hashed)
            plans = self._by_leaf(news)
            new_bytes = sum(
                own_bytes(plans[new.digest], new.nbytes) if new.digest in plans else new.nbytes
                for new, _ in news
            )
            if nbytes - new_bytes > nbytes * KNOWN_SHARE:
                self._write(copy.handle, news, plans)
                copy.discard()
            else:
                self._transaction.add_container(copy.keep(segments, hashed))
        except BaseException:
            copy.discard()
            raise
        return hashed

    def _news(
        self, segments: Sequence[Segment], hashed: Sequence[Hashed]
    ) -> list[tuple[NewPiece, Hashed]]:
        """The pieces that are nowhere yet, each digest once; from now on they count as known."""
        known = self._index.find({found.digest for found in hashed} - self._fresh)
        news = []
        for part, found in zip(segments, hashed, strict=True):
            if part.nbytes and found.digest not in known and found.digest not in self._fresh:
                self._fresh.add(found.digest)
                self.new_tensors += part.name is not None
                self.new_bytes += part.nbytes
                news.append((NewPiece(part.start, part.nbytes, found.digest), found))
        return news

    def _write(
        self,
        handle: Handle,
        news: Sequence[tuple[NewPiece, Hashed]],
        plans: Mapping[bytes, Plan],
        progress: ProgressListener | None = None,
    ) -> None:
        """Store pieces of an open file by their plans, and as they are where there is none."""
        plain = []
        for new, found in news:
            plan = plans.get(new.digest)
            if plan is None or self.encoded.encode(handle, new, found.leaves, plan) is None:
                plain.append(new)
            if progress is not None:
                progress.advance(new.nbytes)
        for kind, writer in self._writers.items():
            writer.add(handle, [new for new in plain if kind_for(new.nbytes) == kind])

    def close(self) -> None:
        """Close the files that were opened to find shared leaves."""
        self._sharing.close()

    def check_hits(self) -> None:
        """Check that all pieces of the new manifest are in the store.

        Raises:
            LostHitError: A piece was removed during the import.
        """
        wanted = {piece.digest for piece in self.pieces if piece.nbytes}
        held = self._index.find(wanted, external=self._in_place)
        lost = wanted - held.keys()
        if lost:
            raise LostHitError.at(
                self._objects.layout.root,
                f"{len(lost)} of {len(wanted)} pieces were removed meanwhile, {min(lost).hex()} "
                "is the first",
                lost=len(lost),
            )
        places = [place for found in held.values() for place in found]
        bases = self._index.find({base for place in places for base in place.bases})
        places += [place for found in bases.values() for place in found]
        self._transaction.settle({place.container for place in places})


def import_source(
    objects: Objects,
    index: StoreIndex,
    hasher: Hasher,
    source: ImportSource,
    name: str,
    *,
    replace: bool,
    progress: ProgressListener,
    hints: ImportListener,
    compress: bool,
    base: str | None,
    in_place: bool,
    check_name: Callable[[], None],
    all_files: bool = False,
    dry_run: bool = False,
) -> ImportResult:
    """Store the checkpoint `source` and commit it as `name`, atomically.

    Call it inside `with locks.session(...):`. With `in_place`, weights stay where they are and are
    indexed there, but other files are stored. With `compress`, tensors are stored encoded where
    that saves space. They may be encoded against the checkpoint `base` or, if it is None, the most
    similar checkpoint. `check_name` is called just before the name changes, while the lock for
    changing references is held. If `check_name` raises, the name stays as it was.
    `all_files` says that `source` has all files of its folder. With `dry_run`, the files are only
    hashed, and nothing is written.

    Raises:
        NameTakenError: The name holds another checkpoint, and `replace` is False.
        LostFilesError: The name holds files that only an import of all files keeps, `source` lacks
            them, and `all_files` is False.
        UnknownNameError: No checkpoint is called `base`.
    """
    if not replace and name in objects.names():
        same = _unchanged(objects, index, hasher, source, name, in_place=in_place)
        if same is not None:
            return replace_fields(same, done=False) if dry_run else same
        # By the same: what of it is damaged or gone is stored again.
        check_name = partial(_check_still, objects, name, objects.ref(name), check_name)
        replace = True
    elif replace and not all_files:
        paths = {file.stored_as for file in source.files}
        check_name = partial(_check_kept, objects, name, paths, check_name)
        check_name()  # before the work; it is looked at again after it
    if dry_run:
        return _planned(objects, index, hasher, source, name, progress, in_place=in_place)
    encoder = _encoder(objects, index, source, base) if compress else None
    for file in source.files if in_place else ():
        # Where the weights are is written down, as text that is not of this locale.
        text = os.fsencode(file.path.absolute()).decode("utf-8", "surrogateescape")
        check_text(text, file.path)
    progress.start(source.nbytes)
    with ExitStack() as undo:
        if encoder is not None:
            undo.callback(encoder.close)
        transaction = undo.enter_context(OrderedTransaction(objects, index))
        work = Import(objects, index, hasher, transaction, progress, hints, encoder, in_place)
        undo.callback(work.close)
        for file in source.files:
            work.add(file)  # hash it, look its pieces up, encode and write what is new
        notes = notes_of(source.files)
        manifest, blobs = manifests.build(work.files, work.pieces, notes)
        for part, blob in blobs.items():
            transaction.add_object(part, blob)
        transaction.commit(
            name, manifest, replace=replace, check_hits=work.check_hits, check_name=check_name
        )
    containers = transaction.containers
    copies = manifests.not_indexed(work.files, work.pieces, manifests.counted_files(notes))
    stored = sum(_size_on_disk(objects, container) for container in containers)
    return ImportResult(
        name=name,
        manifest=manifest,
        files=len(work.files),
        tensors=sum(piece.name is not None for piece in work.pieces) - len(copies),
        new_tensors=work.new_tensors,
        new_bytes=work.new_bytes,
        known_bytes=source.nbytes - work.new_bytes - work.external_bytes,
        external_bytes=work.external_bytes,
        stored_bytes=stored + transaction.object_bytes,
        containers=tuple(f"{c.name}.{c.kind}" for c in containers),
        left_out=source.left_out,
        encoded_tensors=work.encoded.tensors,
        saved_bytes=work.encoded.saved_bytes,
        leaf_shared_bytes=work.encoded.leaf_shared_bytes,
        base=encoder.base_name if encoder is not None and work.encoded.tensors else None,
        not_indexed=copies,
    )


def _planned(
    objects: Objects,
    index: StoreIndex,
    hasher: Hasher,
    source: ImportSource,
    name: str,
    progress: ProgressListener,
    *,
    in_place: bool,
) -> ImportResult:
    """Return the result that an import would have; hash the files, and write nothing."""
    progress.start(source.nbytes)
    entries, pieces, own = list[FileEntry](), list[Piece](), set[bytes]()
    for file in source.files:
        handle = file.open_with(objects.files)
        try:
            hashed = hash_copy(hasher, handle, file.segments, progress)
        finally:
            objects.files.close(handle)
        found = [
            Piece(each.digest, part.nbytes, part.name, part.dtype, part.shape)
            for part, each in zip(file.segments, hashed, strict=True)
        ]
        entries.append(FileEntry(file.stored_as, file.nbytes, len(found), file.prefix))
        pieces += found
        if not (in_place and file.weights):
            own |= {piece.digest for piece in found}
    notes = notes_of(source.files)
    manifest, _ = manifests.build(entries, pieces, notes)
    copies = manifests.not_indexed(entries, pieces, manifests.counted_files(notes))
    sizes = {piece.digest: piece.nbytes for piece in pieces if piece.nbytes}
    missing = (own & sizes.keys()) - index.find(sizes).keys()
    external = sum(file.nbytes for file in source.files if in_place and file.weights)
    new_bytes = sum(sizes[digest] for digest in missing)
    return ImportResult(
        name=name,
        manifest=manifest,
        files=len(entries),
        tensors=sum(piece.name is not None for piece in pieces) - len(copies),
        new_tensors=len(missing & {piece.digest for piece in pieces if piece.name is not None}),
        new_bytes=new_bytes,
        known_bytes=source.nbytes - new_bytes - external,
        external_bytes=external,
        stored_bytes=0,
        containers=(),
        left_out=source.left_out,
        not_indexed=copies,
        done=False,
    )


def _unchanged(
    objects: Objects,
    index: StoreIndex,
    hasher: Hasher,
    source: ImportSource,
    name: str,
    *,
    in_place: bool,
) -> ImportResult | None:
    """Return the result of importing what a name holds already; None if not all of it is there.

    Only what has as many files and bytes is read and hashed. That is done before anything is
    written: another checkpoint of the same sizes would be stored whole for a name that is taken.

    Raises:
        NameTakenError: The name holds something else.
    """
    taken = NameTakenError.at(objects.layout.root, f"{name!r} is there already", name=name)
    try:
        manifest = objects.ref(name)
        content = objects.manifest(manifest)
    except StoreError as error:
        raise taken from error
    if (len(content.files), content.nbytes) != (len(source.files), source.nbytes):
        raise taken
    if expected_manifest(objects.files, hasher, source, lambda _path, _fd: {}) != manifest:
        raise taken
    pieces = objects.pieces(manifest, content)
    wanted = {piece.digest for piece in pieces if piece.nbytes}
    if wanted - index.find(wanted, external=in_place).keys():
        return None
    copies = manifests.not_indexed(content.files, pieces, manifests.counted_files(content.notes))
    return ImportResult(
        name=name,
        manifest=manifest,
        files=len(content.files),
        tensors=sum(piece.name is not None for piece in pieces) - len(copies),
        new_tensors=0,
        new_bytes=0,
        known_bytes=source.nbytes,
        stored_bytes=0,
        containers=(),
        left_out=source.left_out,
        unchanged=True,
        not_indexed=copies,
    )


def _check_still(
    objects: Objects, name: str, manifest: str, check_name: Callable[[], None]
) -> None:
    """Check that a name that held the same still does.

    Raises:
        NameTakenError: It holds something else since.
    """
    check_name()
    if objects.ref(name) != manifest:
        raise NameTakenError.at(objects.layout.root, f"{name!r} is there already", name=name)


def _check_kept(
    objects: Objects, name: str, paths: Collection[str], check_name: Callable[[], None]
) -> None:
    """Check that no file is lost that only an import of all files keeps.

    Raises:
        LostFilesError: The name holds such a file that is not among `paths`.
    """
    check_name()
    if name not in objects.names():
        return
    try:
        notes = objects.manifest(objects.ref(name)).notes
    except StoreError:
        return  # what is damaged is replaced in any case
    lost = sorted(manifests.opaque_files(notes) - {*paths})
    if lost:
        count = f"{len(lost)} files" if len(lost) > 1 else "1 file"
        what = f"{name!r} holds {count} of an import with --all-files, which this one lacks"
        raise LostFilesError.at(
            objects.layout.root, f"{what}: {', '.join(lost[:_SHOWN])}", name=name, files=lost
        )


def _encoder(
    objects: Objects, index: StoreIndex, source: ImportSource, base: str | None
) -> "Encoder":
    from tensor_dedup.store.writing.encoder import Encoder  # and with it numpy

    encoder = Encoder(objects, index)
    if base is not None:
        encoder.open_base(check_name(base))
    else:
        encoder.find_base(source, in_files(file.path for file in source.files))
    return encoder


def _size_on_disk(objects: Objects, container: ContainerId) -> int:
    layout = objects.layout
    paths = {
        layout.container(container.name, container.kind),
        layout.table(container.name, container.kind),
    }
    found = [objects.files.status(path) for path in paths]
    return sum(status.size for status in found if status is not None)


def expected_manifest(
    files: Files, hasher: Hasher, source: ImportSource, known: KnownDigests
) -> str:
    """Return the name of the manifest that importing `source` would make.

    `known(path, fd)` returns the digests that the caller knows of an open file, as a mapping from
    (start, nbytes) to digests. They are trusted; other parts of the file are hashed. Use the result
    only to decide whether to import again.
    """
    entries: list[FileEntry] = []
    pieces: list[Piece] = []
    for file in source.files:
        handle = file.open_with(files)
        try:
            digests = _digests(hasher, handle, file, known(file.path, handle.fd))
        finally:
            files.close(handle)
        entries.append(FileEntry(file.stored_as, file.nbytes, len(digests), file.prefix))
        pieces += [
            Piece(digest, part.nbytes, part.name, part.dtype, part.shape)
            for part, digest in zip(file.segments, digests, strict=True)
        ]
    return manifests.build(entries, pieces, notes_of(source.files))[0]


def _digests(
    hasher: Hasher, handle: Handle, file: ImportFile, known: Mapping[tuple[int, int], str]
) -> Sequence[bytes]:
    unknown: list[Segment] = [s for s in file.segments if (s.start, s.nbytes) not in known]
    hashed = {
        (segment.start, segment.nbytes): found.digest
        for segment, found in zip(unknown, hash_copy(hasher, handle, unknown, None), strict=True)
    }
    return [
        hashed.get((s.start, s.nbytes)) or bytes.fromhex(known[s.start, s.nbytes])
        for s in file.segments
    ]
