"""Conversions of models that share: what was shared before is shared after."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kernel
from pipelines import equal, parameters, shared
from tensor_dedup import sweep, verify
from tensor_dedup.loader.mappings import MAPPINGS
from tensor_dedup.loader.registry import registry
from tensor_dedup.patches.moves import APPLY
from tensor_dedup.patches.signatures import usable


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    gc.collect()
    before = len(registry.residents()), kernel.slabs()
    yield
    gc.collect()
    assert (len(registry.residents()), kernel.slabs()) == before


def pair() -> tuple[Any, Any]:
    """Two models of equal weights which share them, twins among them."""
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        parts = nn.Linear(64, 64), nn.LayerNorm(64), nn.LayerNorm(64), nn.Conv2d(4, 4, 3)
        models.append(nn.Sequential(*parts).half())
        sweep(models[-1])
    assert shared(*models) == parameters(models[0]).keys()
    return models[0], models[1]


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.float(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
)
def test_two_that_are_converted_meet_again(convert: Callable[[Any], Any]) -> None:
    first, second = pair()
    objects = list(first.parameters())
    for model in (first, second):
        convert(model)
    assert shared(first, second) == equal(first, second) == parameters(first).keys()
    assert list(first.parameters()) == objects
    assert verify().ok


def test_one_that_is_cast_leaves_the_other_and_comes_back() -> None:
    first, second = pair()
    before = {name: value.clone() for name, value in second.state_dict().items()}
    first.float()
    assert not shared(first, second)
    assert {p.dtype for p in second.parameters()} == {torch.float16}
    first.half()
    assert shared(first, second) == parameters(first).keys()
    assert all(torch.equal(before[name], value) for name, value in first.state_dict().items())


def test_a_move_to_where_it_is_changes_nothing() -> None:
    first, second = pair()
    places = [p.data_ptr() for p in first.parameters()]
    first.to("cpu", torch.float16).cpu()
    assert [p.data_ptr() for p in first.parameters()] == places
    assert shared(first, second) == parameters(first).keys()


def test_what_was_private_stays_private() -> None:
    first, second = pair()
    for model in (first, second):
        model.add_module("adapter", nn.Linear(8, 8, dtype=torch.float16))
        nn.init.ones_(model.adapter.weight)
        model.float()
    assert shared(first, second) == {n for n in parameters(first) if not n.startswith("adapter")}


def test_memory_that_processes_are_to_have_in_common_is_left_to_them() -> None:
    first, _ = pair()
    first.share_memory()
    assert all(p.is_shared() for p in first.parameters())


def test_the_seam_is_what_was_recorded_and_goes_with_what_is_shared() -> None:
    first, second = pair()
    assert usable(APPLY)
    assert hasattr(nn.Module._apply, "_tensor_dedup")
    del first, second
    gc.collect()
    nn.Linear(2, 2).half()
    assert hasattr(nn.Module._apply, "_tensor_dedup") == (len(MAPPINGS) > 0)
