"""Safetensors files that lie, each with the error it must raise, and honest oddities."""

import struct
from typing import Any

from safetensors import deserialize

from tensor_dedup.errors import FormatError
from tensor_dedup.formats import errors as lies
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
LIARS: list[tuple[str, bytes, type[FormatError]]] = [
    ("no bytes", b"", lies.EmptyFileError),
    ("one byte", b"\1", lies.FileTooShortError),
    ("seven bytes", b"\2\0\0\0\0\0\0", lies.FileTooShortError),
    ("header of 2^64-1 bytes", b"\xff" * 8 + b"{}", lies.HeaderTooLargeError),
    ("header of 2^40 bytes", struct.pack("<Q", 1 << 40) + b"{}", lies.HeaderTooLargeError),
    (
        "header one byte over the limit",
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
        lies.HeaderTooLargeError,
    ),
    ("header longer than file", struct.pack("<Q", 3) + b"{}", lies.HeaderTruncatedError),
    ("length as big-endian", struct.pack(">Q", 2) + b"{}", lies.HeaderTooLargeError),
    ("header cut in the middle", file_of(one(), b"")[:-5], lies.HeaderTruncatedError),
    ("header of no bytes", file_of(""), lies.BadJsonError),
    ("not UTF-8", file_of(b'{"\xff":1}'), lies.JsonEncodingError),
    ("surrogate as bytes", file_of(b'{"\xed\xa0\x80":1}'), lies.JsonEncodingError),
    ("UTF-16", file_of("{}".encode("utf-16-le")), lies.BadJsonError),
    ("byte order mark", file_of("\ufeff" + one()), lies.BadJsonError),
    ("half a surrogate pair", file_of(r'{"\ud800":' + entry() + "}"), lies.JsonEncodingError),
    ("low half alone", file_of(r'{"\udc00":' + entry() + "}"), lies.JsonEncodingError),
    ("half a pair before a pair", file_of(more(r'"\ud800\ud83d\ude00"')), lies.JsonEncodingError),
    ("not JSON", file_of("hello"), lies.BadJsonError),
    ("cut JSON of right length", file_of(one()[:-1]), lies.BadJsonError),
    ("text after the JSON", file_of(one() + "{}"), lies.BadJsonError),
    ("zeros after the JSON", file_of(one() + "\0\0"), lies.BadJsonError),
    ("trailing comma", file_of('{"a":' + entry() + ",}"), lies.BadJsonError),
    ("comment", file_of("{/**/}", b""), lies.BadJsonError),
    ("control character in a name", file_of('{"a\1":' + entry() + "}"), lies.BadJsonError),
    ("pickle", file_of(b"\x80\x04."), lies.JsonEncodingError),
    ("NaN", file_of(more("NaN")), lies.JsonConstantError),
    ("Infinity", file_of(more("Infinity")), lies.JsonConstantError),
    ("-Infinity as offset", file_of(one(offsets="[-Infinity,8]")), lies.JsonConstantError),
    ("number beyond floats", file_of(more("1e999")), lies.JsonNumberError),
    ("the largest float, where readers disagree", file_of(more("1.7976931348623158e308")),
     lies.JsonNumberError),
    ("number of 5000 digits", file_of(more("9" * 5000)), lies.JsonNumberError),
    ("dimension of 5000 digits", file_of(one(shape="[" + "9" * 5000 + "]")), lies.JsonNumberError),
    ("lists 200,000 deep", file_of("[" * 200_000), lies.JsonNestingError),
    ("objects 200,000 deep", file_of('{"a":' * 200_000), lies.JsonNestingError),
    ("lists 126 deep in a tensor", file_of(more("[" * 126 + "]" * 126)), lies.JsonNestingError),
    ("millions of empty lists", file_of(more("[" + "[]," * 2_000_001 + "[]]")), lies.JsonBombError),
    ("millions of objects", file_of("{" + "{" * 1_000_002), lies.JsonBombError),
    ("millions of numbers", file_of(one(shape="[" + "1," * 8_000_001 + "1]")), lies.JsonBombError),
    ("list", file_of("[]", b""), lies.NotAnObjectError),
    ("null", file_of("null", b""), lies.NotAnObjectError),
    ("text", file_of('"abc"', b""), lies.NotAnObjectError),
    ("number", file_of("12", b""), lies.NotAnObjectError),
    ("space before the object", file_of(" " + one()), lies.HeaderStartError),
    ("new line before the object", file_of("\n" + one()), lies.HeaderStartError),
    ("tensor twice", file_of(f'{{"a":{entry()},"a":{entry()}}}'), lies.DuplicateKeyError),
    ("tensor twice, once escaped", file_of(f'{{"a":{entry()},"\\u0061":{entry()}}}'),
     lies.DuplicateKeyError),
    ("field twice", file_of(one(more=',"shape":[2]')), lies.DuplicateKeyError),
    ("unknown field twice", file_of(one(more=',"x":1,"x":1')), lies.DuplicateKeyError),
    ("key twice deep inside", file_of(more('[{"k":1,"k":2}]')), lies.DuplicateKeyError),
    ("metadata twice", file_of('{"__metadata__":{},"__metadata__":{}}', b""),
     lies.DuplicateKeyError),
    ("metadata key twice", file_of('{"__metadata__":{"k":"1","k":"2"}}', b""),
     lies.DuplicateKeyError),
    ("metadata with a number", file_of('{"__metadata__":{"k":1}}', b""), lies.MetadataError),
    ("metadata with null", file_of('{"__metadata__":{"k":null}}', b""), lies.MetadataError),
    ("metadata with an object", file_of('{"__metadata__":{"k":{}}}', b""), lies.MetadataError),
    ("metadata as list", file_of('{"__metadata__":[]}', b""), lies.MetadataError),
    ("metadata as text", file_of('{"__metadata__":"x"}', b""), lies.MetadataError),
    ("entry null", file_of('{"a":null}'), lies.TensorEntryError),
    ("entry a list", file_of('{"a":["F32",[2],[0,8]]}'), lies.TensorEntryError),
    ("entry empty", file_of('{"a":{}}'), lies.TensorEntryError),
    ("no offsets", file_of('{"a":{"dtype":"F32","shape":[2]}}'), lies.TensorEntryError),
    ("unknown dtype", file_of(one('"F33"')), lies.UnknownDtypeError),
    ("dtype in lower case", file_of(one('"f32"')), lies.UnknownDtypeError),
    ("dtype number", file_of(one("0")), lies.UnknownDtypeError),
    ("dtype null", file_of(one("null")), lies.UnknownDtypeError),
    ("dtype list", file_of(one('["F32"]')), lies.UnknownDtypeError),
    ("dtype object", file_of(one('{"F32":null}')), lies.UnknownDtypeError),
    ("negative dimension", file_of(one(shape="[-2]")), lies.BadShapeError),
    ("two negative dimensions", file_of(one(shape="[-1,-2]")), lies.BadShapeError),
    ("minus zero", file_of(one(shape="[-0]", offsets="[0,0]"), b""), lies.BadShapeError),
    ("boolean dimension", file_of(one(shape="[true,2]")), lies.BadShapeError),
    ("float dimension", file_of(one(shape="[2.0]")), lies.BadShapeError),
    ("text dimension", file_of(one(shape='["2"]')), lies.BadShapeError),
    ("nested dimension", file_of(one(shape="[[2]]")), lies.BadShapeError),
    ("shape a number", file_of(one(shape="2")), lies.BadShapeError),
    ("shape null", file_of(one(shape="null")), lies.BadShapeError),
    ("dimension 2^64", file_of(one(shape=f"[{1 << 64}]")), lies.BadShapeError),
    ("2^64 elements", file_of(one(shape="[4294967296,4294967296]")), lies.ShapeOverflowError),
    ("2^64 bits", file_of(one(shape=f"[{1 << 59}]")), lies.ShapeOverflowError),
    ("wraps to 8 bytes", file_of(one(shape=f"[{(1 << 63) + 1},2]")), lies.ShapeOverflowError),
    ("overflow, then zero", file_of(one(shape=f"[{1 << 63},4,0]", offsets="[0,0]"), b""),
     lies.ShapeOverflowError),
    ("one offset", file_of(one(offsets="[8]")), lies.BadOffsetsError),
    ("three offsets", file_of(one(offsets="[0,8,8]")), lies.BadOffsetsError),
    ("negative offset", file_of(one(offsets="[-8,0]")), lies.BadOffsetsError),
    ("float offset", file_of(one(offsets="[0,8.0]")), lies.BadOffsetsError),
    ("boolean offset", file_of(one(offsets="[false,8]")), lies.BadOffsetsError),
    ("offset 2^64", file_of(one(offsets=f"[0,{1 << 64}]")), lies.BadOffsetsError),
    ("offsets an object", file_of(one(offsets='{"0":0,"1":8}')), lies.BadOffsetsError),
    ("ends before it begins", file_of(one(offsets="[8,0]")), lies.OffsetsReversedError),
    ("one byte beyond the file", file_of(one(), b"\0" * 7), lies.OffsetsBeyondFileError),
    ("far beyond the file", file_of(one(offsets=f"[0,{(1 << 64) - 1}]")),
     lies.OffsetsBeyondFileError),
    ("size too small", file_of(one(shape="[1]")), lies.SizeMismatchError),
    ("size too large", file_of(one(shape="[3]")), lies.SizeMismatchError),
    ("scalar of two", file_of(one(shape="[]")), lies.SizeMismatchError),
    ("empty tensor with bytes", file_of(one(shape="[0]")), lies.SizeMismatchError),
    ("F4 with half a byte", file_of(one('"F4"', "[15]")), lies.SubByteError),
    ("F6 with 6 bits", file_of(one('"F6_E2M3"', "[]", "[0,1]"), b"\0"), lies.SubByteError),
    ("same bytes twice", file_of(two("[0,4]", "[0,4]"), b"\0" * 4), lies.OverlapError),
    ("overlap by a byte", file_of(two("[0,4]", "[3,7]"), b"\0" * 7), lies.OverlapError),
    ("hole at the start", file_of(one(shape="[1]", offsets="[4,8]")), lies.HoleError),
    ("hole in the middle", file_of(two("[0,4]", "[5,9]"), b"\0" * 9), lies.HoleError),
    ("trailing byte", file_of(one(), b"\0" * 9), lies.TrailingBytesError),
    ("data but no tensors", file_of("{}"), lies.TrailingBytesError),
    ("a zip after the tensors", file_of(one(), b"\0" * 8 + b"PK\x05\x06" + b"\0" * 18),
     lies.TrailingBytesError),
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
