"""vLLM: the load format `tensor_dedup` and the argument `tensor_dedup=`.

Both functions below are entry points; vLLM calls them in every process, before it reads any
argument. Importing this module loads neither vllm nor torch.
"""

import functools
import importlib.util

from tensor_dedup.patches.vllm.hooks import install

LOAD_FORMAT = "tensor_dedup"


def prepare() -> None:
    """Entry point in `vllm.platform_plugins`: patches the arguments and claims no platform.

    vLLM asks platform plug-ins while it is being imported, before anybody can build arguments;
    the general plug-ins below would come too late for `LLM(tensor_dedup=...)`.
    """
    install()


def register() -> None:
    """Entry point in `vllm.general_plugins`: idempotent, called in every process of an engine."""
    install()
    _register_loader()


@functools.cache  # vLLM warns about a load format that is registered twice
def _register_loader() -> None:
    if importlib.util.find_spec("tensor_dedup.patches.vllm.loader") is None:
        return
    from vllm.model_executor.model_loader import register_model_loader

    from tensor_dedup.patches.vllm.loader import TensorDedupLoader

    register_model_loader(LOAD_FORMAT)(TensorDedupLoader)
