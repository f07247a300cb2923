"""The sizes of training runs: what their steps hold and share, and how much tensors change.

Only metadata is read (references, manifests and their pages, tables), and no tensor. Each page is
read once, however many steps share it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import MissingObjectError, UnknownNameError
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import manifests_of_run, parse_step_name, tensors_of
from tensor_dedup.store.upkeep.gc import file_bytes, held_in, refuse_unless_certain
from tensor_dedup.store.upkeep.inventory import take_containers
from tensor_dedup.store.upkeep.live_set import Held, needed
from tensor_dedup.store.upkeep.stats import disk_bytes


@dataclass(frozen=True, slots=True)
class RunStats:
    """The sizes of a run, or of all runs together. For all runs, `run_id` is None.

    `total_chunks` is the number of tensors in the manifests of all steps, and `unique_chunks` is
    the number of distinct digests among them. `dedup_ratio` is unique / total, so lower means more
    reuse. `total_bytes` is the size of the distinct tensors on disk, as they are encoded.
    """

    run_id: str | None
    checkpoints: int
    total_chunks: int
    unique_chunks: int
    dedup_ratio: float
    total_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a step added to its run: the tensors that no earlier step had. Sizes are in bytes.

    - `nbytes` is the size of the whole step, and `new_bytes` the size of its new tensors.
    - `stored_bytes` is the space that the new tensors take on disk. Pieces that they are encoded
      against (bases) are included if no earlier step needed them.
    - `dedup_ratio` is the number of distinct tensors divided by the number of all tensors, in the
      steps up to this one.
    """

    step: int
    tensors: int
    new_tensors: int
    nbytes: int
    new_bytes: int
    stored_bytes: int
    dedup_ratio: float

    def to_dict(self) -> dict[str, object]:
        """Return all fields as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run, or all runs together, costs on disk. All sizes are in bytes.

    - `unique_bytes` is the size on disk of the pieces that only the run needs.
    - `shared_bytes` is the size on disk of the pieces that other runs or checkpoints need, too.
    - `reclaimable_bytes` is what `gc` would free if only the run were deleted: whole containers,
      and the run's manifests and references.
    - `dead_bytes` is the size of pieces that would then be unused, but not freed. They stay because
      their containers hold other pieces in use.
    - `store_bytes` is the size of all files of the store, with metadata, unused files and the
      trash.

    `unique_bytes` and `shared_bytes` include the pieces that deltas are encoded against. Pieces
    that are only in files indexed in place do not count.
    """

    reclaimable_bytes: int
    dead_bytes: int
    unique_bytes: int
    shared_bytes: int
    store_bytes: int

    @property
    def disk_bytes(self) -> int:
        """The size on disk of all pieces that the run needs."""
        return self.unique_bytes + self.shared_bytes

    def to_dict(self) -> dict[str, object]:
        """Return all fields and `disk_bytes` as a dict for JSON."""
        return asdict(self) | {"disk_bytes": self.disk_bytes}


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """The number of steps in which a tensor changed, and in which it stayed identical.

    Each step is compared with the step before, if both have a tensor of this name.
    """

    name: str
    identical: int
    changed: int

    @property
    def percent(self) -> float | None:
        """The percentage of steps in which the tensor was identical, or None if no step counts."""
        pairs = self.identical + self.changed
        return round(100 * self.identical / pairs, 1) if pairs else None

    def to_dict(self) -> dict[str, object]:
        """Return all fields and `identical_percent` as a dict for JSON."""
        return asdict(self) | {"identical_percent": self.percent}


def run_stats(objects: Objects, runs: Iterable[str], run_id: str | None) -> RunStats:
    """Return the sizes of `runs` together. `run_id` is stored in the result.

    Call it inside `with locks.session(...):`. No tensor data is read.
    """
    seen: dict[bytes, list[Piece]] = {}
    sizes: dict[bytes, int] = {}
    steps = total = 0
    for run in runs:
        for _, content in manifests_of_run(objects, run):
            tensors = tensors_of(objects, content, seen)
            steps += 1
            total += len(tensors)
            sizes |= {piece.digest: piece.nbytes for piece in tensors}
    stored = sum(stored_bytes(_tables(objects), sizes).values())
    ratio = len(sizes) / total if total else 1.0
    return RunStats(run_id, steps, total, len(sizes), round(ratio, 4), stored)


