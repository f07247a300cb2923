"""Tables of containers: the places and digests of the pieces in a container. No I/O.

A container is an immutable file of pieces. In a `slab`, `pack` or `delta`, the table is a frame
near the end of the file. For a `raw` container, it is a separate file. An `external` container is
only a table. A container is named by the digest of its table's frame, and the table holds the
digests of all its pieces.
"""

import struct
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from tensor_dedup.digest import LEAF_BYTES, combine, digest
from tensor_dedup.errors import IntegrityError
from tensor_dedup.store.codecs.interface import AGAINST_BASE, LEAVES
from tensor_dedup.store.codecs.parts import is_part, leaf_bytes, numbers_in, part_digest
from tensor_dedup.store.codecs.records import head_bytes
from tensor_dedup.store.errors import DamagedFileError, NewerFormatError
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile

KIND = b"tabl"
PLAIN = "raw"  # the codec of bytes that are stored as they are
DIGEST_BYTES = 32
ENCODED = "delta"  # the kind of container whose records are all encoded
MIXED = "mixed"  # the kind of container, of a remote only, whose records are encoded or plain
ALIGNMENT = {"raw": 1, "slab": 4096, "pack": 64, ENCODED: 64, MIXED: 64, EXTERNAL: 1}
_TAIL = struct.Struct("<Q8s")
_TAIL_MAGIC = b"TDSTEND\x01"
TAIL_BYTES = _TAIL.size


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A record in a container's table: where and how a piece is stored.

    The `stored` bytes at `offset` are decoded by `codec` to the `nbytes` of the piece. `base` is
    the digest of the piece that this one is encoded against, or None. `leaves` are the concatenated
    digests of the decoded leaves (2 MiB each).
    """

    digest: bytes
    offset: int
    stored: int
    nbytes: int
    codec: str
    base: bytes | None
    leaves: bytes

    @property
    def leaf_list(self) -> list[bytes]:
        """The leaf digests as a list."""
        return [self.leaves[at : at + 32] for at in range(0, len(self.leaves), 32)]

    @property
    def codec_name(self) -> str:
        """The name of the codec, without the colon and the parameters that may follow."""
        return self.codec.partition(":")[0]

    @property
    def parts(self) -> dict[int, bytes]:
        """The digests of the leaves that are stored as pieces of their own, by leaf number."""
        return {number: self._part(number) for number in numbers_in(self.codec) or ()}

    @property
    def bases(self) -> tuple[bytes, ...]:
        """The digests of all other pieces needed to decode this one: its base, then its parts."""
        return () if self.base is None else (self.base, *self.parts.values())

    def leaf_in(self, start: int) -> tuple[bytes, int]:
        """Return what to read to decode a leaf: the digest of another piece, and an offset in it.

        `start` is the offset of the leaf in this piece, which must be encoded against other pieces.
        """
        number = start // LEAF_BYTES
        if is_part(self.codec, number):
            return self._part(number), 0
        return self.base or b"", start

    def _part(self, number: int) -> bytes:
        return part_of(self.leaves, number, self.nbytes)


def part_of(leaves: bytes, number: int, nbytes: int) -> bytes:
    """Return the digest of the separate piece that consists of leaf `number` of a piece.

    The piece has `nbytes`, and `leaves` are its concatenated leaf digests.
    """
    at = number * DIGEST_BYTES
    return part_digest(leaves[at : at + DIGEST_BYTES], leaf_bytes(number, nbytes))


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The table of a container: its kind, the size of its data, and its records by offset.

    For an `external` container, `origin` describes the indexed file (`ExternalFile.to_texts`). For
    any other kind, it is None.
    """

    kind: str
    data_bytes: int
    records: list[Record]
    origin: list[str] | None


class Encoded(NamedTuple):
    """The frame of a table, and the name of the container, which is the digest of the frame."""

    name: str
    blob: bytes


def encode(table: Table) -> Encoded:
    """Encode `table`; return its frame and the name of the container."""
    blob = frames.encode(KIND, table)
    return Encoded(digest(blob), blob)


def tail(table_at: int) -> bytes:
    """Return the bytes that end a slab, pack or delta and state `table_at`, its table's offset."""
    return _TAIL.pack(table_at, _TAIL_MAGIC)


