"""The inventory of a remote: its objects, and the pieces that its references lead to."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import listed, read_table
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    RemoteAccessError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.manifests import RemoteManifest, read_manifest
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.store.upkeep import live_set

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


@dataclass
class RemoteInventory:
    """The inventory of a remote: its objects, and the content of its manifests and tables.

    * `objects` maps keys to statuses.
    * `manifests` has the manifest of each name, and `broken` the names of manifests to which a
      reference leads, but which cannot be read completely.
    * `tables` maps containers to their tables, and `unreadable` maps a container to a fault of the
      container or of its table. It is unknown whether a checkpoint needs such a container.
    * `newer` has those of the unreadable containers that a later version has written.
    * `problems` has all other faults.
    """

    objects: dict[str, ObjectStatus] = field(default_factory=dict)
    manifests: list[RemoteManifest] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    tables: dict[ContainerId, Table] = field(default_factory=dict)
    unreadable: dict[ContainerId, RemoteFault] = field(default_factory=dict)
    newer: set[ContainerId] = field(default_factory=set)
    problems: list[RemoteFault] = field(default_factory=list)

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

    def records(
        self, without: Collection[tuple[ContainerId, bytes]] = ()
    ) -> dict[ContainerId, list[Record]]:
        """Return the records in each table.

        `without` has pairs of a container and a digest, which name records to leave out.
        """
        return {
            container: [r for r in table.records if (container, r.digest) not in without]
            for container, table in self.tables.items()
        }

    def lost(self, without: Collection[tuple[ContainerId, bytes]] = ()) -> dict[bytes, list[str]]:
        """Return the lost pieces: a dict from digests to the names of checkpoints that need them.

        A piece is lost if no container holds it, or if containers hold it only as a delta whose
        base is in no container. `without` is as in `records`.
        """
        live = self.live()
        gone = live_set.lost(live, self.records(without))
        return {digest: users for digest, users in live.items() if digest in gone}


def take_inventory(bucket: Bucket, known: RemoteInventory | None = None) -> RemoteInventory:
    """List all objects of a remote, and read all references, manifests, pages and tables.

    Objects that cannot be read are reported in the result. `known` is an earlier inventory; an
    immutable object that has the same status as in `known` is not read again.
    """
    known, found = known or RemoteInventory(), RemoteInventory()
    # Containers are listed last: then all that a reference leads to was there before.
    _list(bucket, found, layout.MANIFESTS, layout.REFS)
    _read_manifests(bucket, found, known)
    _list(bucket, found, layout.CONTAINERS, layout.TABLES)
    _read_tables(bucket, found, known)
    return found


def _list(bucket: Bucket, found: RemoteInventory, *prefixes: str) -> None:
    for status in (status for prefix in prefixes for status in bucket.list(prefix)):
        found.objects[status.key] = status
        if not layout.is_known(status.key):
            found.problems.append(RemoteFault(bucket.at(status.key), UNKNOWN_OBJECT))


def _read_manifests(bucket: Bucket, found: RemoteInventory, known: RemoteInventory) -> None:
    refs = (layout.name_of_ref(key) for key in found.objects if key.startswith(layout.REFS))
    names = sorted(name for name in refs if name is not None)
    blobs = {
        part: blob
        for each in known.manifests
        for part, blob in each.blobs.items()
        if found.has_still(known, layout.manifest_key(part))
    }
    whole = {m.manifest: m for m in known.manifests if m.blobs.keys() <= blobs.keys()}

    def read(name: str) -> RemoteManifest | RemoteFault | None:
        manifest = None
        try:
            manifest = _referred(bucket, name)
            if manifest is None:
                return None
            if manifest in whole:
                return replace(whole[manifest], name=name)
            content = read_manifest(bucket, name, manifest, blobs.get)
            blobs.update(content.blobs)  # checkpoints share pages
            return content
        except AWAY:
            raise
        except StoreError as error:
            if manifest is not None:
                found.broken.add(manifest)
            return RemoteFault(bucket.at(layout.ref_key(name)), str(error), (name,))

    for each in bucket.each(read, names):
        if isinstance(each, RemoteManifest):
            found.manifests.append(each)
        elif each is not None:
            found.problems.append(each)


def _referred(bucket: Bucket, name: str) -> str | None:
    key = layout.ref_key(name)
    found = bucket.get(key, layout.TEXT_BYTES)
    if found is None:  # none is ever deleted
        raise MissingRemoteError.at(bucket.at(key), "it is listed, and it is not there")
    return layout.referred(found[0], name, bucket.at(key))


def _read_tables(bucket: Bucket, found: RemoteInventory, known: RemoteInventory) -> None:
    def read(container: ContainerId) -> Table | StoreError:
        both = layout.container_key(container), layout.table_key(container.name)
        if container in known.tables and found.has_still(known, *both):
            return known.tables[container]
        try:
            table = read_table(bucket, container.name)
            check_size(bucket, container, table, found.objects[both[0]].size)
        except AWAY:
            raise
        except StoreError as error:
            return error
        return table

    listed_ = [c for key in found.objects if (c := layout.container_of(key)) is not None]
    # One without a table is being pushed, or its push has died: garbage, when it is old.
    wanted = [c for c in listed_ if layout.table_key(c.name) in found.objects]
    for container, table in zip(wanted, bucket.each(read, wanted), strict=True):
        if isinstance(table, Table):
            found.tables[container] = table
        elif isinstance(table, MissingRemoteError):  # a sweep has deleted it meanwhile
            found.objects.pop(layout.table_key(container.name), None)
        else:
            where = bucket.at(layout.container_key(container))
            found.unreadable[container] = RemoteFault(where, str(table))
            if isinstance(table, NewerFormatError):
                found.newer.add(container)


def check_size(bucket: Bucket, container: ContainerId, table: Table, size: int) -> None:
    """Check that `table` is that of a container whose object has `size` bytes.

    Raises:
        DamagedRemoteError: It is that of another one, or the container is cut short.
    """
    expected = listed(container, table).nbytes
    if table.kind != container.kind or size != expected:
        what = f"{size} bytes, its table says {expected} of the kind {table.kind}"
        raise DamagedRemoteError.at(bucket.at(layout.container_key(container)), what)
