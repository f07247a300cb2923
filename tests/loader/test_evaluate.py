"""Deferred loading gives the bytes of plain loading, and equal recipes mean equal bytes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_dedup.loader.deferred.storage import as_view
from tensor_dedup.loader.deferred.straight_reads import unread_tensor
from vllm_runs import deferring

_STEP = st.tuples(*(st.integers(0, 9999),) * 4)
PROGRAMS = st.lists(_STEP, min_size=1, max_size=14)
SEEDS = (0, 1, 2)
# What a recipe gave the first time any program had it: the whole run checks every repetition.
_SEEN: dict[str, bytes] = {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("programs")
    return {
        seed: deferring.save(folder / f"{seed}.safetensors", deferring.random_sources(seed))
        for seed in SEEDS
    }


def check(files: dict[int, Path], program: list[deferring.Step]) -> None:
    recipes = [check_one(path, program) for path in files.values()]
    for name in recipes[0].keys() & recipes[1].keys():
        # Over other bytes in any source it follows from, a recipe has another name.
        (first, used), (second, others) = recipes[0][name], recipes[1][name]
        assert used == others or first != second


def check_one(path: Path, program: list[deferring.Step]) -> dict[str, tuple[str, list[str | None]]]:
    skip: set[int] = set()
    wanted = deferring.real(
        deferring.random_model(), path, deferring.loader(program, skip, real=True)
    )
    load = deferring.loader(program, skip, real=False)
    found = {}
    with deferring.deferred(deferring.random_model(), path, load) as run:
        assert deferring.raw(run.model.get_buffer("buffer")) == wanted["buffer"]
        for name, straight in straight_bytes(run).items():
            assert straight == wanted[name], name
        for name, each in run.parameters.items():
            assert run.bytes(name) == wanted[name], name
            if each.view is not None:
                used = [source.digest for source in each.sources]
                found[name] = run.book.digest(each.view), used
                assert _SEEN.setdefault(found[name][0], wanted[name]) == wanted[name]
        sources = {id(s): s for each in run.parameters.values() for s in each.sources}
        parts = Counter(source.spec.name for source in sources.values())
        assert all(count <= max(parts[name], 1) for name, count in run.file.reads.items())
    return found


def straight_bytes(run: deferring.Deferred) -> dict[str, bytes]:
    """The bytes of those final tensors that could go straight from the file to a GPU."""
    found = {}
    for name, each in run.parameters.items():
        wanted = each.view is not None and each.view.is_whole() and each.sources
        unread = unread_tensor(each, run.evaluator, run.reader, str) if wanted else None
        if unread is not None:
            flat = torch.full((each.nbytes,), 255, dtype=torch.uint8)
            unread.content.fill(flat.numpy().data, 0)
            found[name] = deferring.raw(as_view(flat, each.require_view()))
    run.file.reads.clear()
    return found


@settings(max_examples=250, derandomize=True)
@given(program=PROGRAMS)
def test_any_program_gives_the_bytes_of_plain_loading(
    files: dict[int, Path], program: list[deferring.Step]
) -> None:
    check(files, program)


@pytest.mark.long
@settings(max_examples=5_000)
@given(program=st.lists(_STEP, min_size=1, max_size=40))
def test_any_long_program_gives_the_bytes_of_plain_loading(
    files: dict[int, Path], program: list[deferring.Step]
) -> None:
    check(files, program)


@pytest.mark.parametrize(
    ("source", "turn"),
    [
        (torch.arange(1.0, 25.0).view(1, 24), lambda w: w.t()),
        (torch.arange(1.0, 25.0).view(4, 1, 6), lambda w: w.transpose(1, 2)),
        (torch.arange(1.0, 25.0).view(24, 1), lambda w: w),
    ],
    ids=["row as a column", "inner row as columns", "column"],
)
def test_a_dimension_of_one_loses_nothing_on_the_way_to_a_gpu(
    tmp_path: Path, source: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What is turned is in order, and its strides are not those of the parameter."""
    path = deferring.save(tmp_path / "one.safetensors", {"w": source})
    model = deferring.module(p=torch.zeros(turn(source).shape))

    def load(m: Any, w: deferring.Weights) -> None:
        m.p.data.copy_(turn(w["w"]))

    with deferring.deferred(model, path, load) as run:
        straight = straight_bytes(run)
        assert set(straight.values()) <= {deferring.raw(source)}
        assert run.bytes("p") == deferring.raw(source)
