"""The catalog of a remote: which container holds which piece.

A piece is a tensor, a header or a small file, named by its digest. A container is an immutable
object with pieces and a table of these pieces; a copy of the table is a separate object. A piece
may be stored as a delta, that is, as a difference from another piece, its base.

The catalog consists of immutable segments, which list containers with prefixes of the digests of
their pieces. One small object, the head, names the segments in use and the trash. The trash lists
unused objects that a gc has condemned, so that a later gc deletes them. Every push and every gc
replaces the head by a conditional write, and so learns of the changes that others have made
(`commit`). Everything but the trash can be rebuilt from the tables.

A prefix of 16 bytes proves that a container holds a piece, and a push relies on it. If the catalog
has many pieces, prefixes for large containers are cut to 3 or 4 bytes to save space. A short prefix
only says that a container may hold a piece, and the table of the container has to be read to be
certain (`confirm`). A pull need not read the whole catalog, because each manifest has a list of the
containers that it needs (`holders`).
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

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

PREFIX_BYTES: Final = 16
# A container with more pieces has shorter prefixes in a segment, where the catalog has too many of
# them for whole ones: a table that is read instead has four times as many bytes.
_FEW: Final = 32
_WHOLE: Final = 2048
# One piece in so many that are nowhere seems to be somewhere, and costs the reading of a table.
_MISTAKEN_BITS: Final = 12
_SHORTEST: Final = 3
_HEAD, _SEGMENT, _TRASH = b"rcat", b"rlst", b"rcnd"
# A head from before version 1, whose segments and list of what is condemned had other forms.
_FORMER_HEAD: Final = b"rhed"
_FORMS: Final = 8
_NAMED: Final = re.compile(r"([a-z]+/)([0-9a-f]{2}/)?([0-9a-f]{64})(\.[a-z]+)?")
# Readers take so many segments at most; a push merges small ones before there are more.
_SEGMENTS: Final = 2
# A push may write so much catalog beside its own; what is larger waits for a later push or a gc.
_MERGE_BYTES: Final = 48 << 10
_MOST_SEGMENTS: Final = 8
# A catalog that is no larger has one segment: reading another costs more than writing it again.
_SMALL_BYTES: Final = 16 << 10
_ATTEMPTS: Final = 40
_PAUSE_S: Final = 0.05


class ListedContainer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The entry of a container in the catalog: its name, kind, size in bytes and pieces.

    Pieces are listed by prefixes, the first `width` bytes of their digests:

    * `alone` joins the prefixes of the pieces that are stored without a base.
    * `deltas` joins the prefixes of the pieces that are stored as deltas.

    If `width` is less than PREFIX_BYTES, a prefix only shows that the container may hold a piece.
    """

    name: bytes
    kind: str
    nbytes: int
    alone: bytes
    deltas: bytes
    width: int

    @property
    def pieces(self) -> int:
        """The number of pieces in the entry."""
        return (len(self.alone) + len(self.deltas)) // self.width

    def shortened(self, width: int) -> "ListedContainer":
        """Return the entry with its prefixes cut to `width` bytes.

        If the entry has few pieces, or prefixes of at most `width` bytes, it is returned unchanged.
        """
        if width >= self.width or self.pieces <= _FEW:
            return self
        alone, deltas = (
            b"".join(prefix[:width] for prefix in _split(held, self.width))
            for held in (self.alone, self.deltas)
        )
        return msgspec.structs.replace(self, alone=alone, deltas=deltas, width=width)


class CatalogSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The decoded content of a segment of the catalog: a list of container entries."""

    containers: Sequence[ListedContainer]


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The names of the segments, and of the list of what is condemned, if there is one."""

    segments: list[bytes]
    trash: bytes | None


