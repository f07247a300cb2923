"""An index of data files is believed only when everything in it fits."""

import json
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from files.refusals import refused
from tensor_dedup.errors import FormatError
from tensor_dedup.formats.errors import JsonFault, TensorIndexError
from tensor_dedup.formats.errors import TensorIndexFault as Fault
from tensor_dedup.formats.serverless.artifact import parse_descriptor, parse_verification
from tensor_dedup.formats.serverless.storage_graph import graph_of, parse_graph, rebuild_index
from tensor_dedup.formats.serverless.tensor_index import (
    DTYPES,
    check_data,
    check_same,
    encode_index,
    encode_index_cbor,
    parse_index,
    parse_index_cbor,
)

GOOD = [0, 24, [2, 3], [3, 1], "torch.float32", 0]
NAME = "b" + "a" * 55


def index(**rows: object) -> bytes:
    return json.dumps(rows).encode()


def row(**changes: object) -> list[object]:
    names = ("offset", "size", "shape", "stride", "dtype", "storage_offset")
    return [changes.get(name, value) for name, value in zip(names, GOOD, strict=True)]


LIARS: list[tuple[str, bytes, Fault | JsonFault]] = [
    ("nothing", b"", JsonFault.SYNTAX),
    ("a list", b"[]", JsonFault.NOT_AN_OBJECT),
    ("not UTF-8", b'{"\xff":1}', JsonFault.ENCODING),
    ("a name twice", b'{"a":1,"a":1}', JsonFault.DUPLICATE_KEY),
    ("NaN", b'{"a":[NaN]}', JsonFault.CONSTANT),
    ("deep lists", b'{"a":' + b"[" * 100_000, JsonFault.NESTING),
    ("millions of lists", b'{"a":[' + b"[]," * 2_000_001 + b"[]]}", JsonFault.BOMB),
    ("an entry null", index(a=None), Fault.FIELDS),
    ("an entry an object", index(a={"offset": 0}), Fault.FIELDS),
    ("4 fields", index(a=GOOD[:4]), Fault.FIELDS),
    ("7 fields", index(a=[*GOOD, 0]), Fault.FIELDS),
    ("5 and 6 fields", index(a=GOOD[:5], b=GOOD), Fault.FIELDS),
    ("offset negative", index(a=row(offset=-8)), Fault.NUMBER),
    ("offset a float", index(a=row(offset=8.0)), Fault.NUMBER),
    ("offset a text", index(a=row(offset="0")), Fault.NUMBER),
    ("offset true", index(a=row(offset=True)), Fault.NUMBER),
    ("offset 2^63", index(a=row(offset=1 << 63)), Fault.NUMBER),
    ("offset of 100 digits", index(a=row(offset=10**100)), Fault.NUMBER),
    ("size null", index(a=row(size=None)), Fault.NUMBER),
    ("storage offset negative", index(a=row(storage_offset=-1)), Fault.NUMBER),
    ("storage offset a list", index(a=row(storage_offset=[])), Fault.NUMBER),
    ("unknown dtype", index(a=row(dtype="torch.float31")), Fault.DTYPE),
    ("dtype of safetensors", index(a=row(dtype="F32")), Fault.DTYPE),
    ("dtype a number", index(a=row(dtype=4)), Fault.DTYPE),
    ("dtype a list", index(a=row(dtype=["torch.float32"])), Fault.DTYPE),
    ("quantised dtype", index(a=row(dtype="torch.qint8")), Fault.DTYPE),
    ("shape a number", index(a=row(shape=6)), Fault.SHAPE),
    ("shape negative", index(a=row(shape=[-2, -3])), Fault.SHAPE),
    ("shape with true", index(a=row(shape=[True, 3])), Fault.SHAPE),
    ("shape of 65 dimensions", index(a=row(shape=[1] * 65, stride=[1] * 65)), Fault.SHAPE),
    ("2^126 elements", index(a=row(shape=[1 << 62, 1 << 62], stride=[0, 0])), Fault.SHAPE),
    ("stride negative", index(a=row(stride=[-3, 1])), Fault.STRIDE),
    ("stride missing", index(a=row(stride=[1])), Fault.STRIDE),
    ("stride a text", index(a=row(stride="31")), Fault.STRIDE),
    ("storage at 4", index(a=row(offset=4)), Fault.MISALIGNED),
    ("view too long", index(a=row(shape=[3, 3])), Fault.VIEW_BEYOND_STORAGE),
    ("view strides out", index(a=row(stride=[1 << 61, 1])), Fault.VIEW_BEYOND_STORAGE),
    ("view begins too late", index(a=row(storage_offset=1)), Fault.VIEW_BEYOND_STORAGE),
    ("view of one element too late", index(a=row(shape=[], stride=[], storage_offset=6)),
     Fault.VIEW_BEYOND_STORAGE),
    ("storages overlap", index(a=GOOD, b=row(offset=16)), Fault.STORAGE_OVERLAP),
    ("one storage inside another", index(a=row(size=800), b=row(offset=8)),
     Fault.STORAGE_OVERLAP),
    ("hole between storages", index(a=GOOD, b=row(offset=24 + 4104)), Fault.STORAGE_HOLE),
    ("hole at the start", index(a=row(offset=1 << 40)), Fault.STORAGE_HOLE),
]  # fmt: skip


