"""The load format `tensor_dedup`: vLLM's default loader, over deferred tensors."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.loader.memory import SharedMemoryError
from tensor_dedup.loader.report import ModelReport, add
from tensor_dedup.loader.sources import StaleHintError
from tensor_dedup.loader.trace import UntraceableError
from tensor_dedup.patches.vllm import weight_iterators, writers
from tensor_dedup.patches.vllm.kernels import final_bytes
from tensor_dedup.patches.vllm.load_format import KEY, split
from tensor_dedup.patches.vllm.run import Run
from tensor_dedup.patches.vllm.seams import usable

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, LoadConfig, ModelConfig, VllmConfig

_log = logging.getLogger(__name__)
# Tracing replaces process-wide state (the default dtype among it), and two loads of one model at
# once would each build what one could share.
_load_lock = threading.RLock()
# What a model's loading code may raise when it meets a tensor without content.
_TRACING_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
    AssertionError,
)  # fmt: skip


class TensorDedupLoader(DefaultModelLoader):
    """Loads a model whose final tensors are shared with the models already in this process.

    Any weights it cannot share it loads as vLLM would, and `report()` says why. Loads of one
    process wait for each other. Raises ConfigError, FormatError, ChangedFileError, AuditError.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self.dedup, inner = split(extra.pop(KEY, None))
        super().__init__(
            dataclasses.replace(load_config, load_format=inner, model_loader_extra_config=extra)
        )
        weight_iterators.install()
        writers.install()

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Build the model and give it its weights."""
        with _load_lock:
            refusal = self._refusal(vllm_config)
            if refusal is not None:
                return self._load_plainly(refusal, vllm_config, model_config, prefix)
            try:
                return self._load_trusting_hints(vllm_config, model_config, prefix)
            except (UnsupportedError, SharedMemoryError) as error:
                _log.debug("sharing was given up here", exc_info=True)
                refusal = str(error)
            # Outside the handler: the error's frames hold the model that was begun.
            return self._load_plainly(refusal, vllm_config, model_config, prefix)

    def _refusal(self, vllm_config: VllmConfig) -> str | None:
        """Why this model is loaded plainly from the start, or None."""
        device = self._device(vllm_config)
        if not self.dedup.enabled:
            return "tensor_dedup is switched off"
        if device.type != "cpu":
            return f"sharing on {device.type} is not in this version"
        if not (usable("loader") and usable("reload")):
            return "this vLLM is not one that tensor-dedup knows"
        return None

    def _device(self, vllm_config: VllmConfig) -> torch.device:
        device = self.load_config.device or vllm_config.device_config.device
        return torch.device(device or "cpu")

    def _load_plainly(
        self, reason: str, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> nn.Module:
        _log.warning("%s: loading without sharing: %s", model_config.model, reason)
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        report = ModelReport(name=model_config.model, rank=vllm_config.parallel_config.rank)
        report.tensors_total = sum(1 for _ in model.parameters())
        dtype = cast("torch.dtype", model_config.dtype)
        report.total_bytes = report.private_bytes = final_bytes(model, dtype)
        report.bytes_materialised = report.total_bytes
        _describe_checkpoint(report, model_config.model)
        report.skipped = [("<model>", reason)]
        add(report)
        return model

    def _load_trusting_hints(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> nn.Module:
        """Load; once more without hints when one of them turned out to be wrong."""
        trust = self.dedup.verify == "hint"
        try:
            return self._load_shared(vllm_config, model_config, prefix, trust_hints=trust)
        except StaleHintError as error:
            _log.warning("%s; loading again without hints", error)
        return self._load_shared(vllm_config, model_config, prefix, trust_hints=False)

    def _load_shared(
        self,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        prefix: str,
        *,
        trust_hints: bool,
    ) -> nn.Module:
        device = self._device(vllm_config)
        dtype = cast("torch.dtype", model_config.dtype)  # vLLM has resolved "auto" by now
        with (
            _taken_back(vllm_config),
            Run(self.dedup, dtype, trust_hints=trust_hints) as run,
            set_default_torch_dtype(dtype),
        ):
            with device:
                model = self.create_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            self._trace(run, model, model_config)
            began = time.perf_counter()
            run.share_outside_layers(model)
            with run.retied(model, model_config), _hooked(model, run):
                loader_utils.process_weights_after_loading(model, model_config, device)
            run.share_left_over(model)
            run.finish()
            report = run.report(model_config.model, vllm_config.parallel_config.rank)
            report.seconds["process"] = max(
                0.0,
                time.perf_counter() - began - report.seconds["read"] - report.seconds["hash"],
            )
        add(report)
        return model.eval()

    def _trace(self, run: Run, model: nn.Module, model_config: ModelConfig) -> None:
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                raise UntraceableError("weights are quantised while they are loaded")
        began = time.perf_counter()
        try:
            run.defer(model)
            with weight_iterators.deferring(run.open_files), run.tracer.recording():
                self.load_weights(model, model_config)
            run.conclude(model)
        except _TRACING_ERRORS as error:
            # A checkpoint that does not fit the model fails again, plainly, with vLLM's own words.
            raise UntraceableError(f"its loading code cannot be deferred ({error})") from error
        run.plan_seconds = time.perf_counter() - began


@contextmanager
def _taken_back(vllm_config: VllmConfig) -> Iterator[None]:
    """When the block fails, let the next attempt find things as this one found them.

    vLLM enters each attention and MoE layer in the configuration when it is made, and refuses a
    second one of that name; constructors draw random numbers.
    """
    compilation = vllm_config.compilation_config
    layers = dict(compilation.static_forward_context)
    experts = list(compilation.static_all_moe_layers)
    counted = [Counter(ops) for ops in _counted_ops(compilation)]
    numbers = torch.get_rng_state()
    try:
        yield
    except BaseException:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        compilation.static_all_moe_layers[:] = experts
        for ops, before in zip(_counted_ops(compilation), counted, strict=True):
            ops.clear()
            ops.update(before)
        torch.set_rng_state(numbers)
        raise


def _counted_ops(compilation: CompilationConfig) -> tuple[Counter[str], Counter[str]]:
    return compilation.enabled_custom_ops, compilation.disabled_custom_ops


def _describe_checkpoint(report: ModelReport, path: str) -> None:
    """Enter the sizes of a local checkpoint that vLLM read by itself; nothing when unknown."""
    try:
        checkpoint = open_checkpoint(path)
    except (TensorDedupError, OSError):
        return
    report.checkpoint_bytes = report.bytes_read = checkpoint.nbytes
    report.source_tensors_total = checkpoint.tensor_count
    report.header_bytes = sum(file.header.header_bytes for file in checkpoint.files)


@contextmanager
def _hooked(model: nn.Module, run: Run) -> Iterator[None]:
    """Lead every layer's processing through `run`, by an attribute that shadows the method."""
    hooked: list[QuantizeMethodBase] = []
    try:
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            name = "process_weights_after_loading"
            if isinstance(method, QuantizeMethodBase) and name not in vars(method):
                original = method.process_weights_after_loading
                setattr(method, name, run.hook(original))
                hooked.append(method)
        yield
    finally:
        for method in hooked:
            vars(method).pop("process_weights_after_loading", None)
