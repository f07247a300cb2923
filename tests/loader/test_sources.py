"""Source tensors are read once, hashed where they are used, and never believed blindly."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from files import hinted
from processes import process_state
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import ChangedFileError, FormatError
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex
from tensor_dedup.loader.checkpoint_io.sources import (
    SourceFile,
    SourceReader,
    SourceTensor,
    StaleHintError,
)
from vllm_runs import deferring
from vllm_runs.deferring import Weights, module

VALUES = torch.arange(24, dtype=torch.float32).view(4, 6)
# Large enough for the hash to be computed by other threads, while the loading goes on.
MANY = 1 << 18


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return deferring.save(tmp_path / "m.safetensors", {"w": VALUES, "v": VALUES + 1})


@pytest.fixture
def file(path: Path) -> Iterator[SourceFile]:
    opened = SourceFile(path, None, "blake3")
    yield opened
    opened.close()


def read(source: SourceTensor, *, hashed: bool = True) -> tuple[SourceReader, torch.Tensor]:
    reader, memory = SourceReader("blake3"), torch.empty(source.spec.nbytes, dtype=torch.uint8)
    reader.fill(source, memory, hashed=hashed)
    reader.settle()
    return reader, memory


def test_reading_gives_the_bytes_and_their_digest(file: SourceFile) -> None:
    source = file.tensors["v"]
    reader, memory = read(source)
    assert memory.view(torch.float32).tolist() == (VALUES + 1).reshape(-1).tolist()
    assert source.digest == digest(memory.numpy().data)
    assert file.hashed == {(source.spec.start, source.spec.nbytes): source.digest}
    assert (reader.counters.bytes_read, reader.counters.bytes_hashed) == (96, 96)


def test_reading_without_hashing_leaves_the_digest_unknown(file: SourceFile) -> None:
    reader, _ = read(file.tensors["w"], hashed=False)
    assert file.tensors["w"].digest is None
    assert (reader.counters.bytes_read, reader.counters.bytes_hashed) == (96, 0)


def test_a_file_truncated_while_open_is_an_error_with_the_numbers(
    path: Path, file: SourceFile
) -> None:
    os.truncate(path, file.header.file_size - 8)
    last = max(file.tensors.values(), key=lambda source: source.spec.start)
    with pytest.raises(FormatError, match="ends after 88 of 96 bytes"):
        read(last)


def test_what_arrived_counts_whatever_became_of_another(file: SourceFile) -> None:
    def refuse(piece: memoryview, offset: int) -> None:
        raise OSError("there is no room for it")

    reader, source = SourceReader("blake3"), file.tensors["v"]
    memory = torch.empty(source.spec.nbytes, dtype=torch.uint8)
    reader.fill(source, memory, hashed=True)
    with pytest.raises(OSError, match="no room"):
        reader.read_pieces(file.tensors["w"], refuse)
    assert source.digest == digest(memory.numpy().data)
    assert file.tensors["w"].digest is None
    # And the reader goes on.
    assert reader.read_pieces(file.tensors["w"], lambda piece, offset: None)


def test_a_file_changed_while_open_is_noticed(path: Path, file: SourceFile) -> None:
    file.check_unchanged()
    with path.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedFileError):
        file.check_unchanged()


def test_hints_that_are_interrupted_leave_no_descriptor(
    path: Path, index: HintIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(index, "lookup", lookup)
    before = process_state.descriptors()
    with pytest.raises(KeyboardInterrupt):
        SourceFile(path, index, "blake3")
    assert not process_state.descriptors() - before


def test_a_header_that_lies_leaves_no_descriptor(tmp_path: Path) -> None:
    before = process_state.descriptors()
    liar = tmp_path / "liar.safetensors"
    liar.write_bytes(b"\xff" * 64)
    with pytest.raises(FormatError):
        SourceFile(liar, None, "blake3")
    assert not process_state.descriptors() - before


def remembered(index: HintIndex, path: Path, digests: dict[tuple[int, int], str]) -> None:
    with hinted.opened(path) as fd:
        before = FileIdentity.of(fd)
        assert index.record(fd, before, hinted.old_enough(before), "blake3", digests)


@pytest.fixture
def index(tmp_path: Path) -> HintIndex:
    return HintIndex(tmp_path / "hints.sqlite")


def test_a_hint_gives_the_digest_without_reading(path: Path, index: HintIndex) -> None:
    plain = deferring.CountedFile(path)
    _, memory = read(plain.tensors["w"])
    remembered(index, path, plain.hashed)
    plain.close()
    file = deferring.CountedFile(path, index)
    assert file.tensors["w"].digest == digest(memory.numpy().data)
    assert file.tensors["w"].hinted
    assert file.tensors["v"].digest is None
    assert not file.reads
    file.close()
    untrusting = SourceFile(path, index, "blake3", trust=False)
    assert untrusting.tensors["w"].digest is None
    untrusting.close()


def test_leaves_that_were_not_remembered_with_the_whole_are_when_it_is_read(
    index: HintIndex, tmp_path: Path
) -> None:
    path = deferring.save(tmp_path / "large.safetensors", {"w": torch.rand(9 << 18)})
    plain = SourceFile(path, None, "blake3")
    read(plain.tensors["w"])
    whole = (plain.tensors["w"].spec.start, 9 << 20)
    assert len(plain.hashed) == 1 + 5
    remembered(index, path, {whole: plain.hashed[whole]})
    for expected in (0, 5):
        file = SourceFile(path, index, "blake3")
        assert file.tensors["w"].digest == plain.hashed[whole]
        assert len(file.tensors["w"].leaves) == expected
        read(file.tensors["w"])
        with hinted.opened(path) as fd:
            index.record(fd, file.identity, hinted.old_enough(file.identity), "blake3", file.hashed)
        file.close()
    plain.close()


def test_a_hint_that_lies_is_caught_when_the_bytes_are_read(path: Path, index: HintIndex) -> None:
    file = SourceFile(path, None, "blake3")
    spec = file.tensors["w"].spec
    file.close()
    remembered(index, path, {(spec.start, spec.nbytes): digest(b"something else")})
    file = SourceFile(path, index, "blake3")
    with pytest.raises(StaleHintError, match="remembered as"):
        read(file.tensors["w"])
    file.forget()
    file.close()
    file = SourceFile(path, index, "blake3")
    assert file.tensors["w"].digest is None
    file.close()


def test_many_recipes_read_a_source_once(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        for name in "abc":
            m.get_parameter(name).data.copy_(w["w"])
        m.d.data.copy_(w["w"] * 2 + w["v"])
        m.e.data[0].copy_(w["w"])
        m.e.data[1].copy_(w["w"])

    def make() -> torch.nn.Module:
        plain = {name: torch.zeros(4, 6) for name in "abcd"}
        return module(**plain, e=torch.zeros(2, 4, 6))

    wanted = deferring.real(make(), path, load)
    with deferring.deferred(make(), path, load) as run:
        for name in run.parameters:
            assert run.bytes(name) == wanted[name]
        assert run.file.reads == {"w": 1, "v": 1}
        assert not run.evaluator._kept


def test_a_source_behind_a_copy_is_read_once(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        staged = torch.empty_like(w["w"]).copy_(w["w"])
        m.p.data[:4].copy_(staged)
        m.p.data[4:].copy_(staged)

    wanted = deferring.real(module(p=torch.zeros(8, 6)), path, load)
    with deferring.deferred(module(p=torch.zeros(8, 6)), path, load) as run:
        assert run.bytes("p") == wanted["p"]
        assert run.file.reads == {"w": 1}


def test_hashing_never_sees_memory_change(tmp_path: Path) -> None:
    """Sources are read straight to their place; what overlaps them waits for their hash."""
    tensors = {name: torch.rand(MANY) for name in "abc"}
    path = deferring.save(tmp_path / "big.safetensors", tensors)

    def load(m: Any, w: Weights) -> None:
        m.p.data[:MANY].copy_(w["a"])
        m.p.data[MANY // 2 : MANY // 2 + MANY].copy_(w["b"])
        m.p.data[1:].copy_(torch.cat([w["c"], w["c"][: MANY // 2 - 1]]))
        m.p.data.mul_(2)

    size = MANY // 2 * 3
    wanted = deferring.real(module(p=torch.zeros(size)), path, load)
    for _ in range(5):
        with deferring.deferred(module(p=torch.zeros(size)), path, load) as run:
            assert run.bytes("p") == wanted["p"]
            for name, source in run.file.tensors.items():
                assert source.digest == digest(tensors[name].numpy().data), name


# --- leaves


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file with a tensor of four and a half leaves, and one of a single leaf."""
    numbers = torch.arange(9 * LEAF_BYTES // 8, dtype=torch.int32)
    return deferring.save(
        tmp_path / "l.safetensors", {"w": numbers, "v": numbers[: LEAF_BYTES // 4] + 1}
    )


def test_leaves_of_large_tensors_are_remembered(large: Path, index: HintIndex) -> None:
    file = deferring.CountedFile(large)
    _, memory = read(file.tensors["w"])
    read(file.tensors["v"])
    found = [
        digest(memory.numpy().data[at : at + LEAF_BYTES])
        for at in range(0, len(memory), LEAF_BYTES)
    ]
    assert file.tensors["w"].leaves == tuple(found)
    assert file.tensors["v"].leaves == ()
    assert len(file.hashed) == 2 + 5
    remembered(index, large, file.hashed)
    file.close()
    known = deferring.CountedFile(large, index)
    assert known.tensors["w"].leaves == tuple(found)
    assert not known.reads
    known.close()


def test_a_tensor_without_one_of_its_leaves_has_none(large: Path, index: HintIndex) -> None:
    file = SourceFile(large, None, "blake3")
    read(file.tensors["w"])
    spec = file.tensors["w"].spec
    del file.hashed[spec.start + LEAF_BYTES, LEAF_BYTES]
    remembered(index, large, file.hashed)
    file.close()
    known = SourceFile(large, index, "blake3")
    assert known.tensors["w"].digest is not None
    assert known.tensors["w"].leaves == ()
    known.close()


def test_of_known_leaves_only_those_asked_for_are_read(large: Path) -> None:
    file = SourceFile(large, None, "blake3")
    source = file.tensors["w"]
    _, memory = read(source)
    reader, got = SourceReader("blake3"), dict[int, bytes]()
    reader.read_leaves(source, [1, 4], lambda piece, at: got.update({at: bytes(piece)}))
    data = bytes(memory.numpy().data)
    assert got == {at: data[at : at + LEAF_BYTES] for at in (LEAF_BYTES, 4 * LEAF_BYTES)}
    assert reader.counters.bytes_read == reader.counters.bytes_hashed == LEAF_BYTES * 3 // 2
    source.leaves = (*source.leaves[:4], digest(b"another"))
    with pytest.raises(StaleHintError, match="leaf 4"):
        reader.read_leaves(source, [1, 4], lambda piece, at: None)
    file.close()


def test_errors_of_reading_a_leaf_come_after_all_reads(large: Path) -> None:
    file = SourceFile(large, None, "blake3")
    source = file.tensors["w"]
    read(source)
    os.truncate(large, source.spec.start + 4 * LEAF_BYTES)
    seen = list[int]()
    with pytest.raises(FormatError, match="truncated"):
        SourceReader("blake3").read_leaves(source, [4, 0, 1], lambda piece, at: seen.append(at))
    assert sorted(seen) == [0, LEAF_BYTES]
    file.close()
