"""The catalog of a remote: which container holds which piece.

A piece is a tensor, a header or a small file, named by its digest. A container is an immutable
object with pieces and a table of these pieces; a copy of the table is a separate object. A piece
may be stored as a delta, that is, as a difference from other pieces, its bases.

The catalog consists of immutable segments, which list containers with prefixes of the digests of
their pieces. One small object, the head, names the segments in use, the trash, and what was found
damaged. The trash lists unused objects that a gc has condemned, so that a later gc deletes them.
Every push and every gc replaces the head by a conditional write, and so learns of the changes that
others have made (`commit`). Everything but the trash can be rebuilt from the tables.
"""

import random
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tensor_dedup.digest import digest
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    FormerRemoteError,
    MissingRemoteError,
    RemoteAccessError,
    RemoteBusyError,
    remote_damage,
)
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames, tables
from tensor_dedup.store.format.tables import DIGEST_BYTES, TAIL_BYTES, Table

# So much of a digest proves a piece: of 2^40 pieces, two have one prefix with a chance of 2^-49.
PREFIX_BYTES: Final = 16
_HEAD, _SEGMENT, _TRASH = b"rhdr", b"rseg", b"rtrs"
# Heads from before version 1, whose segments and trash had other forms.
_FORMER_HEADS: Final = frozenset({b"rhed", b"rcat"})
_STAMP_BYTES: Final = 8
# A push merges segments up to this size with its own; it reads and writes no more than this again.
_MERGED_BYTES: Final = 512 << 10
# Each takes a request to read. Where a push would keep more larger ones, it merges the smallest of
# them, too: it seldom does, and writes at most a third of the catalog that it has read.
_LARGE_SEGMENTS: Final = 8
_MERGED_SEGMENTS: Final = 3
# Of those that a head may name; pushes leave far fewer.
_MOST_SEGMENTS: Final = 4096
_ATTEMPTS: Final = 40
_PAUSE_S: Final = 0.05


class ListedContainer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The entry of a container in the catalog: its name, kind, size in bytes and pieces.

    Pieces are listed by the first PREFIX_BYTES bytes of their digests:

    * `alone` joins the prefixes of the pieces that are stored without a base.
    * `deltas` joins the prefixes of the pieces that are stored as deltas.
    """

    name: bytes
    kind: str
    nbytes: int
    alone: bytes
    deltas: bytes

    @property
    def container(self) -> ContainerId:
        """The container of this entry."""
        return ContainerId(self.name.hex(), self.kind)

    @property
    def pieces(self) -> int:
        """The number of pieces in the entry."""
        return (len(self.alone) + len(self.deltas)) // PREFIX_BYTES


Segment = Sequence[ListedContainer]
"""The entries that a segment lists."""


# Every commit stamps what it writes with random bytes. So a writer knows its own head, and what it
# writes has the name of nothing that a gc is deleting.


class _SegmentFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stamp: bytes
    containers: list[ListedContainer]


class _TrashFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stamp: bytes
    condemned: dict[str, int]
    deletion: "Deletion | None"


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The digests of the segments and of the trash, and the keys of what was found damaged."""

    stamp: bytes
    segments: list[bytes]
    trash: bytes | None
    damaged: list[str]


class Deletion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a gc is deleting: the keys, and since when, in seconds of the server's clock."""

    since: int
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Trash:
    """The unused objects of a remote, by key.

    * `condemned` has the objects that a later gc deletes if still nothing refers to them, each with
      the time at which it was condemned, in seconds of the server's clock.
    * `deletion` has what one gc is deleting, or is None.
    """

    condemned: Mapping[str, int] = field(default_factory=dict)
    deletion: Deletion | None = None

    @property
    def deleting(self) -> frozenset[str]:
        """The keys of the objects that a gc is deleting."""
        return frozenset(self.deletion.keys if self.deletion is not None else ())


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """What a new head is to name.

    * `kept` has the names of segments that stay, and `entries` what a new segment is to list.
    * `trash` and `damaged` are as in `Catalog`.
    """

    kept: Collection[bytes]
    entries: Sequence[ListedContainer]
    trash: Trash
    damaged: frozenset[str]


