"""A recipe does not tell in which order a checkpoint brings what does not overlap."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_runs import deferring
from vllm_runs.deferring import Load, Weights, module

ROWS = torch.arange(24, dtype=torch.float32).view(6, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pieces = {"q": ROWS[:2], "k": ROWS[2:4], "v": ROWS[4:]}
    contiguous = {name: piece.clone() for name, piece in pieces.items()}
    return deferring.save(tmp_path / "model.safetensors", contiguous)


def recipe(path: Path, load: Load) -> tuple[str, list[str], bytes]:
    """Recipe, sources in its order, and bytes, which are those of plain loading."""
    wanted = deferring.real(module(p=torch.zeros(6, 4)), path, load)["p"]
    with deferring.deferred(module(p=torch.zeros(6, 4)), path, load) as run:
        assert run.bytes("p") == wanted
        sources = [source.spec.name for source in run.parameters["p"].sources]
        return run.recipe("p"), sources, wanted


def fuse(order: str, first_row: dict[str, int]) -> Load:
    def load(m: Any, w: Weights) -> None:
        for name in order:
            m.p.data[first_row[name] : first_row[name] + 2].copy_(w[name])

    return load


def test_pieces_of_one_tensor_may_come_in_any_order(path: Path) -> None:
    rows = {"q": 0, "k": 2, "v": 4}
    recipes = [recipe(path, fuse(order, rows)) for order in ("qkv", "vqk", "kvq")]
    assert recipes[0] == recipes[1] == recipes[2]
    assert recipes[0][1] == ["q", "k", "v"]


def test_pieces_in_other_places_are_another_tensor(path: Path) -> None:
    first = recipe(path, fuse("qkv", {"q": 0, "k": 2, "v": 4}))
    other = recipe(path, fuse("kqv", {"q": 2, "k": 0, "v": 4}))
    assert first[2] != other[2]
    assert first[0] != other[0]


def test_the_order_of_pieces_that_overlap_is_told(path: Path) -> None:
    rows = {"q": 0, "k": 1, "v": 4}
    first, other = (recipe(path, fuse(order, rows)) for order in ("qkv", "kqv"))
    assert first[2] != other[2]
    assert first[0] != other[0]


def test_the_order_of_columns_that_interleave_is_kept(path: Path) -> None:
    def columns(m: Any, w: Weights) -> None:
        m.p.data[0:2, 0::2].copy_(w["q"][:, 0::2])
        m.p.data[0:2, 1::2].copy_(w["k"][:, 1::2])

    recipe(path, columns)


def test_a_write_that_reads_what_was_written_stays_behind_it(path: Path) -> None:
    def scaled_after(m: Any, w: Weights) -> None:
        m.p.data[2:4].copy_(w["k"])
        m.p.data[2:4].mul_(2)
        m.p.data[0:2].copy_(w["q"])

    def scaled_before(m: Any, w: Weights) -> None:
        m.p.data[2:4].mul_(2)
        m.p.data[2:4].copy_(w["k"])
        m.p.data[0:2].copy_(w["q"])

    assert recipe(path, scaled_after)[0] != recipe(path, scaled_before)[0]


def test_what_was_copied_within_a_tensor_is_what_was_there_then(path: Path) -> None:
    def copied_first(m: Any, w: Weights) -> None:
        m.p.data[4:6].copy_(w["v"])
        m.p.data[2:4].copy_(m.p.data[4:6])
        m.p.data[0:2].copy_(m.p.data[2:4])

    def copied_last(m: Any, w: Weights) -> None:
        m.p.data[0:2].copy_(m.p.data[2:4])
        m.p.data[2:4].copy_(m.p.data[4:6])
        m.p.data[4:6].copy_(w["v"])

    first, last = recipe(path, copied_first), recipe(path, copied_last)
    assert first[2] != last[2]
    assert first[0] != last[0]
