"""One copy of every tensor that several models have in common.

Importing this package loads neither torch nor vllm: each name is imported when it is first used.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.errors import ConfigError, FormatError, StoreError, TensorDedupError
    from tensor_dedup.loader.report import report
    from tensor_dedup.loader.residents.resident import shares_memory
    from tensor_dedup.loader.unsharing.unshare import unshare, verify
    from tensor_dedup.patches.huggingface.pipelines import disable, enable, move, sweep
    from tensor_dedup.store.store import Store

__all__ = [
    "ConfigError",
    "FormatError",
    "Store",
    "StoreError",
    "TensorDedupConfig",
    "TensorDedupError",
    "disable",
    "enable",
    "move",
    "report",
    "shares_memory",
    "sweep",
    "unshare",
    "verify",
]

_HOMES: Mapping[str, str] = {
    "ConfigError": "tensor_dedup.errors",
    "FormatError": "tensor_dedup.errors",
    "Store": "tensor_dedup.store.store",
    "StoreError": "tensor_dedup.errors",
    "TensorDedupConfig": "tensor_dedup.config",
    "TensorDedupError": "tensor_dedup.errors",
    "disable": "tensor_dedup.patches.huggingface.pipelines",
    "enable": "tensor_dedup.patches.huggingface.pipelines",
    "move": "tensor_dedup.patches.huggingface.pipelines",
    "report": "tensor_dedup.loader.report",
    "shares_memory": "tensor_dedup.loader.residents.resident",
    "sweep": "tensor_dedup.patches.huggingface.pipelines",
    "unshare": "tensor_dedup.loader.unsharing.unshare",
    "verify": "tensor_dedup.loader.unsharing.unshare",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


# vLLM asks its plug-ins before it reads its arguments, except where it is told its platform
# (VLLM_TARGET_DEVICE): there only this import can teach it `tensor_dedup=`. find_spec finds a
# top-level package without importing it.
if importlib.util.find_spec("vllm") is not None:
    from tensor_dedup.patches.vllm import hooks

    hooks.install()

# Likewise `from_pretrained(..., tensor_dedup=...)` of Diffusers and Transformers.
if any(importlib.util.find_spec(name) is not None for name in ("transformers", "diffusers")):
    from tensor_dedup.patches.huggingface import pipelines

    pipelines.install()
