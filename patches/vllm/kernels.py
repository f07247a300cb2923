"""vLLM's kernels: which layers can be shared by layer key, and what a kernel has packed.

A layer key identifies a processed layer by everything that processing reads. Only classes that
tests cover are named here. If the installed vLLM has moved one of them, models still load, and the
layers of that class are shared by their final bytes.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from vllm import _custom_ops
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from tensor_dedup.loader.deferred.layer_key import plain

_PLAIN = (bool, int, float, str, type(None))
_SCALES = "_tensor_dedup_scales"
_LAYERS = "vllm.model_executor.layers.quantization"
_KERNELS = "vllm.model_executor.kernels.linear"


def _classes(*targets: str) -> tuple[type, ...]:
    """Return those of these classes that this vLLM has."""
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
    """Return vLLM's kernel of a quantised linear layer, or None if the layer has no kernel."""
    for holder in (layer.quant_method, getattr(layer, "scheme", None)):
        for name in ("fp8_linear", "kernel"):
            kernel = getattr(holder, name, None)
            if isinstance(kernel, _KINDS):
                return kernel
    return None


def is_plain_fp8(layer: nn.Module) -> bool:
    """Return whether a layer has fp8 weights and a kernel that leaves them unchanged.

    The result is False for classes that tests do not cover.
    """
    method: Any = layer.quant_method
    return type(method) in _FP8 and type(method.fp8_linear) in _FP8_KERNELS


def packs_int8(layer: nn.Module) -> bool:
    """Return whether a layer has an int8 weight that its kernel may pack for oneDNN."""
    scheme = getattr(layer, "scheme", None)
    if type(layer.quant_method) not in _INT8_METHODS or type(scheme) not in _INT8:
        return False  # a method that rotates weights has the same scheme
    return type(linear_kernel(layer)) in _INT8_KERNELS


def dispatch() -> dict[str, bool]:
    """Return whether the features that affect how vLLM packs a weight on a CPU are available.

    The result maps each feature's name, such as "onednn", to True or False. Instruction sets and
    environment variables also affect the packing, but are not included.
    """
    return {
        "onednn": bool(_custom_ops._supports_onednn),
        "zen": bool(current_platform.is_zen_cpu()),
        "zentorch": hasattr(torch.ops.zentorch, "zentorch_linear_unary"),
        "zentorch_prepack": hasattr(torch.ops.zentorch, "zentorch_weight_prepack_for_linear"),
        "sgl": hasattr(torch.ops._C, "convert_weight_packed"),
        "conv": hasattr(_custom_ops, "causal_conv1d_weight_pack"),
    }


