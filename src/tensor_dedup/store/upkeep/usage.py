"""The disk usage of each checkpoint and each run, and what deleting them would free.

Only metadata is read (references, manifests and their pages, tables), and no tensor.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import UnknownNameError
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.manifests import Manifest
from tensor_dedup.store.format.names import file_of, marked_by
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.upkeep.gc import file_bytes
from tensor_dedup.store.upkeep.inventory import Inventory, take_containers
from tensor_dedup.store.upkeep.live_set import Held, needed
from tensor_dedup.store.upkeep.stats import disk_bytes

Kind = Literal["stored", "external", "run"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The disk usage of a checkpoint, or of a run with all its steps. All sizes are in bytes.

    - `nbytes` is the size of an export.
    - `unique_bytes` is the size on disk of the pieces that only this checkpoint or run needs. It
      includes the pieces that deltas are encoded against.
    - `shared_bytes` is the size on disk of the pieces that other checkpoints or runs need, too.
    - `encoding_saves_bytes` is how many bytes the encoding of its pieces saves.
    - `external_bytes` is the size of the pieces in files indexed in place.
    - `imported_at` is in seconds since 1970. For a run, it is the time of the last save.
    - `reclaimable_bytes` is what `gc` would free if the checkpoint or run were deleted. It is None
      while the store is damaged, because `gc` then deletes nothing.
    - `damage` says what cannot be read, or is None.
    """

    name: str
    kind: Kind
    steps: int
    nbytes: int
    unique_bytes: int
    shared_bytes: int
    encoding_saves_bytes: int
    external_bytes: int
    imported_at: int
    reclaimable_bytes: int | None
    damage: str | None

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON. `steps` is included only for a run."""
        document = asdict(self)
        if self.kind != "run":
            del document["steps"]
        return document


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The disk usage of all checkpoints and runs, by name, and the totals. All sizes are in bytes.

    - `unique_bytes` is the sum of the `unique_bytes` of all checkpoints and runs.
    - `shared_bytes` and `external_bytes` count each piece once.
    - `disk_bytes` is the size of all files of the store, with metadata, unused files and the trash.
    """

    checkpoints: tuple[Usage, ...]
    unique_bytes: int
    shared_bytes: int
    external_bytes: int
    disk_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        document = asdict(self)
        document["checkpoints"] = [each.to_dict() for each in self.checkpoints]
        return document


@dataclass(slots=True)
class _Group:
    """The references of one checkpoint, or of one run, and what they lead to."""

    name: str
    is_run: bool
    steps: int = 0
    nbytes: int = 0
    references: int = 0
    imported_at: int = 0
    pages: set[bytes] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    live: dict[bytes, int] = field(default_factory=dict)
    damage: str | None = None


def usage(objects: Objects, alone: str | None = None) -> StoreUsage:
    """Return the disk usage of each checkpoint and each run.

    If `alone` is the name of a step, that step is listed separately and not as a part of its run.
    Call it inside `with locks.session(...):`.
    """
    groups = _groups(objects, alone)
    live = {digest: nbytes for group in groups for digest, nbytes in group.live.items()}
    found = take_containers(objects, live)
    return _Measurement(objects, groups, found).result()


