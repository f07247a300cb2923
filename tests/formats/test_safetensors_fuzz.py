"""Headers nobody thought of: the library is the judge, and nothing but FormatError comes out."""

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from files.refusals import count_accepted
from files.safetensors_files import entry, file_of, library, parse, seen_by_library, seen_by_us
from tensor_dedup.errors import FormatError
from tensor_dedup.formats.errors import (
    JsonFault,
    LocatedError,
    SafetensorsFault,
)
from tensor_dedup.formats.safetensors import DTYPE_BITS

# Bits of text that have broken readers of JSON or of this format before.
SPLINTERS = (
    "{", "}", "[", "]", ",", ":", '"', " ", "\n", "\\", "\\u0000", "\\ud800", "\\udc00", "\ufeff",
    "null", "true", "false", "NaN", "-Infinity", "-0", "0", "-1", "1.0", "1e0", "1E400", "1e-400",
    "18446744073709551615", "18446744073709551616", "9223372036854775808", "9" * 400, "01", "+1",
    '"F32"', '"F4"', '"BOOL"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', "{}",
    '{"F32":null}', "[0,0]", "[0,8]", "\0", "\x7f", "é", "[" * 130 + "]" * 130,
)  # fmt: skip


def judge(file: bytes) -> bool:
    """Ours and the library's verdict on a file agree. Returns whether both accepted it."""
    try:
        found = seen_by_us(file)
    except FormatError as error:
        if not refused_on_purpose(error):
            with pytest.raises(SafetensorError):
                library(file)
        return False
    assert found == seen_by_library(file)
    return True


def refused_on_purpose(error: FormatError) -> bool:
    """The four strictnesses that formats/safetensors.py lists."""
    kind = error.kind if isinstance(error, LocatedError) else None
    if kind is SafetensorsFault.TENSOR_ENTRY:
        return "JSON list" in str(error)
    if kind is SafetensorsFault.UNKNOWN_DTYPE:
        return str(error.facts["dtype"]).startswith("{")
    return kind in (JsonFault.DUPLICATE_KEY, SafetensorsFault.HEADER_START, JsonFault.BOMB)


def honest(rng: random.Random) -> tuple[dict[str, Any], int]:
    """The header of a file that is in order, as an object, and the size of its data."""
    header: dict[str, Any] = {}
    end = 0
    for _ in range(rng.randrange(4)):
        dtype = rng.choice(tuple(DTYPE_BITS))
        shape = [rng.randrange(4) for _ in range(rng.randrange(3))] + [4]
        begin, end = end, end + DTYPE_BITS[dtype] * math.prod(shape) // 8
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])]
        rng.shuffle(fields)
        header[rng.choice("abcdef") * rng.randrange(3)] = dict(fields)
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": rng.choice(("pt", "", "é"))}
    # A name drawn twice has left a hole: one more lie for the fuzzer.
    items = list(header.items())
    rng.shuffle(items)
    return dict(items), end


def _change_value(rng: random.Random, header: dict[str, Any]) -> None:
    tensors = [value for value in header.values() if "dtype" in value]
    if not tensors:
        return
    field = rng.choice(("dtype", "shape", "data_offsets", "extra"))
    value: object = rng.choice(
        (None, True, -1, 1.5, "F32", "F4", [], {}, [0], [0, 4], [4, 0], [1 << 64, 1], [[0], 1])
    )
    tensor = rng.choice(tensors)
    numbers = tensor.get(field)
    if isinstance(numbers, list) and numbers and rng.random() < 0.7:
        numbers[rng.randrange(len(numbers))] = rng.choice(
            (0, 1, 2, 3, 4, 8, 1 << 31, 1 << 63, (1 << 64) - 1, -1)
        )
    elif rng.random() < 0.2:
        tensor.pop(field, None)
    else:
        tensor[field] = value


def _change_text(rng: random.Random, text: str) -> str:
    start = rng.randrange(len(text) + 1)
    stop = min(len(text), start + rng.choice((0, 0, 0, 1, 1, 2, 9)))
    return text[:start] + rng.choice(SPLINTERS) + text[stop:]


def _change_bytes(rng: random.Random, file: bytes) -> bytes:
    changed = bytearray(file)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[place : place + rng.randrange(4)]
        elif kind == 2:
            changed[place:place] = rng.randbytes(rng.randrange(4))
        else:
            del changed[place:]
    return bytes(changed)


def liar(rng: random.Random) -> bytes:
    """A file made from an honest one by changes to values, text, data or bytes."""
    header, size = honest(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        _change_value(rng, header)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    for _ in range(rng.choice((0, 0, 1, 2))):
        text = _change_text(rng, text)
    file = file_of(text, rng.randbytes(max(0, size + rng.choice((0, 0, 0, 0, 1, -1)))))
    return _change_bytes(rng, file) if rng.random() < 0.2 else file


def fuzz(cases: int, seed: int) -> None:
    accepted = count_accepted(cases, seed, lambda rng, _: liar(rng), judge)
    # Fuzzing that never or always gets past the checks tests nothing.
    assert cases // 20 < accepted < cases // 2


def test_fuzz() -> None:
    fuzz(20_000, seed=20_240_601)


@pytest.mark.long
def test_fuzz_a_million() -> None:
    fuzz(1_000_000, seed=1)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\2\0\0\0\0\0\0\0{}")
def test_any_bytes(file: bytes) -> None:
    judge(file)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100))
def test_any_header(header: bytes) -> None:
    judge(file_of(header, b""))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("dtype", "shape", "data_offsets", "x")), inner)
    ),
    max_leaves=8,
)
FIELDS = {
    "dtype": st.sampled_from(tuple(DTYPE_BITS)) | JSON,
    "shape": st.lists(st.integers(0, 3) | JSON, max_size=3) | JSON,
    "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | JSON,
}
ENTRIES = st.fixed_dictionaries(FIELDS, optional={"x": JSON}) | JSON
HEADERS = st.fixed_dictionaries(
    {}, optional={"__metadata__": JSON, "a": ENTRIES, "b": ENTRIES, "": ENTRIES}
)


@settings(max_examples=500, deadline=None)
@given(HEADERS | JSON, st.integers(0, 16), st.booleans())
def test_any_json(header: object, data_bytes: int, plain: bool) -> None:
    judge(file_of(json.dumps(header, ensure_ascii=plain), bytes(data_bytes)))


def layout(begin: int, end: int) -> str:
    return entry('"U8"', f"[{max(0, end - begin)}]", f"[{begin},{end}]")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5), st.integers(0, 12))
def test_any_layout(offsets: list[tuple[int, int]], data_bytes: int) -> None:
    tensors = ",".join(f'"{i}":{layout(begin, end)}' for i, (begin, end) in enumerate(offsets))
    judge(file_of(f"{{{tensors}}}", bytes(data_bytes)))


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_any_order_of_honest_tensors_is_accepted(order: list[int], sizes: list[int]) -> None:
    ends = list(itertools.accumulate(sizes))
    entries = [layout(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    tensors = ",".join(f'"{i}":{entries[i]}' for i in order)
    file = file_of(f"{{{tensors}}}", bytes(range(sum(sizes))))
    assert judge(file)
    starts = [spec.start for spec in parse(file).tensors]
    assert starts == sorted(starts)
