"""List and measure the checkpoints on a remote, and delete their names."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import Catalog, catalog_of, noted_damage, rebuilt
from tensor_dedup.remote.conditions import check_remote, check_still
from tensor_dedup.remote.errors import UnknownRemoteNameError, UnlistedRemoteError
from tensor_dedup.remote.inventory import AWAY, take_inventory
from tensor_dedup.remote.manifests import (
    RemoteManifest,
    find_ref,
    list_refs,
    read_manifest,
    read_ref,
)
from tensor_dedup.remote.push import write_ref
from tensor_dedup.store.errors import UnfitForCollectionError
from tensor_dedup.store.format.manifests import named_tensors
from tensor_dedup.store.format.names import MARK, marked_by
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.upkeep.live_set import needed, readable


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """The description of a checkpoint on a remote.

    * `manifest` is the name of its manifest, and `nbytes` the size of the checkpoint's files.
    * `unique_bytes` is the stored size of the pieces that only this checkpoint needs, including
      bases of its deltas. It is None if it was not computed.
    * `damage` is the reason why the checkpoint cannot be read completely, or None. If only pieces
      are lost, `manifest` is still set.
    """

    name: str
    manifest: str = ""
    tensors: int = 0
    files: int = 0
    nbytes: int = 0
    unique_bytes: int | None = None
    damage: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the checkpoint as a dict that can be written as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RemoteUsage:
    """The space that a remote takes.

    * `stored_bytes` is the size of the `containers`, and `unused_bytes` how much of that no
      checkpoint needs.
    * `run_unique_bytes` maps the name of a run to the number of bytes that only its steps need.
    """

    checkpoints: tuple[RemoteCheckpoint, ...]
    containers: int
    stored_bytes: int
    unused_bytes: int
    run_unique_bytes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the usage as a dict that can be written as JSON."""
        return {**asdict(self), "checkpoints": [each.to_dict() for each in self.checkpoints]}


def checkpoints(bucket: Bucket, only: Sequence[str] | None = None) -> list[RemoteCheckpoint]:
    """Return a description of each checkpoint, or of those in `only`, sorted by name.

    A checkpoint that cannot be read is included, with the reason in `damage`. The marks of kept
    steps are left out.
    """
    check_remote(bucket)
    noted = _NotedDamage(bucket)

    def describe(name: str) -> RemoteCheckpoint | None:
        try:
            found = read_manifest(bucket, name, read_ref(bucket, name))
            noted.look(found)
            return described(found)
        except UnknownRemoteNameError:
            return None
        except AWAY:
            raise
        except (StoreError, UnfitForCollectionError) as error:
            return RemoteCheckpoint(name, damage=str(error))

    # One after the other: each reads its pages on several threads.
    wanted = list_refs(bucket, thorough=True) if only is None else only
    checkpoints_ = (name for name in wanted if marked_by(name) is None)
    return noted.told([each for name in checkpoints_ if (each := describe(name)) is not None])