def _groups(objects: Objects, alone: str | None) -> list[_Group]:
    groups: dict[tuple[bool, str], _Group] = {}
    pages: dict[bytes, dict[bytes, int]] = {}
    for name in objects.references():
        kept = marked_by(name)
        checkpoint = kept or name
        group = _Group(checkpoint, False)
        try:
            manifest_name = objects.ref(name)
            manifest = objects.manifest(manifest_name)
            notes = _notes_of(checkpoint, manifest)
            run = notes.run if notes is not None and checkpoint != alone else None
            key = (run is not None, run or checkpoint)
            group = groups.setdefault(key, _Group(run or checkpoint, run is not None))
            status = objects.files.status(objects.layout.refs / file_of(name))
            if status is not None:
                group.references += status.size
                saved = notes.saved if notes is not None else 0
                group.imported_at = max(group.imported_at, saved or status.mtime_ns // 10**9)
            group.pages |= set(manifest.pages)
            group.objects |= {manifest_name, *(page.hex() for page in manifest.pages)}
            if kept is None:
                group.steps += 1
                group.nbytes += manifest.nbytes
            for page in set(manifest.pages) - pages.keys():
                pieces = objects.page(page.hex()).pieces
                pages[page] = {piece.digest: piece.nbytes for piece in pieces if piece.nbytes}
        except UnknownNameError:  # deleted since the names were read
            continue
        except StoreError as error:
            groups.setdefault((group.is_run, group.name), group).damage = str(error)
    for group in groups.values():
        for page in group.pages & pages.keys():
            group.live |= pages[page]
    return [groups[key] for key in sorted(groups, key=lambda key: key[1])]


def _notes_of(name: str, manifest: Manifest) -> Notes | None:
    """What the run says of its step that has this name; an import has no such notes."""
    parsed, notes = parse_step_name(name), Notes.from_texts(manifest.notes)
    if parsed is None or notes is None or (notes.run, notes.step) != (parsed.run, parsed.step):
        return None
    return notes


class _Measurement:
    def __init__(self, objects: Objects, groups: list[_Group], found: Inventory) -> None:
        self._objects, self._groups, self._found = objects, groups, found
        self._held = found.readable()
        self._lost = found.lost()
        self._need = needed(found.live, self._held)
        # Where a piece lies, and the deltas that it is the base of.
        self._holders: dict[bytes, list[ContainerId]] = {}
        for container, held in self._held.items():
            bases = (base for record in held.values() for base in record.bases)
            for digest in {*held, *bases}:
                self._holders.setdefault(digest, []).append(container)
        self._neighbours: dict[ContainerId, set[ContainerId]] = {}
        self._own, self._external = self._places()
        self._users = Counter(digest for group in groups for digest in group.live)
        self._needing = Counter(d for group in groups for d in self._wanted(group))
        self._manifests = Counter(name for group in groups for name in group.objects)
        self._sizes: dict[ContainerId, int] = {}
        self._certain = not (
            found.problems or self._lost or any(group.damage is not None for group in groups)
        )

    def _places(self) -> tuple[dict[bytes, Record], set[bytes]]:
        """Where each piece takes least in the store itself; those that are only elsewhere."""
        own: dict[bytes, Record] = {}
        there = set[bytes]()
        for container in self._need.containers:
            if container.kind == EXTERNAL:
                there.update(self._held[container])
                continue
            for digest, record in self._held[container].items():
                known = own.get(digest)
                if known is None or record.stored < known.stored:
                    own[digest] = record
        return own, (there & self._found.live.keys()) - own.keys()

    def _wanted(self, group: _Group) -> set[bytes]:
        """The pieces it needs, with the bases of its deltas."""
        records = (self._own[digest] for digest in group.live.keys() & self._own.keys())
        return group.live.keys() | {base for record in records for base in record.bases}

    def result(self) -> StoreUsage:
        found = tuple(self._of(group) for group in self._groups)
        shared = (self._own[d].stored for d, n in self._needing.items() if n > 1 and d in self._own)
        return StoreUsage(
            found,
            sum(each.unique_bytes for each in found),
            sum(shared),
            sum(self._found.live[digest] for digest in self._external),
            disk_bytes(self._objects),
        )

    def _of(self, group: _Group) -> Usage:
        wanted = self._wanted(group) & self._own.keys()
        stored = {True: 0, False: 0}
        for digest in wanted:
            stored[self._needing[digest] == 1] += self._own[digest].stored
        records = (self._own[digest] for digest in group.live.keys() & self._own.keys())
        external = sum(group.live[digest] for digest in group.live.keys() & self._external)
        kind: Kind = "run" if group.is_run else "stored"
        lost = group.live.keys() & self._lost.keys()
        if not group.is_run and (external or self._changed(lost)):
            kind = "external"
        return Usage(
            group.name,
            kind,
            group.steps,
            group.nbytes,
            stored[True],
            stored[False],
            sum(max(0, record.nbytes - record.stored) for record in records),
            external,
            group.imported_at,
            self._reclaimable(group) if self._certain else None,
            group.damage or self._loss(lost),
        )

    def _changed(self, lost: set[bytes]) -> list[str]:
        """The files indexed in place that held these pieces, and changed or are gone."""
        return sorted(
            str(path)
            for container, path in self._found.changed.items()
            if any(record.digest in lost for record in self._found.tables[container].records)
        )

    def _loss(self, lost: set[bytes]) -> str | None:
        if not lost:
            return None
        changed = self._changed(lost)
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return (
                f"{changed[0]}{more}: gone, or changed since it was indexed in place; import it "
                "again with --external --replace, or delete the checkpoint"
            )
        return f"lost pieces: {len(lost)}; run `tensor-dedup repair --from PATH`"

    def _reclaimable(self, group: _Group) -> int:
        """What gc would free if only this were deleted."""
        mine = {digest for digest in group.live if self._users[digest] == 1}
        freed = 0
        if mine:
            held = self._beside(mine)
            there = {digest for pieces in held.values() for digest in pieces}
            then = needed((there & self._found.live.keys()) - mine, held)
            freed = self._bytes(self._need.containers & held.keys()) - self._bytes(then.containers)
        names = (name for name in group.objects if self._manifests[name] == 1)
        sizes = (self._objects.files.status(self._objects.layout.manifest(n)) for n in names)
        objects = sum(status.size for status in sizes if status is not None)
        return max(0, freed) + group.references + objects

    def _beside(self, digests: set[bytes]) -> Held:
        """The containers that could be kept for one of these pieces, or instead of such a one.

        Which containers are needed for pieces follows from those that hold them, or their bases,
        and from those that hold the others in these, and so on: all that `needed` looks at.
        """
        found: dict[ContainerId, Mapping[bytes, Record]] = {}
        waiting = [container for digest in digests for container in self._holders.get(digest, ())]
        while waiting:
            container = waiting.pop()
            if container in found:
                continue
            found[container] = self._held[container]
            if container not in self._neighbours:
                self._neighbours[container] = {
                    other
                    for digest, record in self._held[container].items()
                    for each in (digest, *record.bases)
                    for other in self._holders.get(each, ())
                }
            waiting += self._neighbours[container] - found.keys()
        return found

    def _bytes(self, containers: Iterable[ContainerId]) -> int:
        return sum(self._size(container) for container in containers)

    def _size(self, container: ContainerId) -> int:
        if container not in self._sizes:
            self._sizes[container] = file_bytes(self._objects, [container])
        return self._sizes[container]
