"""The inventory of a remote: its objects, and the pieces that its references lead to."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import (
    listed,
    read_table,
)
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    RemoteAccessError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.pull import (
    RemoteManifest,
    read_manifest,
)
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.upkeep.gc import Held

# What says nothing of an object: the server cannot be asked.
AWAY: Final = (RemoteUnreachableError, RemoteAccessError)
UNKNOWN_OBJECT: Final = "no program of this version makes such an object"


@dataclass(frozen=True, slots=True)
class RemoteFault:
    """A fault of an object on a remote.

    `url` is the URL of the object, `what` describes the fault, and `affected` has the names of the
    checkpoints that the fault affects.
    """

    url: str
    what: str
    affected: tuple[str, ...] = ()


def names(bucket: Bucket) -> list[str]:
    """Return all names that have a reference on the remote, sorted; deleted names are included."""
    found = [layout.name_of_ref(status.key) for status in bucket.list(layout.REFS)]
    return sorted(name for name in found if name is not None)


@dataclass
class RemoteInventory:
    """The inventory of a remote: its objects, and the content of its manifests and tables.

    * `objects` maps keys to statuses, and `deleted` has the names that were deleted.
    * `unreadable` maps the key of a container to a fault of the container or of its table. It is
      unknown whether a checkpoint needs the container.
    * `problems` has all other faults.
    * `newer` has the containers that a later version has written. Their content is unknown.
    * `broken` has the names of manifests to which a reference leads, but which cannot be read
      completely.
    """

    manifests: list[RemoteManifest] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    tables: dict[ContainerId, Table] = field(default_factory=dict)
    objects: dict[str, ObjectStatus] = field(default_factory=dict)
    problems: list[RemoteFault] = field(default_factory=list)
    unreadable: dict[str, RemoteFault] = field(default_factory=dict)
    newer: set[ContainerId] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def has_still(self, earlier: "RemoteInventory", *keys: str) -> bool:
        """Return whether the objects at `keys` exist and have not changed since `earlier`."""
        return all(k in self.objects and self.objects[k] == earlier.objects.get(k) for k in keys)

    def live(self) -> dict[bytes, list[str]]:
        """Return the pieces that checkpoints need: a dict from digests to names of checkpoints."""
        users: dict[bytes, list[str]] = {}
        for found in self.manifests:
            name = marked_by(found.name) or found.name  # a kept step needs what its mark leads to
            for digest in {piece.digest for piece in found.pieces if piece.nbytes}:
                users.setdefault(digest, []).append(name)
        return users

    def held(self) -> dict[ContainerId, dict[bytes, Record]]:
        """Return the pieces in each container: for each piece, its entry (record) in the table."""
        return {c: {r.digest: r for r in table.records} for c, table in self.tables.items()}

    def lost(self, without: Collection[tuple[ContainerId, bytes]] = ()) -> dict[bytes, list[str]]:
        """Return the lost pieces: a dict from digests to the names of checkpoints that need them.

        A piece is lost if no container holds it, or if containers hold it only as a delta whose
        base is in no container. `without` has pairs of a container and a digest, which name copies
        to treat as missing.
        """
        held = {
            c: {d: record for d, record in records.items() if (c, d) not in without}
            for c, records in self.held().items()
        }
        there = {digest for records in readable(held).values() for digest in records}
        return {digest: users for digest, users in self.live().items() if digest not in there}


def readable(held: Held) -> dict[ContainerId, dict[bytes, Record]]:
    """Return `held` without the deltas whose base is in no container, which cannot be read."""
    alone = {d for records in held.values() for d, record in records.items() if record.base is None}
    return {
        container: {d: r for d, r in records.items() if alone.issuperset(r.bases)}
        for container, records in held.items()
    }


def take_inventory(bucket: Bucket, known: RemoteInventory | None = None) -> RemoteInventory:
    """List all objects of a remote, and read all references, manifests, pages and tables.

    Objects that cannot be read are reported in the result. If a push runs meanwhile, its new
    objects are not taken for garbage. `known` is an earlier inventory; an immutable object that has
    the same status as in `known` is not read again.
    """
    known = known or RemoteInventory()
    found = RemoteInventory()
    folders = layout.CONTAINERS, layout.TABLES, layout.MANIFESTS, layout.HOLDERS, layout.REFS
    for prefix in folders:
        for status in bucket.list(prefix):
            found.objects[status.key] = status
    for key in found.objects:
        if not layout.is_known(key):
            found.problems.append(RemoteFault(bucket.at(key), UNKNOWN_OBJECT))
    _read_tables(bucket, found, known)
    _read_manifests(bucket, found, known)
    # A push may have ended meanwhile: a reference that was read last leads to what came later.
    while found.lost() and _list_more(bucket, found, known):
        pass
    return found


def _read_manifests(bucket: Bucket, found: RemoteInventory, known: RemoteInventory) -> None:
    # No reference is ever deleted. So one that any list has had is there, and an answer that it is
    # not, as a list without it, is an old one.
    refs = (key for key in chain(found.objects, known.objects) if key.startswith(layout.REFS))
    listed_ = (layout.name_of_ref(key) for key in refs)
    every = sorted({*names(bucket), *(name for name in listed_ if name is not None)})
    blobs = {
        part: blob
        for each in known.manifests
        for part, blob in each.blobs.items()
        if found.has_still(known, layout.manifest_key(part))
    }
    whole = {m.manifest: m for m in known.manifests if m.blobs.keys() <= blobs.keys()}

    def read(name: str) -> tuple[str, RemoteManifest | StoreError | None]:
        key, manifest = layout.ref_key(name), ""
        try:
            ref = bucket.get(key, layout.TEXT_BYTES)
            if ref is None:
                raise MissingRemoteError.at(bucket.at(key), "it is listed, and it is not there")
            manifest = layout.referred(ref[0], name, bucket.at(key)) or ""
            if manifest in whole:
                return manifest, replace(whole[manifest], name=name)
            return manifest, read_manifest(bucket, name, manifest, blobs.get) if manifest else None
        except AWAY:
            raise
        except StoreError as error:
            return manifest, error

    for name, (manifest, content) in zip(every, bucket.each(read, every), strict=True):
        if isinstance(content, RemoteManifest):
            found.manifests.append(content)
        elif content is None:
            found.deleted.append(name)
        else:
            where = bucket.at(layout.ref_key(name))
            found.problems.append(RemoteFault(where, str(content), (name,)))
            if manifest:
                found.broken.add(manifest)


def _list_more(bucket: Bucket, found: RemoteInventory, known: RemoteInventory) -> bool:
    """List containers and tables again, and read the tables of new ones; whether any was read."""
    for prefix in (layout.CONTAINERS, layout.TABLES):
        for status in bucket.list(prefix):
            if layout.is_known(status.key):
                found.objects.setdefault(status.key, status)
    before = len(found.tables)
    _read_tables(bucket, found, known)
    return len(found.tables) > before


def _read_tables(bucket: Bucket, found: RemoteInventory, known: RemoteInventory) -> None:
    """Read the tables of listed containers that have not been read yet."""
    done = {*map(layout.container_key, found.tables), *found.unreadable}
    keys = (key for key in found.objects if key not in done)
    containers = [c for key in keys if (c := layout.container_of(key)) is not None]

    def table(container: ContainerId) -> Table | StoreError:
        try:
            read = read_table(bucket, container.name)
            entry = listed(container, read)
        except AWAY:
            raise
        except StoreError as error:
            return error
        key = layout.container_key(container)
        size = found.objects[key].size
        if read.kind == container.kind and entry.nbytes == size:
            return read
        what = f"{size} bytes, its table says {entry.nbytes} of the kind {read.kind}"
        return DamagedRemoteError.at(bucket.at(key), what)

    # One without a table is being pushed, or its push has died: garbage, when it is old.
    whole = [c for c in containers if layout.table_key(c.name) in found.objects]
    for c in whole:
        both = layout.container_key(c), layout.table_key(c.name)
        if c in known.tables and found.has_still(known, *both):
            found.tables[c] = known.tables[c]
    whole = [c for c in whole if c not in found.tables]
    for container, read in zip(whole, bucket.each(table, whole), strict=True):
        if isinstance(read, Table):
            found.tables[container] = read
        else:
            key = layout.container_key(container)
            found.unreadable[key] = RemoteFault(bucket.at(key), str(read))
            if isinstance(read, NewerFormatError):
                found.newer.add(container)
