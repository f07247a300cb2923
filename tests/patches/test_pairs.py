"""Every kind of pair: what is equal is one memory, and computes what plain loading computes.

In either order of loading, and after whatever moves weights about without changing them.
"""

import importlib
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.pairs import CASES
from models.tiny_pipelines import equal, parameters, shared
from processes import process_state
from tensor_dedup import enable, report, shares_memory, verify
from tensor_dedup.patches.huggingface.model_load import modules_of

Made = Mapping[str, tuple[Path, Path]]


pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two paths by name of the case, and what each computes when it is loaded plainly."""

    @cache
    def make(name: str) -> tuple[tuple[Path, Path], tuple[bytes, bytes]]:
        case = CASES[name]
        root = tmp_path_factory.mktemp("pair")
        one, two = case.make(root)
        return (one, two), (case.output(case.load(one)), case.output(case.load(two)))

    return make


def apart(loaded: Any) -> bool:
    """Is no tensor of a model the memory of another one of it?"""
    models = modules_of(loaded).values()
    pairs = (pair for model in models for pair in combinations(model.parameters(), 2))
    return not any(a.nbytes == b.nbytes and shares_memory(a, b) for a, b in pairs)


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_equal_is_shared_and_computes_the_same(made: Any, name: str, turned: bool) -> None:
    case = CASES[name]
    paths, expected = made(name)
    order = [1, 0] if turned else [0, 1]
    with enable():
        loaded = {number: case.load(paths[number]) for number in order}
    first, second = loaded[order[0]], loaded[order[1]]
    same = equal(first, second)
    assert shared(first, second) == same
    assert 0 < len(same) < len(parameters(first))
    assert apart(first)
    assert apart(second)
    assert report().models[-1].skipped == []
    assert [case.output(loaded[number]) for number in (0, 1)] == list(expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.casts])
def test_a_cast_and_the_way_back_change_nothing(made: Any, name: str) -> None:
    case = CASES[name]
    paths, expected = made(name)
    with enable():
        first, second = (case.load(path) for path in paths)
    same = equal(first, second)
    assert shared(first, second) == same
    kinds = {name: each.dtype for name, each in parameters(first).items()}
    buffers = [
        (module, {name: value.clone() for name, value in module.named_buffers()})
        for pipeline in (first, second)
        for module in modules_of(pipeline).values()
    ]
    for pipeline in (first, second):
        pipeline.to(torch.float64)
    assert shared(first, second) == same
    [dtype] = set(kinds.values())
    for pipeline in (first, second):
        pipeline.to(dtype)
    assert shared(first, second) == same
    # torch casts the buffers too, and not all come back as they were: some are wider than weights.
    for module, values in buffers:
        for key, value in module.named_buffers():
            value.data = values[key]
    assert {name: each.dtype for name, each in parameters(first).items()} == kinds
    assert [case.output(each) for each in (first, second)] == list(expected)
    assert verify().ok


@pytest.mark.parametrize("name", ["SD 1.5 and a fine-tune", "IF stage I and II", "tied GPT-2"])
def test_offloading_on_and_off_changes_nothing(made: Any, name: str) -> None:
    """As enable_sequential_cpu_offload does it, with a CPU for a device."""
    accelerate: Any = importlib.import_module("accelerate")
    case = CASES[name]
    paths, expected = made(name)
    with enable():
        first, second = (case.load(path) for path in paths)
    same = equal(first, second)
    assert shared(first, second) == same
    memory = process_state.slab_memory()["Anonymous"]
    offloaded = [max(modules_of(each).values(), key=size) for each in (first, second)]
    for model in offloaded:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [case.output(each) for each in (first, second)] == list(expected)
    for model in offloaded:
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
    # accelerate unties what is tied, so there may be more names; none has memory of its own.
    assert shared(first, second) == equal(first, second) >= same
    assert process_state.slab_memory()["Anonymous"] == memory
    assert [case.output(each) for each in (first, second)] == list(expected)


def size(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves])
def test_what_is_saved_is_found_again(made: Any, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    paths, expected = made(name)
    with enable():
        first, second = (case.load(path) for path in paths)
        assert shared(first, second) == equal(first, second)
        second.save_pretrained(tmp_path)
        again = case.load(tmp_path)
    assert shared(second, again) == parameters(second).keys()
    assert case.output(again) == expected[1]
    assert case.output(first) == expected[0]
