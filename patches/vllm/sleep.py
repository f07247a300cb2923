"""vLLM's sleep mode for shared weights, which vLLM's own allocator does not manage.

`CuMemAllocator` offloads only the memory that torch has allocated, and shared weights are mapped
outside of it. So the worker's `sleep` is wrapped to unmap the shared weights from the GPU, and its
`wake_up` to map them again.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import wrapt

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.checkpoint_io.stub_folder import stored_in
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.sleep import SleepingModel
from tensor_dedup.loader.residents.manager import client_of
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import MemoryManagerError
from tensor_dedup.patches.vllm.load_formats import KEY, LOAD_FORMAT, split
from tensor_dedup.patches.vllm.seams import usable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

    from tensor_dedup.loader.cuda.shared import SharedGpu

_log = logging.getLogger(__name__)
_WORKER: Final = "vllm.v1.worker.gpu_worker"
_asleep: Final[weakref.WeakKeyDictionary[Any, SleepingModel]] = weakref.WeakKeyDictionary()
# Also those without shared weights: what torch has allocated, vLLM's allocator unmaps.
_sleeping: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


@functools.cache
def install() -> None:
    """Wrap the methods `sleep` and `wake_up` of vLLM's worker. Idempotent.

    If the worker's module is not imported yet, this happens when it is imported. In a vLLM whose
    sleep mode is not supported, nothing is wrapped.
    """
    if usable("sleep"):
        wrapt.when_imported(_WORKER)(_patch)


def models_of(worker: Any) -> list[nn.Module]:
    """Return the models of a worker: its own and, if there is one, the speculative draft."""
    draft = getattr(worker, "get_draft_model", None)
    found = (worker.get_model(), draft() if draft is not None else None)
    return [model for model in found if model is not None]


def is_asleep(model: nn.Module) -> bool:
    """Return whether the weights of a worker's model may be unmapped, shared or not.

    They are from the beginning of the worker's `sleep` to the end of its `wake_up` of weights.
    """
    return model in _sleeping


def _patch(module: ModuleType) -> None:
    worker: Any = module.Worker
    worker.sleep = _sleep(worker.sleep)
    worker.wake_up = _wake_up(worker.wake_up)


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **options: Any) -> Any:
        gpu = _gpu_of(self)
        if level > 1 and gpu is not None:
            raise UnsupportedError(
                f"sleep level {level} discards weights, and tensor_dedup shares them; use level 1, "
                "which copies nothing that another engine has, and call wake_up() first: vLLM has "
                "paused this engine already",
                level=level,
            )
        awake = [model for model in models_of(self) if model not in _sleeping]
        _sleeping.update(awake)
        try:
            if gpu is not None:
                _fall_asleep(self, gpu)
            return original(self, level, *args, **options)
        except BaseException:
            # vLLM takes this engine for awake, so it must be, whatever has been unmapped by now.
            if (shared := _asleep.get(self)) is not None:
                shared.wake()
            _sleeping.difference_update(awake)
            raise

    return sleep


def _wake_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None, *args: Any, **options: Any) -> Any:
        if tags is not None and "weights" not in tags:
            return original(self, tags, *args, **options)
        if (shared := _asleep.get(self)) is not None:
            shared.wake()  # first, so that one for which there is no room can be tried again
            del _asleep[self]
        woken = original(self, tags, *args, **options)
        _sleeping.difference_update(models_of(self))
        return woken

    return wake_up


def _gpu_of(worker: Any) -> SharedGpu | None:
    """Return the GPU whose memory the worker's model may share."""
    if worker.vllm_config.load_config.load_format != LOAD_FORMAT:
        return None
    return DEVICES.at(worker.device)


def _fall_asleep(worker: Any, gpu: SharedGpu) -> None:
    model = _asleep.get(worker)
    try:
        if model is None:
            model = _asleep[worker] = _sleeping_model(worker, gpu)
    except (MemoryManagerError, UnsupportedError) as error:
        _log.warning("shared weights stay on the GPU while this engine sleeps: %s", str(error))
        return
    tensors = []
    for each in models_of(worker):
        tensors += [param_data(tensor) for tensor in chain(each.parameters(), each.buffers())]
    report = model.sleep(tensors)
    for reason in report.reasons:
        _log.warning("not all shared weights sleep: %s", reason)
    _log.info(
        "%d bytes of shared weights are unmapped, %d were copied to host memory",
        report.unmapped,
        report.copied,
    )


def _sleeping_model(worker: Any, gpu: SharedGpu) -> SleepingModel:
    load_config = worker.vllm_config.load_config
    mine = (load_config.model_loader_extra_config or {}).get(KEY)
    config, checkout = split(mine)[0], stored_in(mine)
    if config.memory_manager is None:
        raise UnsupportedError("there is no memory manager to keep them; give memory_manager")
    where = os.fspath(config.memory_manager)
    host = client_of(where)
    try:
        device = client_of(where, gpu.gpu.device.uuid)
    except MemoryManagerError as error:
        _log.debug("no memory manager of the GPU: %s", str(error))
        device = None
    model = worker.vllm_config.model_config.model
    # As its load called it, so that both have one name in the managers.
    name = checkout.url if checkout is not None and checkout.folder == model else model
    return SleepingModel(gpu, host, device, checkpoint_name(name))