@dataclass
class Catalog:
    """The catalog in memory: the containers, and an index from pieces to containers.

    * `segments` maps the names of segments, which are their digests, to their entries.
    * `trash` is empty if it was not read.
    * `damaged` has the keys of objects that were found damaged or missing. No such container is
      listed.
    * `tag` is the tag that the head had when it was read, None if there was no head.
    * `rebuilt` is True if the entries were read from tables, so that no segment has them.
    """

    containers: dict[ContainerId, ListedContainer] = field(default_factory=dict)
    segments: dict[bytes, Segment] = field(default_factory=dict)
    trash: Trash = field(default_factory=Trash)
    damaged: frozenset[str] = frozenset()
    tag: str | None = None
    rebuilt: bool = False
    _alone: dict[bytes, list[ContainerId]] = field(default_factory=dict)
    _deltas: dict[bytes, list[ContainerId]] = field(default_factory=dict)

    def add(self, entry: ListedContainer) -> None:
        """Add the entry of a container; do nothing if the catalog has the container already."""
        key = entry.container
        if key in self.containers:
            return
        self.containers[key] = entry
        for found, held in ((self._alone, entry.alone), (self._deltas, entry.deltas)):
            for prefix in {*_split(held)}:
                found.setdefault(prefix, []).append(key)

    def holders(self, digest_: bytes, *, alone: bool = False) -> list[ContainerId]:
        """Return the containers that hold a piece; an empty list if there are none.

        Containers that have the piece only as a delta come last; with `alone`, they are left out.
        """
        prefix = digest_[:PREFIX_BYTES]
        found = self._alone.get(prefix, [])
        return [*found] if alone else [*found, *self._deltas.get(prefix, [])]


def listed(
    container: ContainerId, table: Table, there: Collection[bytes] | None = None
) -> ListedContainer:
    """Return the catalog entry of `container`, made from its `table`.

    If `there`, a collection of digests, is given, a delta is listed only if `there` has all of its
    bases.
    """
    blob = tables.encode(table).blob
    records = table.records
    return ListedContainer(
        bytes.fromhex(container.name),
        container.kind,
        table.data_bytes + len(blob) + TAIL_BYTES,
        b"".join(r.digest[:PREFIX_BYTES] for r in records if r.base is None),
        b"".join(
            r.digest[:PREFIX_BYTES]
            for r in records
            if r.base is not None and (there is None or all(base in there for base in r.bases))
        ),
    )


def entries_of(
    tables_: Mapping[ContainerId, Table], condemned: Collection[str]
) -> list[ListedContainer]:
    """Return the entries of containers, made from all `tables_` of a remote that are to be listed.

    A delta is listed only if all its bases are in containers that are listed and not condemned, and
    no delta is listed of a condemned container: a push that relies on a piece takes the piece's own
    container off the list of condemned objects, and knows of no other.
    """
    kept = {c for c in tables_ if layout.container_key(c) not in condemned}
    there = {r.digest for c in kept for r in tables_[c].records if r.base is None}
    return [listed(c, table, there if c in kept else ()) for c, table in tables_.items()]


def read_catalog(
    bucket: Bucket, *, with_trash: bool = False, before: Catalog | None = None
) -> Catalog | None:
    """Read the catalog, or return None if its main object, the head, does not exist.

    The trash, the list of unused objects, is read only if `with_trash` is True. `before` is a
    catalog that was read earlier; its segments are not read again.

    Raises:
        DamagedRemoteError: The head, a segment or the trash is damaged.
        MissingRemoteError: A segment or the trash is missing.
        NewerFormatError: One of these objects has a format later than version 1.
        FormerRemoteError: The head has a format earlier than version 1.
    """
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    if found is None:
        return None
    head = _head(bucket, found[0])
    known = {} if before is None else before.segments

    def segment(name: bytes) -> Segment:
        return known[name] if name in known else _read_segment(bucket, name)

    catalog = Catalog(tag=found[1], damaged=frozenset(head.damaged))
    for name, held in zip(head.segments, bucket.each(segment, head.segments), strict=True):
        catalog.segments[name] = held
        for entry in held:
            catalog.add(entry)
    if with_trash:
        catalog.trash = _read_trash(bucket, head)
    return catalog


def _head(bucket: Bucket, blob: bytes) -> _Head:
    if frames.kind_of(blob) in _FORMER_HEADS:
        # Put together anew, the catalog would forget what is being deleted.
        what = (
            "this catalog is from before version 1 of the format, which is all this program knows"
        )
        raise FormerRemoteError.at(bucket.at(layout.HEAD), what)
    with remote_damage(bucket.at(layout.HEAD)) as path:
        head = frames.decode(blob, _HEAD, _Head, path)
    if len(head.segments) > _MOST_SEGMENTS:
        what = f"it names {len(head.segments)} segments, {_MOST_SEGMENTS} are allowed"
        raise DamagedRemoteError.at(bucket.at(layout.HEAD), what)
    return head


