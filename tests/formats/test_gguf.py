"""GGUF: what the gguf package writes is read as it reads it, and liars are told what they said."""

import os
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from files import gguf_files
from files.gguf_files import HONEST, LIARS, file_of, info, listed, number, one, parse
from files.refusals import refused
from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.errors import (
    CheckpointFault,
    FormatFault,
    GgufFault,
)
from tensor_dedup.formats.gguf import DTYPES, MAX_HEADER_BYTES, REMOVED, GgufHeader, read_header
from tensor_dedup.formats.safetensors import DTYPE_BITS

Q = GGMLQuantizationType
Seen = dict[str, tuple[str, tuple[int, ...], bytes]]


def called(kind: GGMLQuantizationType) -> str:
    """What the package's type is called here."""
    plain = {Q.F64, Q.F32, Q.F16, Q.BF16, Q.I8, Q.I16, Q.I32, Q.I64}
    return kind.name if kind in plain else f"gguf:{kind.name}"


def seen_by_package(path: Path) -> Seen:
    return {
        tensor.name: (
            called(tensor.tensor_type),
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.data.tobytes(),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def seen_by_us(path: Path, header: GgufHeader) -> Seen:
    file = path.read_bytes()
    return {
        spec.name: (spec.dtype, spec.shape, file[spec.start : spec.start + spec.nbytes])
        for spec in header.tensors
    }


def write(path: Path, tensors: dict[str, Any], alignment: int | None = None) -> Path:
    """A file of the package: arrays, or (bytes of blocks, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_string("general.name", "a name — 名")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(1000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 1000)
    writer.add_array("flags", [True, False])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_uint64("large", 1 << 40)
    writer.add_int8("small", -3)
    writer.add_float64("exact", 0.25)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: GGMLQuantizationType, rows: int, width: int = 1) -> tuple[Any, Any]:
    """Rows of so many blocks of any bytes: the package knows no quantiser for some types."""
    _, nbytes = GGML_QUANT_SIZES[kind]
    rng = numpy.random.default_rng(int(kind))
    return rng.integers(0, 256, (rows, width * nbytes), dtype=numpy.uint8), kind


def test_the_table_of_types_is_that_of_the_package() -> None:
    assert {kind: (t.dtype, t.block_elements, t.block_bytes) for kind, t in DTYPES.items()} == {
        int(kind): (called(kind), *GGML_QUANT_SIZES[kind]) for kind in Q
    }
    assert not REMOVED.keys() & set(Q)


def test_plain_types_are_called_as_in_safetensors() -> None:
    plain = [layout for layout in DTYPES.values() if not layout.dtype.startswith("gguf:")]
    assert {layout.dtype for layout in plain} < DTYPE_BITS.keys()
    for layout in plain:
        assert (layout.block_elements, layout.block_bytes * 8) == (1, DTYPE_BITS[layout.dtype])


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_a_file_of_the_package(tmp_path: Path, alignment: int | None) -> None:
    rng = numpy.random.default_rng(0)
    tensors: dict[str, Any] = {
        "token_embd.weight": rng.random((6, 64), dtype=numpy.float32),
        "output_norm.weight": rng.random(5, dtype=numpy.float32),
        "half": rng.random((3, 7)).astype(numpy.float16),
        "double": rng.random((2, 2, 3)),
        "four": rng.integers(0, 9, (2, 1, 3, 5), dtype=numpy.int32),
        "bytes": rng.integers(0, 9, 7, dtype=numpy.int8),
    }
    for kind in Q:
        if GGML_QUANT_SIZES[kind][0] > 1:
            tensors[f"blk.0.{kind.name}.weight"] = blocks(kind, 3, 2)
    tensors["brain"] = (rng.integers(0, 256, (2, 8), dtype=numpy.uint8), Q.BF16)
    path = write(tmp_path / "model.gguf", tensors, alignment)
    header = read_header(path)
    assert seen_by_us(path, header) == seen_by_package(path)
    assert len(header.tensors) == len(tensors)
    assert (header.version, header.alignment) == (3, alignment or 32)
    assert header.metadata["general.name"] == "a name — 名"
    assert (header.metadata["large"], header.metadata["small"]) == (1 << 40, -3)
    assert (header.metadata["exact"], header.metadata["tokenizer.ggml.add_bos_token"]) == (0.25, 1)
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.header_bytes == min(spec.start for spec in header.tensors)


def test_what_was_quantised_is_the_blocks(tmp_path: Path) -> None:
    weight = numpy.linspace(-1, 1, 4 * 256, dtype=numpy.float32).reshape(4, 256)
    packed = gguf.quantize(weight, Q.Q8_0)
    path = write(tmp_path / "model.gguf", {"w": (packed, Q.Q8_0)})
    (spec,) = read_header(path).tensors
    assert (spec.dtype, spec.shape, spec.nbytes) == ("gguf:Q8_0", (4, 256), 4 * 8 * 34)
    data = path.read_bytes()[spec.start : spec.start + spec.nbytes]
    assert data == packed.tobytes()


@pytest.mark.parametrize(("what", "file", "lie"), LIARS, ids=[what for what, _, _ in LIARS])
def test_a_liar_is_told_what_it_said(
    tmp_path: Path, what: str, file: bytes, lie: FormatFault
) -> None:
    with refused(lie) as caught:
        parse(file)
    assert str(caught.value).startswith("liar.gguf: ")
    path = tmp_path / "liar.gguf"
    path.write_bytes(file)
    with refused(lie, match=r"liar\.gguf"):
        read_header(path)


def test_every_kind_of_error_has_a_liar() -> None:
    assert set(GgufFault) - {lie for _, _, lie in LIARS} == {
        GgufFault.HEADER_TOO_LARGE,  # test_a_huge_header_is_not_read
    }


@pytest.mark.parametrize(("what", "file"), HONEST, ids=[what for what, _ in HONEST])
def test_honest_oddities(tmp_path: Path, what: str, file: bytes) -> None:
    header = parse(file)
    path = tmp_path / "odd.gguf"
    path.write_bytes(file)
    assert read_header(path).tensors == header.tensors


def test_an_error_names_tensor_and_numbers_and_survives_pickling() -> None:
    with refused(GgufFault.MISALIGNED) as caught:
        parse(one(name="blk.0", offset=8))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.facts == {
        "path": "liar.gguf",
        "tensor": "blk.0",
        "offset": 8,
        "alignment": 32,
    }
    assert str(error) == (
        "liar.gguf: tensor 'blk.0': its offset 8 is no multiple of 32; "
        "download or save this file again"
    )


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    count = 1 << 35
    path.write_bytes(file_of([listed(gguf_files.U8, count)], counts=(0, 1)))
    os.truncate(path, (1 << 35) + 1000)
    with refused(GgufFault.HEADER_TOO_LARGE, match=str(MAX_HEADER_BYTES)):
        read_header(path)


def test_a_header_of_many_chunks(tmp_path: Path) -> None:
    words = b"".join(gguf_files.text(f"word {i}") for i in range(200_000))
    file = file_of([listed(gguf_files.STRING, 200_000, words), number("n", 7)], [info()], b"\0" * 8)
    path = tmp_path / "words.gguf"
    path.write_bytes(file)
    header = read_header(path)
    assert header.metadata == {"n": 7}
    assert header.header_bytes == len(file) - 8
    with path.open("rb") as opened:
        opened.seek(5)
        assert read_header("named", fd=opened.fileno()).tensors == header.tensors
        assert opened.tell() == 5


def test_what_is_no_file(tmp_path: Path) -> None:
    with refused(CheckpointFault.NOT_A_FILE):
        read_header(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        read_header(tmp_path / "nothing.gguf")


def test_a_file_that_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(gguf_files.HONEST_FILE)
    status = os.stat_result((0o100644, 0, 0, 1, 0, 0, 1 << 20, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda fd: status)
    with pytest.raises(ChangedFileError, match="shrank"):
        read_header(path)
