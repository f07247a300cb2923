"""Give a running engine's weights private memory before vLLM overwrites them.

Copy-on-write already protects other models. But without this, a model that overwrites all its
weights would hold memory twice, for as long as it exists: its own copies, and the shared memory
that it still has mapped.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import wrapt

from tensor_dedup.loader.residents.slab import SharedMemoryError
from tensor_dedup.loader.unsharing.model_digests import note_write
from tensor_dedup.loader.unsharing.unshare import leave_gpus, let_go_of_written, unshare
from tensor_dedup.patches.vllm.kernels import packs_int8, scales_kept
from tensor_dedup.patches.vllm.load_formats import follows_steps
from tensor_dedup.patches.vllm.seams import usable
from tensor_dedup.patches.vllm.sleep import models_of
from tensor_dedup.patches.vllm.step_updates import patch_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from torch import nn

_log = logging.getLogger(__name__)
# Both generations of runners; the CPU runners inherit from them.
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
# The CPU worker inherits from it.
_WORKER = "vllm.v1.worker.gpu_worker"
# What may have written when it returns. Who updates some weights keeps sharing the others.
_UPDATES = ("update_weights", "finish_weight_update")


@functools.cache
def install() -> None:
    """Wrap the functions of vLLM that reload or update weights. Idempotent.

    Functions in a module that is not imported yet are wrapped when the module is imported.
    """
    for name in _RUNNERS:
        wrapt.when_imported(name)(_patch)
    if usable("updates"):
        wrapt.when_imported(_WORKER)(_patch_updates)
    wrapt.when_imported(_WORKER)(patch_worker)


def _patch(module: ModuleType) -> None:
    runner: Any = module.GPUModelRunner
    original = runner.reload_weights

    @functools.wraps(original)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        note_write(model)
        leave_gpus(model)  # first, for it may refuse: graphs have captured addresses there
        unshare(model)
        with _keeping_scales(model):
            return original(self, *args, **kwargs)

    runner.reload_weights = reload_weights


def _patch_updates(module: ModuleType) -> None:
    for name in _UPDATES:
        original = getattr(module.Worker, name, None)
        if original is not None:
            setattr(module.Worker, name, _then_let_go(original))


def _then_let_go(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if follows_steps(self.vllm_config):  # nothing is written
            return original(self, *args, **kwargs)
        for model in models_of(self):
            note_write(model)
            leave_gpus(model)  # where nothing is copied on write
        with _keeping_scales(*models_of(self)):
            done = original(self, *args, **kwargs)
        for model in models_of(self):
            _let_go(model)
        return done

    return update


@contextmanager
def _keeping_scales(*models: nn.Module) -> Iterator[None]:
    """Keep the memory of int8 scales while layers may be packed anew.

    An int8 kernel is told once where its scales are. vLLM then copies them to where the former ones
    were, and drops these: without this, a reloaded model computes with whatever comes to lie there.
    """
    layers = [module for model in models for module in model.modules()]
    if any(hasattr(layer, "quant_method") and packs_int8(layer) for layer in layers):
        # Without the lock of loads: an update may wait for a thread that loads.
        with scales_kept():
            yield
    else:
        yield


def _let_go(model: nn.Module) -> None:
    """Release memory behind written weights; a failure, which only costs memory, is logged."""
    try:
        let_go_of_written(model)
    except SharedMemoryError as error:
        _log.warning("after an update, memory that was shared before stays mapped: %s", str(error))
