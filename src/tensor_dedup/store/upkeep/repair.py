"""Repair: restoring of damaged or lost data from the trash, the quarantine, and given checkpoints.

No source is trusted. Pieces are restored only if their bytes have the right digest. Manifests and
their pages are restored only if their content has the digest that is their name.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import CheckpointError, StoreError, UnsupportedError
from tensor_dedup.store.codecs.parts import leaf_bytes, part_digest
from tensor_dedup.store.containers import ContainerId, container_in
from tensor_dedup.store.errors import is_unreadable
from tensor_dedup.store.format import frames, manifests, tables
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.manifests import FileEntry, Piece
from tensor_dedup.store.format.references import ref_text
from tensor_dedup.store.format.tables import Table
from tensor_dedup.store.hashing import (
    Hashed,
    Hasher,
    ProgressListener,
    Range,
    SilentListener,
)
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.upkeep.inventory import Inventory, take_inventory
from tensor_dedup.store.upkeep.verify import Level, verify
from tensor_dedup.store.writing.containers import ContainerWriter, NewPiece, kind_for
from tensor_dedup.store.writing.sources import (
    ImportFile,
    ImportSource,
    Segment,
    notes_of,
    paths_of_models,
    read_file,
    read_source,
)

# A few flipped bits are told from another name or manifest, whose digests differ everywhere.
NEAR_BYTES = 4
_REF_BYTES = 1 << 12


@dataclass
class RepairResult:
    """The result of a repair: counts of what was restored, and a list of what is still missing."""

    pieces: int = 0
    bytes: int = 0
    manifests: int = 0
    references: int = 0
    padding: int = 0
    from_trash: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing is missing any more, as far as the metadata shows."""
        return not self.missing

    def to_dict(self) -> dict[str, object]:
        """Return all fields and `whole` as a dict for JSON."""
        names = self.__dataclass_fields__
        return {"whole": self.whole, **{name: getattr(self, name) for name in names}}


