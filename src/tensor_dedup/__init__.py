"""Keeps one copy of every tensor that several models have in common.

Importing this package loads neither torch nor vllm, because each name is imported when it is first
used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names, for type checkers. A test checks that the two lists agree.
if TYPE_CHECKING:
    from tensor_dedup.api import Store as Store
    from tensor_dedup.config import TensorDedupConfig as TensorDedupConfig
    from tensor_dedup.errors import AuditError as AuditError
    from tensor_dedup.errors import CheckpointError as CheckpointError
    from tensor_dedup.errors import ConfigError as ConfigError
    from tensor_dedup.errors import FormatError as FormatError
    from tensor_dedup.errors import StoreError as StoreError
    from tensor_dedup.errors import TensorDedupError as TensorDedupError
    from tensor_dedup.errors import UnsupportedError as UnsupportedError
    from tensor_dedup.loader.report import Report as Report
    from tensor_dedup.loader.report import report as report
    from tensor_dedup.loader.residents.resident import shared_bytes as shared_bytes
    from tensor_dedup.loader.residents.resident import shares_memory as shares_memory
    from tensor_dedup.loader.unsharing.unshare import unshare as unshare
    from tensor_dedup.loader.unsharing.unshare import verify as verify
    from tensor_dedup.patches.huggingface.pipelines import disable as disable
    from tensor_dedup.patches.huggingface.pipelines import enable as enable
    from tensor_dedup.patches.huggingface.pipelines import move as move
    from tensor_dedup.patches.huggingface.pipelines import sweep as sweep
    from tensor_dedup.publishing.publisher import Publisher as Publisher
    from tensor_dedup.remote.remote import Remote as Remote
    from tensor_dedup.store.reading.tensors import load_tensors as load_tensors
    from tensor_dedup.training.run import CheckpointStore as CheckpointStore

# And for run time: the module in which each is looked up when it is first used.
_HOMES = {
    "TensorDedupConfig": "tensor_dedup.config",
    "AuditError": "tensor_dedup.errors",
    "CheckpointError": "tensor_dedup.errors",
    "ConfigError": "tensor_dedup.errors",
    "FormatError": "tensor_dedup.errors",
    "StoreError": "tensor_dedup.errors",
    "TensorDedupError": "tensor_dedup.errors",
    "UnsupportedError": "tensor_dedup.errors",
    "Report": "tensor_dedup.loader.report",
    "report": "tensor_dedup.loader.report",
    "shared_bytes": "tensor_dedup.loader.residents.resident",
    "shares_memory": "tensor_dedup.loader.residents.resident",
    "unshare": "tensor_dedup.loader.unsharing.unshare",
    "verify": "tensor_dedup.loader.unsharing.unshare",
    "disable": "tensor_dedup.patches.huggingface.pipelines",
    "enable": "tensor_dedup.patches.huggingface.pipelines",
    "move": "tensor_dedup.patches.huggingface.pipelines",
    "sweep": "tensor_dedup.patches.huggingface.pipelines",
    "CheckpointStore": "tensor_dedup.training.run",
    "load_tensors": "tensor_dedup.store.reading.tensors",
    "Publisher": "tensor_dedup.publishing.publisher",
    "Remote": "tensor_dedup.remote.remote",
    "Store": "tensor_dedup.api",
}

if not TYPE_CHECKING:  # they take the names that are imported as themselves for the public ones
    __all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})


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
