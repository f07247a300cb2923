"""Experts whose weights the engine itself overwrites while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

BALANCED = "enable_eplb: balancing experts overwrites it while the engine runs"


def eplb_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that vLLM moves from rank to rank when it balances experts (`enable_eplb`)."""
    for module in model.modules():
        config: Any = getattr(module, "moe_config", None)
        parallel = getattr(config, "moe_parallel_config", None)
        # What runs experts has their configuration too, and parts that stay where they are. A
        # method may be a module, or not.
        own = "quant_method" in module._modules or "quant_method" in vars(module)
        if own and getattr(parallel, "enable_eplb", False):
            yield from module.parameters()
