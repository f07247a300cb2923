"""Where pieces are on a remote, by its catalog and the tables of its containers."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    Catalog,
    read_catalog,
    read_table,
    read_table_within,
    rebuilt,
)
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    LostRemotelyError,
    MissingRemoteError,
    RemoteAccessError,
    UnlistedRemoteError,
)
from tensor_dedup.remote.pieces import Place, Places, name_of
from tensor_dedup.store.codecs.parts import leaf_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.index import StoreIndex

# Of an object that is not there S3 says to those who may not list that they have no access.
GONE: Final = (LostRemotelyError, RemoteAccessError)
UNREADABLE: Final = (*GONE, NewerFormatError)


class Locator:
    """Finds pieces on a remote, for all checkpoints of one pull. Use it from one thread.

    The catalog is read once, and each table once. If a piece is nowhere by the catalog, something
    may have been pushed or deleted meanwhile: the catalog is read again, and then it is put
    together from all tables. Each of that happens once for a locator.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._catalog: Catalog | None = None
        # What to look in next, where a piece is nowhere.
        self._sources: list[Callable[[], Catalog | None]] = [self._read, self._read, self._rebuild]
        self._no_catalog: StoreError | None = None
        self._records: dict[bytes, list[Place]] = {}
        self._tables: set[ContainerId] = set()
        self._unreadable: dict[ContainerId, StoreError] = {}
        self._names: dict[bytes, str] = {}
        # Places that hold something else, by container and offset, and where containers end.
        self._spoilt: set[tuple[object, object]] = set()
        self._ends: dict[object, int] = {}
        self._lost_bases: set[object] = set()

    def places(
        self, missing: Mapping[bytes, int], names: Mapping[bytes, str], index: StoreIndex | None
    ) -> Places:
        """Return where to read the `missing` pieces, and the bases that have to come with them.

        * `missing` maps the digests of pieces to their sizes. Of several copies of a piece, the one
          is chosen that costs least. A delta is chosen only if each of its bases is in the store or
          has a copy on the remote that is no delta.
        * `names` maps digests to names of tensors, for messages.
        * `index` is that of the store that is pulled into. If it is None, nothing in the store is
          relied on: all bases come along.

        Raises:
            MissingRemoteError: A piece, or what it is stored against, is nowhere on the remote.
            DamagedRemoteError: A size in `missing` is wrong, or the only table or the catalog that
                would lead to a piece is damaged.
            RemoteAccessError, NewerFormatError: That table or the catalog cannot be read.
        """
        self._names |= names
        places = self._located(missing, index)
        for digest, nbytes in missing.items():
            container, record = places[digest]
            if record.nbytes != nbytes:
                name = name_of(digest, self._names)
                what = f"{record.nbytes} bytes of {digest.hex()} ({name}), {nbytes} expected"
                where = self._bucket.at(layout.table_key(container.name))
                raise DamagedRemoteError.at(where, what, digest=digest.hex(), tensors=[name])
        return places

    def leave_out(self, error: StoreError) -> bool:
        """Use the place no more that `error` reports as missing or damaged.

        `error` comes from `RemotePieces`. Of a base in the store that cannot be read, the index
        knows that, and the base comes along next time. Returns False if the error names nothing
        new.
        """
        facts = error.facts
        container, offset, end = (facts.get(key) for key in ("container", "offset", "intact"))
        if isinstance(end, int):
            self._ends[container] = min(end, self._ends.get(container, end))
        elif isinstance(offset, int):
            self._spoilt.add((container, offset))
        elif (base := facts.get("base")) is not None and base not in self._lost_bases:
            self._lost_bases.add(base)
        else:
            return False
        return True

    # The catalog

    def _located(self, missing: Mapping[bytes, int], index: StoreIndex | None) -> Places:
        first: StoreError | None = None
        for catalog in self._catalogs():
            try:
                return self._found(catalog, missing, index)
            except UNREADABLE as error:
                first = first or error
        last = first or self._no_catalog
        assert last is not None
        raise last

    def _catalogs(self) -> Iterator[Catalog]:
        """The catalog as it is known, and then as it may be known better."""
        if self._catalog is not None:
            yield self._catalog
        while self._sources:
            is_first = self._catalog is None
            found = self._sources.pop(0)()
            if found is not None:
                self._catalog = found
                if found.rebuilt or not is_first:
                    # Most of a damaged container may be whole, and nowhere else; and what a gc was
                    # to delete may be there still, where it was killed.
                    unlisted = map(layout.container_of, found.damaged | found.trash.deleting)
                    self._read_tables({each for each in unlisted if each is not None})
                yield found

    def _read(self) -> Catalog | None:
        try:
            found = read_catalog(self._bucket, before=self._catalog)
        except (DamagedRemoteError, MissingRemoteError) as error:
            self._no_catalog = error
            return None
        if found is None:
            where = self._bucket.at(layout.HEAD)
            self._no_catalog = MissingRemoteError.at(where, "the catalog is gone")
        return found

    def _rebuild(self) -> Catalog | None:
        try:
            return rebuilt(self._bucket, relied_on=False)
        except (UnlistedRemoteError, RemoteAccessError):  # of those who may only read objects
            return None

    # The pieces

    def _found(
        self, catalog: Catalog, missing: Mapping[bytes, int], index: StoreIndex | None
    ) -> Places:
        nowhere = set[bytes]()  # of what others are stored against

        def options(digest: bytes) -> list[Place]:
            return [p for p in self._copies(digest) if nowhere.isdisjoint(p[1].bases)]

        while True:
            lost = self._learn(catalog, missing, options)
            if lost:
                raise self._missing_error(catalog, lost[0], nowhere)
            every = {digest: options(digest) for digest in missing}
            here = _alone_here(index, every.values()) if index is not None else set[bytes]()
            there = here | missing.keys()
            places = {
                digest: min(held, key=lambda place: _cost(place[1], there))
                for digest, held in every.items()
            }
            bases = dict.fromkeys(b for _, record in places.values() for b in record.bases)
            needed = [base for base in bases if base not in here]
            nowhere.update(absent := self._learn(catalog, needed, self._alone, alone=True))
            if not absent:
                alone = {base: self._alone(base) for base in needed}
                return places | {
                    base: min(held, key=lambda place: (place[1].stored, place[0]))
                    for base, held in alone.items()
                }

    def _copies(self, digest: bytes) -> list[Place]:
        """The known copies of a piece, but for those that are missing or damaged."""
        return [place for place in self._records.get(digest, ()) if not self._is_left_out(*place)]

    def _is_left_out(self, container: ContainerId, record: Record) -> bool:
        end = self._ends.get(container.name)
        is_cut = end is not None and record.offset + record.stored > end
        return is_cut or (container.name, record.offset) in self._spoilt

    def _alone(self, digest: bytes) -> list[Place]:
        return [place for place in self._copies(digest) if place[1].base is None]

    def _learn(
        self,
        catalog: Catalog,
        wanted: Collection[bytes],
        options: Callable[[bytes], Sequence[Place]],
        *,
        alone: bool = False,
    ) -> list[bytes]:
        """Read tables until each piece has an option; return the pieces that have none."""
        while left := [digest for digest in wanted if not options(digest)]:
            holders = {
                d: [c for c in catalog.holders(d, alone=alone) if c not in self._tables]
                for d in left
            }
            chosen = _few(holders)
            if not chosen:
                break
            self._read_tables(chosen)
        return left

    def _read_tables(self, containers: Collection[ContainerId]) -> None:
        """Read the tables of these containers, unless they were read before."""

        def read(container: ContainerId) -> Sequence[Record]:
            try:
                return self._table(container)
            except UNREADABLE as error:
                self._unreadable[container] = error
                return ()

        new = sorted(container for container in containers if container not in self._tables)
        for container, records in zip(new, self._bucket.each(read, new), strict=True):
            self._tables.add(container)
            for record in records:
                self._records.setdefault(record.digest, []).append((container, record))

    def _table(self, container: ContainerId) -> Sequence[Record]:
        """Read the table of a container or, where that is gone or damaged, the one in it."""
        try:
            table = read_table(self._bucket, container.name)
        except GONE:
            entry = self._catalog and self._catalog.containers.get(container)
            within = entry and read_table_within(self._bucket, container, entry.nbytes)
            if not within:
                raise
            table = within
        if table.kind != container.kind:
            where = self._bucket.at(layout.table_key(container.name))
            raise DamagedRemoteError.at(where, f"it is of the kind {table.kind}")
        return table.records

    def _missing_error(
        self, catalog: Catalog, digest: bytes, nowhere: Collection[bytes]
    ) -> StoreError:
        """The error that a piece is nowhere, or what its copies are stored against."""
        copies = self._copies(digest)
        if copies:
            digest = min(base for _, r in copies for base in r.bases if base in nowhere)
        for container in catalog.holders(digest):
            if container in self._unreadable:
                return self._unreadable[container]
        name = name_of(digest, self._names)
        what = f"no container there holds {digest.hex()} ({name})"
        return MissingRemoteError.at(self._bucket.url, what, digest=digest.hex(), tensors=[name])


def _few(holders: Mapping[bytes, Sequence[ContainerId]]) -> set[ContainerId]:
    """A small set of containers that together hold the pieces: those first that hold the most."""
    counts = Counter(container for held in holders.values() for container in held)
    ranked = {c: rank for rank, c in enumerate(sorted(counts, key=lambda c: (-counts[c], c)))}
    return {min(held, key=ranked.__getitem__) for held in holders.values() if held}


def _alone_here(index: StoreIndex, options: Iterable[Sequence[Place]]) -> set[bytes]:
    """What of the bases of these copies the store has, not as a delta."""
    bases = {base for held in options for _, record in held for base in record.bases}
    found = index.find(bases)
    return {d for d, places in found.items() if any(place.base is None for place in places)}


def _cost(record: Record, there: Collection[bytes]) -> int:
    """The bytes of a copy, and of what it is stored against and is not `there`."""
    base = 0 if record.base is None or record.base in there else record.nbytes
    new = (number for number, part in record.parts.items() if part not in there)
    return record.stored + base + sum(leaf_bytes(number, record.nbytes) for number in new)
