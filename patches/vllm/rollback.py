"""Loading that fails leaves vLLM's configuration as it found it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tensor_dedup.loader.process_state import rng_restored_on_failure

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig


@contextmanager
def restored_on_failure(vllm_config: VllmConfig) -> Iterator[None]:
    """When the block fails, let the next attempt find things as this one found them.

    vLLM enters each attention and MoE layer in the configuration when it is made, and refuses a
    second one of that name; constructors draw random numbers.
    """
    compilation = vllm_config.compilation_config
    layers = dict(compilation.static_forward_context)
    experts = list(compilation.static_all_moe_layers)
    counted = [Counter(ops) for ops in _counted_ops(compilation)]
    try:
        with rng_restored_on_failure():
            yield
    except BaseException:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        compilation.static_all_moe_layers[:] = experts
        for ops, before in zip(_counted_ops(compilation), counted, strict=True):
            ops.clear()
            ops.update(before)
        raise


def _counted_ops(compilation: CompilationConfig) -> tuple[Counter[str], Counter[str]]:
    return compilation.enabled_custom_ops, compilation.disabled_custom_ops