@pytest.mark.parametrize(("blob", "lie"), [case[1:] for case in LIARS], ids=[c[0] for c in LIARS])
def test_liars_are_refused(blob: bytes, lie: Fault | JsonFault) -> None:
    with refused(lie, match="liar") as caught:
        parse_index(blob, "liar")
    assert len(str(caught.value)) < 1000


def test_a_long_name_does_not_fill_the_message() -> None:
    with refused(Fault.FIELDS) as caught:
        parse_index(index(**{"n" * 100_000: None}), "liar")
    assert len(str(caught.value)) < 1000


CBOR_LIARS: list[tuple[str, bytes, Fault | JsonFault]] = [
    ("nothing", b"", Fault.CBOR),
    ("cut", cbor2.dumps({"a": GOOD})[:-1], Fault.CBOR),
    ("more behind", cbor2.dumps({"a": GOOD}) + b"\0", Fault.CBOR),
    ("a list", cbor2.dumps([]), JsonFault.NOT_AN_OBJECT),
    ("a map of 2^60 names", b"\xbb\x10" + bytes(7), Fault.CBOR),
    ("a text of 2^60 bytes", b"\xa1\x7b\x10" + bytes(7), Fault.CBOR),
    ("a name twice", b"\xa2\x61a\x01\x61a\x01", Fault.CBOR),
    ("without a length", b"\xbf\x61a\x01\xff", Fault.CBOR),
    ("a number as its name", cbor2.dumps({1: GOOD}), Fault.CBOR),
    ("too deep", b"\xa1\x61a" + b"\x81" * 1000 + b"\x00", Fault.CBOR),
    ("a number in two bytes", b"\xa1\x61a\x18\x01", Fault.CBOR),
    ("a tagged date", b"\xa1\x61a\xc1\x00", Fault.CBOR),
    ("a big number", b"\xa1\x61a\xc2\x41\x08", Fault.CBOR),
    ("a shared value", b"\xa1\x61a\xd8\x1c\x81\xd8\x1d\x00", Fault.CBOR),
    ("an entry a number", cbor2.dumps({"a": 1}), Fault.FIELDS),
    ("an offset beyond 64 bits", cbor2.dumps({"a": row(offset=1 << 70)}), Fault.NUMBER),
    ("bytes as dtype", cbor2.dumps({"a": row(dtype=b"torch.float32")}), Fault.DTYPE),
    ("a float in the shape", cbor2.dumps({"a": row(shape=[2.0, 3])}), Fault.SHAPE),
]