def packed_linear(layer: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the layer's function `cpu_linear` if other layers can use its packed weight, or None.

    vLLM computes the layer with `cpu_linear`, which holds the packed weight in its closure. The
    result is None in these cases:

    * There is no such function, or it holds no packed weight.
    * The closure also holds other data, such as a copy of the layer's bias.
    """
    linear: Any = getattr(layer, "cpu_linear", None)
    cells = getattr(linear, "__closure__", None) or ()
    names = linear.__code__.co_freevars if cells else ()
    owned = [_owned(name, cell.cell_contents) for name, cell in zip(names, cells, strict=True)]
    return linear if owned and all(owned) else None


def _owned(name: str, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return "weight" in name and not isinstance(value, nn.Parameter)
    return isinstance(value, (CPUDNNLGEMMHandler, int))


def unpacked_linear(layer: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the layer's function `cpu_linear` if it holds no packed weight, or None.

    vLLM computes the layer with `cpu_linear`. Where oneDNN has no kernel (float16 on many CPUs),
    this is a plain function, and the layer keeps its unpacked weight.
    """
    linear = getattr(layer, "cpu_linear", None)
    plain_function = isinstance(linear, FunctionType) and not linear.__closure__
    return linear if plain_function else None


def packed_scaled(layer: nn.Module) -> CPUDNNLGEMMHandler | None:
    """Return the oneDNN handler with the layer's packed int8 weight.

    The result is None if the layer has no int8 weight, or if its kernel does not use oneDNN.
    """
    kernel: Any = linear_kernel(layer)
    handler = getattr(kernel, "dnnl_handler", None)
    if not packs_int8(layer) or not isinstance(handler, CPUDNNLGEMMHandler):
        return None
    return handler if kernel.linear_method == kernel._apply_weights_onednn else None


@contextmanager
def scales_kept() -> Iterator[list[int]]:
    """Context manager: int8 handlers that this thread creates inside it keep their scales alive.

    A oneDNN handler has only a pointer to its scales. So each new handler also gets a reference to
    them. The context manager yields a list. Each new handler adds one entry, which identifies the
    storage of its scales. Several threads can use the context manager at the same time.
    """
    kept: list[int] = []
    with _HANDLERS.watched():
        _HANDLERS.mine.kept.append(kept)
        try:
            yield kept
        finally:
            _HANDLERS.mine.kept.pop()


class _Handlers:
    """The replacement of vLLM's handler factory while any thread is in `scales_kept`."""

    def __init__(self) -> None:
        self.mine = _Kept()
        self._watching = 0
        self._alone()
        os.register_at_fork(after_in_child=self._alone)

    def _alone(self) -> None:
        # A thread that does not exist in the child may hold it. One that watched does not leave
        # either: the function stays replaced there, and does for others what vLLM's own does.
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._lock:
            if self._watching == 0:
                self._create = _custom_ops.create_onednn_scaled_mm
                _custom_ops.create_onednn_scaled_mm = self._keeping(self._create)
            self._watching += 1
        try:
            yield
        finally:
            with self._lock:
                self._watching -= 1
                if self._watching == 0:
                    _custom_ops.create_onednn_scaled_mm = self._create

    def _keeping(self, create: Callable[..., CPUDNNLGEMMHandler]) -> Callable[..., Any]:
        @functools.wraps(create)
        def keeping(
            weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any, **kwargs: Any
        ) -> CPUDNNLGEMMHandler:
            handler = create(weight, weight_scales, *args, **kwargs)
            if self.mine.kept:
                memory = weight_scales.detach()  # not the parameter, whose memory will be another
                setattr(handler, _SCALES, memory)
                for kept in self.mine.kept:
                    kept.append(memory.untyped_storage()._cdata)
            return handler

        return keeping


class _Kept(threading.local):
    """The lists of the blocks that the current thread is in."""

    def __init__(self) -> None:
        self.kept: list[list[int]] = []


_HANDLERS: Final = _Handlers()


def kept_by_others(parameter: nn.Parameter, kept: Sequence[int] = ()) -> bool:
    """Return whether another object also uses the memory of `parameter`, such as a kernel's view.

    `kept` is the list that `scales_kept` yields, with an entry for each oneDNN handler. Uses by
    these handlers do not count.
    """
    storage = parameter.untyped_storage()._cdata
    # The parameter holds its storage once, and the handle asked for here once more.
    return torch._C._storage_Use_Count(storage) > 2 + kept.count(storage)


def holds_memory(layer: nn.Module, block: torch.Tensor) -> bool:
    """Return whether a layer or its `cpu_linear` holds a tensor in the same memory as `block`."""
    storage = block.untyped_storage().data_ptr()
    linear = getattr(layer, "cpu_linear", None)
    cells = [cell.cell_contents for cell in getattr(linear, "__closure__", None) or ()]
    held = [*cells, *vars(layer).values(), *layer._parameters.values()]
    return any(
        isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == storage
        for each in held
    )


def processed_attributes(layer: nn.Module) -> dict[str, Any] | None:
    """Return the attributes that processing has set on the layer's MoE kernel.

    The result is {} if the layer has no unquantised experts. It is None in these cases:

    * The layer has no kernel yet.
    * An attribute cannot be copied to another layer, because it is not a plain value.
    """
    method: Any = layer.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return {}
    processed = method.moe_kernel
    if processed is None:
        return None
    fresh = _fresh_kernel(method, layer)
    changed = {
        name: value
        for name, value in vars(processed.fused_experts).items()
        if name not in vars(fresh.fused_experts)
        or plain(value) != plain(vars(fresh.fused_experts)[name])
    }
    return changed if all(isinstance(value, _PLAIN) for value in changed.values()) else None


def set_attributes(layer: nn.Module, attributes: dict[str, Any]) -> None:
    """Set `attributes` on the layer's MoE kernel.

    They come from `processed_attributes` of an equal layer. With {}, nothing is done.
    """
    method: Any = layer.quant_method
    for name, value in attributes.items():
        setattr(method.moe_kernel.fused_experts, name, value)


def _fresh_kernel(method: Any, layer: nn.Module) -> Any:
    kernel, config = method.moe_kernel, method.moe_quant_config
    try:
        method._init_moe_kernel(layer)
        return method.moe_kernel
    finally:
        method.moe_kernel, method.moe_quant_config = kernel, config


def final_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the size of a processed model in bytes: its parameters and its packed weights.

    Each element of a packed weight counts as 1 byte if the weight is int8, and otherwise as one
    element of `dtype`. Padding that oneDNN may add is not counted.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    itemsize = dtype.itemsize
    for module in model.modules():
        if hasattr(module, "quant_method") and (scaled := packed_scaled(module)) is not None:
            total += scaled.n * scaled.k  # of int8
        linear = getattr(module, "cpu_linear", None)
        for cell in getattr(linear, "__closure__", None) or ():
            handler = cell.cell_contents
            if isinstance(handler, CPUDNNLGEMMHandler):
                total += handler.n * handler.k * itemsize
    return total