def _read_segment(bucket: Bucket, name: bytes) -> Segment:
    key = layout.segment_key(name.hex())
    return decode_segment(_named(bucket, key, name.hex()), bucket.at(key))


def decode_segment(blob: bytes, where: str) -> Segment:
    """Decode `blob`, a segment read from the URL `where`; return its container entries.

    Raises:
        DamagedRemoteError: The bytes are not a valid segment.
        NewerFormatError: The segment has a later version.
    """
    with remote_damage(where) as path:
        entries = frames.decode(blob, _SEGMENT, _SegmentFrame, path).containers
    for entry in entries:
        is_known = entry.kind in layout.KINDS and len(entry.name) == DIGEST_BYTES
        held = entry.alone, entry.deltas
        if not is_known or entry.nbytes <= 0 or any(len(each) % PREFIX_BYTES for each in held):
            raise DamagedRemoteError.at(where, "an entry of a container contradicts itself")
    return entries


def _read_trash(bucket: Bucket, head: _Head) -> Trash:
    if head.trash is None:
        return Trash()
    key = layout.trash_key(head.trash.hex())
    blob = _named(bucket, key, head.trash.hex())
    with remote_damage(bucket.at(key)) as path:
        found = frames.decode(blob, _TRASH, _TrashFrame, path)
    return Trash(found.condemned, found.deletion)


def _named(bucket: Bucket, key: str, name: str) -> bytes:
    found = bucket.get(key, layout.FRAME_BYTES)
    if found is None:
        raise MissingRemoteError.at(bucket.at(key), "this object of the remote is gone")
    if digest(found[0]) != name:
        what = "its bytes do not have the digest it is named by"
        raise DamagedRemoteError.at(bucket.at(key), what)
    return found[0]


def read_trash(bucket: Bucket) -> Trash | None:
    """Read the list of unused objects; return None if the catalog's head does not exist.

    Raises:
        DamagedRemoteError: The head or the list is damaged.
        MissingRemoteError: The list is missing.
        NewerFormatError: The head or the list has a later version.
        FormerRemoteError: The head has a format earlier than version 1.
    """
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    return None if found is None else _read_trash(bucket, _head(bucket, found[0]))


def noted_damage(bucket: Bucket) -> frozenset[str]:
    """Return the keys of the objects that are noted as damaged or missing, in one request.

    If they cannot be read, the result is empty.
    """
    with suppress(DamagedRemoteError, NewerFormatError):
        found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
        return frozenset(_head(bucket, found[0]).damaged if found is not None else ())
    return frozenset()


def read_table(bucket: Bucket, name: str) -> Table:
    """Read and check the table of the container `name`.

    Raises:
        MissingRemoteError: The table is missing.
        DamagedRemoteError: The table is damaged.
        NewerFormatError: The table has a later version.
    """
    key = layout.table_key(name)
    found = bucket.get(key, layout.FRAME_BYTES)
    if found is None:
        raise MissingRemoteError.at(bucket.at(key), "this table is gone", container=name)
    with remote_damage(bucket.at(key)) as path:
        kind = frames.decode(found[0], tables.KIND, Table, path).kind
        if kind not in layout.READABLE:
            raise NewerFormatError.at(path, f"a container of the unknown kind {kind!r}")
        return tables.decode(found[0], name, kind, path)


def read_table_within(bucket: Bucket, container: ContainerId, nbytes: int) -> Table | None:
    """Read and check the copy of the table at the end of a container of `nbytes` bytes.

    Returns None if the copy cannot be read, for example because it is missing or damaged.
    """
    key, end = layout.container_key(container), nbytes - TAIL_BYTES
    try:
        tail = bytes(bucket.get_range(key, max(0, end), nbytes))
        with remote_damage(bucket.at(key)) as path:
            start = tables.table_start(tail, nbytes, path)
            if end - start > layout.FRAME_BYTES:
                return None
            blob = bytes(bucket.get_range(key, start, end))
            return tables.decode(blob, container.name, container.kind, path)
    except (FileNotFoundError, DamagedRemoteError, NewerFormatError, RemoteAccessError):
        return None


