"""What nobody has written since `torch.empty` is told from what a constructor has filled."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from tensor_dedup.loader.deferred.uninitialised import UninitialisedStorages, surely_unwritten
from vllm_runs import deferring


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(1)


def _fill_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """With one call for all of them, as optimizers do."""
    torch._foreach_zero_(tensors)
    return tensors


@pytest.mark.parametrize(
    ("make", "untouched"),
    [
        (lambda: torch.empty(3), True),
        (lambda: torch.empty_strided((2, 3), (1, 2)), True),
        (lambda: torch.empty_like(torch.zeros(3)), True),
        (lambda: torch.zeros(1).new_empty(3), True),
        (lambda: nn.Parameter(torch.empty(2, 3)).data.view(6)[2:], True),
        (lambda: torch.zeros(3), False),
        (lambda: torch.tensor([1.0, 2.0]), False),
        (lambda: torch.from_numpy(torch.ones(3).numpy()), False),
        (lambda: _fill(torch.empty(3)), False),
        (lambda: torch.empty(3).copy_(torch.ones(3)), False),
        (lambda: torch.add(torch.ones(3), 1, out=torch.empty(3)), False),
        (lambda: _fill_all([torch.empty(3), torch.empty(2)])[0], False),
        (lambda: nn.Linear(2, 3).weight, False),
    ],
)
def test_a_tensor_is_untouched_until_it_is_written(make: object, untouched: bool) -> None:
    assert callable(make)
    watch = UninitialisedStorages()
    with watch.watching():
        tensor = make()
    assert watch.holds(tensor) is untouched


def test_a_write_to_a_part_is_a_write() -> None:
    watch = UninitialisedStorages()
    with watch.watching():
        tensor = torch.empty(4, 4)
        tensor[:2, 1].zero_()
    assert not watch.holds(tensor)


def test_only_what_is_made_under_watch_counts_and_no_memory_is_held() -> None:
    before = torch.empty(3)
    watch = UninitialisedStorages()
    with watch.watching():
        tensor = torch.empty(3)
        number = tensor.untyped_storage()._cdata
    assert not watch.holds(before)
    assert watch.holds(tensor)
    del tensor
    gc.collect()
    # Its number is given to nobody else, so no later tensor is taken for it.
    later = [torch.empty(3) for _ in range(1000)]
    assert number not in {each.untyped_storage()._cdata for each in later}
    assert not any(watch.holds(each) for each in later)


def test_what_no_write_reaches_is_counted_from_below(tmp_path: Path) -> None:
    path = deferring.save(tmp_path / "file.safetensors", {"w": torch.ones(2, 3)})
    model = deferring.module(
        whole=torch.empty(2, 3),
        part=torch.empty(4, 3),
        none=torch.empty(2),
        twice=torch.empty(4, 3),
        summed=torch.empty(2, 3),
    )

    def load(model: nn.Module, weights: deferring.Weights) -> None:
        source = weights["w"]
        model.get_parameter("whole").data.copy_(source)
        model.get_parameter("part").data[1:3].copy_(source)
        for _ in range(2):
            model.get_parameter("twice").data[:2].copy_(source)
        model.get_parameter("summed").data.copy_(source).mul_(2)

    with deferring.deferred(model, path, load) as run:
        lacking = {name: surely_unwritten(run.view(name).storage) for name in run.parameters}
    assert lacking == {"whole": 0, "part": 24, "none": 8, "twice": 0, "summed": 0}
