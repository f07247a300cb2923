"""Pipelines whose weights Diffusers or accelerate take away between uses, beside others.

With a CPU for the device: what is shown is that neighbours stay as they are, and what stays shared.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import tiny_pipelines
from models.tiny_pipelines import equal, image, load, parameters, shared
from processes import process_state
from tensor_dedup import enable, sweep, verify
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.patches.huggingface import offloading
from tensor_dedup.patches.huggingface.model_load import modules_of
from tensor_dedup.seams import usable

CPU = torch.device("cpu")
Offload = Callable[[Any, Path], None]


pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    tiny_pipelines.make(root)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, bytes]:
    """What each pipeline draws when it is loaded plainly."""
    return {name: image(load(folder / name)) for name in ("sd", "tuned")}


def by_leaf(pipeline: Any, _: Path) -> None:
    pipeline.enable_group_offload(onload_device=CPU, offload_type="leaf_level")


def by_block(pipeline: Any, _: Path) -> None:
    pipeline.enable_group_offload(
        onload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )


def to_disk(pipeline: Any, disk: Path) -> None:
    for name, model in modules_of(pipeline).items():
        hooks: Any = importlib.import_module("diffusers.hooks")
        hooks.apply_group_offloading(
            model,
            onload_device=CPU,
            offload_type="leaf_level",
            offload_to_disk_path=str(disk / name),
        )


def by_model(pipeline: Any, _: Path) -> None:
    """As enable_model_cpu_offload does it, which asks for an accelerator."""
    accelerate: Any = importlib.import_module("accelerate")
    for model in modules_of(pipeline).values():
        accelerate.cpu_offload_with_hook(model, CPU)


def in_sequence(pipeline: Any, _: Path) -> None:
    """As enable_sequential_cpu_offload does it."""
    accelerate: Any = importlib.import_module("accelerate")
    for model in modules_of(pipeline).values():
        accelerate.cpu_offload(model, CPU, offload_buffers=True)


@pytest.mark.parametrize("offload", [by_leaf, by_block, to_disk, by_model, in_sequence])
def test_an_offloaded_pipeline_leaves_its_neighbours(
    folder: Path, tmp_path: Path, alone: dict[str, bytes], offload: Offload
) -> None:
    with enable():
        one, other, third = load(folder / "sd"), load(folder / "tuned"), load(folder / "sd")
    same = equal(one, other)
    assert shared(one, other) == same
    assert shared(one, third) == parameters(one).keys()
    memory = process_state.slab_memory()["Anonymous"]
    offload(other, tmp_path)
    for _ in range(2):
        assert image(other) == alone["tuned"]
        assert image(one) == image(third) == alone["sd"]
    assert shared(one, third) == parameters(one).keys()
    assert process_state.slab_memory()["Anonymous"] == memory
    assert verify().ok


@pytest.mark.parametrize("offload", [by_leaf, by_block, by_model])
def test_what_is_offloaded_to_host_memory_stays_shared_there(
    folder: Path, tmp_path: Path, alone: dict[str, bytes], offload: Offload
) -> None:
    with enable():
        one, other = load(folder / "sd"), load(folder / "tuned")
    same = equal(one, other)
    assert shared(one, other) == same
    for pipeline in (one, other):
        offload(pipeline, tmp_path)
        image(pipeline)
    assert shared(one, other) == same
    assert [image(one), image(other)] == [alone["sd"], alone["tuned"]]


class Used(nn.Linear):
    """Says where its weight is while it is used, and may write to it there."""

    mapped: bool | None = None
    writes: Callable[[torch.Tensor], object] | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = super().forward(values)
        self.mapped = is_mapped(self.weight)
        if self.writes is not None:
            with torch.no_grad():
                self.writes(self.weight)
        return result


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), Used(64, 64))


def pair_with_a_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Two that share, of which one goes for each use to what does as a device: memory elsewhere."""
    first, second = linear(), linear()
    for model in (first, second):
        sweep(model)
    assert shared(first, second) == parameters(first).keys()
    group: Any = importlib.import_module("diffusers.hooks.group_offloading").ModuleGroup
    offload = inspect.unwrap(group._offload_to_memory)

    def transfer(_: Any, tensor: Any, source_tensor: Any, default_stream: Any) -> None:
        tensor.data = source_tensor.clone()

    monkeypatch.setattr(group, "_transfer_tensor_to_device", offloading.onloading(transfer))
    monkeypatch.setattr(group, "_offload_to_memory", offloading.offloading(offload))
    hooks: Any = importlib.import_module("diffusers.hooks")
    hooks.apply_group_offloading(first, onload_device=CPU, offload_type="leaf_level")
    return first, second


def test_what_was_on_a_device_gets_its_mapping_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair_with_a_device(monkeypatch)
    values = torch.ones(1, 64)
    for _ in range(2):
        assert torch.equal(first(values), second(values))
        assert shared(first, second) == parameters(first).keys()
        assert (first[2].mapped, second[2].mapped) == (False, True)
    assert verify().ok


@pytest.mark.parametrize(
    "write",
    [lambda weight: weight.add_(1), lambda weight: weight.data.add_(1)],
    ids=["counted", "through data"],
)
def test_what_was_written_on_a_device_does_not(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], object]
) -> None:
    first, second = pair_with_a_device(monkeypatch)
    first[2].writes = write
    values = torch.ones(1, 64)
    assert torch.equal(first(values), second(values))
    assert shared(first, second) == parameters(first).keys() - {"2.weight"}
    assert torch.equal(first[2].weight, second[2].weight + 1)
    assert not torch.equal(first(values), second(values))
    assert verify().ok


def test_the_seams_are_what_was_recorded() -> None:
    assert usable(offloading.ONLOAD)
    assert usable(offloading.OFFLOAD)
