"""Steps of a training as a trainer publishes them, and what must be there afterwards."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from tensor_dedup import Store

SIZE = 1 << 20


def model_at(step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A large tensor in which each step changes one number in a hundred, and a small one."""
    draw = torch.Generator().manual_seed(seed)
    large = torch.randn(SIZE, generator=draw).mul(0.02).to(torch.bfloat16)
    for each in range(step):
        at = torch.randint(SIZE, (SIZE // 100,), generator=draw)
        large.view(torch.int16)[at] += 1 + each % 2
    return {"large": large, "small": torch.full((3,), float(step))}


def weights_of(store: Store, name: str) -> dict[str, torch.Tensor]:
    """The weights that an export of a checkpoint has."""
    with tempfile.TemporaryDirectory() as folder:
        store.export(name, Path(folder, "export"))
        return load_file(Path(folder, "export", "model.safetensors"))


def assert_published(store: Store, step: int, run: str = "policy") -> None:
    """A step is there, with exactly the weights of `model_at`."""
    found = weights_of(store, f"{run}@{step}")
    assert found.keys() == {"large", "small"}
    for name, tensor in model_at(step).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
