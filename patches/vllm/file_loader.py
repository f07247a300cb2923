"""vLLM's default loader, or in its place the loader of a load format that has one of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensor_dedup.patches.vllm import load_formats

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig


class ReadingLoader(DefaultModelLoader):
    """Gives a model its weights as the load format does; notes whether the model tells which."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._format = str(load_config.load_format)
        self._tracked = False
        self._inner = load_formats.loader_of(self._format, load_config)
        if self._inner is not None:  # it has taken its own settings
            load_config = dataclasses.replace(
                load_config, load_format="auto", model_loader_extra_config={}
            )
        super().__init__(load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Give the model its weights."""
        if self._inner is None:
            super().load_weights(model, model_config)
        else:
            self._inner.load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Every tensor by name, for a reload; AttributeError where vLLM's own loader has none."""
        if self._inner is None:
            return super().get_all_weights(model_config, model)
        found: Generator[tuple[str, torch.Tensor], None, None]
        found = cast("Any", self._inner).get_all_weights(model_config, model)
        return found

    def track_weights_loading(
        self, model: nn.Module, loaded_weights: set[str] | None, *args: Any, **more: Any
    ) -> None:
        """As vLLM does: called where the model says what it has loaded."""
        super().track_weights_loading(model, loaded_weights, *args, **more)
        quantized = args[0] if args else more.get("quantized")  # of newer versions
        self._tracked = loaded_weights is not None and not quantized
