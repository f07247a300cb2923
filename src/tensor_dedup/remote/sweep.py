"""Garbage collection (gc) of a remote: first a plan, computed without changes, then its execution.

An object is deleted by two runs. The first run condemns the objects to which no reference leads: it
notes them in the trash, with the time. Objects younger than the lease, a period longer than any
push takes, are not condemned yet. A run at least a lease later deletes the condemned objects to
which still no reference leads. By then, a push that relied on such an object has ended, or has
taken the object off the list of condemned objects.

A push and a gc both replace the head of the catalog by conditional writes, so each notices the
other. If another writer was first, a gc starts again.

Only one run deletes at a time. It notes what it is deleting, and a push avoids these objects until
the run has ended. If the run was killed, a later one takes over.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import (
    Catalog,
    CatalogChange,
    Deletion,
    Trash,
    catalog_of,
    commit,
    entries_of,
    tag_of,
    with_more,
)
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import RemoteBusyError, UncertainRemoteError, as_far_as_allowed
from tensor_dedup.remote.inventory import UNKNOWN_OBJECT, RemoteInventory, take_inventory
from tensor_dedup.remote.lease import boottime
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.upkeep.live_set import anchors, needed, readable

# A list may tell the time of an object more finely than the object itself.
_CLOCK_S: Final = 2.0
# So long a run deletes what it has listed; for so long others leave it alone.
_DELETING_S: Final = 1800.0
_DEAD_S: Final = 3600.0
# Those after the first are short. On a large remote all of them together take a few times as long
# as the first, and to give up is to throw away what that has read.
_ATTEMPTS: Final = 40


@dataclass(frozen=True, slots=True)
class RemoteGcPlan:
    """The plan or the result of a gc. Sizes are in bytes.

    * `condemn` has the keys of the objects to condemn, and `delete` those of the objects to delete.
    * `waiting` is the number of objects that have been condemned for less than the lease.
    * `young` is the number of unused objects younger than the lease. A push may be about to refer
      to them, so they are left to a later run.
    * `done` is False after a dry run.
    """

    condemn: tuple[str, ...]
    delete: tuple[str, ...]
    condemned_bytes: int
    deleted_bytes: int
    waiting: int
    young: int
    young_bytes: int
    done: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a dict that can be written as JSON."""
        return {**asdict(self), "condemn": [*self.condemn], "delete": [*self.delete]}


def gc(bucket: Bucket, lease_s: float, *, dry_run: bool = False) -> RemoteGcPlan:
    """Condemn unused objects, and delete objects that have been condemned for `lease_s` seconds.

    Objects younger than `lease_s` are not condemned yet. With a lease of 0, a single run deletes
    all unused objects. With `dry_run`, nothing is changed, and the result is the plan.

    Raises:
        NotARemoteError: There is no remote.
        UncertainRemoteError: An object that may be needed cannot be read, or was written by a later
            version; nothing was condemned or deleted.
        RemoteBusyError: Another gc is deleting objects, or other writers kept changing the remote.
    """
    check_remote(bucket)
    catalog: Catalog | None = None
    found = RemoteInventory()
    for _ in range(_ATTEMPTS):
        started = boottime()
        catalog = catalog_of(bucket, before=catalog)
        found = take_inventory(bucket, found)
        _refuse_unless_certain(bucket, found, catalog)
        # In this order: others must not hold it for dead before it does so itself.
        began = boottime()
        now = _time_of(bucket, dry_run)
        plan, wanted, doomed = _plan(bucket, found, catalog, now, lease_s)
        if dry_run:
            return plan
        if doomed and (other := _at_work(catalog, now)) is not None:
            raise _busy(bucket, other)
        if tag_of(bucket) != catalog.tag:
            continue  # before all of the catalog is written for an attempt that is in vain
        if not _entered(bucket, catalog, wanted):
            continue
        gone = _execute(bucket, doomed, wanted.trash.deletion, catalog.trash.condemned, began)
        deleted = tuple(key for key in plan.delete if key in gone)
        nbytes = sum(doomed[key].size for key in deleted)
        return replace(plan, done=True, delete=deleted, deleted_bytes=nbytes)
    what = (
        f"others changed it during each of {_ATTEMPTS} attempts; one takes "
        f"{boottime() - started:.0f} s, and needs as long without a push"
    )
    raise RemoteBusyError.at(bucket.url, what)


def _time_of(bucket: Bucket, dry_run: bool) -> float:
    """The server's time; for who may only read, and so delete nothing, this machine's."""
    if not dry_run:
        return bucket.now()
    known = [float(RealFiles().now())]
    with as_far_as_allowed():
        known.append(bucket.now())
    return known[-1]


