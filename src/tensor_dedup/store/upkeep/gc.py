"""Garbage collection: first a plan, computed without changes, then its execution.

The store is locked exclusively. Files to which no reference leads are moved to the trash and
deleted after a grace period. If it is uncertain which files are in use, nothing is moved or
deleted.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import UnfitForCollectionError
from tensor_dedup.store.folders import files_below, remove_folder
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.index import open_index
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.upkeep.inventory import Inventory, catch_up, take_inventory
from tensor_dedup.store.upkeep.live_set import NeededPieces, needed

_log = logging.getLogger(__name__)
DEFAULT_GRACE_HOURS = 24.0
_HOUR_S = 3600
_NAMED = 5


@dataclass(frozen=True, slots=True)
class GarbageItem:
    """A file to remove, with its size in bytes."""

    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class GcPlan:
    """The plan or the result of a garbage collection.

    - `trash` has the files to move to the trash. A container is moved as a whole.
    - `delete` has the files to delete, from the trash and the quarantine.
    - `unfinished` has the temporary files to remove.
    - `kept_bytes` is the size of the containers that stay.
    - `dead_bytes` is the size of the unused pieces in these containers.
    - `done` is False if nothing was changed, as after a dry run.
    """

    trash: tuple[GarbageItem, ...]
    delete: tuple[GarbageItem, ...]
    unfinished: tuple[GarbageItem, ...]
    kept_bytes: int
    dead_bytes: int
    done: bool = False

    @property
    def freed_bytes(self) -> int:
        """The number of bytes that are freed immediately.

        Files that were moved to the trash are freed when their grace period has ended.
        """
        return sum(item.nbytes for item in (*self.delete, *self.unfinished))

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a dict for JSON."""

        def shown(items: Iterable[GarbageItem]) -> list[dict[str, object]]:
            return [{"path": str(item.path), "bytes": item.nbytes} for item in items]

        return {
            "done": self.done,
            "trash": shown(self.trash),
            "delete": shown(self.delete),
            "unfinished": shown(self.unfinished),
            "trash_bytes": sum(item.nbytes for item in self.trash),
            "freed_bytes": self.freed_bytes,
            "kept_bytes": self.kept_bytes,
            "dead_bytes": self.dead_bytes,
        }


def file_bytes(objects: Objects, containers: Iterable[ContainerId]) -> int:
    """Return the total size of the files of `containers`, including the tables."""
    paths = (path for container in containers for path in _files_of(objects, container))
    return sum(item.nbytes for item in _items(objects, paths))


def dead_bytes(found: Inventory, keep: NeededPieces) -> int:
    """Return how many bytes unused pieces take in the containers that `keep` names.

    External containers, which index files outside the store, do not count.
    """
    used = found.live.keys() | keep.anchors
    return sum(record.stored for record in held_in(found, keep) if record.digest not in used)


def held_in(found: Inventory, keep: NeededPieces) -> Iterator[Record]:
    """Yield the undamaged records in the containers that `keep` names.

    External containers, which index files outside the store, are left out.
    """
    own = (container for container in keep.containers if container.kind != EXTERNAL)
    return (record for container in own for record in found.good(container))


def refuse_unless_certain(found: Inventory) -> None:
    """Check that everything in the store is readable and that no piece in use is lost.

    `found` is the inventory of the store.

    Raises:
        UnfitForCollectionError: A file cannot be read, or a piece is lost. The message names the
            first such file or piece.
    """
    if found.problems:
        problem = found.problems[0]
        names = (each.checkpoint for each in found.problems if each.checkpoint)
        broken = sorted({marked_by(name) or name for name in names})
        named = f"; broken: {', '.join(broken[:_NAMED])}" if broken else ""
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        raise UnfitForCollectionError.at(
            problem.path,
            f"files that cannot be read: {len(found.problems)}, the first of them this "
            f"({problem.error}){named}{more}",
            problems=len(found.problems),
            checkpoints=broken,
        )
    lost = found.lost()
    if lost:
        digest = min(lost)
        user = found.users.get(digest, ["some checkpoint"])[0]
        raise UnfitForCollectionError.at(
            user, f"lost pieces: {len(lost)}, the first of them {digest.hex()}"
        )


