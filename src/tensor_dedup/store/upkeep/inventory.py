"""The inventory of a store: its contents and what is in use, for gc, verify and repair.

Damaged files do not stop an inventory; they are recorded in it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    ChangedExternalError,
    DamagedFileError,
    UnknownNameError,
)
from tensor_dedup.store.format.external import EXTERNAL
from tensor_dedup.store.format.manifests import Manifest, counted_files, not_indexed
from tensor_dedup.store.format.names import file_of, marked_by
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.upkeep import live_set


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that cannot be read: its kind, its path, the error, and the affected reference."""

    kind: str
    path: Path
    error: StoreError
    checkpoint: str | None = None


@dataclass
class Inventory:
    """The inventory of a store: its contents, and which of them are in use.

    - `manifests` maps each readable reference to the name of its manifest.
    - `live` maps the digests of the pieces in use to their sizes. References lead to these pieces.
    - `users` maps the digest of each piece in `live` to the checkpoints and tensors that use it.
    - `checkpoints` has the names of the checkpoints, `references` the number of their tensors, and
      `logical_bytes` their size. The mark of a kept step is no checkpoint; what it leads to is in
      use like anything else.
    - `objects` has the names of all manifests and pages that references lead to.
    - `absent` has the names in `objects` whose files cannot be read.
    - `tables` maps each container with a readable table to that table.
    - `bad` maps each container in `tables` to the offsets of its damaged pieces.
    - `changed` maps external containers to their files, if the files were modified. All pieces of
      these containers count as damaged.
    - `problems` lists the files that cannot be read.
    """

    live: dict[bytes, int] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    users: dict[bytes, list[str]] = field(default_factory=dict)
    references: int = 0
    logical_bytes: int = 0
    checkpoints: list[str] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    tables: dict[ContainerId, Table] = field(default_factory=dict)
    bad: dict[ContainerId, frozenset[int]] = field(default_factory=dict)
    changed: dict[ContainerId, Path] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def good(self, container: ContainerId) -> Iterator[Record]:
        """Iterate over the records of a container, without those of damaged pieces."""
        bad = self.bad[container]
        return (r for r in self.tables[container].records if r.offset not in bad)

    def records(self) -> dict[ContainerId, list[Record]]:
        """Return the records of each container, without those of damaged pieces."""
        return {container: [*self.good(container)] for container in self.tables}

    def anchors(self) -> set[bytes]:
        """Return the digests of the anchors: the pieces that deltas can be decoded against."""
        return live_set.anchors(self.records())

    def readable(self) -> dict[ContainerId, dict[bytes, Record]]:
        """Return the readable records, by container and digest.

        A delta is readable only if all pieces that it is encoded against are readable.
        """
        return live_set.readable(self.records())

    def lost(self) -> dict[bytes, int]:
        """Return the live pieces that are lost, with their sizes.

        A piece is lost if no container has a readable copy.
        """
        gone = live_set.lost(self.live, self.records())
        return {digest: nbytes for digest, nbytes in self.live.items() if nbytes and digest in gone}

    def exposed(self) -> dict[bytes, int]:
        """Return the live pieces with only damaged copies in the store, and intact ones outside it.

        The result maps their digests to their sizes.
        """
        readable = self.readable()
        own = {d for c, held in readable.items() if c.kind != EXTERNAL for d in held}
        others = {d for c, held in readable.items() if c.kind == EXTERNAL for d in held}
        damaged = {
            record.digest: record.nbytes
            for container, table in self.tables.items()
            for record in table.records
            if container.kind != EXTERNAL and record.offset in self.bad[container]
        }
        only_there = (damaged.keys() & self.live.keys() & others) - own
        return {digest: damaged[digest] for digest in only_there}

    def missing_bases(self, digest: bytes) -> list[bytes]:
        """Return the digests of missing anchors against which the piece `digest` is encoded."""
        anchors = self.anchors()
        records = (r for container in self.tables for r in self.good(container))
        return [
            base for r in records if r.digest == digest for base in r.bases if base not in anchors
        ]

    def deltas_of(self, digest: bytes) -> list[bytes]:
        """Return the digests of the pieces that are stored as deltas against the piece `digest`."""
        records = (r for container in self.tables for r in self.good(container))
        return [r.digest for r in records if digest in r.bases]

    def lost_anchors(self) -> set[bytes]:
        """Return the digests of the missing anchors of lost pieces.

        A piece may be lost because anchors against which it is encoded are missing. If they are
        restored, the piece is readable again. An anchor need not belong to a checkpoint.
        """
        lost, anchors = self.lost(), self.anchors()
        return {
            base
            for container in self.tables
            for r in self.good(container)
            if r.digest in lost
            for base in r.bases
            if base not in anchors
        }


def take_inventory(objects: Objects) -> Inventory:
    """Read all metadata of a store, but no tensor data; return the inventory.

    Call it inside `with locks.session(...):`.
    """
    found = Inventory()
    for name in objects.references():
        _checkpoint(objects, found, name)
    return _with_containers(objects, found)


