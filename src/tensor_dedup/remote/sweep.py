"""Garbage collection (gc) of a remote: delete objects that nothing refers to.

An object is deleted by two runs. The first run condemns the objects to which no reference leads: it
removes them from the catalog and notes the time. Objects younger than the lease, a period longer
than any push takes, are not condemned yet. A run at least a lease later deletes the condemned
objects to which still no reference leads. By then, a push that relied on such an object has ended,
or has taken the object off the list of condemned objects.

A push and a gc both replace the head of the catalog by conditional writes, so each notices the
other. If another writer was first, a gc starts again.

Several runs may delete the same object at once. Each run notes the objects that it is deleting, and
a push avoids such an object until all of these runs have ended. The notes of a killed run are
removed by a later run.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final

from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import (
    DAMAGED,
    Catalog,
    CatalogChange,
    ListedContainer,
    Trash,
    catalog_of,
    commit,
    listed,
    segment_of,
    tag_of,
    with_more,
)
from tensor_dedup.remote.conditions import check_remote
from tensor_dedup.remote.errors import (
    RemoteBusyError,
    UncertainRemoteError,
    as_far_as_allowed,
)
from tensor_dedup.remote.inventory import (
    UNKNOWN_OBJECT,
    RemoteInventory,
    readable,
    take_inventory,
)
from tensor_dedup.remote.lease import boottime
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.upkeep.gc import needed

# A list may tell the time of an object more finely than the object itself.
_CLOCK_S: Final = 2.0
# So long a sweep deletes what it has listed; what has been listed for so long, nobody deletes.
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
        RemoteBusyError: Other writers kept changing the remote.
    """
    check_remote(bucket)
    catalog: Catalog | None = None
    found = RemoteInventory()
    for _ in range(_ATTEMPTS):
        started = boottime()
        catalog = catalog_of(bucket, before=catalog)
        found = take_inventory(bucket, _surely_there(found, catalog))
        _refuse_unless_certain(bucket, found, catalog)
        # In this order: others must not hold it for dead before it does so itself.
        began = boottime()
        now = _time_of(bucket, dry_run)
        plan, segments, waiting = _plan(bucket, found, catalog, now, lease_s)
        if dry_run:
            return plan
        if tag_of(bucket) != catalog.tag:
            continue  # before all of the catalog is written for an attempt that is in vain
        deleting = _others(bucket, catalog, now)
        since = _second_of_its_own(deleting, now)
        for key in plan.delete:
            deleting[key] = tuple(sorted((*deleting.get(key, ()), since)))
        wanted = (segments, Trash(waiting, deleting))
        done: list[Catalog] = []

        def change(
            seen: Catalog,
            catalog: Catalog = catalog,
            wanted: CatalogChange = wanted,
            done: list[Catalog] = done,
        ) -> CatalogChange | None:
            if seen is not catalog:
                done.append(seen)  # somebody was first: mark again
                return None
            return wanted

        # Another one may have planned the same in the same second: each needs an entry of its own.
        commit(bucket, catalog, change, told_by_bytes=not plan.delete)
        if done:
            continue
        gone, late = _delete(bucket, found, plan.delete, began)
        _forget(bucket, {*plan.delete} - late, since, began)
        deleted = tuple(key for key in plan.delete if key in gone)
        nbytes = sum(found.objects[key].size for key in deleted)
        return replace(plan, done=True, delete=deleted, deleted_bytes=nbytes)
    what = (
        f"others changed it during each of {_ATTEMPTS} attempts; one takes "
        f"{boottime() - started:.0f} s, and needs as long without a push"
    )
    raise RemoteBusyError.at(bucket.url, what)


def _surely_there(found: RemoteInventory, catalog: Catalog) -> RemoteInventory:
    """An earlier inventory, with the tables of those containers only that no sweep has deleted.

    A list that has one may be an old answer. Whoever deletes one has taken it out of the segments
    and off the list of what is condemned before, and then this catalog is no longer the present
    one, which the commit finds out.
    """
    condemned = catalog.trash.condemned.keys() - catalog.trash.deleting.keys()
    keys = {*map(layout.container_key, catalog.containers), *condemned}
    tables = {c: table for c, table in found.tables.items() if layout.container_key(c) in keys}
    return replace(found, tables=tables)


