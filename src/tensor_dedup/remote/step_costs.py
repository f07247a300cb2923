"""What each step of a run costs on a remote, by what is listed, manifests and tables alone."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import catalog_of, read_table
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import UnknownRemoteNameError
from tensor_dedup.remote.inventory import AWAY
from tensor_dedup.remote.manifests import RemoteManifest, find_ref, list_refs, read_manifest
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format.manifests import Piece
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import Step, StepName, parse_step_name, step_name
from tensor_dedup.store.upkeep.run_sizes import Growth, grown, own_records


@dataclass(frozen=True, slots=True)
class RemoteStep:
    """A step of a run on a remote, and what it costs there. Sizes are in bytes.

    * `growth` is what the step added to those before it, by their numbers. What later steps need of
      deleted ones counts for the first that needs it. It is None if a table cannot be read.
    * `kind` is "whole" if the step's tensors are stored by themselves, and "delta" if at least one
      is stored as a difference from another. It is None if that is not known.
    * `anchor` is the name of the step that most of it differs from. It is None for a whole step,
      and if no step of the run has those tensors any more.
    * `direct_bytes` is the size of what changed since the step before, which programs that follow
      the run pull. It is None if the remote does not have that.
    """

    step: Step
    growth: Growth | None
    kind: Literal["whole", "delta"] | None
    anchor: str | None
    direct_bytes: int | None

    def to_dict(self) -> dict[str, object]:
        """Return the step as a dict for JSON, with the fields of its description."""
        cost = self.growth
        return {
            **self.step.to_dict(),
            "new_tensors": None if cost is None else cost.new_tensors,
            "new_bytes": None if cost is None else cost.new_bytes,
            "stored_bytes": None if cost is None else cost.stored_bytes,
            "kind": self.kind,
            "anchor": self.anchor,
            "direct_bytes": self.direct_bytes,
        }


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """The steps of the run `run` on a remote, ordered by number.

    `damaged` maps the names of steps that cannot be read to the reasons. Their costs are not known,
    and what others need of them counts for those.
    """

    run: str
    steps: tuple[RemoteStep, ...]
    damaged: dict[str, str]


def step_costs(bucket: Bucket, run: str) -> RemoteRun:
    """Return the steps of `run` with what each costs. No tensor data is read.

    Raises:
        UnknownRemoteNameError: There is no step of this run.
    """
    check_remote(bucket)
    refs = dict[StepName, ObjectStatus]()
    for name, status in list_refs(bucket, run).items():
        parsed = parse_step_name(name)
        if parsed is not None and parsed.run == run:
            refs[parsed] = status
    found, damaged = _manifests(bucket, [each for each in refs if not each.kept])
    steps = [
        _described(each, refs[name], kept=StepName(run, name.step, kept=True) in refs)
        for name, each in sorted(found.items(), key=lambda pair: pair[0].step)
        if _is_of(name, each)
    ]
    if not steps and not damaged:
        is_name = find_ref(bucket, run) is not None
        what = f"no step of a run {run!r}{', which is a checkpoint' if is_name else ''}"
        raise UnknownRemoteNameError.at(bucket.url, what, name=run, run=run)
    tensors = {step.step: _tensors(found[StepName(run, step.step, kept=False)]) for step in steps}
    first = dict[bytes, int]()
    for number, pieces in tensors.items():
        for piece in pieces:
            first.setdefault(piece.digest, number)
    records = _records(bucket, first.keys())
    sizes = {status.key: status.size for status in bucket.list(layout.STEPS)}
    growth = grown([(s.step, tensors[s.step], s.nbytes) for s in steps], records or {})
    costs = []
    for step, grew in zip(steps, growth, strict=True):
        direct = _direct(sizes, step.manifest)
        if records is None:
            costs.append(RemoteStep(step, None, None, None, direct))
            continue
        kind, against = _anchor(tensors[step.step], records, first)
        anchor = None if against is None else step_name(run, against)
        costs.append(RemoteStep(step, grew, kind, anchor, direct))
    return RemoteRun(run, tuple(costs), damaged)


def _manifests(
    bucket: Bucket, steps: Collection[StepName]
) -> tuple[dict[StepName, RemoteManifest], dict[str, str]]:
    """The manifests of those steps that can be read, and what is wrong with the others."""
    pages: dict[str, bytes] = {}  # which steps share

    def read(step: StepName) -> RemoteManifest | StoreError | None:
        try:
            manifest = find_ref(bucket, step.name)
            if manifest is None:  # deleted since it was listed
                return None
            found = read_manifest(bucket, step.name, manifest, pages.get)
        except AWAY:
            raise
        except StoreError as error:
            return error
        pages.update(found.blobs)
        return found

    results = dict(zip(steps, bucket.each(read, steps), strict=True))
    whole = {step: each for step, each in results.items() if isinstance(each, RemoteManifest)}
    broken = {step.name: str(e) for step, e in results.items() if isinstance(e, StoreError)}
    return whole, broken


def _is_of(step: StepName, found: RemoteManifest) -> bool:
    """Whether a checkpoint was saved as this step: an imported one may be called so."""
    notes = Notes.from_texts(found.content.notes)
    return notes is not None and (notes.run, notes.step) == (step.run, step.step)


def _described(found: RemoteManifest, status: ObjectStatus, *, kept: bool) -> Step:
    notes = Notes.from_texts(found.content.notes)
    assert notes is not None
    return Step(
        notes.run,
        notes.step,
        found.name,
        found.manifest,
        notes.adapter,
        dict(notes.metrics),
        found.content.nbytes,
        kept,
        notes.saved or int(status.modified),
        notes.goals,
    )


def _tensors(found: RemoteManifest) -> list[Piece]:
    return [piece for piece in found.pieces if piece.name is not None]


def _records(bucket: Bucket, wanted: Collection[bytes]) -> dict[bytes, Record] | None:
    """How the tensors `wanted` are stored, and those that they are differences from.

    None if something that says so cannot be read.
    """
    held: dict[ContainerId, dict[bytes, Record]] = {}

    def read(container: ContainerId) -> Sequence[Record]:
        return read_table(bucket, container.name).records

    def look(digests: Iterable[bytes]) -> dict[bytes, Record]:
        holders = {each for digest in digests for each in catalog.holders(digest)}
        new = sorted(holders - held.keys())
        for container, records in zip(new, bucket.each(read, new), strict=True):
            held[container] = {record.digest: record for record in records}
        return own_records(held, held.keys())

    try:
        catalog = catalog_of(bucket)
        found = look(wanted)
        return look({base for digest in wanted & found.keys() for base in found[digest].bases})
    except AWAY:
        raise
    except StoreError:
        return None


def _anchor(
    pieces: Sequence[Piece], records: Mapping[bytes, Record], first: Mapping[bytes, int]
) -> tuple[Literal["whole", "delta"], int | None]:
    """The kind of a step, and the step that most of it differs from, if there is one.

    `first` has the first step that has a tensor.
    """
    sizes = Counter[int | None]()
    for piece in pieces:
        record = records.get(piece.digest)
        if record is not None and record.base is not None:
            sizes[first.get(record.base)] += piece.nbytes
    return ("delta", sizes.most_common(1)[0][0]) if sizes else ("whole", None)


def _direct(sizes: Mapping[str, int], manifest: str) -> int | None:
    keys = layout.step_key(manifest), layout.step_data_key(manifest)
    return sum(sizes[key] for key in keys) if all(key in sizes for key in keys) else None
