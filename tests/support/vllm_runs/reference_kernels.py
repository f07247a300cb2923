"""Plain kernels for formats that vLLM has none for on this CPU, put where vLLM looks for one.

What is loaded, and how it is processed, is vLLM's own: each derives from the class whose processing
kernels of GPUs use, and only multiplies.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mxfp4.emulation import EmulationMxfp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.platforms import PlatformEnum

from models import quantised

_YES = (True, None)


class PlainBlockFp8(Fp8BlockScaledMMLinearKernel):
    """Blocks of fp8, each with a scale, widened before they are multiplied."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Any:
        return _YES

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        rows, columns = self.weight_group_shape
        scale = Bs.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return functional.linear(A, (B.float() * scale).to(A.dtype))


class PlainNvFp4(EmulationNvFp4LinearKernel):
    """vLLM's emulation, whose own product needs a GPU."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts: Any = layer
        scale = parts.weight_scale.float() * parts.weight_global_scale
        weight = quantised.unpacked_fp4(parts.weight) * scale.repeat_interleave(16, 1)
        return functional.linear(x, weight.to(x.dtype), bias)


class PlainMxFp4(EmulationMxfp4LinearKernel):
    """vLLM's emulation, whose own product needs another package."""

    @classmethod
    def can_implement(cls, config: Any) -> Any:
        return _YES

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts: Any = layer
        scale = (parts.weight_scale.float() - 127).exp2()
        weight = quantised.unpacked_fp4(parts.weight) * scale.repeat_interleave(32, 1)
        return functional.linear(x, weight.to(x.dtype), bias)


def _scaled_fp8(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's own operation does, which is there on some CPUs only."""
    scaled = (values.float() / scale).clamp(-448.0, 448.0)
    return scaled.to(torch.float8_e4m3fn), scale


@contextmanager
def installed() -> Iterator[None]:
    """While active, vLLM finds them where it would find none."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_custom_ops, "scaled_fp8_quant", _scaled_fp8))
        for table, kernel in (
            (linear._POSSIBLE_FP8_BLOCK_KERNELS, PlainBlockFp8),
            (linear._POSSIBLE_NVFP4_KERNELS, PlainNvFp4),
            (linear._POSSIBLE_MXFP4_KERNELS, PlainMxFp4),
        ):
            tables: Any = table
            found = [*tables.get(PlatformEnum.CPU, []), kernel]
            stack.enter_context(mock.patch.dict(tables, {PlatformEnum.CPU: found}))
        yield


@contextmanager
def for_gguf() -> Iterator[None]:
    """The same for the plug-in for GGUF, whose kernels all need a GPU."""
    import gguf

    ops = importlib.import_module("vllm_gguf_plugin.ops")

    def widened(weight: torch.Tensor, kind: int, dtype: torch.dtype) -> torch.Tensor:
        values = gguf.quants.dequantize(weight.numpy(), gguf.GGMLQuantizationType(kind))
        return torch.from_numpy(values).to(dtype)

    def multiply(weight: torch.Tensor, x: torch.Tensor, kind: int, _row: int) -> torch.Tensor:
        return functional.linear(x, widened(weight, kind, x.dtype))

    def dequantize(
        weight: torch.Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return widened(weight, kind, dtype).view(rows, columns)

    with (
        mock.patch.object(ops, "ggml_mul_mat_a8", multiply),
        mock.patch.object(ops, "ggml_mul_mat_vec_a8", multiply),
        mock.patch.object(ops, "ggml_dequantize", dequantize),
    ):
        yield