def stored_bytes(tables: Iterable[Table], wanted: Collection[bytes]) -> dict[bytes, int]:
    """Return the bytes that each piece in `wanted` takes on disk, in its smallest copy.

    `tables` are the tables of the containers. A piece that is in no table is left out. Some leaves
    of a piece may be stored as pieces of their own. The result has entries for these leaves, too.
    """
    tables = list(tables)
    least = _least(tables, wanted)
    parts = _least(tables, {part for each in least.values() for part in each.parts.values()})
    return {digest: record.stored for digest, record in (parts | least).items()}


def _least(tables: Iterable[Table], wanted: Collection[bytes]) -> dict[bytes, Record]:
    """The records of these pieces, each where it takes least."""
    least: dict[bytes, Record] = {}
    for table in tables:
        for record in table.records:
            if record.digest in wanted:
                known = least.setdefault(record.digest, record)
                if record.stored < known.stored:
                    least[record.digest] = record
    return least


def _tables(objects: Objects) -> Iterator[Table]:
    """The tables of all containers that are there."""
    for container in objects.containers:
        with suppress(MissingObjectError):
            yield objects.containers.table(container)


def growth(objects: Objects, run: str) -> list[Growth]:
    """Return what each step of a run added to it, in the order of step numbers.

    Call it inside `with locks.session(...):`. No tensor data is read.
    """
    seen: dict[bytes, list[Piece]] = {}
    steps = [
        (step, tensors_of(objects, content, seen), content.nbytes)
        for step, content in manifests_of_run(objects, run)
    ]
    held: dict[ContainerId, dict[bytes, Record]] = {}
    for container in objects.containers:
        with suppress(MissingObjectError):
            table = objects.containers.table(container)
            held[container] = {record.digest: record for record in table.records}
    return grown(steps, own_records(held, held.keys()))


def grown(
    steps: Iterable[tuple[int, Sequence[Piece], int]], records: Mapping[bytes, Record]
) -> list[Growth]:
    """Return what each of `steps` added to those before it.

    Each of `steps` has a number, the step's tensors, and its size. `records` says how each tensor
    is stored, as `own_records` returns it. Nothing is read.
    """
    known, needed_before = set[bytes](), set[bytes]()
    total, found = 0, []
    for step, tensors, nbytes in steps:
        new = {piece.digest: piece.nbytes for piece in tensors if piece.digest not in known}
        known.update(new)
        total += len(tensors)
        ratio = round(len(known) / total if total else 1.0, 4)
        taken = _with_bases(new, records)
        stored = sum(taken[digest] for digest in taken.keys() - needed_before)
        needed_before.update(taken)
        added = len(new), nbytes, sum(new.values()), stored
        found.append(Growth(step, len(tensors), *added, ratio))
    return found


def tensor_changes(objects: Objects, run: str) -> list[TensorChanges]:
    """Count for each tensor of a run in how many steps it changed.

    A step is compared with the step of the next smaller number. The tensors are in the order of
    their first appearance. Call it inside `with locks.session(...):`. No tensor data is read.
    """
    counts: dict[str, list[int]] = {}
    pages: dict[bytes, list[Piece]] = {}  # of the step before
    kept: Counter[bytes] = Counter()  # in how many steps a page was that of the step before

    def count_kept(gone: Iterable[bytes]) -> None:
        for page in gone:
            for piece in pages[page]:
                counts[piece.name or ""][0] += kept[page]
            del kept[page]

    for _, content in manifests_of_run(objects, run):
        now = {page: pages.get(page) or _tensors(objects, page) for page in content.pages}
        gone = pages.keys() - now.keys()
        before = {piece.name: piece for page in gone for piece in pages[page]}
        for page, pieces in now.items():
            if page in pages:  # names are unique: none of these tensors is in another page
                kept[page] += 1
                continue
            for piece in pieces:
                count = counts.setdefault(piece.name or "", [0, 0])
                if piece.name in before:
                    count[before[piece.name] != piece] += 1
        count_kept(gone)
        pages = now
    count_kept(pages)
    return [TensorChanges(name, *count) for name, count in counts.items()]