class Trash(msgspec.Struct, frozen=True):
    """The unused or damaged objects of a remote, by key. Times are seconds of the server's clock.

    * `condemned` has the objects that a later gc deletes if nothing refers to them, each with the
      time at which it was condemned. The time 0 marks an object that was found damaged or missing.
    * `deleting` has the objects that are being deleted. An object has one time for each gc that is
      deleting it: the time at which that gc began.
    """

    condemned: dict[str, int]
    deleting: dict[str, tuple[int, ...]]


class _Keys(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Keys in a list of what is condemned, and since when.

    `forms` are keys with ?? and * for the first two digits and all of a digest, each of which is a
    key of each of these digests; where there are none, they are keys as they are.
    """

    since: int
    forms: list[str]
    digests: bytes


class _TrashList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    condemned: list[_Keys]
    deleting: list[_Keys]


# Stands for the second since when a container is condemned that was found damaged.
DAMAGED: Final = 0
_NO_TRASH: Final = Trash({}, {})
CatalogChange: TypeAlias = tuple[Mapping[bytes, list[ListedContainer]], Trash]
"""The segments and the trash that a head is to name."""


def listed(
    container: ContainerId, table: Table, there: Collection[bytes] | None = None
) -> ListedContainer:
    """Return the catalog entry of `container`, made from its `table`, with prefixes of full length.

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
        PREFIX_BYTES,
    )


def bases_listed(entry: ListedContainer, table: Table) -> set[bytes]:
    """Return the digests of the bases of all deltas that `entry` lists.

    `table` is the table of the same container; it names the bases.
    """
    width = entry.width
    there = {*_split(entry.deltas, width)}
    return {base for r in table.records if r.digest[:width] in there for base in r.bases}


