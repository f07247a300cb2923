"""Models whose parameters are shared, in memory and in mapped files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensor_dedup import TensorDedupConfig
from tensor_dedup.loader.post_load.batch import DedupContext
from tensor_dedup.loader.post_load.dedup import ModuleDedup
from tensor_dedup.loader.post_load.mapped_files import MappedFiles
from tensor_dedup.loader.residents.provider import HostProvider

# Elements of four bytes: a tensor of the first number is read as soon as it is heard of, one of the
# second is hashed by the thread that loads.
LARGE = 4 << 20
COUNT = 16 << 10


def dedup_of(model: nn.Module, files: MappedFiles | None = None) -> ModuleDedup:
    return ModuleDedup(
        model, DedupContext(TensorDedupConfig(), HostProvider(keep_alignment=True), files)
    )


def shared(model: nn.Module) -> ModuleDedup:
    found = dedup_of(model)
    found.settle()
    return found


def model_of(**parameters: torch.Tensor) -> Any:
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def as_file(value: float, count: int = COUNT) -> bytes:
    return torch.full((count,), value).numpy().tobytes()


def mapped(path: Path, count: int = COUNT) -> Any:
    """A model of one parameter that lies in a mapped file, as loaders leave it."""
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=4 * count)
    return model_of(weight=torch.empty(0).set_(storage, 0, (count,), (1,)))
