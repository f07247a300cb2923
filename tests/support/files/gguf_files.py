"""GGUF files that lie, each with the error it must raise, and honest oddities."""

import struct
from collections.abc import Sequence

from tensor_dedup.formats.errors import GgufFault as Fault
from tensor_dedup.formats.gguf import MAX_NAME_BYTES, GgufHeader, parse_header

U8, I8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 6, 7, 8, 9, 10


def parse(file: bytes) -> GgufHeader:
    return parse_header(file, len(file), "liar.gguf")


def text(value: bytes | str, length: int | None = None) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def listed(kind: int, count: int, values: bytes = b"") -> bytes:
    return entry("list", ARRAY, array(kind, count, values))


def info(
    name: bytes | str = "a",
    sizes: Sequence[int] = (2,),
    kind: int = 0,
    offset: int = 0,
    dimensions: int | None = None,
) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return (
        text(name)
        + struct.pack(f"<I{len(sizes)}Q", count, *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def file_of(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file of these entries and tensors; `counts` are what it says of tensors, entries."""
    said = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *said) + b"".join([*entries, *tensors])
    return head + b"\0" * (-len(head) % alignment) + data if data or tensors else head


def one(data: bytes = b"\0" * 8, **fields: object) -> bytes:
    """One tensor of two F32, or as `fields` of `info` say."""
    return file_of((), [info(**fields)], data)  # type: ignore[arg-type]


def two(first: int, second: int, data: int) -> bytes:
    """Two tensors of 8 bytes at these offsets."""
    return file_of((), [info("a", offset=first), info("b", offset=second)], b"\0" * data)


def nested(depth: int) -> bytes:
    """Lists in lists, the innermost of one byte."""
    value = array(U8, 1, b"\0")
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return file_of([entry("list", ARRAY, value)])


def aligned(value: bytes, kind: int = U32) -> bytes:
    return file_of([entry("general.alignment", kind, value)])


HONEST_FILE = file_of(
    [number("n", 7), entry("s", STRING, text("x"))],
    [info("a", (4, 3)), info("b", (32, 2), 8, 64)],
    bytes(range(48)) + b"\0" * 16 + bytes(68),
)

# (what the liar does, its file, the error)
LIARS: list[tuple[str, bytes, Fault]] = [
    ("no bytes", b"", Fault.MAGIC),
    ("the magic alone", b"GGUF", Fault.MAGIC),
    ("another magic", b"GGML" + HONEST_FILE[4:], Fault.MAGIC),
    ("a safetensors file", struct.pack("<Q", 2) + b"{}" + b" " * 90, Fault.MAGIC),
    ("big-endian version", b"GGUF" + struct.pack(">I", 3) + HONEST_FILE[8:],
     Fault.BIG_ENDIAN),
    ("big-endian throughout", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), Fault.BIG_ENDIAN),
    ("version 0", file_of(version=0), Fault.VERSION),
    ("version 1, with counts of 32 bits", file_of(version=1), Fault.VERSION),
    ("version 4", file_of(version=4), Fault.VERSION),
    ("version 2^32 - 1", file_of(version=0xFFFFFFFF), Fault.VERSION),
    ("no counts", HONEST_FILE[:8], Fault.TRUNCATED),
    ("half a count", HONEST_FILE[:20], Fault.TRUNCATED),
    ("2^64 - 1 tensors", file_of(counts=((1 << 64) - 1, 0)), Fault.COUNT),
    ("2^64 - 1 entries", file_of(counts=(0, (1 << 64) - 1)), Fault.COUNT),
    ("a tensor too many for the file", file_of(counts=(1, 0)), Fault.COUNT),
    ("entries eat the tensors' room", file_of([listed(U8, 60, b"\0" * 60)], counts=(2, 1)),
     Fault.COUNT),
    ("an entry more than there are", file_of([listed(U8, 0)], counts=(0, 2)),
     Fault.TRUNCATED),
    ("three entries in the room of two", file_of([entry("k", U64, bytes(8)), bytes(13)],
     counts=(0, 3)), Fault.COUNT),
    ("a key of 2^63 bytes", file_of([text("k", 1 << 63) + bytes(20)]), Fault.LENGTH),
    ("a key a byte too long", file_of([text("k" * 30, 31)]), Fault.LENGTH),
    ("a key that is not UTF-8", file_of([entry(b"\xff", U8, b"\0")]), Fault.TEXT),
    ("a key twice", file_of([number("k", 1), number("k", 2)]), Fault.DUPLICATE_KEY),
    ("the alignment twice", file_of([number("general.alignment", 32)] * 2),
     Fault.DUPLICATE_KEY),
    ("a type of value beyond the last", file_of([entry("k", 13, bytes(8))]),
     Fault.VALUE_TYPE),
    ("a type of value of 2^32 - 1", file_of([entry("k", 0xFFFFFFFF, bytes(8))]),
     Fault.VALUE_TYPE),
    ("a list of an unknown type", file_of([listed(13, 1, bytes(8))]), Fault.VALUE_TYPE),
    ("a value cut off", file_of([entry("k", U64, bytes(7))]), Fault.TRUNCATED),
    ("a text of 2^64 - 1 bytes", file_of([entry("k", STRING, text("x", (1 << 64) - 1))]),
     Fault.LENGTH),
    ("a text a byte too long", file_of([entry("k", STRING, text("xyz", 4))]),
     Fault.LENGTH),
    ("a list of 2^64 - 1 bytes", file_of([listed(U8, (1 << 64) - 1)]), Fault.LENGTH),
    ("a list of 2^62 numbers", file_of([listed(F32, 1 << 62, bytes(64))]), Fault.LENGTH),
    ("a list of 2^61 texts", file_of([listed(STRING, 1 << 61, bytes(64))]), Fault.LENGTH),
    ("a list of 2^60 lists", file_of([listed(ARRAY, 1 << 60, bytes(64))]), Fault.LENGTH),
    ("a text in a list beyond the file", file_of([listed(STRING, 2, text("a") + text("b", 99))]),
     Fault.LENGTH),
    ("a text in a list of 2^63 bytes", file_of([listed(STRING, 1, text("b", 1 << 63))]),
     Fault.LENGTH),
    ("a list that ends in a length", file_of([listed(STRING, 2, text("abcdefgh") + bytes(1))]),
     Fault.TRUNCATED),
    ("lists nested too deep", nested(5), Fault.NESTING),
    ("lists nested 5,000 deep", nested(5_000), Fault.NESTING),
    ("a truth value of 2", file_of([entry("k", BOOL, b"\2")]), Fault.BOOL),
    ("a truth value of 255 in a list", file_of([listed(BOOL, 3, b"\0\1\xff")]),
     Fault.BOOL),
    ("alignment 0", aligned(struct.pack("<I", 0)), Fault.ALIGNMENT),
    ("alignment 48", aligned(struct.pack("<I", 48)), Fault.ALIGNMENT),
    ("alignment of 64 bits", aligned(struct.pack("<Q", 32), U64), Fault.ALIGNMENT),
    ("alignment as a text", aligned(text("32"), STRING), Fault.ALIGNMENT),
    ("alignment as a list", aligned(array(U32, 1, struct.pack("<I", 32)), ARRAY),
     Fault.ALIGNMENT),
    ("alignment 2^31, and data that is not there",
     file_of([number("general.alignment", 1 << 31)], [info()], b"\0" * 8),
     Fault.BEYOND_FILE),
    ("a name beyond the file", file_of((), [text("a", 1 << 40) + bytes(16)]),
     Fault.LENGTH),
    ("a name that is not UTF-8", one(name=b"\xc3\x28"), Fault.TEXT),
    ("a name of a page", one(name="n" * (MAX_NAME_BYTES + 1)), Fault.NAME),
    ("a name twice", file_of((), [info(), info(offset=32)], b"\0" * 40),
     Fault.DUPLICATE_TENSOR),
    ("five dimensions", one(sizes=(1, 1, 1, 1, 2)), Fault.DIMENSIONS),
    ("2^32 - 1 dimensions", one(dimensions=0xFFFFFFFF), Fault.DIMENSIONS),
    ("a type that was taken back", one(kind=4), Fault.TENSOR_TYPE),
    ("another type that was taken back", one(kind=31), Fault.TENSOR_TYPE),
    ("a type of the future", one(kind=99), Fault.TENSOR_TYPE),
    ("a type of 2^32 - 1", one(kind=0xFFFFFFFF), Fault.TENSOR_TYPE),
    ("half a block of Q4_0", one(sizes=(16,), kind=2, data=b"\0" * 9), Fault.BLOCK),
    ("rows of Q4_K that are no blocks", one(sizes=(128, 2), kind=12, data=b"\0" * 144),
     Fault.BLOCK),
    ("a single Q8_0", one(sizes=(), kind=8), Fault.BLOCK),
    ("2^64 elements", one(sizes=(1 << 32, 1 << 32)), Fault.OVERFLOW),
    ("wraps to 8 bytes", one(sizes=((1 << 63) + 2,)), Fault.OVERFLOW),
    ("2^63 bytes", one(sizes=(1 << 61,)), Fault.OVERFLOW),
    ("overflow, then zero", one(sizes=(1 << 62, 4, 0)), Fault.OVERFLOW),
    ("zero, then a dimension of 2^63", one(sizes=(0, 1 << 63)), Fault.OVERFLOW),
    ("an offset off by one", one(offset=1), Fault.MISALIGNED),
    ("an offset of half the alignment", two(0, 16, 24), Fault.MISALIGNED),
    ("an offset of 2^64 - 1", one(offset=(1 << 64) - 1), Fault.MISALIGNED),
    ("an offset of 2^63", one(offset=1 << 63), Fault.HOLE),
    ("a hole at the start", one(offset=32, data=b"\0" * 40), Fault.HOLE),
    ("a hole in the middle", two(0, 64, 72), Fault.HOLE),
    ("the same bytes twice", two(0, 0, 8), Fault.OVERLAP),
    ("overlap by a block", file_of((), [info("a", (10,)), info("b", offset=32)], b"\0" * 40),
     Fault.OVERLAP),
    ("an empty tensor inside another",
     file_of((), [info("a", (16,)), info("b", (0,), offset=32)], b"\0" * 64),
     Fault.OVERLAP),
    ("one byte short", one(data=b"\0" * 7), Fault.BEYOND_FILE),
    ("no data at all", one(data=b""), Fault.BEYOND_FILE),
    ("the second tensor missing", two(0, 32, 32), Fault.BEYOND_FILE),
    ("a byte after the padding", one(data=b"\0" * 33), Fault.TRAILING_BYTES),
    ("a zip after the tensors", one(data=b"\0" * 32 + b"PK\x05\x06" + b"\0" * 18),
     Fault.TRAILING_BYTES),
    ("data but no tensors", file_of([number("n", 1)], (), b"\0" * 8),
     Fault.TRAILING_BYTES),
]  # fmt: skip

HONEST: list[tuple[str, bytes]] = [
    ("nothing", file_of()),
    ("a vocabulary alone", file_of([number("n", 1), listed(STRING, 1, text("t"))])),
    ("metadata alone, padded", file_of([number("n", 1)]) + b"\0" * 23),
    ("version 2", file_of(version=2)),
    ("one tensor", one()),
    ("one tensor, padded", one(data=b"\0" * 32)),
    ("no dimension", one(sizes=(), data=b"\0" * 4)),
    ("empty tensor", one(sizes=(0, 3), data=b"")),
    ("name of nothing", one(name="")),
    ("names in other scripts", one(name="重み/é")),
    ("not in order", two(32, 0, 40)),
    ("alignment 8", file_of([number("general.alignment", 8)], [info()], bytes(8), alignment=8)),
    ("lists nested", nested(4)),
    ("a vocabulary of odd bytes", file_of([listed(STRING, 2, text(b"\xff\xfe") + text(""))])),
    ("a text that is not UTF-8", file_of([entry("k", STRING, text(b"\xff"))])),
    ("two types", HONEST_FILE),
]  # fmt: skip