@dataclass
class Catalog:
    """The catalog in memory: the containers, and an index from pieces to containers.

    `tag` is the tag that the catalog's head, its main object, had when it was read. It is None if
    there was no head.
    """

    containers: dict[ContainerId, ListedContainer] = field(default_factory=dict)
    segments: dict[bytes, list[ListedContainer]] = field(default_factory=dict)
    trash: Trash = _NO_TRASH
    trash_key: str | None = None
    tag: str | None = None
    # Where it was put together from tables, nothing of it is in segments yet.
    rebuilt: bool = False
    _alone: dict[bytes, list[ContainerId]] = field(default_factory=dict)
    _deltas: dict[bytes, list[ContainerId]] = field(default_factory=dict)
    # What deltas are against, of the containers whose tables were read for that.
    bases: dict[ContainerId, dict[bytes, tuple[bytes, ...]]] = field(default_factory=dict)
    # Deltas, as containers and prefixes, against something that no container holds.
    stranded: set[tuple[ContainerId, bytes]] = field(default_factory=set)
    # Pieces that are known to be in the one container that may hold them (`assure`).
    _assured: Collection[bytes] = frozenset()
    _widths: set[int] = field(default_factory=set)

    def add(self, container: ListedContainer) -> None:
        """Add the entry of a container; do nothing if the catalog has the container already."""
        key = ContainerId(container.name.hex(), container.kind)
        if key in self.containers:
            return
        self.containers[key] = container
        self._widths.add(container.width)
        for found, held in ((self._alone, container.alone), (self._deltas, container.deltas)):
            for prefix in {*_split(held, container.width)}:
                found.setdefault(prefix, []).append(key)

    def learn(self, container: ListedContainer) -> None:
        """Replace the entry of a container in the catalog by `container`, a more precise entry."""
        key = ContainerId(container.name.hex(), container.kind)
        less = self.containers.pop(key)
        for found, held in ((self._alone, less.alone), (self._deltas, less.deltas)):
            for prefix in {*_split(held, less.width)}:
                found[prefix] = [each for each in found[prefix] if each != key]
        self.add(container)

    def only(self, digests: Iterable[bytes]) -> list[ListedContainer]:
        """Return copies of catalog entries that list only the pieces in `digests`.

        A piece that several containers hold is listed for one of them, and a piece that none holds
        is left out. Call this method only if all prefixes in the catalog have their full length.
        """
        found: dict[ContainerId, tuple[list[bytes], list[bytes]]] = {}
        for key in dict.fromkeys(each[:PREFIX_BYTES] for each in digests):
            for kind, held in enumerate((self._alone, self._deltas)):
                there = [each for each in held.get(key, []) if (each, key) not in self.stranded]
                if there:
                    found.setdefault(there[0], ([], []))[kind].append(key)
                    break
        return [
            msgspec.structs.replace(
                self.containers[container], alone=b"".join(alone), deltas=b"".join(deltas)
            )
            for container, (alone, deltas) in sorted(found.items())
        ]

    def holders(self, digest_: bytes, *, alone: bool = False) -> list[ContainerId]:
        """Return the containers that hold a piece; an empty list if there are none.

        * With `alone`, containers that have the piece only as a delta are left out.
        * Containers that may hold the piece, but not certainly (`is_doubtful`), come last.
        * Deltas that `unheld` has found to lack a base are left out.
        """
        keys = [digest_[:width] for width in sorted(self._widths, reverse=True)]
        found = [each for key in keys for each in self._alone.get(key, [])]
        if not alone:
            deltas = (each for key in keys for each in self._deltas.get(key, []))
            whole = digest_[:PREFIX_BYTES]
            found += [each for each in deltas if (each, whole) not in self.stranded]
        return sorted(found, key=self.is_doubtful)

    def is_doubtful(self, container: ContainerId) -> bool:
        """Return whether the prefixes in a container's entry are too short to prove anything."""
        return self.containers[container].width < PREFIX_BYTES

    def assure(self, digests: Iterable[bytes]) -> None:
        """Record that the remote certainly has these pieces, because a reference leads to them.

        A piece is recorded only if a single container may hold it. The table of that container then
        need not be read. Call this method before any table is read.
        """
        self._assured = {digest_ for digest_ in digests if self._has_one_holder(digest_)}

    def _has_one_holder(self, digest_: bytes) -> bool:
        # Others of that container may have the same short prefix, if they are of the same kind.
        held, alone = self.holders(digest_), self.holders(digest_, alone=True)
        return len({*held}) == 1 and len(alone) in (0, len(held))

    def is_assured(self, digest_: bytes) -> bool:
        """Return whether `assure` has recorded this piece."""
        return digest_ in self._assured


def confirm(
    bucket: Bucket, catalog: Catalog, digests: Collection[bytes], *, alone: bool = False
) -> None:
    """Read tables until it is certain for each piece which container holds it.

    Afterwards, the first container that `catalog.holders` returns for a piece certainly holds it.
    If none is returned, no container holds the piece. `alone` is passed to `holders`. A container
    whose table is missing or damaged counts as empty.
    """

    def exact(container: ContainerId) -> ListedContainer:
        entry = catalog.containers[container]
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            table = read_table(bucket, container.name)
            if table.kind == container.kind:
                # The table also has differences that a sweep has left out, from what is gone.
                return listed(container, table, bases_listed(entry, table))
        return msgspec.structs.replace(entry, alone=b"", deltas=b"", width=PREFIX_BYTES)

    while True:
        found = ((digest, catalog.holders(digest, alone=alone)) for digest in digests)
        doubtful = [
            held
            for digest, held in found
            if held and catalog.is_doubtful(held[0]) and not catalog.is_assured(digest)
        ]
        if not doubtful:
            return
        counts = Counter(container for held in doubtful for container in held)
        chosen = sorted({max(held, key=lambda c: (counts[c], c)) for held in doubtful})
        for container in bucket.each(exact, chosen):
            catalog.learn(container)