@pytest.mark.parametrize(
    ("blob", "lie"), [case[1:] for case in CBOR_LIARS], ids=[c[0] for c in CBOR_LIARS]
)
def test_liars_in_cbor_are_refused(blob: bytes, lie: Fault | JsonFault) -> None:
    with refused(lie):
        parse_index_cbor(blob, "liar")


@given(st.binary(max_size=64))
def test_any_bytes_are_an_index_or_a_format_error(blob: bytes) -> None:
    for parse in (parse_index, parse_index_cbor):
        try:
            parse(blob, "any")
        except FormatError:
            continue


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("torch.int8"),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
def test_any_object_is_an_index_or_a_format_error(rows: dict[str, Any]) -> None:
    for parse, blob in (
        (parse_index, json.dumps(rows).encode()),
        (parse_index_cbor, cbor2.dumps(rows)),
    ):
        try:
            parse(blob, "any")
        except FormatError:
            continue


def test_what_the_two_layouts_say_is_read() -> None:
    five = parse_index(index(b=row(offset=24)[:5], a=GOOD[:5]), "five")
    assert (five.fields, [entry.name for entry in five.entries]) == (5, ["a", "b"])
    assert five.entries[0].storage_offset == 0
    rows = {"view": row(shape=[2], stride=[3], storage_offset=1), "whole": GOOD}
    six = parse_index(index(**rows), "six")
    assert (six.fields, six.total_size, len(six.storages)) == (6, 24, 1)
    view, whole = six.entries
    assert (view.start, view.nbytes, view.contiguous) == (4, 8, False)
    assert (whole.start, whole.nbytes, whole.contiguous) == (0, 24, True)


def test_a_storage_is_as_large_as_its_largest_tensor_says() -> None:
    found = parse_index(index(a=row(size=24), b=row(size=32, shape=[8], stride=[1])), "x")
    assert [(storage.offset, storage.nbytes) for storage in found.storages] == [(0, 32)]


def test_encodings_are_those_of_tensorcast() -> None:
    # Written by hand: names in order, no spaces, no escapes; the shortest CBOR.
    text = '{"a":[0,24,[2,3],[3,1],"torch.float32",0],"é":[24,2,[],[],"torch.bfloat16",0]}'.encode()
    found = parse_index(text, "x")
    assert encode_index(reversed(found.entries)) == text
    binary = encode_index_cbor(reversed(found.entries))
    assert binary.startswith(b"\xa2\x61a\x86\x00\x18\x18\x82\x02\x03\x82\x03\x01\x6dtorch.float32")
    assert binary.endswith(b"\x62" + "é".encode() + b"\x86\x18\x18\x02\x80\x80\x6etorch.bfloat16\0")
    assert parse_index_cbor(binary, "x").entries == found.entries


def test_an_index_is_compared_with_its_twin_and_its_data() -> None:
    found = parse_index(index(a=GOOD), "x")
    check_same(found, parse_index_cbor(encode_index_cbor(found.entries), "y"))
    with refused(Fault.INDEXES_DIFFER, match="'a'"):
        check_same(found, parse_index(index(a=row(dtype="torch.int32")), "y"))
    for nbytes in (24, 32, 4096, 24 + 4096):
        check_data(found, nbytes, "x")
    with refused(Fault.STORAGE_BEYOND_DATA):
        check_data(found, 23, "x")
    with refused(Fault.TRAILING_DATA):
        check_data(found, 24 + 4097, "x")


def graph(**changes: object) -> tuple[list[Any], list[Any]]:
    entry = {"storage_id": "s0", "device": "cpu", "nbytes": 24}
    alias = {
        "name": "a",
        "storage_id": "s0",
        "storage_offset": 0,
        "logical_length": 24,
        "shape": [2, 3],
        "stride": [3, 1],
        "dtype": "torch.float32",
    }
    for key, value in changes.items():
        (alias if key in alias and key != "storage_id" else entry)[key] = value
    return [entry], [alias]