def plan_gc(objects: Objects, grace_hours: float, found: Inventory | None = None) -> GcPlan:
    """Return the plan of a garbage collection. Call it inside `with locks.sweep(...):`.

    Files that have been in the trash or the quarantine for `grace_hours` are to be deleted. `found`
    is a current inventory of the store; if it is None, an inventory is taken.

    Raises:
        UnfitForCollectionError: It is uncertain what is in use.
    """
    found = take_inventory(objects) if found is None else found
    refuse_unless_certain(found)
    layout, now = objects.layout, objects.files.now()
    need = needed(found.live, found.readable())
    keep = need.containers
    trash = [
        path
        for container in sorted(found.tables.keys() - keep)
        for path in _files_of(objects, container)
    ]
    trash += objects.containers.orphans()
    trash += [layout.manifest(n) for n in objects.manifest_names() if n not in found.objects]
    # Without a grace nothing is too young, not even what a clock that was set back dates ahead.
    before = now - grace_hours * _HOUR_S if grace_hours > 0 else math.inf
    old = [*_older(objects, layout.trash, before), *_older(objects, layout.quarantine, before)]
    old += [layout.bad(name) for name in _stale_lists(objects, keep)]
    unfinished = [*files_below(objects.files, layout.tmp)]
    return GcPlan(
        tuple(_items(objects, trash)),
        tuple(_items(objects, old)),
        tuple(_items(objects, unfinished)),
        file_bytes(objects, keep),
        dead_bytes(found, need),
    )


def sweep_now(objects: Objects, wait_s: float, check: Callable[[], None]) -> GcPlan:
    """Delete all unused files at once. Files already in the trash keep their grace period.

    `check` is called under the exclusive lock of the store, before anything is deleted. If it
    raises, nothing is deleted.

    Raises:
        StoreBusyError: Other sessions were not closed within `wait_s` seconds.
        UnfitForCollectionError: It is uncertain what is in use; nothing was changed.
    """
    with objects.session():
        found = take_inventory(objects)
    with objects.sweep(wait_s):
        check()
        plan = plan_gc(objects, DEFAULT_GRACE_HOURS, catch_up(objects, found))
        return execute(objects, plan, 0)


def sweep_former(objects: Objects, manifests: Iterable[str], wait_s: float) -> GcPlan:
    """Delete at once what only the former checkpoints with these manifests used.

    Other unused files stay for a garbage collection, with their grace period.

    Raises:
        StoreBusyError: Other sessions were not closed within `wait_s` seconds.
        UnfitForCollectionError: It is uncertain what is in use; nothing was changed.
    """
    with objects.session():
        found = take_inventory(objects)
        theirs = _files_of_former(objects, found, manifests)
    with objects.sweep(wait_s):
        plan = plan_gc(objects, DEFAULT_GRACE_HOURS, catch_up(objects, found))
        trash = tuple(item for item in plan.trash if item.path in theirs)
        return execute(objects, replace(plan, trash=trash, delete=(), unfinished=()), 0)


def _files_of_former(objects: Objects, found: Inventory, manifests: Iterable[str]) -> set[Path]:
    """The files that checkpoints with these manifests use or used, as far as they can be read."""
    digests, paths = set[bytes](), set[Path]()
    for name in manifests:
        with suppress(StoreError):
            content = objects.manifest(name)
            parts = {name, *(page.hex() for page in content.pages)}
            paths |= {objects.layout.manifest(part) for part in parts}
            digests |= {piece.digest for piece in objects.pieces(name, content)}
    records = [record for table in found.tables.values() for record in table.records]
    digests |= {base for record in records if record.digest in digests for base in record.bases}
    for container, table in found.tables.items():
        if any(record.digest in digests for record in table.records):
            paths |= {*_files_of(objects, container)}
    return paths


