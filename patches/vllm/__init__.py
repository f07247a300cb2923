"""vLLM: the load format `tensor_dedup` and the argument `tensor_dedup=`.

Both functions below are entry points; vLLM calls them in every process, before it reads any
argument. Importing this module loads neither vllm nor torch.
"""

import importlib.util

LOAD_FORMAT = "tensor_dedup"


def prepare() -> None:
    """Entry point in `vllm.platform_plugins`: claims no platform."""


def register() -> None:
    """Entry point in `vllm.general_plugins`: idempotent, called in every process of an engine."""
    if importlib.util.find_spec("tensor_dedup.patches.vllm.loader") is None:
        return