def take_containers(objects: Objects, live: Mapping[bytes, int]) -> Inventory:
    """Take the inventory of the containers only.

    `live` maps the digests of the pieces in use to their sizes. Call it inside `with
    locks.session(...):`.
    """
    return _with_containers(objects, Inventory(dict(live)))


def catch_up(objects: Objects, found: Inventory) -> Inventory:
    """Bring the inventory `found` up to date and return it.

    Call it inside `with locks.sweep(...):`. Immutable files that were read already are not read
    again. Pieces of checkpoints that were deleted meanwhile still count as live. If a live piece is
    lost or a file cannot be read, a new inventory is taken.
    """
    bad = set(objects.bad_containers())
    known = {
        container: table
        for container, table in found.tables.items()
        if container.kind != EXTERNAL and container.name not in bad and not found.bad[container]
    }
    found.tables, found.bad, found.changed = {}, {}, {}
    for name in objects.references():
        _checkpoint(objects, found, name)
    _with_containers(objects, found, known)
    return take_inventory(objects) if found.problems or found.lost() else found


def _with_containers(
    objects: Objects, found: Inventory, known: Mapping[ContainerId, Table] | None = None
) -> Inventory:
    for path in objects.aliens():
        what = "nothing in a store has such a name; move it out of the store"
        error = DamagedFileError(f"{path}: {what}", path=str(path))
        found.problems.append(Problem("alien", path, error))
    for container in objects.containers:
        if known is not None and container in known:
            found.tables[container], found.bad[container] = known[container], frozenset()
        else:
            _container(objects, found, container)
    lost = found.lost()
    for container, path in found.changed.items():
        if any(record.digest in lost for record in found.tables[container].records):
            why = ChangedExternalError.at(path, "it changed since it was indexed in place")
            found.problems.append(Problem("external", path, why))
    return found


def _checkpoint(objects: Objects, found: Inventory, name: str) -> None:
    path, kept = objects.layout.refs / file_of(name), marked_by(name)
    try:
        manifest_name = objects.ref(name)
    except UnknownNameError:  # deleted since the names were read
        return
    except StoreError as error:
        if kept is None:
            found.checkpoints.append(name)
        found.problems.append(Problem("reference", path, error, name))
        return
    if found.manifests.get(name) == manifest_name:
        return
    found.manifests[name] = manifest_name
    if kept is None:
        found.checkpoints.append(name)
    elif found.manifests.get(kept) == manifest_name:
        return  # read with its step
    found.objects.add(manifest_name)
    try:
        manifest = objects.manifest(manifest_name)
    except StoreError as error:
        _absent(objects, found, "manifest", manifest_name, error, name)
        return
    if kept is None:
        found.logical_bytes += manifest.nbytes
        found.references -= _copies(objects, manifest_name, manifest)
    for page, times in Counter(manifest.pages).items():
        _page(objects, found, page.hex(), kept or name, times if kept is None else 0)


def _copies(objects: Objects, name: str, manifest: Manifest) -> int:
    """Return how many tensors of its files the checkpoint does not count; 0 where it is damaged."""
    counted = counted_files(manifest.notes)
    if not counted:
        return 0
    try:
        return len(not_indexed(manifest.files, objects.pieces(name, manifest), counted))
    except StoreError:  # which is noted as a problem of the page
        return 0


def _page(objects: Objects, found: Inventory, page: str, name: str, times: int) -> None:
    """Note what a page holds that the checkpoint has this many times; for a mark, 0 times."""
    found.objects.add(page)
    try:
        pieces = objects.page(page).pieces
    except StoreError as error:
        _absent(objects, found, "page", page, error, name)
        return
    for piece in pieces:
        found.live[piece.digest] = piece.nbytes
        found.references += times if piece.name is not None else 0
        label = f"{name}: {piece.name}" if piece.name is not None else f"{name}: (file or header)"
        found.users.setdefault(piece.digest, []).append(label)


def _absent(
    objects: Objects, found: Inventory, kind: str, part: str, error: StoreError, name: str
) -> None:
    found.absent.add(part)
    found.problems.append(Problem(kind, objects.layout.manifest(part), error, name))


def _container(objects: Objects, found: Inventory, container: ContainerId) -> None:
    path = objects.layout.container(container.name, container.kind)
    try:
        table = objects.containers.table(container)
    except StoreError as error:
        table_path = objects.layout.table(container.name, container.kind)
        found.problems.append(Problem("table", table_path, error))
        return
    try:
        bad = objects.bad_offsets(container.name)
    except StoreError as error:
        found.problems.append(Problem("list", objects.layout.bad(container.name), error))
        return
    whole = objects.containers.data_is_whole(container, table)
    if not whole and container.kind == EXTERNAL:
        # No fault of the store: while nobody needs what is in it, all is well.
        found.changed[container] = objects.containers.data_path(container, table)
        bad = frozenset(record.offset for record in table.records)
    elif not whole:
        gone = DamagedFileError.at(path, f"its {table.data_bytes} bytes are not there")
        found.problems.append(Problem("container", path, gone))
        return
    found.tables[container] = table
    found.bad[container] = bad
