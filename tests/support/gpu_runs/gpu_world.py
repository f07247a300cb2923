"""What the tests of tests/gpu run on: a GPU, or a rehearsal over the fake driver.

With TENSOR_DEDUP_FAKE_GPU=1 the same processes, managers and mappings run over memory files, and
torch computes with them on the CPU. It shows that the tests run, and nothing about a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpu_runs import gpus
from gpu_runs.answers import Worker
from gpu_runs.fake_driver import FakeDriver
from gpu_runs.gpu_loads import Lender
from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.residents import DeviceRequest, Views, copy_of
from tensor_dedup.loader.cuda.tensors import CPU, CUDA
from tensor_dedup.loader.residents.resident import resident_key, tensor_bytes
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.cuda.driver import Driver
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.protocol.paths import device_socket
from tensor_dedup.types import ResidentKey

REHEARSAL = os.environ.get("TENSOR_DEDUP_FAKE_GPU") == "1"
KIND = CPU if REHEARSAL else CUDA
PLACE = torch.device("cpu" if REHEARSAL else "cuda:0")
UNIT = 2 << 20  # of a real GPU, and a multiple of the fake's
MIB = 1 << 20


def new_driver() -> Driver:
    """The driver of this process."""
    driver: Driver = FakeDriver() if REHEARSAL else NvidiaDriver()
    driver.init()
    return driver


def wait_for_gpu() -> None:
    """Until all kernels of this process have ended; their errors come out here."""
    if not REHEARSAL:
        torch.cuda.synchronize()


def output_of(code: str) -> str:
    """What a fresh interpreter prints last that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def used_bytes() -> int:
    """Memory of the GPU that is in use, by whomever, as NVML counts it."""
    uuid = new_driver().devices()[0].uuid  # nvidia-smi does not know CUDA_VISIBLE_DEVICES
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", uuid]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * MIB


class Manager(managers.Manager):
    """A manager of GPU 0."""

    command = gpus.GpuManager.command if REHEARSAL else (*managers.Manager.command, "--device", "0")

    def served(self, path: Path) -> Path:
        return device_socket(path, new_driver().devices()[0].uuid)

    def admin(self) -> Admin:
        """To ask and to evict with."""
        return Admin(self.socket)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Manager]:
    """A manager with its socket in this folder."""
    manager = Manager(folder / "m.sock", "--budget", str(8 << 30), *options)
    try:
        yield manager
    finally:
        manager.close()


def weights(seed: int, side: int = 1024) -> torch.Tensor:
    """A square matrix on the host; the same in every process."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(side, side, generator=made, dtype=torch.float32).div_(side**0.5)


def key_of(tensor: torch.Tensor) -> ResidentKey:
    return resident_key(tensor, digest(tensor_bytes(tensor)))


class Load:
    """A process's part: its GPU, its connection, and what its model sees."""

    def __init__(self, socket: str) -> None:
        self.gpu = Gpu(new_driver(), "0")
        self.client = connect(socket, keep_connected=False, device=self.gpu.device.uuid)
        self.lender = Lender(self.client, self.gpu, "test")
        self.views = Views(KIND)

    def put(self, *tensors: torch.Tensor) -> None:
        wanted = [
            DeviceRequest(key_of(t).digest, key_of(t), t.nbytes, copy_of(t, self.gpu))
            for t in tensors
        ]
        assert all(self.lender.put(wanted))

    def find(self, tensor: torch.Tensor, views: Views | None = None) -> torch.Tensor:
        found = self.lender.by_content(key_of(tensor))
        assert found is not None
        return (views or self.views).tensor(found)


@contextmanager
def workers(manager: Manager, count: int, **environment: str) -> Iterator[list[Worker]]:
    """So many processes of `gpu_worker`, connected, and ended with the context."""
    with started("gpu_worker", count, **environment) as found:
        for each in found:
            each.tell("connect", str(manager.socket.with_name("m.sock")))
        for each in found:
            each.value()
        yield found


@contextmanager
def started(module: str, count: int, **environment: str) -> Iterator[list[Worker]]:
    """So many processes that do the functions of a module, ended with the context."""
    found: list[Worker] = []
    try:
        for _ in range(count):
            found.append(Worker(module, **environment))
        yield found
    finally:
        for each in found:
            each.close()