def catalog_of(bucket: Bucket, *, before: Catalog | None = None) -> Catalog:
    """Read the catalog and its trash; if a part is missing or damaged, rebuild the catalog.

    The catalog is rebuilt in memory, from the tables. The trash, the list of unused objects, is
    then empty if it cannot be read. `before` is a catalog that was read earlier; its segments are
    not read again.

    Raises:
        FormerRemoteError: The head has a format earlier than version 1.
        NewerFormatError: The head has a later version.
    """
    try:
        found = read_catalog(bucket, with_trash=True, before=before)
    except (DamagedRemoteError, MissingRemoteError):
        found = None
    return rebuilt(bucket) if found is None else found


def rebuilt(bucket: Bucket, *, relied_on: bool = True) -> Catalog:
    """Return a catalog built from all readable tables on the remote; nothing is written.

    Containers that are noted as damaged, or that a gc is deleting, are left out. What the head and
    the trash say is kept as far as they can be read.

    With `relied_on`, a push may rely on what is listed. So containers are listed, too: one that is
    missing or has another size than its table says is added to `damaged`. And deltas whose bases
    are condemned are left out. A pull needs neither: a delta can be read while its base is there.

    Raises:
        UnlistedRemoteError: The remote is behind a web server that lists nothing.
    """
    catalog = Catalog(rebuilt=True)
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    if found is not None:
        catalog.tag = found[1]
        with suppress(DamagedRemoteError, MissingRemoteError):
            head = _head(bucket, found[0])
            catalog.damaged = frozenset(head.damaged)
            catalog.trash = _read_trash(bucket, head)
    tables_ = _tables_of(bucket)
    condemned: Collection[str] = ()
    if relied_on:
        catalog.damaged |= _broken(bucket, tables_) - catalog.trash.deleting
        condemned = catalog.trash.condemned
    out = catalog.damaged | catalog.trash.deleting
    kept = {c: table for c, table in tables_.items() if layout.container_key(c) not in out}
    for entry in entries_of(kept, condemned):
        catalog.add(entry)
    return catalog


def _tables_of(bucket: Bucket) -> dict[ContainerId, Table]:
    names = [name for s in bucket.list(layout.TABLES) if (name := layout.object_of(s.key))]

    def read(name: str) -> Table | None:
        # `verify` names it; here it is a miss.
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            return read_table(bucket, name)
        return None

    found = zip(names, bucket.each(read, names), strict=True)
    return {ContainerId(name, table.kind): table for name, table in found if table is not None}


def _broken(bucket: Bucket, tables_: Mapping[ContainerId, Table]) -> set[str]:
    """The keys of the containers that are not there with the size that their tables say.

    To be called after the tables were read: a container is written before its table.
    """
    sizes = {status.key: status.size for status in bucket.list(layout.CONTAINERS)}
    keys = {layout.container_key(c): listed(c, table).nbytes for c, table in tables_.items()}
    return {key for key, nbytes in keys.items() if sizes.get(key) != nbytes}


def commit(
    bucket: Bucket,
    catalog: Catalog,
    change: Callable[[Catalog], CatalogChange | None],
    pause: Callable[[float], None] = time.sleep,
) -> Catalog:
    """Replace the head, the main object of the catalog, by a conditional write.

    * `change` receives the current catalog and returns what the new head is to name, or None to
      change nothing. If another writer has replaced the head meanwhile, `change` is called again
      with that writer's catalog. It may raise an error to end the attempts.
    * `pause` waits between the attempts.

    Returns the catalog that `change` received last.

    Raises:
        RemoteBusyError: Other writers replaced the head before each attempt.
    """
    for attempt in range(_ATTEMPTS):
        if (wanted := change(catalog)) is None:
            return catalog
        blob = _written(bucket, wanted)
        if bucket.put_if(layout.HEAD, blob, catalog.tag):
            return catalog
        now = bucket.get(layout.HEAD, layout.HEAD_BYTES)
        if now is not None and now[0] == blob:
            return catalog  # ours: the answer to it was lost
        pause(_PAUSE_S * random.random() * (attempt + 1))
        catalog = catalog_of(bucket, before=catalog)
    raise RemoteBusyError.at(bucket.at(layout.HEAD), f"others wrote it {_ATTEMPTS} times meanwhile")