def _time_of(bucket: Bucket, dry_run: bool) -> float:
    """The server's time; for who may only read, and so delete nothing, this machine's."""
    if not dry_run:
        return bucket.now()
    known = [float(RealFiles().now())]
    with as_far_as_allowed():
        known.append(bucket.now())
    return known[-1]


def _refuse_unless_certain(bucket: Bucket, found: RemoteInventory, catalog: Catalog) -> None:
    lost = found.lost()
    # A container that cannot be read is garbage like any other where all pieces are elsewhere, and
    # no push relies on it.
    named = {*map(layout.container_key, catalog.containers)}
    problems = [*found.problems]
    problems += [fault for key, fault in found.unreadable.items() if lost or key in named]
    if found.newer:
        first = found.unreadable[layout.container_key(min(found.newer))]
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
) -> tuple[RemoteGcPlan, Mapping[bytes, list[ListedContainer]], dict[str, int]]:
    """What is to be done, and the segments and the condemned keys that are to be."""
    # What was condemned may be damaged: it is kept only for what nothing else holds.
    live, held = found.live(), found.held()
    out = {*catalog.trash.condemned, *catalog.trash.deleting}
    whole = readable({c: r for c, r in held.items() if layout.container_key(c) not in out})
    kept = needed(live, whole).containers
    kept |= needed(live.keys() - {d for r in whole.values() for d in r}, held).containers
    used = {layout.container_key(c) for c in kept} | {layout.table_key(c.name) for c in kept}
    used |= {layout.manifest_key(name) for each in found.manifests for name in each.blobs}
    used |= {layout.holders_key(each.manifest) for each in found.manifests}
    # No reference is ever deleted, not even that of a deleted name: a request to delete it that
    # came late would take what was pushed under that name meanwhile.
    used |= {key for key in found.objects if key.startswith(layout.REFS)}
    dead = {key: status for key, status in found.objects.items() if key not in used}
    # What nothing refers to is given the lease even if it was found damaged: that may have been a
    # mistake, and a push may be about to refer to it.
    before = {
        key: int(now) if since == DAMAGED and key in dead else since
        for key, since in catalog.trash.condemned.items()
    }
    old = {k: s for k, s in dead.items() if now - s.modified >= lease_s}
    # Segments that no head names, and what was begun in a folder, are nobody's after the lease.
    current = {layout.segment_key(name.hex()) for name in catalog.segments} | {layout.HEAD}
    for prefix in (layout.CATALOG, layout.TRASH, layout.PROBE, layout.TMP):
        for status in bucket.list(prefix):
            if status.key in current:
                continue
            if layout.is_passing(status.key):
                if now - status.modified >= lease_s:
                    old[status.key] = status
            elif prefix != layout.TMP:
                raise UncertainRemoteError.at(bucket.at(status.key), UNKNOWN_OBJECT, problems=1)
    found.objects |= old
    expired = {k for k in old if now - before.get(k, now) >= lease_s}
    expired |= {k for k in catalog.trash.deleting if k in dead}
    waiting = {k: before.get(k, int(now)) for k in old if k not in expired}
    # What was found damaged and is in use stays out of the catalog, until it is pushed again.
    damaged = [key for key, since in catalog.trash.condemned.items() if since == DAMAGED]
    waiting |= {k: before[k] for k in damaged if k in used or (k in dead and k not in expired)}
    named = [c for c in kept if layout.container_key(c) not in waiting]
    named += [
        c
        for c in found.tables
        if c not in kept
        and layout.container_key(c) not in expired
        and layout.container_key(c) not in waiting
    ]
    # A difference that nobody uses keeps no base, and is as absent as that is: no push may rely on
    # it from here on.
    anchors = (r for c in {*kept, *named} for r in found.tables[c].records if r.base is None)
    there = {record.digest for record in anchors}
    segments = segment_of(listed(c, found.tables[c], there) for c in named)
    # Segments are named by what they hold: one that was given up may be the one that is due.
    due = {layout.segment_key(name.hex()) for name in segments}
    expired -= due
    waiting = {k: since for k, since in waiting.items() if k not in due}
    sizes = {k: s.size for k, s in (dead | old).items()}
    young = dead.keys() - old.keys() - expired
    plan = RemoteGcPlan(
        condemn=tuple(sorted(k for k in waiting if k not in before)),
        delete=tuple(sorted(expired, key=_order)),
        condemned_bytes=sum(sizes[k] for k in waiting if k not in before),
        deleted_bytes=sum(sizes[k] for k in expired),
        waiting=len(waiting),
        young=len(young),
        young_bytes=sum(sizes[k] for k in young),
    )
    return plan, segments, waiting


