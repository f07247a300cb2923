"""Safetensors files that lie, each with the error it must raise, and honest oddities."""

import struct
from typing import Any

from safetensors import deserialize

from tensor_dedup.formats.errors import JsonFault
from tensor_dedup.formats.errors import SafetensorsFault as Fault
from tensor_dedup.formats.safetensors import MAX_HEADER_BYTES, SafetensorsHeader, parse_header

Seen = dict[str, tuple[str, tuple[int, ...], bytes]]


def file_of(header: bytes | str, data: bytes = b"\0" * 8) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def parse(file: bytes) -> SafetensorsHeader:
    return parse_header(file, len(file), "liar.safetensors")


def entry(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]", more: str = "") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


def one(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]", more: str = "") -> str:
    return f'{{"a":{entry(dtype, shape, offsets, more)}}}'


def two(first: str, second: str) -> str:
    return f'{{"a":{entry(shape="[1]", offsets=first)},"b":{entry(shape="[1]", offsets=second)}}}'


def more(value: str) -> str:
    return one(more=f',"x":{value}')


def library(file: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What the safetensors library makes of a file; SafetensorError when it refuses it."""
    found: list[tuple[str, dict[str, Any]]] = deserialize(file)  # type: ignore[no-untyped-call]
    return found


def seen_by_us(file: bytes) -> Seen:
    return {
        spec.name: (spec.dtype, spec.shape, file[spec.start : spec.start + spec.nbytes])
        for spec in parse(file).tensors
    }


def seen_by_library(file: bytes) -> Seen:
    return {
        name: (str(view["dtype"]), tuple(view["shape"]), bytes(view["data"]))
        for name, view in library(file)
    }


# (what the liar does, its file, the error). Sixteen bytes of data where tensors say more than 8.
LIARS: list[tuple[str, bytes, Fault | JsonFault]] = [
    ("no bytes", b"", Fault.EMPTY_FILE),
    ("one byte", b"\1", Fault.FILE_TOO_SHORT),
    ("seven bytes", b"\2\0\0\0\0\0\0", Fault.FILE_TOO_SHORT),
    ("header of 2^64-1 bytes", b"\xff" * 8 + b"{}", Fault.HEADER_TOO_LARGE),
    ("header of 2^40 bytes", struct.pack("<Q", 1 << 40) + b"{}", Fault.HEADER_TOO_LARGE),
    (
        "header one byte over the limit",
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
        Fault.HEADER_TOO_LARGE,
    ),
    ("header longer than file", struct.pack("<Q", 3) + b"{}", Fault.HEADER_TRUNCATED),
    ("length as big-endian", struct.pack(">Q", 2) + b"{}", Fault.HEADER_TOO_LARGE),
    ("header cut in the middle", file_of(one(), b"")[:-5], Fault.HEADER_TRUNCATED),
    ("header of no bytes", file_of(""), JsonFault.SYNTAX),
    ("not UTF-8", file_of(b'{"\xff":1}'), JsonFault.ENCODING),
    ("surrogate as bytes", file_of(b'{"\xed\xa0\x80":1}'), JsonFault.ENCODING),
    ("UTF-16", file_of("{}".encode("utf-16-le")), JsonFault.SYNTAX),
    ("byte order mark", file_of("\ufeff" + one()), JsonFault.SYNTAX),
    ("half a surrogate pair", file_of(r'{"\ud800":' + entry() + "}"), JsonFault.ENCODING),
    ("low half alone", file_of(r'{"\udc00":' + entry() + "}"), JsonFault.ENCODING),
    ("half a pair before a pair", file_of(more(r'"\ud800\ud83d\ude00"')), JsonFault.ENCODING),
    ("not JSON", file_of("hello"), JsonFault.SYNTAX),
    ("cut JSON of right length", file_of(one()[:-1]), JsonFault.SYNTAX),
    ("text after the JSON", file_of(one() + "{}"), JsonFault.SYNTAX),
    ("zeros after the JSON", file_of(one() + "\0\0"), JsonFault.SYNTAX),
    ("trailing comma", file_of('{"a":' + entry() + ",}"), JsonFault.SYNTAX),
    ("comment", file_of("{/**/}", b""), JsonFault.SYNTAX),
    ("control character in a name", file_of('{"a\1":' + entry() + "}"), JsonFault.SYNTAX),
    ("pickle", file_of(b"\x80\x04."), JsonFault.ENCODING),
    ("NaN", file_of(more("NaN")), JsonFault.CONSTANT),
    ("Infinity", file_of(more("Infinity")), JsonFault.CONSTANT),
    ("-Infinity as offset", file_of(one(offsets="[-Infinity,8]")), JsonFault.CONSTANT),
    ("number beyond floats", file_of(more("1e999")), JsonFault.NUMBER),
    ("the largest float, where readers disagree", file_of(more("1.7976931348623158e308")),
     JsonFault.NUMBER),
    ("number of 5000 digits", file_of(more("9" * 5000)), JsonFault.NUMBER),
    ("dimension of 5000 digits", file_of(one(shape="[" + "9" * 5000 + "]")), JsonFault.NUMBER),
    ("lists 200,000 deep", file_of("[" * 200_000), JsonFault.NESTING),
    ("objects 200,000 deep", file_of('{"a":' * 200_000), JsonFault.NESTING),
    ("lists 126 deep in a tensor", file_of(more("[" * 126 + "]" * 126)), JsonFault.NESTING),
    ("millions of empty lists", file_of(more("[" + "[]," * 2_000_001 + "[]]")), JsonFault.BOMB),
    ("millions of objects", file_of("{" + "{" * 1_000_002), JsonFault.BOMB),
    ("millions of numbers", file_of(one(shape="[" + "1," * 8_000_001 + "1]")), JsonFault.BOMB),
    ("list", file_of("[]", b""), JsonFault.NOT_AN_OBJECT),
    ("null", file_of("null", b""), JsonFault.NOT_AN_OBJECT),
    ("text", file_of('"abc"', b""), JsonFault.NOT_AN_OBJECT),
    ("number", file_of("12", b""), JsonFault.NOT_AN_OBJECT),
    ("space before the object", file_of(" " + one()), Fault.HEADER_START),
    ("new line before the object", file_of("\n" + one()), Fault.HEADER_START),
    ("tensor twice", file_of(f'{{"a":{entry()},"a":{entry()}}}'), JsonFault.DUPLICATE_KEY),
    ("tensor twice, once escaped", file_of(f'{{"a":{entry()},"\\u0061":{entry()}}}'),
     JsonFault.DUPLICATE_KEY),
    ("field twice", file_of(one(more=',"shape":[2]')), JsonFault.DUPLICATE_KEY),
    ("unknown field twice", file_of(one(more=',"x":1,"x":1')), JsonFault.DUPLICATE_KEY),
    ("key twice deep inside", file_of(more('[{"k":1,"k":2}]')), JsonFault.DUPLICATE_KEY),
    ("metadata twice", file_of('{"__metadata__":{},"__metadata__":{}}', b""),
     JsonFault.DUPLICATE_KEY),
    ("metadata key twice", file_of('{"__metadata__":{"k":"1","k":"2"}}', b""),
     JsonFault.DUPLICATE_KEY),
    ("metadata with a number", file_of('{"__metadata__":{"k":1}}', b""), Fault.METADATA),
    ("metadata with null", file_of('{"__metadata__":{"k":null}}', b""), Fault.METADATA),
    ("metadata with an object", file_of('{"__metadata__":{"k":{}}}', b""), Fault.METADATA),
    ("metadata as list", file_of('{"__metadata__":[]}', b""), Fault.METADATA),
    ("metadata as text", file_of('{"__metadata__":"x"}', b""), Fault.METADATA),
    ("entry null", file_of('{"a":null}'), Fault.TENSOR_ENTRY),
    ("entry a list", file_of('{"a":["F32",[2],[0,8]]}'), Fault.TENSOR_ENTRY),
    ("entry empty", file_of('{"a":{}}'), Fault.TENSOR_ENTRY),
    ("no offsets", file_of('{"a":{"dtype":"F32","shape":[2]}}'), Fault.TENSOR_ENTRY),
    ("unknown dtype", file_of(one('"F33"')), Fault.UNKNOWN_DTYPE),
    ("dtype in lower case", file_of(one('"f32"')), Fault.UNKNOWN_DTYPE),
    ("dtype number", file_of(one("0")), Fault.UNKNOWN_DTYPE),
    ("dtype null", file_of(one("null")), Fault.UNKNOWN_DTYPE),
    ("dtype list", file_of(one('["F32"]')), Fault.UNKNOWN_DTYPE),
    ("dtype object", file_of(one('{"F32":null}')), Fault.UNKNOWN_DTYPE),
    ("negative dimension", file_of(one(shape="[-2]")), Fault.BAD_SHAPE),
    ("two negative dimensions", file_of(one(shape="[-1,-2]")), Fault.BAD_SHAPE),
    ("minus zero", file_of(one(shape="[-0]", offsets="[0,0]"), b""), Fault.BAD_SHAPE),
    ("boolean dimension", file_of(one(shape="[true,2]")), Fault.BAD_SHAPE),
    ("float dimension", file_of(one(shape="[2.0]")), Fault.BAD_SHAPE),
    ("text dimension", file_of(one(shape='["2"]')), Fault.BAD_SHAPE),
    ("nested dimension", file_of(one(shape="[[2]]")), Fault.BAD_SHAPE),
    ("shape a number", file_of(one(shape="2")), Fault.BAD_SHAPE),
    ("shape null", file_of(one(shape="null")), Fault.BAD_SHAPE),
    ("dimension 2^64", file_of(one(shape=f"[{1 << 64}]")), Fault.BAD_SHAPE),
    ("2^64 elements", file_of(one(shape="[4294967296,4294967296]")), Fault.SHAPE_OVERFLOW),
    ("2^64 bits", file_of(one(shape=f"[{1 << 59}]")), Fault.SHAPE_OVERFLOW),
    ("wraps to 8 bytes", file_of(one(shape=f"[{(1 << 63) + 1},2]")), Fault.SHAPE_OVERFLOW),
    ("overflow, then zero", file_of(one(shape=f"[{1 << 63},4,0]", offsets="[0,0]"), b""),
     Fault.SHAPE_OVERFLOW),
    ("one offset", file_of(one(offsets="[8]")), Fault.BAD_OFFSETS),
    ("three offsets", file_of(one(offsets="[0,8,8]")), Fault.BAD_OFFSETS),
    ("negative offset", file_of(one(offsets="[-8,0]")), Fault.BAD_OFFSETS),
    ("float offset", file_of(one(offsets="[0,8.0]")), Fault.BAD_OFFSETS),
    ("boolean offset", file_of(one(offsets="[false,8]")), Fault.BAD_OFFSETS),
    ("offset 2^64", file_of(one(offsets=f"[0,{1 << 64}]")), Fault.BAD_OFFSETS),
    ("offsets an object", file_of(one(offsets='{"0":0,"1":8}')), Fault.BAD_OFFSETS),
    ("ends before it begins", file_of(one(offsets="[8,0]")), Fault.OFFSETS_REVERSED),
    ("one byte beyond the file", file_of(one(), b"\0" * 7), Fault.OFFSETS_BEYOND_FILE),
    ("far beyond the file", file_of(one(offsets=f"[0,{(1 << 64) - 1}]")),
     Fault.OFFSETS_BEYOND_FILE),
    ("size too small", file_of(one(shape="[1]")), Fault.SIZE_MISMATCH),
    ("size too large", file_of(one(shape="[3]")), Fault.SIZE_MISMATCH),
    ("scalar of two", file_of(one(shape="[]")), Fault.SIZE_MISMATCH),
    ("empty tensor with bytes", file_of(one(shape="[0]")), Fault.SIZE_MISMATCH),
    ("F4 with half a byte", file_of(one('"F4"', "[15]")), Fault.SUB_BYTE),
    ("F6 with 6 bits", file_of(one('"F6_E2M3"', "[]", "[0,1]"), b"\0"), Fault.SUB_BYTE),
    ("same bytes twice", file_of(two("[0,4]", "[0,4]"), b"\0" * 4), Fault.OVERLAP),
    ("overlap by a byte", file_of(two("[0,4]", "[3,7]"), b"\0" * 7), Fault.OVERLAP),
    ("hole at the start", file_of(one(shape="[1]", offsets="[4,8]")), Fault.HOLE),
    ("hole in the middle", file_of(two("[0,4]", "[5,9]"), b"\0" * 9), Fault.HOLE),
    ("trailing byte", file_of(one(), b"\0" * 9), Fault.TRAILING_BYTES),
    ("data but no tensors", file_of("{}"), Fault.TRAILING_BYTES),
    ("a zip after the tensors", file_of(one(), b"\0" * 8 + b"PK\x05\x06" + b"\0" * 18),
     Fault.TRAILING_BYTES),
]  # fmt: skip

# What the library accepts and this package refuses on purpose: see formats/safetensors.py.
STRICTER = {
    "space before the object",
    "new line before the object",
    "tensor twice",
    "tensor twice, once escaped",
    "unknown field twice",
    "key twice deep inside",
    "metadata key twice",
    "entry a list",
    "dtype object",
    "millions of empty lists",
}


HONEST: list[tuple[str, bytes]] = [
    ("one tensor", file_of(one())),
    ("no tensors", file_of("{}", b"")),
    ("padded", file_of(one() + "   \n\t\r ")),
    ("scalar", file_of(one(shape="[]", offsets="[0,4]"), b"\0" * 4)),
    ("empty tensor", file_of(one(shape="[0,3]", offsets="[0,0]"), b"")),
    ("zero before a huge dimension", file_of(one(shape=f"[0,{1 << 63},9]", offsets="[0,0]"), b"")),
    ("unknown field", file_of(more('{"nested":[1.5,null,true,-3,1e5]}'))),
    ("unknown field with a long number", file_of(more("9" * 300))),
    ("nested as deep as allowed", file_of(more("[" * 125 + "]" * 125))),
    ("metadata null", file_of(f'{{"__metadata__":null,"a":{entry()}}}')),
    ("name of nothing", file_of(f'{{"":{entry()}}}')),
    ("escaped pair", file_of(rf'{{"\ud83d\ude00":{entry()}}}')),
    ("a backslash before what looks like a pair", file_of(rf'{{"\\ud800":{entry()}}}')),
    ("names in other scripts", file_of(f'{{"重み/é":{entry()}}}')),
    ("F4", file_of(one('"F4"', "[16]"))),
    ("F6", file_of(one('"F6_E3M2"', "[4]", "[0,3]"), b"\0" * 3)),
    ("not in order", file_of(two("[4,8]", "[0,4]"))),
]  # fmt: skip