def unheld(
    bucket: Bucket, catalog: Catalog, digests: Collection[bytes], *, suspicious: bool = False
) -> set[bytes]:
    """Return those of the pieces in `digests` that no container holds.

    Tables are read where the catalog alone is not certain. Usually, a piece that is stored only as
    a delta counts as held. If `suspicious` is True, or if damage is noted on the remote, such a
    piece counts only if containers also hold all bases of the delta.
    """
    confirm(bucket, catalog, digests)
    if suspicious or DAMAGED in catalog.trash.condemned.values():
        while _strand(bucket, catalog, digests):
            confirm(bucket, catalog, digests)
    return {digest for digest in digests if not catalog.holders(digest)}


def _strand(bucket: Bucket, catalog: Catalog, digests: Collection[bytes]) -> bool:
    """Leave out the first holder of a piece where it is a difference from what none holds.

    Return whether any was left out: the next holder of such a piece has to be looked at, too.
    """
    first = {
        digest: held[0]
        for digest in digests
        if (held := catalog.holders(digest)) and held[0] not in catalog.holders(digest, alone=True)
    }

    def read(container: ContainerId) -> dict[bytes, tuple[bytes, ...]]:
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            records = read_table(bucket, container.name).records
            return {r.digest: r.bases for r in records if r.base is not None}
        return {}

    unread = sorted({*first.values()} - catalog.bases.keys())
    catalog.bases |= zip(unread, bucket.each(read, unread), strict=True)
    bases = {d: catalog.bases[container].get(d, ()) for d, container in first.items()}
    confirm(bucket, catalog, {base for each in bases.values() for base in each}, alone=True)
    stranded = {
        (container, digest[:PREFIX_BYTES])
        for digest, container in first.items()
        if not bases[digest] or not all(catalog.holders(base, alone=True) for base in bases[digest])
    }
    catalog.stranded |= stranded
    return bool(stranded)


def read_catalog(
    bucket: Bucket,
    *,
    with_trash: bool = False,
    known: Mapping[bytes, list[ListedContainer]] | None = None,
) -> Catalog | None:
    """Read the catalog, or return None if its main object, the head, does not exist.

    `known` has segments (parts of the catalog) that were read earlier, by name. They are not read
    again. The trash, the list of unused objects, is read only if `with_trash` is True.

    Raises:
        DamagedRemoteError: The head, a segment or the trash is damaged.
        MissingRemoteError: A segment or the trash is missing.
        NewerFormatError: One of these objects has a format later than version 1.
        FormerRemoteError: The head has a format earlier than version 1.
    """
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    if found is None:
        return None
    blob, tag = found
    head = _head(bucket, blob)
    catalog = Catalog(tag=tag)

    def segment(name: bytes) -> list[ListedContainer]:
        if known is not None and name in known:
            return known[name]
        key = layout.segment_key(name.hex())
        return decode_segment(_named(bucket, key, name.hex()), bucket.at(key))

    for name, held in zip(head.segments, bucket.each(segment, head.segments), strict=True):
        catalog.segments[name] = held
        for container in held:
            catalog.add(container)
    if with_trash:
        catalog.trash = _trash(bucket, head)
        if head.trash is not None:
            catalog.trash_key = layout.trash_key(head.trash.hex())
    return catalog


def _head(bucket: Bucket, blob: bytes) -> _Head:
    if frames.kind_of(blob) == _FORMER_HEAD:
        # Put together anew, the catalog would forget what is being deleted.
        what = (
            "this catalog is from before version 1 of the format, which is all this program knows"
        )
        raise FormerRemoteError.at(bucket.at(layout.HEAD), what)
    with remote_damage(bucket.at(layout.HEAD)) as path:
        head = frames.decode(blob, _HEAD, _Head, path)
    if len(head.segments) > 2 * _MOST_SEGMENTS:
        what = f"it names {len(head.segments)} segments, {2 * _MOST_SEGMENTS} are allowed"
        raise DamagedRemoteError.at(bucket.at(layout.HEAD), what)
    return head


