"""List, measure and verify the checkpoints on a remote, and delete their names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final

from tensor_dedup.digest import digest as digest_of
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    DAMAGED,
    Catalog,
    CatalogChange,
    ListedContainer,
    Trash,
    bases_listed,
    catalog_of,
    commit,
    condemned,
    drop,
    is_damage_noted,
    listed,
    prefixes,
    read_catalog,
    read_table_within,
    read_trash,
    segment_of,
    unheld,
    with_more,
)
from tensor_dedup.remote.conditions import check_remote, restore_marker
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    RemoteBusyError,
    UnknownRemoteNameError,
    as_far_as_allowed,
)
from tensor_dedup.remote.holders import fault_of, put_holders, read_holders
from tensor_dedup.remote.inventory import (
    AWAY,
    RemoteFault,
    RemoteInventory,
    take_inventory,
)
from tensor_dedup.remote.pieces import RemotePieces, name_of
from tensor_dedup.remote.pull import (
    RemoteManifest,
    find_ref,
    list_refs,
    read_content,
    read_manifest,
    read_ref,
)
from tensor_dedup.store.codecs.records import chunks, head_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import AdvisedError, NewerFormatError, UnfitForCollectionError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.manifests import named_tensors
from tensor_dedup.store.format.names import MARK, marked_by
from tensor_dedup.store.format.tables import PLAIN, Record, Table
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.upkeep.gc import needed

_WHOLE: Final = "it was noted as damaged or gone, and it is whole"
_UNSWEPT: Final = (
    "so nobody knows what a sweep is deleting, and no table is written again of a container that "
    "the catalog does not name; when no `remote gc` has run for an hour, push a checkpoint, which "
    "writes a new list, then run this again"
)


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


def checkpoints(bucket: Bucket, only: Sequence[str] | None = None) -> list[RemoteCheckpoint]:
    """Return a description of each checkpoint, or of those in `only`, sorted by name.

    A checkpoint that cannot be read is included, with the reason in `damage`. The marks of kept
    steps are left out.
    """
    check_remote(bucket)
    noted = _noted_damage(bucket)

    def describe(name: str) -> RemoteCheckpoint | None:
        try:
            found = read_manifest(bucket, name, read_ref(bucket, name))
            return described(found, damage=noted(found))
        except UnknownRemoteNameError:
            return None
        except AWAY:
            raise
        except (StoreError, UnfitForCollectionError) as error:
            return RemoteCheckpoint(name, damage=str(error))

    # One after the other: each reads its pages on several threads.
    wanted = list_refs(bucket, thorough=True) if only is None else only
    checkpoints_ = (name for name in wanted if marked_by(name) is None)
    return [each for name in checkpoints_ if (each := describe(name)) is not None]


def _noted_damage(bucket: Bucket) -> Callable[[RemoteManifest], str | None]:
    """Return what says which damage is noted to the pieces of a checkpoint."""
    if not is_damage_noted(bucket):
        return lambda _: None
    catalog = catalog_of(bucket)

    def damage(found: RemoteManifest) -> str | None:
        pieces = {piece.digest for piece in found.pieces if piece.nbytes}
        lost = len(unheld(bucket, catalog, pieces))
        what = f"{lost} of {len(pieces)} pieces are in containers that were found damaged or lost"
        return what if lost else None

    return damage


def described(
    found: RemoteManifest, unique_bytes: int | None = None, damage: str | None = None
) -> RemoteCheckpoint:
    """Return the description of the checkpoint `found`, whose manifest was read."""
    return RemoteCheckpoint(
        found.name,
        found.manifest,
        sum(1 for _ in named_tensors(found.content, found.pieces)),
        len(found.content.files),
        found.content.nbytes,
        unique_bytes,
        damage,
    )


def delete(bucket: Bucket, name: str) -> None:
    """Delete the name of a checkpoint; for a kept step, delete the mark too.

    The reference is replaced by one that marks the name as deleted. The data stays until `gc`
    deletes it: one run condemns unused data, and a run at least a lease later deletes it. Data
    younger than the lease is not condemned yet.

    Raises:
        UnknownRemoteNameError: The remote has no checkpoint of this name, or it is the name of the
            mark of a step that is there.
        RemoteBusyError: Other writers kept changing the name.
    """
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
    key, text = layout.ref_key(name), layout.reference(name, None)
    for attempt in range(8):
        found = bucket.get(key, layout.TEXT_BYTES)
        if found is not None and found[0] == text and attempt:
            return  # ours, whose answer was lost
        if found is None or found[0] == text:
            check_remote(bucket)
            raise UnknownRemoteNameError.at(bucket.url, f"no checkpoint {name!r}", name=name)
        if bucket.put_if(key, text, found[1]):
            return
    raise RemoteBusyError.at(bucket.at(key), "others wrote this reference again and again")


def _mended_tables(
    bucket: Bucket, catalog: Catalog | None, found: RemoteInventory
) -> Iterator[RemoteFault]:
    """The tables that are gone or damaged, when they have been written again from containers.

    Looked for in the containers that the catalog names; where pieces are lost, in all others but
    those of a sweep, which may be about to delete them. Where it is not known which those are, in
    none of the others: a table without its container would have pushes rely on what is gone.
    """
    there = {c for key in found.objects if (c := layout.container_of(key)) is not None}
    without = there - found.tables.keys()
    named = without & (catalog.containers.keys() if catalog is not None else set())
    yield from _read_within(bucket, found, named)
    if without - named and found.lost():
        try:
            swept = _swept(bucket)
        except (DamagedRemoteError, MissingRemoteError, NewerFormatError) as error:
            where = str(error.facts["path"])
            what = error.message.removeprefix(f"{where}: ").removesuffix(f"; {error.advice}")
            yield RemoteFault(where, f"{what}, {_UNSWEPT}")
            return
        rest = {c for c in without - named if layout.container_key(c) not in swept}
        yield from _read_within(bucket, found, rest)


def _swept(bucket: Bucket) -> set[str]:
    """The keys that sweeps have condemned or are deleting; raises where that cannot be read."""
    head, error = bucket.at(layout.HEAD), None
    try:
        if (trash := read_trash(bucket)) is not None:
            return {k for k, s in trash.condemned.items() if s != DAMAGED} | {*trash.deleting}
    except (DamagedRemoteError, MissingRemoteError) as found:
        error = found
    # A head that is lost may have named a list, if there is any.
    if (error is None or error.facts["path"] == head) and not [*bucket.list(layout.TRASH)]:
        return set()
    raise error or MissingRemoteError.at(head, "it is gone")


def _read_within(
    bucket: Bucket, found: RemoteInventory, containers: Collection[ContainerId]
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
        found.unreadable.pop(layout.container_key(container), None)
        yield RemoteFault(bucket.at(key), "this table is gone or damaged; its container has it")


def usage(bucket: Bucket) -> RemoteUsage:
    """Measure the space that a remote and its checkpoints take, from manifests and tables alone."""
    check_remote(bucket)
    found, noted = take_inventory(bucket), _noted_damage(bucket)
    live = found.live()
    need = needed(live, found.held())
    kept = [record for c in need.containers for record in found.tables[c].records]
    # What is stored as a difference needs what it is against, too, whoever else has that.
    users = {digest: {*names_} for digest, names_ in live.items()}
    used_by = ((base, r.digest) for r in kept if r.digest in live for base in r.bases)
    for base, digest in used_by:
        users.setdefault(base, set()).update(live[digest])
    stored: dict[bytes, int] = {}
    for records in found.held().values():
        for record in records.values():
            stored[record.digest] = min(record.stored, stored.get(record.digest, record.stored))
    described_ = []
    runs: dict[str, int] = {}
    for digest, names_ in users.items():
        owners = {owner(name) for name in names_}
        (name, is_run), *others = owners
        if is_run and not others:
            runs[name] = runs.get(name, 0) + stored.get(digest, 0)
    of_one: dict[str, list[bytes]] = {}
    for digest, names_ in users.items():
        (first, *others_) = names_
        if not others_:
            of_one.setdefault(first, []).append(digest)
    for each in found.manifests:
        if marked_by(each.name) is not None:
            continue
        own = sum(stored.get(d, 0) for d in of_one.get(each.name, ()))
        described_.append(described(each, own, noted(each)))
    broken = [
        RemoteCheckpoint(name, damage=fault.what)
        for fault in found.problems
        for name in fault.affected
        if marked_by(name) is None
    ]
    used = live.keys() | need.anchors
    sizes = [s.size for key, s in found.objects.items() if key.startswith(layout.CONTAINERS)]
    return RemoteUsage(
        tuple(sorted([*described_, *broken], key=lambda each: each.name)),
        len(sizes),
        sum(sizes),
        sum(sizes) - sum(record.stored for record in kept if record.digest in used),
        runs,
    )


def owner(name: str) -> tuple[str, bool]:
    """Return the run or checkpoint to which `name` belongs, and whether it is a run.

    For a step or a mark, the result is the name of the run and True. For any other name, it is
    `name` and False.
    """
    step = parse_step_name(name)
    return (name, False) if step is None else (step.run, True)


def verify(
    bucket: Bucket, *, full: bool = False, advance: Callable[[int], None] = lambda _: None
) -> RemoteVerifyResult:
    """Check manifests, tables and references; with `full`, the content of all containers too.

    `advance` receives the number of bytes after each container that was checked in full. Objects
    written by a later version are left unchanged. The check also repairs the remote:

    * A missing or damaged marker (`FORMAT`) is written again.
    * A missing table is written again from its container.
    * Containers with faults are removed from the catalog and from the lists of holders, so that a
      push sends their pieces again.
    * With `full`, intact containers that were noted as damaged are added to the catalog again.
    * Entries in the catalog and in the lists that differ from the tables are corrected.
    * Lost manifests and manifest pages are noted in the catalog.
    """
    faults, read = list[RemoteFault](), 0
    if (what := restore_marker(bucket)) is not None:
        faults.append(RemoteFault(bucket.at(layout.MARKER), what))
    try:  # before the rest is listed: what it names then has been there for a while
        catalog = read_catalog(bucket)
    except AWAY:
        raise
    except StoreError as error:
        faults.append(RemoteFault(bucket.at(layout.HEAD), str(error)))
        catalog = None
    found = take_inventory(bucket)
    faults += found.problems
    faults += _mended_tables(bucket, catalog, found)
    # What containers of a later version hold is not known here.
    lost = found.lost() if not found.newer else {}
    # What nobody needs and no push relies on any more is a sweep's to take, and no fault.
    noted = condemned(bucket) if found.unreadable and not lost else {}
    faults += [fault for key, fault in found.unreadable.items() if key not in noted]
    for digest, losers in lost.items():
        what = f"no container holds {digest.hex()}"
        faults.append(RemoteFault(bucket.url, what, tuple(sorted({*losers}))))
    damaged = list[tuple[ContainerId, Record, str]]()
    if full:
        names = {p.digest: p.name for each in found.manifests for p in each.pieces if p.name}
        for container, table in sorted(found.tables.items()):
            for record, what in _faults_in(bucket, container, table, names):
                damaged.append((container, record, what))
            read += sum(record.stored for record in table.records)
            advance(table.data_bytes)
    bad = _damage(bucket, catalog, found, damaged)
    faults += [fault for held in bad.values() for fault in held]
    faults += _mended(bucket, catalog, found, bad)
    wrong = {container for container, _, _ in damaged}
    if full:
        faults += _taken_back(bucket, found, wrong)
    faults += _mended_notes(bucket, found)
    if not found.newer:
        faults += _mended_holders(bucket, found, wrong)
    names_ = [each.name for each in found.manifests]
    names_ += [each.affected[0] for each in found.problems if each.affected]
    return RemoteVerifyResult(
        sum(marked_by(name) is None for name in names_),
        len(found.tables),
        read,
        tuple(faults),
    )


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


def _damage(
    bucket: Bucket,
    catalog: Catalog | None,
    found: RemoteInventory,
    damaged: Sequence[tuple[ContainerId, Record, str]],
) -> dict[ContainerId, list[RemoteFault]]:
    """The faults of containers with damaged records, and whom they affect.

    That is who needs such a record, or a difference from it, and has no other copy. A container
    that affects nobody and is condemned already is no fault: no push relies on it, and a sweep
    takes it.
    """
    lost = found.lost({(container, record.digest) for container, record, _ in damaged})
    against: dict[bytes, set[bytes]] = {}
    for records in found.held().values():
        for record in records.values():
            for base in record.bases:
                against.setdefault(base, set()).add(record.digest)
    noted = condemned(bucket) if damaged else {}
    known = catalog.containers if catalog is not None else {}
    faults: dict[ContainerId, list[RemoteFault]] = {}
    for container, record, what in damaged:
        hit = (against.get(record.digest, set()) | {record.digest}) & lost.keys()
        users = tuple(sorted({user for digest in hit for user in lost[digest]}))
        where = bucket.at(layout.container_key(container))
        faults.setdefault(container, []).append(RemoteFault(where, what, users))
    return {
        container: held
        for container, held in faults.items()
        if container in known
        or layout.container_key(container) not in noted
        or any(fault.affected for fault in held)
    }


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


def _mended(
    bucket: Bucket, catalog: Catalog | None, found: RemoteInventory, bad: Collection[ContainerId]
) -> Iterator[RemoteFault]:
    """What the catalog says that is not so, when it has been put right."""
    named = catalog.containers if catalog is not None else {}
    absent = named.keys() - found.tables.keys() - found.newer
    lies = {
        c
        for c, entry in _right(named, found).items()
        if _is_wrong(named[c], entry.shortened(named[c].width)) and c not in bad
    }
    with as_far_as_allowed():
        if gone := {*bad, *absent}:
            drop(bucket, gone)
        if lies:
            _correct(bucket, found, lies)
    for containers, what in (
        (absent, "the catalog names it, and it is not there, whole"),
        (lies, "the catalog says of it what its table does not"),
    ):
        for container in sorted(containers):
            yield RemoteFault(bucket.at(layout.container_key(container)), what)


def _taken_back(
    bucket: Bucket, found: RemoteInventory, bad: Collection[ContainerId]
) -> Iterator[RemoteFault]:
    """The containers that are noted as damaged, and are whole, when the catalog has them again."""
    keys = {layout.container_key(c): c for c in found.tables if c not in bad}
    noted = {
        keys[key] for key, since in condemned(bucket).items() if since == DAMAGED and key in keys
    }

    def change(catalog: Catalog) -> CatalogChange | None:
        trash = catalog.trash
        again = {c for c in noted if trash.condemned.get(layout.container_key(c)) == DAMAGED}
        if not again:
            return None
        left = {key: since for key, since in trash.condemned.items() if keys.get(key) not in again}
        tables_ = [found.tables[c] for c in {*catalog.containers, *again} if c in found.tables]
        alone = {r.digest for table in tables_ for r in table.records if r.base is None}
        entries = [listed(c, found.tables[c], alone) for c in again]
        segments = segment_of([*catalog.containers.values(), *entries])
        return segments, Trash(left, trash.deleting)

    if noted:
        with as_far_as_allowed():
            commit(bucket, catalog_of(bucket), change)
    for container in sorted(noted):
        yield RemoteFault(bucket.at(layout.container_key(container)), _WHOLE)


def _mended_notes(bucket: Bucket, found: RemoteInventory) -> Iterator[RemoteFault]:
    """Manifests and pages that are noted as damaged or gone and are whole, no longer noted.

    What is lost of manifests is noted: so a push of one of these names sends it.
    """
    lost = {key for manifest in sorted(found.broken) for key in _lost_of(bucket, manifest)}
    whole = {layout.manifest_key(part) for each in found.manifests for part in each.blobs} - lost
    noted = {k for k, since in condemned(bucket).items() if since == DAMAGED and k in whole}

    def change(catalog: Catalog) -> CatalogChange | None:
        trash = catalog.trash
        left = {k: s for k, s in trash.condemned.items() if k not in noted or s != DAMAGED}
        left |= dict.fromkeys(lost, DAMAGED)
        if left == trash.condemned:
            return None
        return with_more(catalog, ()), Trash(left, trash.deleting)

    if lost or noted:
        with as_far_as_allowed():
            commit(bucket, catalog_of(bucket), change)
    for key in sorted(noted):
        yield RemoteFault(bucket.at(key), _WHOLE)


def _lost_of(bucket: Bucket, manifest: str) -> list[str]:
    """The keys of a manifest, or of those of its pages, that are gone or hold something else.

    They are asked for once more: an answer may be an old one.
    """

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


def _is_wrong(entry: ListedContainer, right: ListedContainer) -> bool:
    """Whether an entry of the catalog says what is not so; it may leave differences out."""
    said, known = ((e.kind, e.nbytes, e.width, e.alone) for e in (entry, right))
    return said != known or not {*prefixes(entry)} <= {*prefixes(right)}


def _mended_holders(
    bucket: Bucket, found: RemoteInventory, bad: Collection[ContainerId]
) -> Iterator[RemoteFault]:
    """What the holders beside manifests say that is not so, when they have been written anew.

    That a container of theirs is gone is no fault: a sweep may have found it needless since.
    """
    there = Catalog()
    for container, table in sorted(found.tables.items()):
        if container not in bad:
            there.add(listed(container, table))
    sizes = dict[bytes, int]()
    for record in (r for table in found.tables.values() for r in table.records):
        sizes[record.digest] = min(record.stored, sizes.get(record.digest, record.stored))
    manifests = {each.manifest: each for each in found.manifests}
    written = [name for name in manifests if layout.holders_key(name) in found.objects]

    def read(name: str) -> Catalog | DamagedRemoteError | None:
        try:
            return read_holders(bucket, name, manifests[name].pieces)
        except DamagedRemoteError as error:
            return error
        except NewerFormatError:
            return None  # a later version knows what it says

    for name, held in zip(written, bucket.each(read, written), strict=True):
        own = {piece.digest for piece in manifests[name].pieces if piece.nbytes}
        what = fault_of(held, own, there)
        if what is None:
            continue
        # Of what is a difference in several containers, the first is named.
        last_first = reversed([*there.containers])
        records = (r for c in last_first for r in found.tables[c].records)
        bases = {r.digest: r.bases for r in records if r.base is not None and r.digest in own}
        entries = there.only(sorted(own.union(*bases.values())))
        with as_far_as_allowed():
            put_holders(bucket, name, entries, sizes)
        if what:
            yield RemoteFault(bucket.at(layout.holders_key(name)), what)


def _right(
    named: Mapping[ContainerId, ListedContainer], found: RemoteInventory
) -> dict[ContainerId, ListedContainer]:
    """Return what a catalog may say of its containers: of their deltas those whose base it has."""
    there = {c: found.tables[c] for c in named if c in found.tables}
    alone = {r.digest for table in there.values() for r in table.records if r.base is None}
    return {
        c: listed(c, table, alone | bases_listed(named[c], table)) for c, table in there.items()
    }


def _correct(bucket: Bucket, found: RemoteInventory, lies: Collection[ContainerId]) -> None:
    """Write of containers what their tables say, as far as the catalog lists them now."""

    def change(catalog: Catalog) -> CatalogChange | None:
        right = _right(catalog.containers, found)
        entries = [
            right.get(c, entry) if c in lies else entry for c, entry in catalog.containers.items()
        ]
        if entries == [*catalog.containers.values()]:
            return None
        return segment_of(entries), catalog.trash

    commit(bucket, catalog_of(bucket), change)