def execute(objects: Objects, plan: GcPlan, grace_hours: float) -> GcPlan:
    """Carry out `plan`; return it with the files that were deleted.

    With a `grace_hours` of 0, files that the plan moves to the trash are deleted, too. Call it
    inside the `with locks.sweep(...):` in which the plan was made.
    """
    layout, files = objects.layout, objects.files
    if plan.trash or plan.delete:
        _settle(objects)
    moved = [GarbageItem(objects.set_aside(i.path, layout.trash), i.nbytes) for i in plan.trash]
    # Without a grace, what has just been moved has been there long enough.
    # What came back and was moved again within a second has the name of what was there before.
    both = [*plan.delete, *(moved if grace_hours <= 0 else ())]
    delete = list({item.path: item for item in both}.values())
    for item in (*delete, *plan.unfinished):
        files.unlink(item.path)
    for name in files.listdir(layout.tmp):  # folders of pulls that were cut short
        remove_folder(files, layout.tmp / name)
    _date_anew(objects)
    for folder in (layout.trash, layout.quarantine, layout.tmp):
        files.sync_folder(folder)
    with open_index(objects):
        pass  # opening it drops the entries of what is gone
    return replace(plan, delete=tuple(delete), done=True)


def _settle(objects: Objects) -> None:
    """Make the names durable that the plan relied on: whoever gave them may have died before that.

    Else a power cut could bring back a reference to what was deleted, or take the container that
    was kept for what is in two.
    """
    files, layout = objects.files, objects.layout
    for folder in sorted({layout.container(c.name, c.kind).parent for c in objects.containers}):
        files.sync_folder(folder)
    files.sync_folder(layout.containers)
    files.sync_folder(layout.refs)


def _files_of(objects: Objects, container: ContainerId) -> list[Path]:
    """The table first: without it the data is no container."""
    table = objects.layout.table(container.name, container.kind)
    data = objects.layout.container(container.name, container.kind)
    return [table] if table == data else [table, data]


def _older(objects: Objects, folder: Path, before: float) -> Iterator[Path]:
    """What was set aside before this second."""
    return (path for path, when in _set_aside(objects, folder) if when <= before)


def _date_anew(objects: Objects) -> None:
    """Let the grace of what is dated ahead begin now; else it might never end.

    The clock was set back since that was set aside: how long ago, nobody knows.
    """
    layout, files = objects.layout, objects.files
    now = files.now()
    for folder in (layout.trash, layout.quarantine):
        ahead = [(path, when) for path, when in _set_aside(objects, folder) if when > now]
        for path, _ in ahead:
            files.rename(path, folder / f"{now}.{path.name.partition('.')[2]}")
        if ahead:
            hours = (max(when for _, when in ahead) - now) / _HOUR_S
            _log.warning(
                "%s: %d files were dated up to %.1f hours ahead, so the clock was set back; they "
                "stay for the whole grace from now on",
                folder,
                len(ahead),
                hours,
            )


def _set_aside(objects: Objects, folder: Path) -> Iterator[tuple[Path, int]]:
    """What was set aside, and the second when; what has another name is left alone."""
    for name in objects.files.listdir(folder):
        when, dot, _ = name.partition(".")
        if dot and when.isascii() and when.isdecimal():
            yield folder / name, int(when)


def _stale_lists(objects: Objects, keep: Iterable[ContainerId]) -> list[str]:
    kept = {container.name for container in keep}
    return [name for name in objects.bad_containers() if name not in kept]


def _items(objects: Objects, paths: Iterable[Path]) -> Iterator[GarbageItem]:
    for path in paths:
        status = objects.files.status(path)
        if status is not None:
            yield GarbageItem(path, status.size)