def _trash(bucket: Bucket, head: _Head) -> Trash:
    if head.trash is None:
        return _NO_TRASH
    name = head.trash.hex()
    key = layout.trash_key(name)
    blob = _named(bucket, key, name)
    with remote_damage(bucket.at(key)) as path:
        found = frames.decode(blob, _TRASH, _TrashList, path)
    for each in (*found.condemned, *found.deleting):
        if len(each.forms) > _FORMS or len(each.digests) % DIGEST_BYTES:
            raise DamagedRemoteError.at(bucket.at(key), "an entry of it contradicts itself")
    deleting = ((key, each.since) for each in found.deleting for key in _unpacked(each))
    since = {key: each.since for each in found.condemned for key in _unpacked(each)}
    return Trash(since, _seconds_of(deleting))


def _seconds_of(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """The seconds of each key, in order."""
    found: dict[str, list[int]] = {}
    for key, since in pairs:
        found.setdefault(key, []).append(since)
    return {key: tuple(sorted(seconds)) for key, seconds in found.items()}


def _packed(keys: Iterable[tuple[str, int]]) -> list[_Keys]:
    """What lists these keys, each with the second since when.

    A table lies under the name of its container, and holders under that of their manifest: so most
    digests stand for two keys.
    """
    forms: dict[tuple[int, bytes], list[str]] = {}
    whole: dict[int, list[str]] = {}
    for key, since in sorted(keys):
        match = _NAMED.fullmatch(key)
        if match is not None and match[2] in (None, f"{match[3][:2]}/"):
            form = f"{match[1]}{'??/' if match[2] else ''}*{match[4] or ''}"
            forms.setdefault((since, bytes.fromhex(match[3])), []).append(form)
        else:
            whole.setdefault(since, []).append(key)
    digests: dict[tuple[int, tuple[str, ...]], list[bytes]] = {}
    for (since, name), held in forms.items():
        for at in range(0, len(held), _FORMS):
            digests.setdefault((since, tuple(held[at : at + _FORMS])), []).append(name)
    found = [
        _Keys(since, [*held], b"".join(sorted(names))) for (since, held), names in digests.items()
    ]
    found += [
        _Keys(since, held[at : at + _FORMS], b"")
        for since, held in whole.items()
        for at in range(0, len(held), _FORMS)
    ]
    return sorted(found, key=lambda each: (each.since, each.forms))


def _unpacked(keys: _Keys) -> Iterator[str]:
    if not keys.digests:
        yield from keys.forms
    for digest_ in _split(keys.digests, DIGEST_BYTES):
        name = digest_.hex()
        for form in keys.forms:
            yield form.replace("??", name[:2]).replace("*", name)


def decode_segment(
    blob: bytes, where: str, form: type[CatalogSegment] = CatalogSegment
) -> list[ListedContainer]:
    """Decode `blob`, a segment read from the URL `where`; return its container entries.

    `form` is the struct to decode to.

    Raises:
        DamagedRemoteError: The bytes are not a valid segment.
        NewerFormatError: The segment has a later version.
    """
    with remote_damage(where) as path:
        containers = [*frames.decode(blob, _SEGMENT, form, path).containers]
    for container in containers:
        _check(container, where)
    return containers


def _check(container: ListedContainer, where: str) -> None:
    known = container.kind in layout.KINDS and len(container.name) == DIGEST_BYTES
    known = known and _SHORTEST <= container.width <= PREFIX_BYTES and container.nbytes > 0
    held = container.alone, container.deltas
    if not known or any(len(each) % container.width for each in held):
        raise DamagedRemoteError.at(where, "an entry of a container contradicts itself")


def _named(bucket: Bucket, key: str, name: str) -> bytes:
    found = bucket.get(key, layout.FRAME_BYTES)
    if found is None:
        raise MissingRemoteError.at(bucket.at(key), "this object of the remote is gone")
    if digest(found[0]) != name:
        what = "its bytes do not have the digest it is named by"
        raise DamagedRemoteError.at(bucket.at(key), what)
    return found[0]


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


def rebuilt(bucket: Bucket, catalog: Catalog | None = None) -> Catalog:
    """Return a catalog built from all readable tables on the remote; nothing is written.

    Left out are:

    * containers that are condemned or being deleted according to `catalog`;
    * deltas with a base that none of the remaining containers has. Containers that were condemned
      because of damage count as remaining here; `unheld` checks such bases later.
    """
    found = Catalog(tag=catalog.tag if catalog else None, rebuilt=True)
    found.trash = catalog.trash if catalog else _NO_TRASH
    condemned_ = found.trash.condemned
    gone = {*condemned_, *found.trash.deleting}
    names = [name for s in bucket.list(layout.TABLES) if (name := layout.object_of(s.key))]

    def read(name: str) -> Table | None:
        # `verify` names it; here it is a miss.
        with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
            return read_table(bucket, name)
        return None

    read_ = zip(names, bucket.each(read, names), strict=True)
    tables_ = {ContainerId(name, table.kind): table for name, table in read_ if table is not None}
    keys = {container: layout.container_key(container) for container in tables_}
    there = {
        record.digest
        for container, table in tables_.items()
        if keys[container] not in gone or condemned_.get(keys[container]) == DAMAGED
        for record in table.records
        if record.base is None
    }
    for container, table in tables_.items():
        if keys[container] not in gone:
            found.add(listed(container, table, there))
    return found


def catalog_of(bucket: Bucket, *, before: Catalog | None = None) -> Catalog:
    """Read the catalog and its trash; if a part is missing or damaged, rebuild the catalog.

    The catalog is rebuilt in memory, from the tables. The trash, the list of unused objects, is
    then empty if it cannot be read. `before` is a catalog that was read earlier. Its segments are
    not read again.
    """
    known = None if before is None else before.segments
    try:
        found = read_catalog(bucket, with_trash=True, known=known)
    except (DamagedRemoteError, MissingRemoteError):
        return rebuilt(bucket, _without_segments(bucket))
    if found is None:
        return rebuilt(bucket)
    return found


def _without_segments(bucket: Bucket) -> Catalog:
    """Read what a catalog says that no table does, if it can be read: what gc is to delete."""
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    if found is None:
        return Catalog()
    catalog = Catalog(tag=found[1])
    with suppress(DamagedRemoteError, MissingRemoteError):
        catalog.trash = _trash(bucket, _head(bucket, found[0]))
    return catalog


def is_damage_noted(bucket: Bucket) -> bool:
    """Return whether the catalog notes that an object was found damaged or missing.

    This takes one or two requests. Returns False if the notes cannot be read.
    """
    return DAMAGED in condemned(bucket).values()


def condemned(bucket: Bucket) -> Mapping[str, int]:
    """Return the keys of condemned objects, each with a time.

    A later gc deletes these objects if nothing refers to them. The time is when the object was
    condemned, in seconds of the server's clock, or 0 if it was found damaged or missing. If the
    list cannot be read, the result is empty.
    """
    with suppress(DamagedRemoteError, MissingRemoteError, NewerFormatError):
        return (read_trash(bucket) or _NO_TRASH).condemned
    return {}


def read_trash(bucket: Bucket) -> Trash | None:
    """Read the list of unused objects; return None if the catalog's head does not exist.

    Raises:
        DamagedRemoteError: The head or the list is damaged.
        MissingRemoteError: The list is missing.
        NewerFormatError: The head or the list has a later version.
        FormerRemoteError: The head has a format earlier than version 1.
    """
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    return None if found is None else _trash(bucket, _head(bucket, found[0]))


def commit(
    bucket: Bucket,
    catalog: Catalog,
    change: Callable[[Catalog], CatalogChange | None],
    pause: Callable[[float], None] = time.sleep,
    *,
    told_by_bytes: bool = True,
) -> Catalog:
    """Replace the head, the main object of the catalog, by a conditional write.

    * `change` receives the current catalog and returns the segments and the trash that the new head
      names, or None to change nothing. If another writer has replaced the head meanwhile, `change`
      is called again with that writer's catalog.
    * `pause` waits between the attempts.
    * `told_by_bytes` matters if the server reports a conflict, but the head now has the bytes of
      this call. If it is True, the write counts as successful. Set it to False if another writer
      may write the same bytes.

    Returns the catalog that `change` received last.

    Raises:
        RemoteBusyError: Other writers replaced the head before each attempt.
    """
    for attempt in range(_ATTEMPTS):
        if (wanted := change(catalog)) is None:
            if tag_of(bucket) == catalog.tag:
                return catalog
            catalog = catalog_of(bucket, before=catalog)
            continue
        segments, trash = wanted
        names: list[bytes] = []
        for name, held in segments.items():
            if name not in catalog.segments or catalog.rebuilt:
                name, blob = _safe_segment(name, held, catalog.trash.deleting)
                bucket.put(layout.segment_key(name.hex()), [memoryview(blob)])
            names.append(name)
        head = _Head(names, _put_trash(bucket, catalog, trash))
        blob = frames.encode(_HEAD, head)
        if bucket.put_if(layout.HEAD, blob, catalog.tag):
            return catalog
        now = bucket.get(layout.HEAD, layout.HEAD_BYTES)
        if told_by_bytes and now is not None and now[0] == blob:
            return catalog  # ours: the answer to it was lost
        pause(_PAUSE_S * random.random() * (attempt + 1))
        catalog = catalog_of(bucket, before=catalog)
    raise RemoteBusyError.at(bucket.at(layout.HEAD), f"others wrote it {_ATTEMPTS} times meanwhile")


def drop(bucket: Bucket, containers: Collection[ContainerId]) -> None:
    """Remove containers from the catalog, and note in it that they are damaged or missing.

    Later pushes do not rely on these containers, and `is_damage_noted` then returns True.
    """
    keys = dict.fromkeys(map(layout.container_key, containers), DAMAGED)

    def change(catalog: Catalog) -> CatalogChange | None:
        kept = [entry for c, entry in catalog.containers.items() if c not in containers]
        trash = Trash({**catalog.trash.condemned, **keys}, catalog.trash.deleting)
        if len(kept) == len(catalog.containers) and trash == catalog.trash:
            return None
        return segment_of(kept), trash

    commit(bucket, catalog_of(bucket), change)


def tag_of(bucket: Bucket) -> str | None:
    """Return the tag of the catalog's head (its main object), or None if there is no head."""
    found = bucket.get(layout.HEAD, layout.HEAD_BYTES)
    return None if found is None else found[1]


def _put_trash(bucket: Bucket, catalog: Catalog, trash: Trash) -> bytes | None:
    if not trash.condemned and not trash.deleting:
        return None
    key, blob = trash_object(trash)
    if catalog.rebuilt or key != catalog.trash_key:
        bucket.put(key, [memoryview(blob)])
    return bytes.fromhex(key.removeprefix(layout.TRASH))


def trash_object(trash: Trash) -> tuple[str, bytes]:
    """Encode `trash`; return the key and the bytes of the object that stores it."""
    deleting = [(key, since) for key, seconds in trash.deleting.items() for since in seconds]
    packed = _TrashList(_packed(trash.condemned.items()), _packed(deleting))
    blob = frames.encode(_TRASH, packed)
    return layout.trash_key(digest(blob)), blob


def _safe_segment(
    name: bytes, held: Sequence[ListedContainer], deleting: Collection[str]
) -> tuple[bytes, bytes]:
    """The name and the frame of a segment, which is none of those that a gc is deleting.

    That gc may have looked at the old one already, and would delete what is written now. An entry
    that is there twice means nothing, and makes another name.
    """
    blob = segment_blob(held)
    while layout.segment_key(name.hex()) in deleting:
        held = [*held, held[0]]
        blob = segment_blob(held)
        name = bytes.fromhex(digest(blob))
    return name, blob


def segment_blob(containers: Iterable[ListedContainer]) -> bytes:
    """Return the bytes of a segment that lists these container entries."""
    return frames.encode(_SEGMENT, CatalogSegment([*containers]))


def segment_of(
    containers: Iterable[ListedContainer], others: int = 0
) -> dict[bytes, list[ListedContainer]]:
    """Return a segment that lists these entries, as a dict that maps its name to the entries.

    The dict is empty if there are no entries. `others` is the number of pieces in the other
    segments. If all pieces together are many, the prefixes in the segment are shortened.
    """
    held = sorted(containers, key=lambda each: each.name)
    pieces = others + sum(each.pieces for each in held)
    if pieces > _WHOLE:
        width = prefix_width(pieces, _MISTAKEN_BITS)
        held = [each.shortened(width) for each in held]
    return {bytes.fromhex(digest(segment_blob(held))): held} if held else {}


def prefix_width(pairs: int, bits: int) -> int:
    """Return the shortest length of digest prefixes, in bytes, that makes collisions rare enough.

    `pairs` is the number of comparisons of two prefixes. The probability that different digests
    look equal in any of them is below 2^-bits. The length is at least 3.
    """
    return next(n for n in range(_SHORTEST, PREFIX_BYTES) if pairs < 1 << 8 * n - bits)


def with_more(
    catalog: Catalog, new: Collection[ListedContainer]
) -> dict[bytes, list[ListedContainer]]:
    """Return the segments of a catalog after adding the entries `new`.

    If the catalog already has an entry for a container, the entry with more pieces is used. Small
    segments are merged, so that there are never many of them. Large segments are rarely rewritten.
    """
    if catalog.rebuilt:
        return segment_of({e.name: e for e in (*catalog.containers.values(), *new)}.values())
    known = {each.name: each.pieces for held in catalog.segments.values() for each in held}
    more = {each.name: each for each in new if each.pieces > known.get(each.name, 0)}
    pieces = sum(each.pieces for each in catalog.containers.values())
    segments = dict(catalog.segments)
    for name, held in catalog.segments.items():
        if any(each.name in more for each in held):
            del segments[name]
            more = {each.name: each for each in held} | more
    segments |= segment_of(more.values(), pieces)
    if len(segments) > 1 and _weight(_together(segments.values())) <= _SMALL_BYTES:
        return segment_of(_together(segments.values()))
    if len(segments) <= _SEGMENTS:
        return segments
    ranked = sorted(segments, key=lambda name: -_weight(segments[name]))
    large, rest = ranked[0], ranked[1:]
    small = _weight(_together(segments[name] for name in rest))
    if 4 * small > _weight(segments[large]):
        large, rest = b"", ranked
    allowed = len(segments) >= _MOST_SEGMENTS
    if not allowed and sum(_weight(segments[name]) for name in rest) > _MERGE_BYTES:
        return segments
    merged = segment_of(_together(segments[name] for name in rest), pieces)
    return ({large: segments[large]} if large else {}) | merged


def _together(parts: Iterable[list[ListedContainer]]) -> list[ListedContainer]:
    return [container for part in parts for container in part]


def _weight(containers: Iterable[ListedContainer]) -> int:
    return sum(64 + len(each.alone) + len(each.deltas) for each in containers)


def _split(held: bytes, width: int) -> Iterator[bytes]:
    return (held[at : at + width] for at in range(0, len(held), width))


def prefixes(container: ListedContainer) -> Iterator[bytes]:
    """Iterate over the digest prefixes of all pieces in a container's entry."""
    yield from _split(container.alone, container.width)
    yield from _split(container.deltas, container.width)
