"""Names that some supported versions of vLLM lack, with substitutes.

`seams` records the versions that have each name, and what a load does without it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn import functional
from vllm.model_executor.layers import utils as layer_utils
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
    """Return whether a quantisation method accepts weights that have been processed already."""
    asked = getattr(method, "supports_pre_processed_weights", False)
    return weights_already_processed is not None and bool(asked)


def create_model(
    loader: Any, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
) -> nn.Module:
    """Build the module tree as `load_model` in the installed vLLM does.

    If vLLM's `loader` has a method `create_model`, it is called, otherwise `initialize_model`.
    """
    build = getattr(loader, "create_model", initialize_model)
    model: nn.Module = build(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    return model


# On a layer: its weight stays plain on the CPU. vLLM 0.28 ignores it, and 0.32 does for embeddings
# and heads.
KEEP_PLAIN = "_cpu_skip_gemm_dispatch"
# On a function: it is the wrapper that checks for KEEP_PLAIN.
_CHECKS = "_tensor_dedup_checks_keep_plain"


def install() -> None:
    """Wrap vLLM's packing function so that some weights stay unpacked. Idempotent.

    A layer whose weight is to stay unpacked has the attribute KEEP_PLAIN, and the wrapper skips
    such layers. Without the wrapper, a reload would pack their weights.
    """
    original = layer_utils.dispatch_cpu_unquantized_gemm
    if not hasattr(original, _CHECKS):
        layer_utils.dispatch_cpu_unquantized_gemm = unless_kept_plain(original)


def unless_kept_plain(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's `dispatch_cpu_unquantized_gemm` to leave layers with KEEP_PLAIN unpacked."""

    @functools.wraps(original)
    def dispatch(layer: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(layer, KEEP_PLAIN, False):
            layer.cpu_linear = functional.linear
        else:
            original(layer, *args, **kwargs)

    setattr(dispatch, _CHECKS, True)
    return dispatch
