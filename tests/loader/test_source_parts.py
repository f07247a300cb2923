"""A load that uses parts of source tensors reads, hashes and remembers these parts, and no more."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from files import hinted
from tensor_dedup.config import TensorDedupConfig
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import FormatError
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.loader.checkpoint_io.sources import (
    Columns,
    SourceFile,
    SourceReader,
    SourceTensor,
    StaleHintError,
)
from tensor_dedup.loader.deferred.layer_records import (
    OriginGoneError,
    SourceLocation,
    same_source_bytes,
)
from tensor_dedup.loader.deferred.sharing_plan import SharingPlan
from tensor_dedup.loader.residents.provider import HostProvider
from vllm_runs import deferring

SIZE = 4  # bytes of a number
W = torch.arange(48, dtype=torch.float32).view(8, 6)
CUBE = W.view(2, 4, 6) + 100
TENSORS = {"w": W, "cube": CUBE}
Cut = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return deferring.save(tmp_path / "m.safetensors", TENSORS)


@pytest.fixture
def index(tmp_path: Path) -> HintIndex:
    return HintIndex(tmp_path / "hints", trusted=lambda _: True)


@contextmanager
def opened(path: Path, index: HintIndex | None = None) -> Iterator[SourceFile]:
    file = SourceFile(path, index, "blake3")
    try:
        yield file
    finally:
        file.close()


def remember(index: HintIndex, file: SourceFile, digests: dict[tuple[int, int], str]) -> None:
    with hinted.opened(file.path) as fd:
        began = hinted.old_enough(file.identity)
        assert index.record(fd, file.identity, began, "blake3", digests)


def rows(file: SourceFile) -> SourceTensor:
    """The upper half of `w`, whose place and size are those of its left half."""
    return file.part(file.tensors["w"], 0, W.nbytes // 2, (4, 6))


def columns(file: SourceFile, start: int = 0) -> SourceTensor:
    """Three columns of `w`."""
    cut = Columns(3 * SIZE, 6 * SIZE)
    return file.part(file.tensors["w"], start * SIZE, W.nbytes // 2, (8, 3), cut)


def read(source: SourceTensor) -> bytes:
    reader, memory = SourceReader("blake3"), torch.empty(source.spec.nbytes, dtype=torch.uint8)
    reader.fill(source, memory, hashed=True)
    reader.settle()
    return bytes(memory.numpy().data)


def check(path: Path, name: str, cuts: list[Cut], sizes: list[int]) -> None:
    """Load a parameter from each cut, as plain loading does, and from sources of these sizes."""
    wanted = [cut(TENSORS[name]) for cut in cuts]
    model = deferring.module(**{f"p{n}": torch.zeros_like(t) for n, t in enumerate(wanted)})

    def load(m: Any, weights: deferring.Weights) -> None:
        for n, cut in enumerate(cuts):
            m.get_parameter(f"p{n}").data.copy_(cut(weights[name]))

    with deferring.deferred(model, path, load) as run:
        sources = {id(s): s for each in run.parameters.values() for s in each.sources}
        assert sorted(s.spec.nbytes for s in sources.values()) == sorted(sizes)
        assert {s.whole.spec.nbytes for s in sources.values()} == {TENSORS[name].nbytes}
        for n, tensor in enumerate(wanted):
            assert run.bytes(f"p{n}") == deferring.raw(tensor)
        for source in sources.values():
            assert source.digest is not None
        counters = run.reader.counters
        assert counters.bytes_read == counters.bytes_hashed == sum(sizes)


@pytest.mark.parametrize(
    ("name", "cuts", "sizes"),
    [
        ("w", [lambda w: w.narrow(0, 2, 3)], [72]),
        ("w", [lambda w: w.narrow(1, 1, 2)], [64]),
        ("w", [lambda w: w.view(-1)[7:9]], [8]),
        ("cube", [lambda w: w.narrow(2, 1, 2)], [64]),
        ("cube", [lambda w: w[1]], [96]),
        ("w", [lambda w: w[:2], lambda w: w[5:6]], [48, 24]),
        ("w", [lambda w: w[:, :2], lambda w: w[:, 5:]], [64, 32]),
        ("w", [lambda w: w[2:5], lambda w: w[2:5]], [72]),
        ("w", [lambda w: w[2:4].to(torch.bfloat16)], [48]),
        ("w", [lambda w: w[1, 2]], [4]),
        ("w", [lambda w: w[1, 2] * 2], [4]),
    ],
)
def test_what_is_used_is_read_and_hashed_and_nothing_else(
    path: Path, name: str, cuts: list[Cut], sizes: list[int]
) -> None:
    check(path, name, cuts, sizes)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("w", [lambda w: w[:4], lambda w: w[4:]]),  # nothing is left out
        ("w", [lambda w: w[:3], lambda w: w[2:4]]),  # read twice
        ("w", [lambda w: w[:2], lambda w: w[4:, :3]]),
        ("w", [lambda w: w[:2], lambda w: w[:, 5:]]),
        ("w", [lambda w: w[:2], lambda w: w]),
        ("w", [lambda w: w[:2].t()]),
        ("w", [lambda w: w[::2]]),
        ("w", [lambda w: w[:, ::2]]),
        ("cube", [lambda w: w[:, 1:3]]),
        ("cube", [lambda w: w[1, :, 2:4]]),
    ],
)
def test_any_other_use_is_of_the_whole_tensor(path: Path, name: str, cuts: list[Cut]) -> None:
    check(path, name, cuts, [TENSORS[name].nbytes])


def test_a_parameter_that_is_itself_columns_of_a_source_keeps_its_strides(path: Path) -> None:
    """Memory that is made for its strides must not be filled with packed columns."""

    def load(m: Any, weights: deferring.Weights) -> None:
        m.p.data = weights["w"][:, 1:4]

    with deferring.deferred(deferring.module(p=torch.zeros(8, 3)), path, load) as run:
        assert run.view("p").stride == run.parameters["p"].geometry.stride == (6, 1)
        assert not run.view("p").is_whole()
        assert run.bytes("p") == deferring.raw(W[:, 1:4])


def test_the_least_size_to_share_is_that_of_tensors_of_the_checkpoint(path: Path) -> None:
    def load(m: Any, weights: deferring.Weights) -> None:
        m.p.data.copy_(weights["w"][:2])

    with deferring.deferred(deferring.module(p=torch.zeros(2, 6)), path, load) as run:
        each = run.parameters["p"]
        for least, shared in ((W.nbytes, True), (W.nbytes + 1, False)):
            config = TensorDedupConfig(min_tensor_bytes=least)
            plan = SharingPlan(config, HostProvider(), run.evaluator)
            assert (plan.reason(each) is None) == shared


def test_parts_of_one_place_and_size_are_remembered_apart(path: Path, index: HintIndex) -> None:
    with opened(path) as file:
        assert (rows(file).spec.start, rows(file).spec.nbytes) == (
            columns(file).spec.start,
            columns(file).spec.nbytes,
        )
        for part, tensor in ((rows(file), W[:4]), (columns(file), W[:, :3])):
            assert read(part) == deferring.raw(tensor)
        assert sorted(file.hashed.values()) == sorted(
            digest(deferring.raw(tensor)) for tensor in (W[:4], W[:, :3])
        )
        remember(index, file, file.hashed)
    with opened(path, index) as file:
        for part, tensor in ((rows(file), W[:4]), (columns(file), W[:, :3])):
            assert (part.digest, part.hinted) == (digest(deferring.raw(tensor)), True)
            assert read(part) == deferring.raw(tensor)
        assert columns(file, 3).digest is None
        assert file.tensors["w"].digest is None


@pytest.mark.parametrize("part", [rows, columns])
def test_a_part_that_is_not_what_was_remembered_is_an_error(
    path: Path, index: HintIndex, part: Callable[[SourceFile], SourceTensor]
) -> None:
    with opened(path) as file:
        read(part(file))
        remember(index, file, dict.fromkeys(file.hashed, digest(b"something else")))
    with opened(path, index) as file, pytest.raises(StaleHintError, match="remembered as"):
        read(part(file))


def test_columns_of_a_file_that_was_cut_off_are_an_error_with_the_numbers(path: Path) -> None:
    with opened(path) as file:
        whole = file.tensors["w"].spec
        os.truncate(path, whole.start + 5 * 6 * SIZE + SIZE)
        with pytest.raises(FormatError, match=f"ends after {(5 * 3 + 1) * SIZE} of 96 bytes"):
            read(columns(file))


@given(data=st.data())
def test_any_piece_of_any_columns_is_gathered(data: st.DataObject) -> None:
    """Also by reads that return less than they were asked for."""
    run, count = (data.draw(st.integers(1, most)) for most in (9, 700))
    between = data.draw(st.integers(1, 9) | st.sampled_from([8192, 8193]))
    count = min(count, 5) if between > 9 else count
    columns = Columns(run, run + between)
    held = bytes(n % 251 for n in range(count * columns.stride))
    wanted = b"".join(held[n : n + run] for n in range(0, len(held), columns.stride))
    offset = data.draw(st.integers(0, len(wanted) - 1))
    piece = bytearray(data.draw(st.integers(1, len(wanted) - offset)))
    most = data.draw(st.integers(1, 3 * columns.stride) | st.just(len(held)))

    def read(parts: list[memoryview], at: int, done: int) -> int:
        assert wanted[done] == held[at]
        asked = sum(part.nbytes for part in parts)
        left = held[at : at + min(asked, most)]
        total = len(left)
        for part in parts:
            taken, left = left[: part.nbytes], left[part.nbytes :]
            part[: len(taken)] = taken
        return total

    assert columns.gather(memoryview(piece), offset, read) == len(piece)
    assert piece == wanted[offset : offset + len(piece)]


def test_columns_are_compared_with_those_of_a_layer_that_was_processed(
    tmp_path: Path, path: Path
) -> None:
    with opened(path) as file:
        origin = SourceLocation.of(columns(file))
    inside, outside = W.clone(), W.clone()
    inside[7, 2], outside[7, 3] = -1, -1
    for tensor, equal in ((W, True), (outside, True), (inside, False)):
        other = deferring.save(tmp_path / "other.safetensors", {**TENSORS, "w": tensor})
        with opened(other) as file:
            assert same_source_bytes([columns(file)], [origin])[0] == equal
            assert not same_source_bytes([columns(file, 3)], [origin])[0]
    os.truncate(path, path.stat().st_size - 1)
    with opened(other) as file, pytest.raises(OriginGoneError):
        same_source_bytes([columns(file)], [origin])


def test_columns_have_leaves_which_are_not_remembered(tmp_path: Path) -> None:
    wide = torch.rand(1024, 1024)
    path = deferring.save(tmp_path / "wide.safetensors", {"w": wide})
    with opened(path) as file:
        part = file.part(
            file.tensors["w"], 0, wide.nbytes * 3 // 4, (1024, 768), Columns(3072, 4096)
        )
        data = read(part)
        assert data == deferring.raw(wide[:, :768])
        wanted = [digest(data[at : at + LEAF_BYTES]) for at in range(0, len(data), LEAF_BYTES)]
        assert list(part.leaves) == wanted
        assert len(wanted) == 2
        assert list(file.hashed.values()) == [digest(data)]
