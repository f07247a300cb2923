"""Verify a remote: check its objects, and repair what can be repaired.

All repairs of the catalog are made by one commit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final

from tensor_dedup.digest import digest as digest_of
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    Catalog,
    CatalogChange,
    ListedContainer,
    catalog_of,
    commit,
    corrected,
    listed,
    prefixes,
    read_catalog,
    read_table,
    read_table_within,
    read_trash,
)
from tensor_dedup.remote.conditions import restore_marker
from tensor_dedup.remote.errors import DamagedRemoteError, MissingRemoteError, as_far_as_allowed
from tensor_dedup.remote.inventory import AWAY, RemoteFault, RemoteInventory, take_inventory
from tensor_dedup.remote.manifests import read_content
from tensor_dedup.remote.pieces import RemotePieces, name_of
from tensor_dedup.store.codecs.records import chunks, head_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import AdvisedError, NewerFormatError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.format.tables import PLAIN, Record, Table

_WHOLE: Final = "it was noted as damaged or gone, and it is whole"
_UNSWEPT: Final = (
    "so nobody knows what a sweep is deleting, and no table is written again; when no `remote gc` "
    "has run for an hour, push a checkpoint, which writes a new list, then run this again"
)


@dataclass(frozen=True, slots=True)
class RemoteVerifyResult:
    """The result of checking a remote.

    `bytes_checked` is the size of the tensor data that was checked, 0 without a full check.
    """

    checkpoints: int
    containers: int
    bytes_checked: int
    faults: tuple[RemoteFault, ...]

    @property
    def fine(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    def to_dict(self) -> dict[str, object]:
        """Return the result as a dict that can be written as JSON."""
        return {**asdict(self), "faults": [asdict(each) for each in self.faults]}


def verify(
    bucket: Bucket, *, full: bool = False, advance: Callable[[int], None] = lambda _: None
) -> RemoteVerifyResult:
    """Check manifests, tables and references; with `full`, the content of all containers too.

    `advance` receives the number of bytes after each container that was checked in full. Objects
    written by a later version are left unchanged. The check also repairs the remote, as far as it
    may write to it:

    * A missing or damaged marker (`FORMAT`) is written again.
    * A missing table is written again from its container.
    * Containers with faults are removed from the catalog, so that a push sends their pieces again.
    * With `full`, intact containers that were noted as damaged are added to the catalog again.
    * Entries in the catalog that differ from the tables are corrected.
    * Lost manifests and manifest pages are noted in the catalog.

    Raises:
        NotARemoteError: There is no remote.
        NewerFormatError: The catalog has a later version.
        FormerRemoteError: The catalog has a format earlier than version 1.
    """
    faults = list[RemoteFault]()
    if (what := restore_marker(bucket)) is not None:
        faults.append(RemoteFault(bucket.at(layout.MARKER), what))
    try:  # before the rest is listed: what it names then has been there for a while
        before = read_catalog(bucket) or Catalog()
    except (DamagedRemoteError, MissingRemoteError) as error:
        faults.append(RemoteFault(bucket.at(layout.HEAD), str(error)))
        before = Catalog()
    found = take_inventory(bucket)
    faults += found.problems
    faults += _mended_tables(bucket, before, found)
    # What containers of a later version hold is not known here.
    lost = found.lost() if not found.newer else {}
    wrong = [*_wrong_records(bucket, found, advance)] if full else []
    now = catalog_of(bucket, before=before)
    if now.tag is None and found.manifests:
        faults.append(RemoteFault(bucket.at(layout.HEAD), "it is gone; a push or a gc writes it"))
    # What nobody needs and no push relies on is a sweep's to take, and no fault.
    gone = {c for c, _, _ in wrong if c not in now.containers and _is_gone(bucket, c)}
    unused = now.damaged | now.trash.deleting | {*map(layout.container_key, gone)}
    unreadable = found.unreadable.items()
    faults += [f for c, f in unreadable if lost or layout.container_key(c) not in unused]
    names = _names(found)
    for digest, losers in lost.items():
        what = f"no container holds {digest.hex()} ({name_of(digest, names)})"
        faults.append(RemoteFault(bucket.url, what, tuple(sorted({*losers}))))
    spoilt = _spoilt(bucket, found, wrong, unused)
    faults += [fault for held in spoilt.values() for fault in held]
    absent = (before.containers.keys() & now.containers) - found.tables.keys() - found.newer
    listed_wrongly = {
        **dict.fromkeys(sorted(absent), "the catalog names it, and it is not there, whole"),
        **dict.fromkeys(
            sorted(_lies(now, found.tables) - spoilt.keys()),
            "the catalog says of it what its table does not",
        ),
    }
    for container, what in listed_wrongly.items():
        faults.append(RemoteFault(bucket.at(layout.container_key(container)), what))
    lost_parts = {key for manifest in sorted(found.broken) for key in _lost_of(bucket, manifest)}
    whole = {layout.manifest_key(part) for each in found.manifests for part in each.blobs}
    if full:
        whole |= {*map(layout.container_key, found.tables.keys() - {c for c, _, _ in wrong})}
    whole &= before.damaged & now.damaged - lost_parts
    faults += [RemoteFault(bucket.at(key), _WHOLE) for key in sorted(whole)]
    bad = lost_parts | {*map(layout.container_key, spoilt.keys() | absent)}
    with as_far_as_allowed():
        _mend(bucket, now, found.tables, bad, whole)
    checkpoints = [each.name for each in found.manifests]
    checkpoints += [each.affected[0] for each in found.problems if each.affected]
    return RemoteVerifyResult(
        sum(marked_by(name) is None for name in checkpoints),
        len(found.tables),
        sum(r.stored for table in found.tables.values() for r in table.records) if full else 0,
        tuple(faults),
    )


def _names(found: RemoteInventory) -> dict[bytes, str]:
    """The names of tensors, by their digests."""
    return {p.digest: p.name for each in found.manifests for p in each.pieces if p.name}


def _mended_tables(
    bucket: Bucket, catalog: Catalog, found: RemoteInventory
) -> Iterator[RemoteFault]:
    """The tables that are gone or damaged, when they have been written again from containers.

    Looked for in the containers that the catalog names and, where pieces are lost, in all others,
    but for those of a sweep, which may be about to delete them: a table without its container would
    have pushes rely on what is gone.
    """
    there = {c for key in found.objects if (c := layout.container_of(key)) is not None}
    without = there - found.tables.keys()
    wanted = without if found.lost() else without & catalog.containers.keys()
    if not wanted:
        return
    try:
        swept = _swept(bucket)
    except (DamagedRemoteError, MissingRemoteError, NewerFormatError) as error:
        where = str(error.facts["path"])
        what = error.message.removeprefix(f"{where}: ").removesuffix(f"; {error.advice}")
        yield RemoteFault(where, f"{what}, {_UNSWEPT}")
        return
    wanted = {c for c in wanted if layout.container_key(c) not in swept}
    yield from _read_within(bucket, found, wanted)


def _swept(bucket: Bucket) -> Collection[str]:
    """The keys that sweeps have condemned or are deleting; raises where that cannot be read."""
    head = bucket.at(layout.HEAD)
    error: DamagedRemoteError | MissingRemoteError = MissingRemoteError.at(head, "it is gone")
    try:
        if (trash := read_trash(bucket)) is not None:
            return {*trash.condemned} | trash.deleting
    except (DamagedRemoteError, MissingRemoteError) as raised:
        error = raised
    # A head that is lost may have named a list, if there is any.
    if error.facts["path"] == head and not [*bucket.list(layout.TRASH)]:
        return ()
    raise error


def _read_within(
    bucket: Bucket, found: RemoteInventory, containers: Iterable[ContainerId]
) -> Iterator[RemoteFault]:
    def read(container: ContainerId) -> Table | None:
        size = found.objects[layout.container_key(container)].size
        table = read_table_within(bucket, container, size)
        if table is None or listed(container, table).nbytes != size:
            return None
        return table if tables.encode(table).name == container.name else None

    wanted = sorted(containers)
    for container, table in zip(wanted, bucket.each(read, wanted), strict=True):
        if table is None:
            continue
        key = layout.table_key(container.name)
        with as_far_as_allowed():
            bucket.put(key, [memoryview(tables.encode(table).blob)])
        found.tables[container] = table
        found.unreadable.pop(container, None)
        yield RemoteFault(bucket.at(key), "this table is gone or damaged; its container has it")


def _wrong_records(
    bucket: Bucket, found: RemoteInventory, advance: Callable[[int], None]
) -> Iterator[tuple[ContainerId, Record, str]]:
    """The records whose bytes are damaged, and how."""
    names = _names(found)
    for container, table in sorted(found.tables.items()):
        for record, what in _faults_in(bucket, container, table, names):
            yield container, record, what
        advance(table.data_bytes)


def _faults_in(
    bucket: Bucket, container: ContainerId, table: Table, names: Mapping[bytes, str]
) -> Iterator[tuple[Record, str]]:
    """The records that are damaged, and how; without a next step, which depends on all of them."""
    places = {r.digest: (container, r) for r in table.records}
    where = bucket.at(layout.container_key(container))
    with RemotePieces(bucket, places, names) as source:
        for record in table.records:
            try:
                if record.codec == PLAIN:
                    for at in range(0, record.nbytes, 8 << 20):
                        view = memoryview(bytearray(min(8 << 20, record.nbytes - at)))
                        source.read_piece_into(record.digest, at, view, record.nbytes)
                else:
                    _check_chunks(source, container, record, names, where)
            except AWAY:
                raise
            except StoreError as error:
                advice = f"; {error.advice}" if isinstance(error, AdvisedError) else ""
                yield record, str(error).removesuffix(advice).removeprefix(f"{where}: ")


def _check_chunks(
    source: RemotePieces,
    container: ContainerId,
    record: Record,
    names: Mapping[bytes, str],
    where: str,
) -> None:
    head = memoryview(bytearray(head_bytes(record.nbytes)))
    source.read_stored(container, record.offset, head)
    for chunk in chunks(bytes(head), record.stored):
        view = memoryview(bytearray(chunk.size))
        source.read_stored(container, record.offset + chunk.offset, view)
        if not chunk.holds(view):
            name = name_of(record.digest, names)
            what = f"a chunk of {record.digest.hex()} at {record.offset} ({name}) is wrong"
            raise DamagedRemoteError.at(where, what)


def _is_gone(bucket: Bucket, container: ContainerId) -> bool:
    return bucket.head(layout.container_key(container)) is None


def _spoilt(
    bucket: Bucket,
    found: RemoteInventory,
    wrong: Sequence[tuple[ContainerId, Record, str]],
    unused: Collection[str],
) -> dict[ContainerId, list[RemoteFault]]:
    """The faults of containers with damaged records, and whom they affect.

    That is who needs such a record, or a difference from it, and has no other copy. A container
    that affects nobody and is `unused` is left out.
    """
    lost = found.lost({(container, record.digest) for container, record, _ in wrong})
    against: dict[bytes, set[bytes]] = {}
    for record in (record for table in found.tables.values() for record in table.records):
        for base in record.bases:
            against.setdefault(base, set()).add(record.digest)
    faults: dict[ContainerId, list[RemoteFault]] = {}
    for container, record, what in wrong:
        hit = (against.get(record.digest, set()) | {record.digest}) & lost.keys()
        users = tuple(sorted({user for digest in hit for user in lost[digest]}))
        where = bucket.at(layout.container_key(container))
        faults.setdefault(container, []).append(RemoteFault(where, what, users))
    return {
        container: held
        for container, held in faults.items()
        if layout.container_key(container) not in unused or any(fault.affected for fault in held)
    }


def _lost_of(bucket: Bucket, manifest: str) -> list[str]:
    """The keys of a manifest, or of those of its pages, that are gone or hold something else."""

    def is_there(part: str) -> bool:
        with suppress(DamagedRemoteError):
            held = bucket.get(layout.manifest_key(part), layout.FRAME_BYTES)
            return held is not None and digest_of(held[0]) == part
        return False

    parts = [manifest]
    if is_there(manifest):
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            pages = read_content(bucket, manifest)[1].pages
            parts = [page.hex() for page in dict.fromkeys(pages)]
    there = zip(parts, bucket.each(is_there, parts), strict=True)
    return [layout.manifest_key(part) for part, is_whole in there if not is_whole]


def _lies(catalog: Catalog, tables_: Mapping[ContainerId, Table]) -> set[ContainerId]:
    """The containers of which a catalog says what is not so; it may leave differences out."""

    def is_wrong(said: ListedContainer, right: ListedContainer) -> bool:
        is_another = (said.kind, said.nbytes, said.alone) != (right.kind, right.nbytes, right.alone)
        return is_another or not {*prefixes(said)} <= {*prefixes(right)}

    named = catalog.containers
    return {c for c in named.keys() & tables_ if is_wrong(named[c], listed(c, tables_[c]))}


def _mend(
    bucket: Bucket,
    now: Catalog,
    tables_: Mapping[ContainerId, Table],
    bad: Collection[str],
    whole: Collection[str],
) -> None:
    """Write a catalog that says of containers what their tables say.

    The keys in `bad` are noted as damaged. Those in `whole` are not any longer, so that their
    containers are listed again.
    """

    def read(container: ContainerId) -> Table | None:
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            return read_table(bucket, container.name)
        return None

    def change(now: Catalog) -> CatalogChange | None:
        damaged = now.damaged.difference(whole).union(bad)
        if damaged == now.damaged and not _lies(now, tables_):
            return None
        again = now.damaged - damaged
        found = {c: table for c, table in tables_.items() if layout.container_key(c) in again}
        named = now.containers | {c: listed(c, table) for c, table in found.items()}
        # What others have pushed since the tables were read.
        new = [c for c in named.keys() - tables_ if layout.container_key(c) not in damaged]
        read_now = zip(new, bucket.each(read, new), strict=True)
        known = {**tables_, **{c: table for c, table in read_now if table is not None}}
        entries = corrected(replace(now, containers=named), known, damaged)
        return CatalogChange((), entries, now.trash, damaged)

    commit(bucket, now, change)
