"""Names that newer versions of vLLM have and older ones lack, and what stands for them there.

`relied_on` and `seams` say of each since when it was seen, and what a load does without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.utils import initialize_model

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

_MODELS = "vllm.model_executor"


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


# Where it is missing, no quantisation method says that it takes weights that were processed before.
weights_already_processed: Callable[[], AbstractContextManager[None]] | None = _optional(
    f"{_MODELS}.utils", "weights_already_processed"
)
# Where it is missing, vLLM does not tie a head that the checkpoint repeats.
untied_lm_head: Callable[[nn.Module], Any] | None = _optional(
    f"{_MODELS}.model_loader.weight_tying", "_get_untied_lm_head"
)


def takes_processed(method: object) -> bool:
    """May a layer of this method be given weights that were processed before?"""
    asked = getattr(method, "supports_pre_processed_weights", False)
    return weights_already_processed is not None and bool(asked)


def create_model(
    loader: Any, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
) -> nn.Module:
    """Build the module tree as this version's own load_model does."""
    build = getattr(loader, "create_model", initialize_model)
    model: nn.Module = build(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    return model
