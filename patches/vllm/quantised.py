"""Which quantised layers can be shared by layer key, and what their kernels are.

The classes are looked up by name: a vLLM that has moved one still loads, and shares those layers
by content. Only what tests have covered is named here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_LAYERS = "vllm.model_executor.layers.quantization"
_KERNELS = "vllm.model_executor.kernels.linear"


def _classes(*targets: str) -> tuple[type, ...]:
    """Those of these classes that this vLLM has."""
    found = []
    for target in targets:
        module, _, name = target.partition(":")
        try:
            found.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue
    return tuple(found)


_KINDS = _classes(
    f"{_KERNELS}.base:MMLinearKernel",
    f"{_KERNELS}.mixed_precision.MPLinearKernel:MPLinearKernel",
    f"{_KERNELS}.scaled_mm.ScaledMMLinearKernel:ScaledMMLinearKernel",
)
_FP8 = _classes(f"{_LAYERS}.fp8:Fp8LinearMethod")
# Kernels of that method that leave the weight as the method does, and set nothing elsewhere.
_FP8_KERNELS = _classes(f"{_KERNELS}.scaled_mm.pytorch:PerTensorTorchFP8ScaledMMLinearKernel")
_INT8 = _classes(f"{_LAYERS}.compressed_tensors.schemes:CompressedTensorsW8A8Int8")
_INT8_METHODS = _classes(
    f"{_LAYERS}.compressed_tensors.compressed_tensors:CompressedTensorsLinearMethod"
)
_INT8_KERNELS = _classes(f"{_KERNELS}.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel")


def linear_kernel(layer: nn.Module) -> Any | None:
    """vLLM's kernel of a quantised linear layer: its method's, or that of its scheme; or None."""
    for holder in (layer.quant_method, getattr(layer, "scheme", None)):
        for name in ("fp8_linear", "kernel"):
            kernel = getattr(holder, name, None)
            if isinstance(kernel, _KINDS):
                return kernel
    return None


def is_plain_fp8(layer: nn.Module) -> bool:
    """Is it a layer of fp8 weights, processed by nobody but their method?"""
    method: Any = layer.quant_method
    return type(method) in _FP8 and type(method.fp8_linear) in _FP8_KERNELS


def packs_int8(layer: nn.Module) -> bool:
    """Is it a layer whose int8 weight the kernel may pack for oneDNN?"""
    scheme = getattr(layer, "scheme", None)
    if type(layer.quant_method) not in _INT8_METHODS or type(scheme) not in _INT8:
        return False  # a method that rotates weights has the same scheme
    return type(linear_kernel(layer)) in _INT8_KERNELS