def _at_work(catalog: Catalog, now: float) -> Deletion | None:
    """What another run is deleting; None if it must have ended or died by now.

    A second far ahead is that of a clock that was put back since.
    """
    deletion = catalog.trash.deletion
    return deletion if deletion is not None and abs(now - deletion.since) < _DEAD_S else None


def _busy(bucket: Bucket, other: Deletion) -> RemoteBusyError:
    since, over = (
        f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S}"
        for second in (other.since, other.since + _DEAD_S)
    )
    what = (
        f"another gc has been deleting objects since {since} (UTC, by the server's clock); do it "
        f"again when that one has ended or, if it was killed, after {over}"
    )
    where = bucket.at(layout.HEAD)
    return RemoteBusyError(f"{where}: {what}", path=where, since=other.since)


def _refuse_unless_certain(bucket: Bucket, found: RemoteInventory, catalog: Catalog) -> None:
    lost = found.lost()
    # A container that cannot be read is garbage like any other where all pieces are elsewhere, and
    # no push relies on it.
    problems = [*found.problems]
    problems += [fault for c, fault in found.unreadable.items() if lost or c in catalog.containers]
    if found.newer:
        first = found.unreadable[min(found.newer)]
        what = f"containers of a later version: {len(found.newer)}, the first of them this"
        said = f"{first.url}: {what}; {NewerFormatError.advice}"
        raise UncertainRemoteError(said, path=first.url, problems=len(problems))
    if problems:
        first, count = problems[0], len(problems)
        what = f"objects that cannot be read: {count}, the first of them this ({first.what})"
        raise UncertainRemoteError.at(first.url, what, problems=count)
    if lost:
        digest = min(lost)
        what = f"lost pieces: {len(lost)}, the first of them {digest.hex()} of {lost[digest][0]!r}"
        raise UncertainRemoteError.at(bucket.url, what)


def _plan(
    bucket: Bucket, found: RemoteInventory, catalog: Catalog, now: float, lease_s: float
) -> tuple[RemoteGcPlan, CatalogChange, dict[str, ObjectStatus]]:
    """What is to be done, what the head is to name then, and the objects to delete."""
    trash, other = catalog.trash, _at_work(catalog, now)
    # Those of a run that has died are taken over, as far as they are garbage still.
    others = trash.deleting if other is not None else frozenset()
    taken_over = trash.deleting - others
    objects = found.objects | _old_bookkeeping(bucket, catalog, now - lease_s)
    used = _used(found, catalog)
    dead = {k: status for k, status in objects.items() if k not in used and k not in others}
    old = {k for k, status in dead.items() if now - status.modified >= lease_s}
    since = {k: int(min(now, trash.condemned.get(k, now))) for k in old}
    expired = {k for k in old if now - since[k] >= lease_s} | (dead.keys() & taken_over)
    waiting = {k: since[k] for k in old - expired}
    new, young = waiting.keys() - trash.condemned.keys(), dead.keys() - old - expired
    plan = RemoteGcPlan(
        condemn=tuple(sorted(new)),
        delete=tuple(sorted(expired, key=_order)),
        condemned_bytes=sum(dead[k].size for k in new),
        deleted_bytes=sum(dead[k].size for k in expired),
        waiting=len(waiting),
        young=len(young),
        young_bytes=sum(dead[k].size for k in young),
    )
    deletion = Deletion(int(now), sorted(expired)) if expired else other
    # What is damaged stays noted until it is pushed again or deleted: no push relies on it.
    damaged = frozenset(k for k in catalog.damaged if k in objects and k not in expired)
    out = expired | damaged | others
    tables = {c: table for c, table in found.tables.items() if layout.container_key(c) not in out}
    entries = entries_of(tables, waiting)
    wanted = CatalogChange([], entries, Trash(waiting, deletion), damaged)
    if len(catalog.segments) == 1 and {e.container: e for e in entries} == catalog.containers:
        wanted = replace(wanted, kept=[*catalog.segments], entries=[])
    return plan, wanted, {k: dead[k] for k in expired}


def _used(found: RemoteInventory, catalog: Catalog) -> set[str]:
    """The keys of what must stay.

    Of containers with the same piece, one that is neither damaged nor being deleted comes first,
    and then one that is not condemned.
    """
    doubtful = catalog.damaged | catalog.trash.deleting
    ranked = dict[int, dict[ContainerId, list[Record]]]()
    for container, held in found.records().items():
        key = layout.container_key(container)
        rank = 2 if key in doubtful else int(key in catalog.trash.condemned)
        ranked.setdefault(rank, {})[container] = held
    candidates: dict[ContainerId, list[Record]] = {}
    kept, rest = set[ContainerId](), {*found.live()}
    for rank in sorted(ranked):
        if not rest:
            break
        better = anchors(candidates)  # nothing is kept for another copy of these
        for container, held in ranked[rank].items():
            candidates[container] = [r for r in held if r.digest not in better]
        copies = readable(candidates)
        there = rest & {digest for each in copies.values() for digest in each}
        kept |= needed(there, copies).containers
        rest -= there
    used = {layout.container_key(c) for c in kept} | {layout.table_key(c.name) for c in kept}
    used |= {layout.manifest_key(part) for each in found.manifests for part in each.blobs}
    # No reference is ever deleted, not even that of a deleted name: a request to delete it that
    # came late would take what was pushed under that name meanwhile.
    return used | {key for key in found.objects if key.startswith(layout.REFS)}


