"""The containers that a push sends, planned from the pieces that the remote lacks.

A piece is sent in an encoded form (compressed, or as a delta from a base) if the store has one that
is smaller. For a delta, the base must also be on the remote, or be sent too. All other pieces are
sent unencoded. An encoded piece may refer to parts: leaves of it that are stored as pieces of their
own. Parts that the remote lacks are sent too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout
from tensor_dedup.remote.catalog import Catalog
from tensor_dedup.store.codecs.parts import leaf_bytes
from tensor_dedup.store.codecs.records import chunks, head_bytes
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import CorruptFrameError, CorruptTensorError, MissingObjectError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.tables import (
    ALIGNMENT,
    ENCODED,
    MIXED,
    PLAIN,
    Encoded,
    Record,
    Table,
)
from tensor_dedup.store.reading.reader import StoredPieces

_BLOCK_BYTES: Final = 4 * LEAF_BYTES
_PLAIN: Final = "pack"
# What saves less goes as it is, and is read without decoding.
_LEAST_SAVED: Final = 512
_Place: TypeAlias = tuple[ContainerId, Record]


@dataclass(frozen=True, slots=True)
class Load:
    """A container that a push is to send.

    `table` lists the pieces of the container, and `frame` is the encoded table. `sources` has, for
    each piece in the table, the place of its encoded copy in the store, or None if the piece is
    sent unencoded.
    """

    container: ContainerId
    table: Table
    frame: Encoded
    sources: Sequence[_Place | None]

    @property
    def nbytes(self) -> int:
        """The size of the container in bytes, including its table."""
        return self.table.data_bytes + len(self.frame.blob) + tables.TAIL_BYTES


class DamagedRecordError(Exception):
    """A piece could not be read from the local store in the form that was planned.

    If `cause` is None, an encoded copy is damaged, and the piece may be sent in another form.
    Otherwise, the store has no intact copy of the piece, and `cause` is the error of the read.
    """

    def __init__(self, digest: bytes, cause: StoreError | None = None) -> None:
        super().__init__(digest.hex())
        self.digest, self.cause = digest, cause


class Planner:
    """Plans in which form and in which container each piece is sent. Use it from one thread only.

    `sizes` has the digests of all pieces of the checkpoints that are pushed.
    """

    def __init__(self, sizes: Collection[bytes]) -> None:
        self._sizes = sizes
        self._damaged: set[bytes] = set()
        self._lost: dict[bytes, StoreError] = {}

    def plan(
        self, source: StoredPieces, missing: Mapping[bytes, int], catalog: Catalog
    ) -> list[Load]:
        """Return the containers in which the `missing` pieces are to be sent.

        `missing` maps the digests of pieces to their sizes, and `catalog` says what the remote has.
        Encoded copies that `note` has recorded as damaged are not used. Apart from that, equal
        arguments give equal containers.

        Raises:
            MissingObjectError: The store `source` does not have one of the pieces.
        """
        chosen = {d: self._encoded(source, d, missing, catalog) for d in missing}
        bases = {base for place in chosen.values() if place for base in place[1].bases}
        for digest in bases & missing.keys():
            if (place := chosen[digest]) is not None and place[1].bases:
                chosen[digest] = self._encoded(source, digest, {}, None)
        parts = self._parts_of(chosen, catalog)
        alone = {digest: self._encoded(source, digest, {}, None) for digest in parts}
        own = self._records(source, chosen, missing)
        brought = self._records(source, alone, parts)
        # A container stays as long as one of its pieces does, and parts serve many steps: they lie
        # by themselves, though one container more is two requests.
        return [*laid_out(own), *laid_out(brought)]

    def _parts_of(
        self, chosen: Mapping[bytes, _Place | None], catalog: Catalog
    ) -> dict[bytes, int]:
        """The parts that come along with these pieces, and their sizes."""
        records = [place[1] for place in chosen.values() if place is not None]
        return {
            digest: leaf_bytes(number, record.nbytes)
            for record in records
            for number, digest in record.parts.items()
            if digest not in chosen and not catalog.holders(digest, alone=True)
        }

    def _records(
        self,
        source: StoredPieces,
        chosen: Mapping[bytes, _Place | None],
        sizes: Mapping[bytes, int],
    ) -> list[tuple[Record, _Place | None]]:
        """The records of pieces as they travel, and where each lies encoded; those last.

        In one sequence: a container of each kind would be two more requests.
        """
        plain = [
            (self._plain_record(source, digest, sizes[digest]), None)
            for digest, place in chosen.items()
            if place is None
        ]
        return [*plain, *((place[1], place) for place in chosen.values() if place is not None)]

    def _encoded(
        self,
        source: StoredPieces,
        digest: bytes,
        missing: Mapping[bytes, int],
        catalog: Catalog | None,
    ) -> _Place | None:
        """The encoded copy that takes least, and whose base is there, or travels too.

        Its parts come along where they are nowhere there. None: the piece goes as it is. Without a
        catalog only a copy without a base will do.
        """
        if digest in self._damaged:
            return None

        def comes(base: bytes) -> bool:
            there = catalog is not None and catalog.holders(base, alone=True)
            return base in missing or bool(there)

        found: list[tuple[int, ContainerId, _Place]] = []
        for place in source.own_places(digest):
            container, record = place
            if record.codec == PLAIN or (record.base is not None and not comes(record.base)):
                continue
            new = {number: part for number, part in record.parts.items() if not comes(part)}
            if all(part not in self._lost and source.records(part) for part in new.values()):
                cost = record.stored + sum(leaf_bytes(number, record.nbytes) for number in new)
                if record.nbytes - cost >= _LEAST_SAVED:
                    found.append((cost, container, place))
        return min(found, key=lambda each: each[:2])[2] if found else None

    def _plain_record(self, source: StoredPieces, digest: bytes, nbytes: int) -> Record:
        records = source.records(digest)
        if not records:
            what = f"no container holds {digest.hex()}"
            raise MissingObjectError.at(source.name, what, digest=digest.hex(), nbytes=nbytes)
        return Record(digest, 0, nbytes, nbytes, PLAIN, None, records[0].leaves)

    def note(self, error: DamagedRecordError) -> None:
        """Record the damaged copy that `error` is about, so that the next plan avoids the copy.

        Raises:
            CorruptTensorError, MissingObjectError: The store has no intact copy of a piece, so no
                plan can send the piece.
        """
        if error.cause is None:
            self._damaged.add(error.digest)
        elif error.digest not in self._sizes:
            # A part: what consists of it may be here in another way.
            self._lost[error.digest] = error.cause
        else:
            # If it is not, what is wrong is the part.
            parts = (each for each in self._lost.values() if isinstance(each, CorruptTensorError))
            gone = isinstance(error.cause, MissingObjectError)
            raise next(parts, error.cause) if gone else error.cause


def laid_out(records: Sequence[tuple[Record, _Place | None]]) -> Iterator[Load]:
    """Distribute pieces among containers, in the order of `records`; yield the containers.

    Each item of `records` is a pair: the table entry of a piece, and the place of its encoded copy
    or None (as in `Load.sources`). A container is complete when it has at least
    CONTAINER_BYTES bytes. A piece larger than that gets a container of its own. If a push is
    resumed after its first containers were sent, the remaining containers are the same as before.
    """
    step, end = ALIGNMENT[MIXED], 0
    held: list[Record] = []
    sources: list[_Place | None] = []
    for record, place in records:
        if record.stored > layout.CONTAINER_BYTES:
            yield _load(record.stored, [msgspec.structs.replace(record, offset=0)], [place])
            continue
        start = -(-end // step) * step
        held.append(msgspec.structs.replace(record, offset=start))
        sources.append(place)
        end = start + record.stored
        if end >= layout.CONTAINER_BYTES:
            yield _load(end, held, sources)
            held, sources, end = [], [], 0
    if held:
        yield _load(end, held, sources)


def _load(
    end: int,
    records: Sequence[Record],
    sources: Sequence[_Place | None],
) -> Load:
    # Of a container's own records: what is left of a push that was cut short has the same kinds.
    plain = [record.codec == PLAIN for record in records]
    kind = _PLAIN if all(plain) else MIXED if any(plain) else ENCODED
    table = Table(kind, end, [*records], None)
    frame = tables.encode(table)
    return Load(ContainerId(frame.name, kind), table, frame, sources)


def fill(source: StoredPieces, load: Load, view: memoryview) -> None:
    """Write the container that `load` describes into `view`, whose size must be `load.nbytes`.

    Raises:
        DamagedRecordError: A copy in the store is damaged.
    """
    at = 0

    def part(nbytes: int) -> memoryview:
        nonlocal at
        at += nbytes
        return view[at - nbytes : at]

    for _ in content(source, load, part):
        pass


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def content(
    source: StoredPieces, load: Load, memory: Callable[[int], memoryview] = _memory
) -> Iterator[memoryview]:
    """Iterate over the bytes of the container that `load` describes, in chunks.

    Chunks are verified when they are read from the store `source`. `memory(nbytes)` returns the
    buffer for a chunk.

    Raises:
        DamagedRecordError: A copy in the store is damaged.
    """
    at = 0
    for record, place in zip(load.table.records, load.sources, strict=True):
        if record.offset > at:
            yield _copied(bytes(record.offset - at), memory)
        if place is None:
            for start in range(0, record.nbytes, _BLOCK_BYTES):
                view = memory(min(_BLOCK_BYTES, record.nbytes - start))
                try:
                    source.read_piece_into(record.digest, start, view, record.nbytes)
                except (CorruptTensorError, MissingObjectError) as error:
                    raise DamagedRecordError(record.digest, error) from error
                yield view
        else:
            yield from _encoded_content(source, *place, memory)
        at = record.offset + record.stored
    yield _copied(load.frame.blob + tables.tail(load.table.data_bytes), memory)


def _copied(data: bytes, memory: Callable[[int], memoryview]) -> memoryview:
    view = memory(len(data))
    view[:] = data
    return view


def _encoded_content(
    source: StoredPieces,
    container: ContainerId,
    record: Record,
    memory: Callable[[int], memoryview],
) -> Iterator[memoryview]:
    """The bytes of an encoded record as they are, each chunk compared with its checksum."""
    head = memory(head_bytes(record.nbytes))
    try:
        if not source.read_stored(container, record.offset, head):
            raise DamagedRecordError(record.digest)
        yield head
        for chunk in chunks(bytes(head), record.stored):
            view = memory(chunk.size)
            read = source.read_stored(container, record.offset + chunk.offset, view)
            if not read or not chunk.holds(view):
                raise DamagedRecordError(record.digest)
            yield view
    except (CorruptFrameError, CorruptTensorError) as error:
        raise DamagedRecordError(record.digest) from error
