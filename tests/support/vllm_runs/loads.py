"""Models loaded by vLLM's own loaders without an engine around them: in hundredths of a second.

    engines.warm_up(path)
    with loads.prepared(path):
        model = loads.load(path)                        # plain
        shared = loads.load(path, tensor_dedup={})
        with loads.as_rank("tp", 1, 2):
            module = loads.load(path, parallel={"tensor_parallel_size": 2, "rank": 1}).module

As one rank of several nothing can be computed, for the other ranks do not exist; but a model is
built and loaded as that rank's, by vLLM's own code.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from tensor_dedup.patches.vllm.arguments import translate
from vllm_runs import engines, plain

_prepared: list[VllmConfig] = []


@contextmanager
def prepared(path: Path) -> Iterator[None]:
    """Make what every load needs: vLLM's process groups, and the config of a model like `path`."""
    llm = plain.engine(path)
    _prepared.append(llm.llm_engine.vllm_config)
    plain.let_go(llm)
    del llm
    try:
        yield
    finally:
        _prepared.pop()


@dataclass
class Model:
    """A loaded model and the config it was loaded by."""

    module: nn.Module
    config: VllmConfig

    def reload(self, path: Path) -> None:
        """What an engine's `reload_weights` does."""
        with set_current_vllm_config(self.config):
            reload_weights(self.config, self.module, None, str(path), True)

    def parameters(self) -> dict[str, str]:
        """A fingerprint of every parameter that is not nothing but packed."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: engines.fingerprint(p) for name, p in named if p.numel()}

    def functions(self) -> dict[str, str]:
        """What every packed weight makes of the same input."""
        found = {}
        for name, layer in self.module.named_modules():
            linear: Any = getattr(layer, "cpu_linear", None)
            if isinstance(linear, FunctionType) and linear.__closure__:
                handler = linear.__closure__[0].cell_contents
                numbers = torch.linspace(-1, 1, 3 * handler.k, dtype=torch.bfloat16)
                given = numbers.view(3, handler.k)
                found[name] = engines.fingerprint(linear(given, layer.weight, None))
        return found


def load(
    path: Path,
    tensor_dedup: dict[str, Any] | None = None,
    parallel: Mapping[str, Any] = MappingProxyType({}),
    load_format: str = "auto",
) -> Model:
    """Load as an engine would; plainly without `tensor_dedup`.

    `parallel`: what is different in the configuration of ranks; see `as_rank` for their groups.
    """
    config = copy.copy(_prepared[-1])
    config.parallel_config = copy.copy(config.parallel_config)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model = str(path)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    extra: dict[str, Any] = {}
    if tensor_dedup is not None:
        mine = {"tensor_dedup": {**tensor_dedup, "inner": load_format}}
        load_format, extra = translate(None, "tensor_dedup", mine)
    config.load_config = LoadConfig(
        load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False
    )
    return by_config(config)


def by_config(config: VllmConfig) -> Model:
    """Load what an engine's configuration asks for."""
    with set_current_vllm_config(config):
        loader = model_loader.get_model_loader(config.load_config)
        module = loader.load_model(vllm_config=config, model_config=config.model_config)
    return Model(module, config)


Kind = Literal["tp", "pp", "dp", "ep"]


@contextmanager
def as_rank(kind: Kind, rank: int, size: int) -> Iterator[None]:
    """While active, this process is that rank of so many in its group of this kind."""
    group: Any = getattr(parallel_state, f"_{kind.upper()}")
    # The first and the last of a pipeline are found by global ranks.
    place: dict[str, Any] = {
        "rank_in_group": rank,
        "world_size": size,
        "rank": rank,
        "ranks": list(range(size)),
    }
    with mock.patch.multiple(group, **place):
        yield
