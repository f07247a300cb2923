"""Where the benchmark of device memory runs: on GPU 0 with a manager, or in a rehearsal."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.tensors import CPU, CUDA
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.cuda.driver import Driver
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol.paths import device_socket

MIB: Final = 1 << 20
_SUPPORT: Final = Path(__file__).resolve().parents[2] / "tests" / "support"
_FAKE_MANAGER: Final = _SUPPORT / "gpu_runs" / "fake_gpu_manager.py"
_REAL_MANAGER = ("-m", "tensor_dedup.memory_manager.server")


def _fake_driver() -> Driver:
    sys.path.append(str(_SUPPORT))  # the fake is no part of the package
    from gpu_runs.fake_driver import FakeDriver

    return FakeDriver()


@dataclass(frozen=True)
class Bench:
    """Where it runs: on GPU 0, or in a rehearsal."""

    work: Path
    rehearsal: bool
    gib: float

    def driver(self) -> Driver:
        """A driver, ready."""
        made: Driver = _fake_driver() if self.rehearsal else NvidiaDriver()
        made.init()
        return made

    @property
    def place(self) -> torch.device:
        """torch's name of it."""
        return torch.device("cpu" if self.rehearsal else "cuda:0")

    @property
    def kind(self) -> int:
        """DLPack's."""
        return CPU if self.rehearsal else CUDA

    @property
    def unit(self) -> int:
        """Bytes of a tensor."""
        return 256 << 10 if self.rehearsal else 64 * MIB

    def wait(self) -> None:
        """For all kernels."""
        if not self.rehearsal:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object]) -> float:
        """How long it takes, kernels included."""
        self.wait()
        began = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - began

    @contextmanager
    def serving(self) -> Iterator["Serving"]:
        """A manager for the length of the context."""
        base = self.work / "m.sock"
        program: tuple[str, ...] = _REAL_MANAGER
        environment = dict(os.environ)
        if self.rehearsal:
            program = (str(_FAKE_MANAGER),)
            environment["PYTHONPATH"] = os.pathsep.join([str(_SUPPORT), *sys.path])
        process = subprocess.Popen(
            [sys.executable, *program, "--device", "0", "--socket", str(base)],
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        gpu = Gpu(self.driver(), "0")
        with ExitStack() as clients:
            found = Serving(base, gpu, clients)
            try:
                _wait_for(found.lender)
                yield found
            finally:
                process.terminate()
                process.wait()


@dataclass(frozen=True)
class Serving:
    """A manager that runs, and this process's GPU."""

    socket: Path
    gpu: Gpu
    clients: ExitStack

    def lender(self) -> DeviceManagerResidents:
        """What a load has that connects anew."""
        client = connect(self.socket, keep_connected=False, device=self.gpu.device.uuid)
        return DeviceManagerResidents(
            device_session(self.clients.enter_context(client), self.gpu, "bench")
        )

    def forget(self) -> None:
        """Unmap what nobody uses, and have the manager drop it."""
        self.gpu.reap(wait=True)
        with Admin(device_socket(self.socket, self.gpu.device.uuid)) as admin:
            admin.evict("bench")


def _wait_for(make: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            make()
        except ManagerGoneError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