class Repair:
    """A repair of a store.

    Use it inside `with locks.session(...):`.
    """

    def __init__(
        self, objects: Objects, index: StoreIndex, hasher: Hasher, progress: ProgressListener
    ) -> None:
        self._objects, self._index, self._hasher = objects, index, hasher
        self._progress = progress
        self._result = RepairResult()
        self._unreadable: list[str] = []

    def run(self, paths: Sequence[Path]) -> RepairResult:
        """Restore what can be restored, also from the checkpoints at `paths`; return the result.

        Each path may have any form that can be imported. A folder of several models stands for all
        of them.

        Raises:
            CheckpointError, UnsupportedError: A path does not lead to a checkpoint; nothing was
                restored.
        """
        # Links may lead anywhere: nothing comes back that the store has not had.
        models = [each for path in paths for each in paths_of_models(path, follow_links=True)]
        given = [read_source(self._objects.files, path, follow_links=True) for path in models]
        self._drop_broken_lists()
        self._check(Level(0))
        found = take_inventory(self._objects)
        self._references(found)
        self._padding(found)
        self._objects_set_aside()
        self._from_trash()
        sources = [*self._own_leftovers(), *given]
        self._progress.start(sum(source.nbytes for source in sources))
        for source in sources:
            self._from_source(source)
        self._index.refresh()
        self._result.missing = _missing(take_inventory(self._objects))
        if self._result.missing and given:
            self._from_all_files(models)
        if self._result.missing:
            self._result.missing += self._unreadable
        return self._result

    def _from_all_files(self, paths: Sequence[Path]) -> None:
        """Restore from what an import leaves out of folders unless it is told to keep all files."""
        sources = [
            read_source(self._objects.files, path, follow_links=True, all_files=True)
            for path in paths
        ]
        self._progress.start(sum(source.nbytes for source in sources))
        for source in sources:
            self._from_source(source)
        self._index.refresh()
        self._result.missing = _missing(take_inventory(self._objects))

    def _check(self, level: Level) -> None:
        verify(self._objects, self._index, self._hasher, level, SilentListener())
        self._index.refresh()

    def _drop_broken_lists(self) -> None:
        """A list that cannot be read is made anew, by reading the containers."""
        broken = [p.path for p in take_inventory(self._objects).problems if p.kind == "list"]
        for path in broken:
            self._objects.set_aside(path, self._objects.layout.quarantine)
        if broken:
            self._check(Level(1))

    def _references(self, found: Inventory) -> None:
        known = list(self._objects.manifest_names())
        for problem in found.problems:
            if problem.kind == "reference" and problem.checkpoint is not None:
                self._reference(problem.checkpoint, problem.path, known)

    def _reference(self, name: str, path: Path, known: Iterable[str]) -> None:
        with suppress(StoreError):
            blob = self._objects.read(path, _REF_BYTES)
            near = [m for m in known if frames.distance(blob, ref_text(name, m)) <= NEAR_BYTES]
            if len(near) == 1:
                self._objects.set_ref(name, near[0], replace=True)
                self._result.references += 1

    def _padding(self, found: Inventory) -> None:
        for container, bad in found.bad.items():
            stained = bad - {record.offset for record in found.tables[container].records}
            if stained:
                done = self._zero(container, stained, found)
                self._objects.set_bad_offsets(container.name, sorted(bad - done))
                self._result.padding += len(done)

    def _zero(self, container: ContainerId, stained: frozenset[int], found: Inventory) -> set[int]:
        # In place: wherever a crash stops it, what is written is what belongs there.
        files, layout = self._objects.files, self._objects.layout
        done = set[int]()
        handle = files.open(layout.container(container.name, container.kind), "modify")
        try:
            for start, nbytes in tables.gaps(found.tables[container]):
                if start in stained:
                    with _tolerating_lost_pages():  # to write a part of one it has to be read
                        files.pwrite(handle, bytes(nbytes), start)
                        done.add(start)
            files.fsync(handle)
        finally:
            files.close(handle)
        return done

    def _objects_set_aside(self) -> None:
        """Manifests and pages that were set aside and can be read: the disk may have been away."""
        layout, files = self._objects.layout, self._objects.files
        aside = {
            name.partition(".")[2]: folder / name
            for folder in (layout.trash, layout.quarantine)
            for name in files.listdir(folder)
        }
        for kind in ("manifest", "page"):  # in this order: one that comes back leads to pages
            decode = manifests.decode_page if kind == "page" else manifests.decode_manifest
            problems = take_inventory(self._objects).problems if aside else []
            for name in {problem.path.name for problem in problems if problem.kind == kind}:
                path = aside.get(name)
                with suppress(StoreError):
                    if path is not None:
                        blob = self._objects.read(path)
                        decode(blob, name, path)
                        self._objects.publish(blob, layout.manifest(name))
                        self._result.manifests += 1

    def _from_trash(self) -> None:
        """Bring back containers that were set aside, where they hold what is lost.

        One that was one too many may by now be the only one that is whole, and one whose table
        could not be read may be readable again.
        """
        before = -1
        while self._result.from_trash != before:  # what came back may itself need another
            before = self._result.from_trash
            for container, paths in list(self._trashed()):
                found = take_inventory(self._objects)
                wanted = found.lost().keys() | found.lost_anchors()
                with suppress(StoreError):
                    table = self._objects.containers.table(container, at=paths[-1])
                    held = any(record.digest in wanted for record in table.records)
                    if held and self._is_complete(container, table, paths[0]):
                        self._bring_back(container, paths)

    def _is_complete(self, container: ContainerId, table: Table, data: Path) -> bool:
        """Whether the file that was set aside has all the bytes that its table says."""
        if container.kind != "raw":
            return True
        status = self._objects.files.status(data)
        return status is not None and status.size == table.data_bytes

    def _bring_back(self, container: ContainerId, paths: Sequence[Path]) -> None:
        layout = self._objects.layout
        for path in paths:
            folder = layout.container(container.name, container.kind).parent
            self._objects.place(path, folder / path.name.partition(".")[2])
        self._result.from_trash += 1

    def _trashed(self) -> Iterator[tuple[ContainerId, list[Path]]]:
        """Containers in the trash and the quarantine with their files, the table's last."""
        for folder in (self._objects.layout.trash, self._objects.layout.quarantine):
            yield from self._set_aside_in(folder)

    def _set_aside_in(self, folder: Path) -> Iterator[tuple[ContainerId, list[Path]]]:
        layout, files = self._objects.layout, self._objects.files
        there = {name.partition(".")[2]: name for name in files.listdir(folder)}
        for file, name in there.items():
            container = container_in(layout.containers / file[:2] / file)
            if container is None:
                continue
            parts = [name]
            if container.kind == "raw":
                data = there.get(f"{container.name}.raw")
                if data is None:
                    continue
                parts.insert(0, data)
            yield container, [folder / part for part in parts]

    def _own_leftovers(self) -> Iterator[ImportSource]:
        """Whole files whose table was damaged: what they hold may still be right.

        And files indexed in place, for what else only they have.
        """
        found = take_inventory(self._objects)
        exposed = found.exposed()
        for container, table in found.tables.items() if exposed else ():
            if container.kind == EXTERNAL and any(r.digest in exposed for r in table.records):
                path = self._objects.containers.data_path(container, table)
                with suppress(CheckpointError, UnsupportedError), _tolerating_lost_pages():
                    yield read_file(path)
        if not found.lost():
            return
        for name in self._objects.files.listdir(self._objects.layout.quarantine):
            if name.endswith(".raw"):
                path = self._objects.layout.quarantine / name
                with suppress(CheckpointError, UnsupportedError), _tolerating_lost_pages():
                    yield read_file(path)

    def _from_source(self, source: ImportSource) -> None:
        hashed = [self._hash(file) for file in source.files]
        found = take_inventory(self._objects)
        if self._publish(source.files, hashed, found.absent):
            found = take_inventory(self._objects)  # what came back leads to more
        # A delta that was lost with its base comes back with it.
        lost = found.lost().keys() | found.lost_anchors() | found.exposed().keys()
        with ExitStack() as undo:
            writers = {kind: ContainerWriter(self._objects, self._hasher, kind) for kind in _KINDS}
            for writer in writers.values():
                undo.callback(writer.abandon)
            for file, digests in zip(source.files, hashed, strict=True):
                self._write(file, digests, lost, writers)
            for writer in writers.values():
                container = writer.finish()
                if container is not None:
                    self._objects.set_bad_offsets(container.name, ())

    def _hash(self, file: ImportFile) -> list[Hashed | None]:
        """The digests of a file's segments; None for what the disk cannot read of it."""
        ranges = [Range(segment.start, segment.nbytes) for segment in file.segments]
        handle = file.open_with(self._objects.files)
        try:
            hashed = self._hasher.hash_readable(handle, ranges, self._progress)
        finally:
            self._objects.files.close(handle)
        if None in hashed:
            self._unreadable.append(f"{file.path}: the disk cannot read all of it")
        return hashed

    def _publish(
        self,
        files: Sequence[ImportFile],
        hashed: Sequence[Sequence[Hashed | None]],
        absent: set[str],
    ) -> int:
        """Put back lost manifests and pages where this source makes the same; how many."""
        entries = [FileEntry(f.stored_as, f.nbytes, len(f.segments), f.prefix) for f in files]
        pieces = [
            Piece(found.digest, part.nbytes, part.name, part.dtype, part.shape)
            for file, all_found in zip(files, hashed, strict=True)
            for part, found in zip(file.segments, all_found, strict=True)
            if found is not None
        ]
        if len(pieces) < sum(map(len, hashed)):
            return 0  # what it describes is not known
        manifest, blobs = manifests.build(entries, pieces, notes_of(files))
        back = 0
        for name, blob in blobs.items():
            path = self._objects.layout.manifest(name)
            gone = manifest in absent and self._objects.files.status(path) is None
            if name in absent or gone:
                self._objects.publish(blob, path)
                back += 1
        self._result.manifests += back
        return back

    def _write(
        self,
        file: ImportFile,
        hashed: Sequence[Hashed | None],
        lost: set[bytes],
        writers: dict[str, ContainerWriter],
    ) -> None:
        news = []
        for part, found in zip(file.segments, hashed, strict=True):
            for new in () if found is None else _held_in(part, found):
                if new.digest in lost:
                    lost.remove(new.digest)
                    news.append(new)
        handle = file.open_with(self._objects.files)
        try:
            for kind, writer in writers.items():
                writer.add(handle, [new for new in news if kind_for(new.nbytes) == kind])
        finally:
            self._objects.files.close(handle)
        self._result.pieces += len(news)
        self._result.bytes += sum(new.nbytes for new in news)


def _held_in(part: Segment, found: Hashed) -> Iterator[NewPiece]:
    """What a segment of a file may bring back: itself, and the pieces that its leaves are."""
    yield NewPiece(part.start, part.nbytes, found.digest)
    if part.nbytes > LEAF_BYTES:
        for number, leaf in enumerate(found.leaf_list):
            nbytes = leaf_bytes(number, part.nbytes)
            start = part.start + number * LEAF_BYTES
            yield NewPiece(start, nbytes, part_digest(leaf, nbytes))


_KINDS = ("slab", "pack")


@contextmanager
def _tolerating_lost_pages() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_unreadable(error):
            raise


def _missing(found: Inventory) -> list[str]:
    """What still stops a checkpoint from being read, for people."""
    broken = [f"{problem.path}: {problem.kind}" for problem in found.problems]
    return broken + [f"{found.users[digest][0]}: {digest.hex()}" for digest in found.lost()]