def _others(bucket: Bucket, catalog: Catalog, now: float) -> dict[str, tuple[int, ...]]:
    """What other sweeps are deleting, for all that is known, and since when.

    Where the clock has been put back since, what counts is when the list was written.
    """
    deleting, written = catalog.trash.deleting, int(now)

    def is_plausible(since: int) -> bool:
        return since < now + _DEAD_S

    if not all(is_plausible(since) for seconds in deleting.values() for since in seconds):
        status = bucket.head(catalog.trash_key) if catalog.trash_key else None
        written = int(now if status is None else min(now, status.modified))
    found = dict[str, tuple[int, ...]]()
    for key, seconds in deleting.items():
        known = (since if is_plausible(since) else written for since in seconds)
        if left := tuple(sorted(since for since in known if now - since < _DEAD_S)):
            found[key] = left
    return found


def _second_of_its_own(others: Mapping[str, Sequence[int]], now: float) -> int:
    """The second since when a sweep deletes; no other one on the list has the same."""
    taken = {since for seconds in others.values() for since in seconds}
    since = int(now)
    while since in taken:
        since -= 1  # not later: nobody may count on it for longer
    return since


def _order(key: str) -> tuple[int, str]:
    """A table before its data: without it the data is no container."""
    return (0 if key.startswith(layout.TABLES) else 1, key)


def _delete(
    bucket: Bucket, found: RemoteInventory, keys: Sequence[str], began: float
) -> tuple[set[str], set[str]]:
    """Delete objects that are still what they were when they were listed.

    Return which were, and of which another request to do so may be carried out later.
    """
    gone, late = set[str](), set[str]()

    def one(key: str) -> None:
        status, listed_ = bucket.head(key), found.objects.get(key)
        if status is None or not (listed_ is None or _same(listed_, status)):
            return
        if boottime() - began > _DELETING_S:
            what = (
                "it took so long that others may count on it no more; what is left goes next time"
            )
            raise RemoteBusyError.at(bucket.at(key), what)
        if not bucket.delete_once(key):
            late.add(key)
        gone.add(key)

    for first in (True, False):
        for _ in bucket.each(one, [key for key in keys if (_order(key)[0] == 0) == first]):
            pass
    return gone, late


def _same(one: ObjectStatus, other: ObjectStatus) -> bool:
    """Whether nobody wrote it in between, for equal bytes have equal tags."""
    return one.tag == other.tag and abs(one.modified - other.modified) < _CLOCK_S


def _forget(bucket: Bucket, keys: Collection[str], since: int, began: float) -> None:
    """Say that this sweep deletes these no longer: pushes need not mind that.

    A sweep whose time is over leaves the list to the next one: others hold it for dead.
    """
    mine = {*keys}

    def change(catalog: Catalog) -> CatalogChange | None:
        if boottime() - began > _DELETING_S:
            return None
        left = dict(catalog.trash.deleting)
        if not all(since in left.get(key, ()) for key in mine):
            return None  # done, by a write whose answer was lost: this second is another's now
        for key in mine & left.keys():
            if seconds := tuple(each for each in left[key] if each != since):
                left[key] = seconds
            else:
                del left[key]
        if left == catalog.trash.deleting:
            return None
        return with_more(catalog, ()), Trash(catalog.trash.condemned, left)

    with suppress(RemoteBusyError):  # the next gc does it
        commit(bucket, catalog_of(bucket), change)
