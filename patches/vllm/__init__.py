"""The integration with vLLM: the load format `tensor_dedup` and the argument `tensor_dedup=`.

The two functions are entry points, which vLLM calls in each of its processes before it reads any
arguments. Importing this module imports neither vllm nor torch.
"""

import functools
import logging
from typing import TYPE_CHECKING

from tensor_dedup.patches.vllm.hooks import install
from tensor_dedup.patches.vllm.load_formats import BACKEND, LOAD_FORMAT

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

_log = logging.getLogger(__name__)


def prepare() -> None:
    """Add the argument `tensor_dedup=` to vLLM. Entry point in `vllm.platform_plugins`.

    vLLM calls this entry point while `vllm` is being imported. An entry point in
    `vllm.general_plugins` would be called too late for `LLM(tensor_dedup=...)`. This function
    returns None, so vLLM does not take the package for a platform.
    """
    install()


def register() -> None:
    """Add the argument and the load format to vLLM. Entry point in `vllm.general_plugins`.

    vLLM calls this function in every process of an engine. Calling it again has no effect.
    """
    install()
    _register_loader()


@functools.cache  # vLLM warns about a load format that is registered twice
def _register_loader() -> None:
    try:
        from vllm.model_executor.model_loader import register_model_loader

        loader = _loader_class()
    except ImportError as error:
        # Raising here would end every engine of a vLLM that lost a name we import, also those
        # that never asked for us. Whoever asks hears from vLLM that the format is not supported.
        _log.warning(
            "the load format %s is not available in this vLLM: %s", LOAD_FORMAT, str(error)
        )
        return
    register_model_loader(LOAD_FORMAT)(loader)
    _register_transfer()


def _register_transfer() -> None:
    """Add the weight transfer engine, where vLLM has a registry of them."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "tensor_dedup.patches.vllm.weight_transfer", "StepTransferEngine"
    )


def _loader_class() -> "type[DefaultModelLoader]":
    """Return the loader, or one that loads plainly if this vLLM lacks a name that it imports."""
    from tensor_dedup.patches.vllm.plain_loads import install as install_plain_loads
    from tensor_dedup.patches.vllm.plain_loads import plain_loader

    install_plain_loads()
    try:
        from tensor_dedup.patches.vllm.loader import TensorDedupLoader
    except ImportError as error:
        return plain_loader(f"this vLLM is not one that tensor-dedup knows: {error}")
    return TensorDedupLoader