def _written(bucket: Bucket, wanted: CatalogChange) -> bytes:
    """Write the new segment and the trash; return the head that names them."""
    stamp, segments, trash = secrets.token_bytes(_STAMP_BYTES), [*wanted.kept], None
    if wanted.entries:
        ordered = sorted(wanted.entries, key=lambda each: each.name)
        segments.append(_put(bucket, layout.segment_key, segment_blob(ordered, stamp)))
    if wanted.trash.condemned or wanted.trash.deletion is not None:
        condemned = dict(sorted(wanted.trash.condemned.items()))
        frame = _TrashFrame(stamp, condemned, wanted.trash.deletion)
        trash = _put(bucket, layout.trash_key, frames.encode(_TRASH, frame))
    return frames.encode(_HEAD, _Head(stamp, segments, trash, sorted(wanted.damaged)))


def _put(bucket: Bucket, key_of: Callable[[str], str], blob: bytes) -> bytes:
    name = digest(blob)
    bucket.put(key_of(name), [memoryview(blob)])
    return bytes.fromhex(name)


def note_damage(bucket: Bucket, keys: Collection[str]) -> None:
    """Note that the objects under `keys` are damaged or missing; later pushes do not rely on them.

    All tables are read, and the catalog is written anew, without these containers and without the
    deltas whose bases only these containers have.
    """
    tables_ = _tables_of(bucket)

    def change(now: Catalog) -> CatalogChange:
        damaged = now.damaged | {*keys}
        return CatalogChange((), corrected(now, tables_, damaged), now.trash, damaged)

    commit(bucket, catalog_of(bucket), change)


def corrected(
    catalog: Catalog, tables_: Mapping[ContainerId, Table], damaged: Collection[str]
) -> list[ListedContainer]:
    """Return the entries of a catalog as the tables of its containers say, without the `damaged`.

    An entry whose table is not among `tables_` stays without its deltas: what these are against is
    unknown.
    """
    named = [c for c in catalog.containers if layout.container_key(c) not in damaged]
    found = entries_of({c: tables_[c] for c in named if c in tables_}, catalog.trash.condemned)
    unread = (catalog.containers[c] for c in named if c not in tables_)
    return [*found, *(msgspec.structs.replace(each, deltas=b"") for each in unread)]


def tag_of(bucket: Bucket) -> str | None:
    """Return the tag of the catalog's head (its main object), or None if there is no head."""
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    return None if found is None else found[1]


def segment_blob(entries: Iterable[ListedContainer], stamp: bytes) -> bytes:
    """Return the bytes of a segment that lists these container entries."""
    return frames.encode(_SEGMENT, _SegmentFrame(stamp, [*entries]))


def with_more(
    catalog: Catalog, new: Iterable[ListedContainer]
) -> tuple[list[bytes], list[ListedContainer]]:
    """Return the segments of a catalog to keep, and the entries of one more, to add entries.

    Each of the entries `new` takes the place of the container's former entry. Small segments are
    merged with the new one, so that there are never many of them; large ones are kept as they are.
    """
    if catalog.rebuilt:
        return [], [*(_by_name(catalog.containers.values()) | _by_name(new)).values()]
    more = _by_name(each for each in new if catalog.containers.get(each.container) != each)
    if not more:
        return [*catalog.segments], []
    sizes = {name: sum(map(_size, held)) for name, held in catalog.segments.items()}
    kept = []
    for name, held in catalog.segments.items():
        is_large = sizes[name] > _MERGED_BYTES
        if is_large and more.keys().isdisjoint(each.name for each in held):
            kept.append(name)
        else:
            more = _by_name(held) | more
    if len(kept) > _LARGE_SEGMENTS:
        for name in sorted(kept, key=sizes.__getitem__)[:_MERGED_SEGMENTS]:
            kept.remove(name)
            more = _by_name(catalog.segments[name]) | more
    return kept, [*more.values()]


def _by_name(entries: Iterable[ListedContainer]) -> dict[bytes, ListedContainer]:
    return {each.name: each for each in entries}


def _size(entry: ListedContainer) -> int:
    """About how many bytes an entry takes in a segment."""
    return 64 + len(entry.alone) + len(entry.deltas)


def _split(held: bytes) -> Iterator[bytes]:
    return (held[at : at + PREFIX_BYTES] for at in range(0, len(held), PREFIX_BYTES))


def prefixes(entry: ListedContainer) -> Iterator[bytes]:
    """Iterate over the digest prefixes of all pieces in a container's entry."""
    yield from _split(entry.alone)
    yield from _split(entry.deltas)
