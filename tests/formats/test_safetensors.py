"""The safetensors header: what is read from honest files, and every way to lie."""

import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from files.refusals import refused
from files.safetensors_files import (
    HONEST,
    LIARS,
    STRICTER,
    entry,
    file_of,
    library,
    one,
    parse,
    seen_by_library,
    seen_by_us,
    two,
)
from processes import process_state
from tensor_dedup.digest import digest
from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError, FormatError
from tensor_dedup.formats.errors import (
    CheckpointFault,
    FormatFault,
    JsonFault,
    SafetensorsError,
    SafetensorsFault,
)
from tensor_dedup.formats.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    read_header,
)
from tensor_dedup.types import TensorSpec


@pytest.mark.parametrize(("what", "file", "lie"), LIARS, ids=[what for what, _, _ in LIARS])
def test_liars(what: str, file: bytes, lie: FormatFault, tmp_path: Path) -> None:
    with refused(lie) as caught:
        parse(file)
    assert str(caught.value).startswith("liar.safetensors")
    assert caught.value.facts["path"] == "liar.safetensors"
    path = tmp_path / "f.safetensors"
    path.write_bytes(file)
    with refused(lie):
        read_header(path)
    if what not in STRICTER:
        with pytest.raises(SafetensorError):
            library(file)


@pytest.mark.parametrize("what", sorted(STRICTER))
def test_where_we_are_stricter_the_library_still_accepts(what: str) -> None:
    # When this fails the library has become strict too: take the case off the list.
    library(next(file for name, file, _ in LIARS if name == what))


def test_every_kind_of_error_has_a_liar() -> None:
    assert {lie for _, _, lie in LIARS} == {*SafetensorsFault, *JsonFault}


def test_an_error_names_tensor_and_numbers_and_survives_pickling() -> None:
    with refused(SafetensorsFault.SIZE_MISMATCH) as caught:
        parse(file_of(one(shape="[3]")))
    error = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), error.kind) == (SafetensorsError, SafetensorsFault.SIZE_MISMATCH)
    assert str(error) == str(caught.value)
    assert error.facts == {"path": "liar.safetensors", "tensor": "a", "expected": 12, "got": 8}
    assert "F32 of shape [3] is 12 bytes, data_offsets hold 8" in str(error)


def test_a_hostile_name_does_not_fill_the_message() -> None:
    name = "n" * 1_000_000
    with refused(SafetensorsFault.UNKNOWN_DTYPE) as caught:
        parse(file_of(f'{{"{name}":{entry(chr(34) + "d" * 1_000_000 + chr(34))}}}'))
    assert len(str(caught.value)) < 1000
    assert len(repr(caught.value.facts)) < 1000


@pytest.mark.parametrize(("what", "file"), HONEST, ids=[what for what, _ in HONEST])
def test_honest_files_are_read_as_the_library_reads_them(what: str, file: bytes) -> None:
    assert seen_by_us(file) == seen_by_library(file)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_size_the_library_gives_it(dtype: str) -> None:
    nbytes = DTYPE_BITS[dtype]
    file = file_of(one(f'"{dtype}"', "[2,4]", f"[0,{nbytes}]"), os.urandom(nbytes))
    assert seen_by_us(file) == seen_by_library(file)


def test_what_a_header_says() -> None:
    file = file_of('{"__metadata__":{"format":"pt"},' + two("[4,8]", "[0,4]")[1:])
    header = parse(file)
    start = len(file) - 8
    assert header == SafetensorsHeader(
        path="liar.safetensors",
        file_size=len(file),
        header_bytes=start,
        metadata={"format": "pt"},
        tensors=(
            TensorSpec("b", "F32", (1,), start, 4),
            TensorSpec("a", "F32", (1,), start + 4, 4),
        ),
    )


def test_read_header_takes_a_path_or_an_open_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of(one()))
    expected = read_header(path)
    assert expected == read_header(str(path))
    with path.open("rb") as file:
        file.seek(5)
        path.unlink()
        assert read_header(path, fd=file.fileno()) == expected
        assert file.tell() == 5


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of(one(shape="[3]")))
    before = process_state.descriptors()
    with pytest.raises(FormatError):
        read_header(path)
    assert not process_state.descriptors() - before


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        read_header(tmp_path / "nowhere")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo])
def test_only_regular_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    make(path)
    with refused(CheckpointFault.NOT_A_FILE):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of(one()))
    pread = os.pread

    def shrink_first(fd: int, nbytes: int, offset: int) -> bytes:
        os.truncate(path, 20)
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", shrink_first)
    with pytest.raises(ChangedFileError):
        read_header(path)


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1, MAX_HEADER_BYTES, 1 << 20])
def test_no_read_allocates_more_than_the_file_holds(length: int, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 100)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    file = file_of("[" + "[]," * 2_500_000 + "[]]")
    tracemalloc.start()
    try:
        with refused(JsonFault.BOMB):
            parse(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The JSON twice, as bytes and as text; unfolded it would be thirty times as much.
    assert peak < 4 * len(file)


def test_as_many_tensors_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_dedup.formats.json._LIMITS", (("{", 102), ("[", 200), (",", 800)))
    empty = entry(shape="[0]", offsets="[0,0]")
    most = "{" + ",".join(f'"{i}":{empty}' for i in range(100)) + "}"
    assert len(parse(file_of(most, b"")).tensors) == 100
    with refused(JsonFault.BOMB):
        parse(file_of(most[:-1] + f',"100":{empty}}}', b""))


def test_a_nan_with_a_payload_survives_fingerprinting(tmp_path: Path) -> None:
    payloads = (0x7FC00000, 0x7FC00123, 0xFFC00000, 0x7FA00001)
    seen = set()
    for bits in payloads:
        path = tmp_path / f"{bits:x}.safetensors"
        path.write_bytes(file_of(one(), struct.pack("<II", bits, 0)))
        (spec,) = read_header(path).tensors
        data = path.read_bytes()[spec.start : spec.start + spec.nbytes]
        assert struct.unpack("<II", data) == (bits, 0)
        seen.add(digest(data))
    assert len(seen) == len(payloads)


def test_files_written_by_the_library_are_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    arrays = {
        f"t{i}": np.full(shape, i, dtype)
        for i, (shape, dtype) in enumerate(
            [((), "f4"), ((3,), "f2"), ((0, 2), "i8"), ((5, 7), "u1"), ((2, 2), "bool")]
        )
    }
    path = tmp_path / "f.safetensors"
    numpy.save_file(arrays, path, metadata={"format": "pt", "é": '"'})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "é": '"'}
    data = path.read_bytes()
    for spec in header.tensors:
        assert spec.shape == arrays[spec.name].shape
        assert data[spec.start : spec.start + spec.nbytes] == arrays[spec.name].tobytes()
    with safe_open(path, "numpy") as opened:
        assert sorted(opened.keys()) == sorted(arrays)


def test_specs_are_plain_values() -> None:
    header = parse(file_of(one()))
    assert pickle.loads(pickle.dumps(header)) == header
    assert json.dumps([list(spec.shape) for spec in header.tensors]) == "[[2]]"