def test_a_graph_gives_the_index() -> None:
    assert rebuild_index(*graph()) == encode_index(parse_index(index(a=GOOD), "x").entries)
    found = parse_index(index(a=GOOD, b=row(offset=24), c=GOOD), "x")
    rows = graph_of(found).to_json()
    assert rebuild_index(rows["storage_entries"], rows["tensor_aliases"]) == encode_index(
        found.entries
    )


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": -1},
        {"nbytes": True},
        {"nbytes": 1 << 63},
        {"nbytes": 20},
        {"device": 3},
        {"storage_id": "s1"},
        {"logical_length": 20},
        {"dtype": "torch.float31"},
        {"dtype": ["torch.float32"]},
        {"shape": [2, -3]},
        {"shape": "23"},
        {"stride": [1]},
        {"storage_offset": 1},
        {"more": 1},
    ],
)
def test_a_graph_that_lies_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TensorIndexError):
        rebuild_index(*graph(**change))


@pytest.mark.parametrize("rows", [None, {}, 3, [None], [[]], [{}]])
def test_what_is_no_graph_is_refused(rows: object) -> None:
    entries, aliases = graph()
    with refused(Fault.DESCRIPTOR):
        parse_graph(rows, aliases, "x")
    with refused(Fault.DESCRIPTOR):
        parse_graph(entries, rows if rows else [{}], "x")
    with refused(Fault.DESCRIPTOR, match="twice"):
        parse_graph(entries * 2, aliases, "x")


DESCRIPTOR = {
    "artifact_id": f"mi2:{NAME}:{NAME}",
    "index_multihash": NAME,
    "data_multihash": NAME,
    "schema_version": "v3",
    "encoding": "json",
    "total_size": 24,
}


@pytest.mark.parametrize(
    "change",
    [
        {"artifact_id": None},
        {"artifact_id": "mi2:a:b"},
        {"artifact_id": f"cgid:{NAME}"},
        {"index_multihash": NAME.upper()},
        {"data_multihash": NAME + "a"},
        {"schema_version": 3},
        {"total_size": -1},
        {"total_size": 1 << 64},
        {"total_size": "24"},
        {"hash_params": []},
        {"hash_params": {"chunk_size": 1}},
        {"hash_params": {"algorithm": "md5"}},
        {"hash_params": {"fanout": 3}},
    ],
)
def test_a_descriptor_that_lies_is_refused(change: dict[str, object]) -> None:
    assert parse_descriptor(json.dumps(DESCRIPTOR).encode(), "x").total_size == 24
    with refused(Fault.DESCRIPTOR):
        parse_descriptor(json.dumps({**DESCRIPTOR, **change}).encode(), "x")


VERIFICATION = {
    "version": "1.0",
    "artifact_size": 24,
    "full_hash": 1,
    "segment_hashes": [0] * 8,
    "sample_values": [0] * 16,
    "key_values": [0] * 3,
}


@pytest.mark.parametrize(
    "change",
    [
        {"artifact_size": -1},
        {"full_hash": 1 << 64},
        {"full_hash": "1"},
        {"segment_hashes": [0] * 7},
        {"sample_values": [0.5] * 16},
        {"key_values": None},
        {"byte_space_id": "view"},
        {"byte_space_id": None},
    ],
)
def test_a_verification_file_that_lies_is_refused(change: dict[str, object]) -> None:
    assert parse_verification(json.dumps(VERIFICATION).encode(), "x").artifact_size == 24
    with refused(Fault.VERIFICATION_FILE):
        parse_verification(json.dumps({**VERIFICATION, **change}).encode(), "x")


def test_the_hashes_of_a_view_are_never_taken_for_another() -> None:
    blob = json.dumps({**VERIFICATION, "byte_space_id": "v"}).encode()
    assert parse_verification(blob, "x", "v").byte_space_id == "v"
    for other in ("", "w"):
        with refused(Fault.VERIFICATION_FILE, match="about 'v'"):
            parse_verification(blob, "x", other)


def test_every_dtype_has_whole_bytes() -> None:
    assert all(size > 0 for _, size in DTYPES.values())
