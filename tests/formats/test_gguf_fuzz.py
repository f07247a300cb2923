"""GGUF files nobody thought of: a FormatError, or what the gguf package sees in them."""

import random
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from files.gguf_files import (
    BOOL,
    HONEST,
    HONEST_FILE,
    LIARS,
    STRING,
    entry,
    file_of,
    info,
    listed,
    number,
    parse,
    text,
)
from files.refusals import count_accepted, mutated, peak_of
from tensor_dedup.errors import FormatError
from tensor_dedup.formats.gguf import DTYPES

SEEDS = [
    HONEST_FILE,
    file_of(
        [
            number("general.alignment", 64),
            entry("yes", BOOL, b"\1"),
            listed(STRING, 3, text("a") + text("bc") + text("")),
            listed(BOOL, 2, b"\0\1").replace(b"list", b"lies"),
        ],
        [info("blk.0.w", (256, 1), 12), info("n", (3, 2, 2), 30, 192), info("e", (0,), 1, 256)],
        bytes(144) + bytes(48) + bytes(24) + bytes(40),
        alignment=64,
    ),
    *(file for _, file in HONEST if len(file) < 400),
]


def seen_by_us(file: bytes) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    kinds = {layout.dtype: kind for kind, layout in DTYPES.items()}
    return {
        spec.name: (
            kinds[spec.dtype],
            spec.shape[::-1],
            file[spec.start : spec.start + spec.nbytes],
        )
        for spec in parse(file).tensors
    }


def judge(file: bytes, path: Path) -> bool:
    """Whether the file was taken; then the package takes it too, and sees the same in it."""
    try:
        found = seen_by_us(file)
    except FormatError:
        return False
    shapes = [shape for _, shape, _ in found.values()]
    if any(not shape or (0 in shape and max(shape) > 1 << 20) for shape in shapes):
        return True  # the package trips over a single number, numpy over a huge empty array
    path.write_bytes(file)
    assert found == {
        tensor.name: (
            int(tensor.tensor_type),
            tuple(map(int, tensor.shape)),
            tensor.data.tobytes(),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    return True


def fuzz(cases: int, seed: int, path: Path) -> None:
    accepted = count_accepted(
        cases, seed, lambda rng, _: mutated(rng, rng.choice(SEEDS)), lambda file: judge(file, path)
    )
    # Fuzzing that never or always gets past the checks tests nothing.
    assert cases // 50 < accepted < cases * 9 // 10


def test_fuzz(tmp_path: Path) -> None:
    fuzz(10_000, 20_261_121, tmp_path / "fuzzed.gguf")


@pytest.mark.long
def test_fuzz_a_million(tmp_path: Path) -> None:
    fuzz(1_000_000, 1, tmp_path / "fuzzed.gguf")


def test_no_lie_makes_it_take_more_memory_than_the_file() -> None:
    for what, file, _ in LIARS:

        def read(file: bytes = file) -> None:
            with suppress(FormatError):
                parse(file)

        assert peak_of(read) < (1 << 16) + 8 * len(file), what


def test_fuzzed_files_do_not_either() -> None:
    rng = random.Random(2)
    for _ in range(500):
        file = mutated(rng, rng.choice(SEEDS))

        def read(file: bytes = file) -> None:
            with suppress(FormatError):
                parse(file)

        assert peak_of(read) < (1 << 16) + 8 * len(file), file


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(file: bytes) -> None:
    for whole in (file, b"GGUF\3\0\0\0" + file):
        with suppress(FormatError):
            parse(whole)


@settings(max_examples=300)
@given(st.data())
def test_any_change_to_an_honest_file(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(SEEDS)))
    at = data.draw(st.integers(0, len(file)))
    gone = data.draw(st.integers(0, 16))
    file[at : at + gone] = data.draw(st.binary(max_size=16))
    with suppress(FormatError):
        header = parse(bytes(file))
        end = max((spec.start + spec.nbytes for spec in header.tensors), default=0)
        assert end <= len(file)