def _tensors(objects: Objects, page: bytes) -> list[Piece]:
    return [piece for piece in objects.page(page.hex()).pieces if piece.name is not None]


@dataclass(slots=True)
class _Part:
    """What some of the references of a store lead to: manifests and pages, and their files."""

    pages: set[bytes] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)

    def add(self, name: str, manifest: Manifest) -> None:
        self.pages |= set(manifest.pages)
        self.objects |= {name, *(page.hex() for page in manifest.pages)}


def run_cost(objects: Objects, runs: Collection[str]) -> RunCost:
    """Return what the runs in `runs` together cost on disk.

    Call it inside `with locks.session(...):`. No tensor data is read.

    Raises:
        UnfitForCollectionError: Something is damaged or lost, so `gc` would free nothing.
        DamagedFileError, MissingObjectError, NewerFormatError: A reference, manifest or page cannot
            be read.
    """
    own, others = _Part(), _Part()
    references = 0
    for name in objects.references():
        with suppress(UnknownNameError):  # deleted since the names were read
            manifest_name = objects.ref(name)
            manifest = objects.manifest(manifest_name)
            if _is_of(name, manifest, runs):
                own.add(manifest_name, manifest)
                status = objects.files.status(objects.layout.refs / file_of(name))
                references += status.size if status is not None else 0
            else:
                others.add(manifest_name, manifest)
    theirs = _live(objects, others.pages)
    ours = _live(objects, own.pages)
    found = take_containers(objects, theirs | ours)
    refuse_unless_certain(found)
    held = found.readable()
    now, then = needed(theirs.keys() | ours.keys(), held), needed(theirs, held)
    freed = file_bytes(objects, now.containers) - file_bytes(objects, then.containers)
    manifests = (objects.layout.manifest(name) for name in own.objects - others.objects)
    sizes = (objects.files.status(path) for path in manifests)
    freed += references + sum(status.size for status in sizes if status is not None)
    unused = ours.keys() - theirs.keys() - then.anchors
    dead = sum(record.stored for record in held_in(found, then) if record.digest in unused)
    records = own_records(held, now.containers)
    mine = _with_bases(ours, records)
    others_too = mine.keys() & _with_bases(theirs, records).keys()
    shared = sum(mine[digest] for digest in others_too)
    return RunCost(max(0, freed), dead, sum(mine.values()) - shared, shared, disk_bytes(objects))


def own_records(held: Held, containers: Collection[ContainerId]) -> dict[bytes, Record]:
    """Return the records of the pieces that these containers hold, each where it takes least.

    Files that are indexed in place are left out.
    """
    found: dict[bytes, Record] = {}
    for container in containers:
        for digest, record in held[container].items() if container.kind != EXTERNAL else ():
            if digest not in found or record.stored < found[digest].stored:
                found[digest] = record
    return found


def _with_bases(live: Iterable[bytes], own: Mapping[bytes, Record]) -> dict[bytes, int]:
    """What these pieces take on disk, with the bases that they are differences from."""
    needing = {digest: own[digest] for digest in live if digest in own}
    bases = {base for record in needing.values() for base in record.bases}
    return {d: own[d].stored for d in needing.keys() | (bases & own.keys())}


def _is_of(name: str, manifest: Manifest, runs: Collection[str]) -> bool:
    """Whether a name is that of a step of one of these runs, or keeps one; an import's is not."""
    parsed, notes = parse_step_name(name), Notes.from_texts(manifest.notes)
    if parsed is None or notes is None or parsed.run not in runs:
        return False
    return (notes.run, notes.step) == (parsed.run, parsed.step)


def _live(objects: Objects, pages: Iterable[bytes]) -> dict[bytes, int]:
    """The pieces on these pages, with their sizes."""
    return {p.digest: p.nbytes for page in pages for p in objects.page(page.hex()).pieces}