def table_start(ending: bytes, size: int, path: PurePath) -> int:
    """Return the offset of the table in a slab, pack or delta of `size` bytes.

    `ending` has the last TAIL_BYTES of the file.

    Raises:
        DamagedFileError: The ending does not hold a valid offset; the error names `path`.
    """
    if len(ending) != TAIL_BYTES:
        raise DamagedFileError.at(path, f"{size} bytes are no container", size=size)
    start, magic = _TAIL.unpack(ending)
    if magic != _TAIL_MAGIC or start > size - TAIL_BYTES - frames.OVERHEAD:
        raise DamagedFileError.at(path, "its last bytes do not lead to its table", size=size)
    if size - start > frames.MAX_FRAME_BYTES:
        raise DamagedFileError.at(path, f"a table of {size - start} bytes", size=size)
    return int(start)


def decode(blob: bytes, name: str, kind: str, path: PurePath) -> Table:
    """Decode `blob`, the table of the container `name`, and check all its records.

    `kind` is the kind of the container.

    Raises:
        DamagedFileError: `blob` is not a valid table of the container; the error names `path`.
        NewerFormatError: A later version of this program wrote the table, or a codec is unknown.
    """
    table = frames.decode(blob, KIND, Table, path)
    if digest(blob) != name or table.kind != kind:
        raise DamagedFileError.at(path, f"its table is that of another container ({table.kind})")
    for record in table.records:
        _check_record(record, table, path)
    _check_places(table, path)
    if kind == EXTERNAL:
        ExternalFile.from_texts(table.origin, table.data_bytes, path)
    return table


def _check_record(record: Record, table: Table, path: PurePath) -> None:
    is_encoded = table.kind == ENCODED or (table.kind == MIXED and record.codec != PLAIN)
    fits = _encoded_fits(record) if is_encoded else _plain_fits(record)
    if fits is None:
        raise NewerFormatError.at(path, f"the codec {record.codec!r}", codec=record.codec)
    try:
        right = combine(record.nbytes, record.leaf_list) == record.digest.hex()
    except IntegrityError:
        right = False
    inside = 0 <= record.offset <= table.data_bytes - record.stored
    if not right or not inside or not fits or record.nbytes <= 0:
        raise DamagedFileError.at(path, f"its record at {record.offset} contradicts itself")
    if record.offset % ALIGNMENT[table.kind]:
        raise DamagedFileError.at(path, f"its record at {record.offset} is not aligned")


def _plain_fits(record: Record) -> bool | None:
    """Whether sizes and base are those of bytes stored as they are; None: these are not."""
    if record.codec != PLAIN or record.base is not None:
        return None
    return record.stored == record.nbytes


def _encoded_fits(record: Record) -> bool | None:
    """Whether sizes, base and parts are those of its codec; None: nobody knows the codec."""
    own = numbers_in(record.codec)
    against_base = AGAINST_BASE.get(record.codec) if own is None else True
    if against_base is None:
        return None
    base = record.base
    if against_base != (base is not None):
        return False
    if base is not None and (len(base) != DIGEST_BYTES or base == record.digest):
        return False
    if own is not None:
        # One leaf at least is the base's, so there are two: no part is the piece itself.
        count = -(-record.nbytes // LEAF_BYTES)
        return len(own) < count and own[-1] < count and record.stored == head_bytes(record.nbytes)
    # What is not smaller would have been stored as it is: no reader need take more than `nbytes`.
    # Nothing follows the head where all leaves are those of the base, the beginning of which it is.
    least = head_bytes(record.nbytes) + (record.codec != LEAVES)
    return least <= record.stored < record.nbytes


def _check_places(table: Table, path: PurePath) -> None:
    for before, after in pairwise(table.records):
        if before.offset + before.stored > after.offset:
            raise DamagedFileError.at(path, f"its records overlap at {after.offset}")
    if table.kind in ("raw", EXTERNAL) and any(gaps(table)):
        raise DamagedFileError.at(path, "its records do not cover the file")


def gaps(table: Table) -> list[tuple[int, int]]:
    """Return the (offset, length) of each range of padding: the bytes that no record covers."""
    found, at = [], 0
    for record in table.records:
        if record.offset > at:
            found.append((at, record.offset - at))
        at = record.offset + record.stored
    if at < table.data_bytes:
        found.append((at, table.data_bytes - at))
    return found