def _old_bookkeeping(bucket: Bucket, catalog: Catalog, before: float) -> dict[str, ObjectStatus]:
    """Segments and lists that no head names, direct differences, and what was begun in a folder,
    from before then.

    Raises:
        UncertainRemoteError: No program of this version makes such an object.
    """
    named = {layout.segment_key(name.hex()) for name in catalog.segments} | {layout.HEAD}
    found = dict[str, ObjectStatus]()
    for prefix in (layout.CATALOG, layout.TRASH, layout.PROBE, layout.STEPS, layout.TMP):
        for status in bucket.list(prefix):
            if layout.is_passing(status.key):
                if status.modified <= before and status.key not in named:
                    found[status.key] = status
            elif prefix != layout.TMP and status.key not in named:
                raise UncertainRemoteError.at(bucket.at(status.key), UNKNOWN_OBJECT, problems=1)
    return found


def _order(key: str) -> tuple[int, str]:
    """A table before its data: without it the data is no container."""
    return (0 if key.startswith(layout.TABLES) else 1, key)


def _entered(bucket: Bucket, catalog: Catalog, wanted: CatalogChange) -> bool:
    """Replace the head, unless it says the same; return whether no other writer was first."""
    same = CatalogChange([*catalog.segments], [], catalog.trash, catalog.damaged)

    def change(seen: Catalog) -> CatalogChange | None:
        return wanted if seen is catalog and wanted != same else None

    return commit(bucket, catalog, change) is catalog


def _execute(
    bucket: Bucket,
    doomed: Mapping[str, ObjectStatus],
    deletion: Deletion | None,
    condemned: Mapping[str, int],
    began: float,
) -> set[str]:
    """Delete objects that are still what they were when they were listed; return which were.

    After an error, what is left is condemned as it was.
    """
    gone, late = set[str](), set[str]()
    if not doomed:
        return gone

    def check_time(key: str) -> None:
        if boottime() - began > _DELETING_S:
            what = (
                "it took so long that others may count on it no more; what is left goes next time"
            )
            raise RemoteBusyError.at(bucket.at(key), what)

    def delete(key: str) -> None:
        status = bucket.head(key)
        if status is None or not _same(doomed[key], status):
            return
        check_time(key)
        if not bucket.delete_once(key):
            late.add(key)
            check_time(key)  # the machine may have slept: what was deleted since may be there again
            bucket.delete(key)
        gone.add(key)

    try:
        for first in (True, False):
            for _ in bucket.each(delete, [key for key in doomed if (_order(key)[0] == 0) == first]):
                pass
    except StoreError:
        done = gone | late
        left = {key: condemned[key] for key in doomed if key in condemned and key not in done}
        with suppress(StoreError):  # so that the next run need not take this one for one at work
            _leave(bucket, deletion, late, left, began)
        raise
    _leave(bucket, deletion, late, {}, began)
    return gone


def _same(one: ObjectStatus, other: ObjectStatus) -> bool:
    """Whether nobody wrote it in between, for equal bytes have equal tags."""
    is_equal = (one.size, one.tag) == (other.size, other.tag)
    return is_equal and abs(one.modified - other.modified) < _CLOCK_S


def _leave(
    bucket: Bucket,
    deletion: Deletion | None,
    late: Collection[str],
    condemned: Mapping[str, int],
    began: float,
) -> None:
    """Note that this run deletes nothing more: pushes need not mind that.

    What is `condemned` is left for a later run. What may still be deleted later, as a request was
    not answered, stays noted. A run whose time is over leaves the note to the next one, for others
    hold it for dead.
    """

    def change(catalog: Catalog) -> CatalogChange | None:
        if deletion is None or deletion != catalog.trash.deletion:
            return None
        if boottime() - began > _DELETING_S:
            return None
        left = Deletion(deletion.since, sorted(late)) if late else None
        trash = Trash({**condemned, **catalog.trash.condemned}, left)
        return CatalogChange(*with_more(catalog, ()), trash, catalog.damaged)

    with suppress(RemoteBusyError):  # the next gc does it
        commit(bucket, catalog_of(bucket), change)
