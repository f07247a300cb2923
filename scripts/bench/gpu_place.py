"""Where the benchmark of device memory runs: on GPU 0 with a manager, or in a rehearsal."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.shared import SharedGpu
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


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Context manager for a rehearsal: what is loaded to the CPU is in memory of the fake GPU."""
    gpu = SharedGpu(Gpu(_fake_driver(), "0"), torch.device("cpu"), CPU)
    with DEVICES.replaced("cpu", lambda _: gpu):
        yield


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
    def serving(self, *, of_host: bool = False) -> Iterator["Serving"]:
        """A manager of the GPU's memory and, if asked for, one of host memory beside it."""
        program: tuple[str, ...] = _REAL_MANAGER
        environment = dict(os.environ)
        if self.rehearsal:
            program = (str(_FAKE_MANAGER),)
            environment["PYTHONPATH"] = os.pathsep.join([str(_SUPPORT), *sys.path])
        commands = [[*program, "--device", "0"], *([[*_REAL_MANAGER]] if of_host else [])]
        gpu = Gpu(self.driver(), "0")
        with ExitStack() as stack:
            # Paths of sockets are short, and that of the models may not be.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="td-"))
            base = Path(folder) / "m.sock"
            for command in commands:
                process = subprocess.Popen(
                    [sys.executable, *command, "--socket", str(base)],
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
            found = Serving(base, gpu, stack.enter_context(ExitStack()))
            _wait_for(found.lender)
            if of_host:
                _wait_for(lambda: connect(base, keep_connected=False).close())
            yield found


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

    def forget(self, name: str = "bench") -> None:
        """Unmap what nobody uses, and have the manager drop what it has of this checkpoint.

        Raises:
            UnsupportedError: Something of the manager's is still in use after a while.
        """
        deadline = time.monotonic() + 10
        with Admin(device_socket(self.socket, self.gpu.device.uuid)) as admin:
            while True:
                self.gpu.reap(wait=True)
                admin.evict(name)
                left = admin.totals()
                if not left.resident_bytes:
                    return
                if time.monotonic() > deadline:
                    raise UnsupportedError(f"{left.resident_bytes} bytes of {name} stay resident")
                time.sleep(0.01)  # a client says in the background what it no longer uses


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
