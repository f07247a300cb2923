"""vLLM engines whose weights are a GPU's shared memory, over the fake driver.

The fake's memory is host memory, so vLLM's CPU engine computes with it; every mapping is read-only,
and a write to one would end this process.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import PlatformEnum, current_platform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from gpu_runs import gpus
from gpu_runs.fake_driver import FakeDriver
from manager_runs import managers
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.memory_manager.cuda.driver import Access, Driver
from tensor_dedup.patches.vllm import arguments
from vllm_runs import plain, shared

PLACE = torch.device("cpu")
# The GPUs of the test that runs.
GPUS: list[SharedGpu] = []


@contextmanager
def on(driver: object) -> Iterator[SharedGpu]:
    """Within the block vLLM's device is a GPU of this driver's."""
    gpu = SharedGpu(Gpu(cast("Driver", driver), "0"), PLACE, CPU)
    with DEVICES.replaced("cpu", lambda _device: gpu):
        GPUS.append(gpu)
        yield gpu


@pytest.fixture
def driver() -> Iterator[gpus.Full]:
    made = gpus.Full()
    yield made
    layerwise.LAYERWISE_INFO.clear()  # where vLLM keeps what it has reloaded
    gc.collect()
    gc.collect()  # what weak tables held until the first collection
    assert all(gpu.gpu.reap(wait=True) == 0 for gpu in GPUS)
    GPUS.clear()
    assert made.left() == {}
    assert gpus.in_use() == 0


def accesses(llm: Any, driver: FakeDriver) -> dict[str, Access]:
    return {name: driver.access(p.data_ptr()) for name, p in shared.parameters(llm).items()}


def addresses(llm: Any) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in shared.parameters(llm).items()}


class IdleBackend(SleepModeBackend):
    """In the place of vLLM's allocator for GPUs, which has nothing of a CPU engine to offload."""

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RUNNING"


@dataclass
class Sleepers:
    """Engines that may sleep, and the managers of the GPU's memory and of the machine's."""

    socket: str
    device: gpus.GpuManager
    host: managers.Manager

    def engine(self, path: Path | str, config: dict[str, Any] | None = None, **options: Any) -> Any:
        """An engine that may sleep; `config` is more of `tensor_dedup`, `options` are arguments."""
        mine = {"memory_manager": self.socket, **(config or {})}
        return plain.engine(path, tensor_dedup=mine, enable_sleep_mode=True, **options)

    def on_gpu(self) -> int:
        """Bytes that are resident in the GPU's memory, by whichever process."""
        return self.device.overview().totals.resident_bytes

    def in_host_memory(self) -> int:
        return self.host.overview().totals.resident_bytes


@pytest.fixture
def sleepers(
    driver: gpus.Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sleepers]:
    """CPU engines that sleep by the functions of the worker for GPUs.

    Real are `LLM` from `enable_sleep_mode` on, scheduler, executor, `Worker.sleep` and `wake_up` of
    vLLM, both managers in processes of their own, and everything of ours. Stood in for are the
    platform's word that it can sleep (and, where our check of the arguments asks, that it is CUDA),
    the functions of the CPU's worker that ignore all of it (away, so those of its base class are
    called), torch's accelerator, and vLLM's allocator, which offloads what is not shared.
    """
    total = 1 << 40
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda _: True)
    monkeypatch.setitem(SleepModeBackendFactory._registry, "cumem", lambda: IdleBackend)
    for name in ("sleep", "wake_up"):
        monkeypatch.delattr(CPUWorker, name)
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(accelerator, "get_memory_info", lambda *_: (total - gpus.in_use(), total))
    monkeypatch.setattr(Worker, "synchronize_device", lambda *_: None)
    may_sleep = arguments._may_sleep

    def asked_on_cuda(settings: object) -> bool:
        with mock.patch.object(type(current_platform), "_enum", PlatformEnum.CUDA):
            return may_sleep(settings)

    monkeypatch.setattr(arguments, "_may_sleep", asked_on_cuda)
    tmp_path.chmod(0o700)
    room = "--budget", str(256 << 20)
    with gpus.running(tmp_path, *room) as device, managers.running(tmp_path) as host, on(driver):
        yield Sleepers(str(tmp_path / "m.sock"), device, host)
