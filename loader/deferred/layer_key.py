"""Layer keys: a name for everything a layer's final tensors follow from.

A key is trusted like the function it stands for, so it takes in too much rather than too little: a
missing input could give wrong weights, a needless one only costs sharing. What is left out is
written down, with the reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from blake3 import blake3

from tensor_dedup.loader.deferred.environment import environment

_CONTEXT = "tensor-dedup layer key v1"
TRACER_VERSION = 1

# A layer's own attributes that name its place and not its content. Ranks: a slice is part of the
# recipe, so equal slices of different ranks meet.
_PLACE = frozenset({"prefix", "layer_name", "name", "training"})
_RANKS = frozenset({"tp_rank", "ep_rank", "dp_rank", "pcp_rank"})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "tensor_dedup": version("tensor-dedup"),
        "tracer": str(TRACER_VERSION),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
    }


def runtime() -> dict[str, Any]:
    """Settings of this process, outside the environment, that kernels read when they pack."""
    return {
        "threads": torch.get_num_threads(),
        "mkldnn": [torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic],
        "matmul": [
            torch.get_float32_matmul_precision(),
            str(getattr(torch.backends.mkldnn, "fp32_precision", None)),
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flush_denormal_default_dtype": str(torch.get_default_dtype()),
        "cpu": {name: str(value) for name, value in sorted(torch.cpu.get_capabilities().items())},
    }


def plain(value: Any, depth: int = 6) -> Any:
    """What of `value` a key can hold: plain values, containers, enums and dataclasses of them.

    Anything else stands in by its class, so that a change of kind still changes the key.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
    if depth > 0:
        if isinstance(value, (list, tuple)):
            return [plain(item, depth - 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(plain(item, depth - 1), sort_keys=True) for item in value)
        if isinstance(value, Mapping):
            return {str(k): plain(v, depth - 1) for k, v in value.items() if str(k) not in _RANKS}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return {"class": class_name(value), **plain(fields, depth)}
    return f"<{class_name(value)}>"


def attributes(thing: object, depth: int = 4) -> dict[str, Any]:
    """The plain attributes of an object that do not name its place in a model."""
    return {
        name: plain(value, depth)
        for name, value in sorted(vars(thing).items())
        if name not in _PLACE | _RANKS
        and not name.startswith(("_parameters", "_buffers", "_modules"))
    }


def class_name(thing: object) -> str:
    """Module and name of the class of `thing`, or of the class or function itself."""
    kind = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def process_inputs() -> dict[str, Any]:
    """What is common to the keys of all layers that this process makes now."""
    return {"versions": _versions(), "environment": environment(), "runtime": runtime()}


def process_state() -> str:
    """One name for everything outside a recipe that arithmetic in it may depend on.

    Sums and products change their last bits with threads, precision settings and libraries.
    """
    return blake3(process_text().encode(), derive_key_context=_CONTEXT).hexdigest()


def process_text() -> str:
    """`process_inputs` as JSON: the first part of every preimage."""
    return json.dumps(process_inputs(), sort_keys=True, default=str)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKey:
    """A layer key: the name, and what it is the name of. Secrets never stand in a preimage."""

    digest: str
    preimage: str

    @classmethod
    def of(cls, process: str | None = None, **inputs: Any) -> LayerKey:
        """The key of these inputs and of everything common to the layers of this process.

        `process`: what `process_text` said at the beginning of the load, when one is under way.
        """
        own = json.dumps(inputs, sort_keys=True, default=str)
        common = process_text() if process is None else process
        preimage = f"{common[:-1]}, {own[1:]}" if inputs else common  # one object of both
        return cls(blake3(preimage.encode(), derive_key_context=_CONTEXT).hexdigest(), preimage)