class _NotedDamage:
    """What the catalog notes as damaged of the checkpoints that `look` was called with."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._catalog = catalog_of(bucket) if noted_damage(bucket) else None
        # By name: the pieces that are not listed, and how many the checkpoint has.
        self._lost: dict[str, tuple[set[bytes], int]] = {}

    def look(self, found: RemoteManifest) -> None:
        """Look for the pieces of a checkpoint in the catalog."""
        if self._catalog is None:
            return
        pieces = {piece.digest for piece in found.pieces if piece.nbytes}
        if lost := {digest for digest in pieces if not self._catalog.holders(digest)}:
            self._lost[found.name] = lost, len(pieces)

    def told(self, found: Sequence[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
        """Return the descriptions, with the damage that is noted to their pieces."""
        if not self._lost:
            return [*found]
        now = self._catalog
        with suppress(UnlistedRemoteError):
            # What was pushed since is in no catalog read before, and a catalog does not list what
            # can be read, but not relied on. The tables have both.
            now = rebuilt(self._bucket, relied_on=False)
        return [replace(each, damage=each.damage or self._text(each.name, now)) for each in found]

    def _text(self, name: str, catalog: Catalog | None) -> str | None:
        pieces, count = self._lost.get(name, (set[bytes](), 0))
        lost = sum(catalog is None or not catalog.holders(digest) for digest in pieces)
        what = f"{lost} of {count} pieces are in containers that were found damaged or lost"
        return what if lost else None


def described(found: RemoteManifest, unique_bytes: int | None = None) -> RemoteCheckpoint:
    """Return the description of the checkpoint `found`, whose manifest was read."""
    return RemoteCheckpoint(
        found.name,
        found.manifest,
        sum(1 for _ in named_tensors(found.content, found.pieces)),
        len(found.content.files),
        found.content.nbytes,
        unique_bytes,
    )


def delete(bucket: Bucket, name: str) -> None:
    """Delete the name of a checkpoint; for a kept step, delete the mark too.

    The reference is replaced by one that marks the name as deleted. The data stays until `gc`
    deletes it: one run condemns unused data, and a run at least a lease later deletes it. Data
    younger than the lease is not condemned yet.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name, or it is the name of the
            mark of a step that is there.
        NoConditionsError: The server does not keep conditions of writes; nothing was written.
        RemoteBusyError: Another writer changed the name meanwhile.
    """
    check_remote(bucket)  # first, for that one writes where there is none
    check_still(bucket)
    if (kept := marked_by(name)) is not None and find_ref(bucket, kept) is not None:
        check_no_mark(bucket, name)
    step = parse_step_name(name)
    if step is not None and not step.kept:
        # First the mark: what is left if this is cut short is a step, which can be deleted again.
        with suppress(UnknownRemoteNameError):
            _delete_name(bucket, name + MARK)
    _delete_name(bucket, name)


def check_no_mark(bucket: Bucket, name: str) -> None:
    """Check that `name` is not that of the mark of a kept step, which is no checkpoint.

    Raises:
        UnknownRemoteNameError: It is the name of a mark.
    """
    if (step := marked_by(name)) is not None:
        what = f"{name!r} is no checkpoint: it is what keeps the step {step!r}; name that"
        raise UnknownRemoteNameError.at(bucket.url, what, name=name)


def _delete_name(bucket: Bucket, name: str) -> None:
    key = layout.ref_key(name)
    found = bucket.get(key, layout.TEXT_BYTES)
    if found is None or found[0] == layout.reference(name, None):
        raise UnknownRemoteNameError.at(bucket.url, f"no checkpoint {name!r}", name=name)
    write_ref(bucket, name, None, found[1])


def usage(bucket: Bucket) -> RemoteUsage:
    """Measure the space that a remote and its checkpoints take, from manifests and tables alone."""
    check_remote(bucket)
    found, noted = take_inventory(bucket), _NotedDamage(bucket)
    live = found.live()
    need = needed(live, readable(found.records()))
    kept = [record for c in need.containers for record in found.tables[c].records]
    used = live.keys() | need.anchors
    # What is stored as a difference needs what it is against, too, whoever else has that.
    users = {digest: {*names} for digest, names in live.items()}
    for record in (record for record in kept if record.digest in live):
        for base in record.bases:
            users.setdefault(base, set()).update(live[record.digest])
    stored: dict[bytes, int] = {}
    for record in (record for table in found.tables.values() for record in table.records):
        stored[record.digest] = min(record.stored, stored.get(record.digest, record.stored))
    unique, of_runs = Counter[str](), Counter[str]()
    for digest, names in users.items():
        if len(names) == 1:
            unique[next(iter(names))] += stored.get(digest, 0)
        owners = {owner(name) for name in names}
        name, is_run = next(iter(owners))
        if is_run and len(owners) == 1:
            of_runs[name] += stored.get(digest, 0)
    whole = [each for each in found.manifests if marked_by(each.name) is None]
    for each in whole:
        noted.look(each)
    checkpoints_ = noted.told([described(each, unique[each.name]) for each in whole])
    checkpoints_ += [
        RemoteCheckpoint(name, damage=fault.what)
        for fault in found.problems
        for name in fault.affected
        if marked_by(name) is None
    ]
    sizes = [s.size for key, s in found.objects.items() if key.startswith(layout.CONTAINERS)]
    return RemoteUsage(
        tuple(sorted(checkpoints_, key=lambda each: each.name)),
        len(sizes),
        sum(sizes),
        sum(sizes) - sum(record.stored for record in kept if record.digest in used),
        {**of_runs},
    )


def owner(name: str) -> tuple[str, bool]:
    """Return the run or checkpoint to which `name` belongs, and whether it is a run.

    For a step or a mark, the result is the name of the run and True. For any other name, it is
    `name` and False.
    """
    step = parse_step_name(name)
    return (name, False) if step is None else (step.run, True)
