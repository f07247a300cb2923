"""Memory of GPUs keeps the contract, over the fake driver; whatever call fails, nothing is left."""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil
import pytest

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, FakeDriver, RefusingDriver, fake_uuid
from store_runs.contracts import BackendTests, reclaimed
from tensor_dedup.memory_manager.backends import ipc
from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.backends.ipc import Helper, IpcBackend, read_ticket, write_ticket
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, Result
from tensor_dedup.memory_manager.errors import (
    BackendError,
    DeviceError,
    NoMemoryError,
    NotSealedError,
)

MIB = 1 << 20
FAKE = "gpu_runs.fake_driver:FakeDriver"


class TestVmm(BackendTests):
    def make(self, folder: Path) -> Backend:
        return VmmBackend(FakeDriver(), "0")

    def write(self, memory: Memory, data: bytes) -> None:
        gpus.write(memory.fileno, memory.nbytes, data)

    def read(self, memory: Memory, nbytes: int) -> bytes:
        return gpus.read(memory.fileno, memory.nbytes, nbytes)


@pytest.fixture(scope="module")
def one_helper() -> Helper:
    """One for the whole contract: it costs a process."""
    return Helper("0", FAKE)


class TestIpc(BackendTests):
    shared: Helper

    @pytest.fixture(autouse=True)
    def _share(self, one_helper: Helper) -> None:
        self.shared = one_helper

    def make(self, folder: Path) -> Backend:
        return IpcBackend(self.shared)

    def write(self, memory: Memory, data: bytes) -> None:
        with gpus.opened(memory.fileno) as (driver, address):
            gpus.put(driver, address, data)

    def read(self, memory: Memory, nbytes: int) -> bytes:
        with gpus.opened(memory.fileno) as (driver, address):
            return gpus.get(driver, address, nbytes)


def test_the_manager_has_no_context_and_no_mapping_and_keeps_no_handle() -> None:
    driver = RefusingDriver(FakeDriver())
    driver.cleaning = True
    backend = VmmBackend(cast("Driver", driver), "0")
    slab = backend.reserve(MIB)
    backend.seal(slab)
    backend.commit(slab, 0, MIB)
    reclaimed(backend, os.dup(slab.fileno), MIB)
    assert set(driver.calls) == {
        "init", "devices", "granularity", "create", "export", "release", "import_", "device_of",
    }  # fmt: skip
    assert cast("FakeDriver", driver._inner).left() == {}


def test_the_descriptor_alone_keeps_the_memory() -> None:
    slab = VmmBackend(FakeDriver(), "0").reserve(MIB)
    gpus.write(slab.fileno, MIB, b"weights")
    kept = os.dup(slab.fileno)
    del slab
    gc.collect()
    assert gpus.read(kept, MIB, 7) == b"weights"
    os.close(kept)


def test_a_gpu_is_found_by_its_uuid_whatever_is_visible() -> None:
    driver = FakeDriver(visible=(3, 1))
    assert VmmBackend(driver, fake_uuid(1)).device.ordinal == 1
    assert VmmBackend(driver, "0").capabilities.device == fake_uuid(3)
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        VmmBackend(driver, fake_uuid(0))


def test_a_gpu_is_found_by_the_beginning_of_its_uuid_if_no_other_has_it() -> None:
    driver = FakeDriver(visible=(3, 1))
    assert VmmBackend(driver, fake_uuid(1)[:12]).device.ordinal == 1
    with pytest.raises(DeviceError, match="give more of the UUID") as caught:
        VmmBackend(driver, "GPU-0000000")
    assert fake_uuid(1) in str(caught.value)
    with pytest.raises(DeviceError, match="no GPU GPU-4"):
        VmmBackend(driver, "GPU-4")


def test_memory_of_another_gpu_is_not_adopted() -> None:
    other = VmmBackend(FakeDriver(visible=(1,)), "0").reserve(MIB)
    for visible in ((0,), (0, 1)):
        with pytest.raises(NotSealedError):
            reclaimed(VmmBackend(FakeDriver(visible), "0"), os.dup(other.fileno), MIB)


def test_a_size_that_is_no_multiple_is_not_adopted() -> None:
    backend = VmmBackend(FakeDriver(), "0")
    slab = backend.reserve(MIB)
    with pytest.raises(NotSealedError, match="units"):
        reclaimed(backend, os.dup(slab.fileno), MIB - 1)


def test_slabs_are_whole_handles_and_tensors_as_torch_has_them() -> None:
    layout = VmmBackend(FakeDriver(), "0").capabilities.layout
    assert (layout.unit, layout.alignment) == (GRANULARITY, 512)


def test_a_full_gpu_is_no_memory() -> None:
    with pytest.raises(NoMemoryError, match="budget"):
        VmmBackend(FakeDriver(nbytes=MIB), "0").reserve(2 * MIB)


def make_and_reclaim(backend: VmmBackend, fd: int) -> None:
    backend.reserve(MIB)
    reclaimed(backend, os.dup(fd), MIB)


@pytest.mark.parametrize("code", [Result.OUT_OF_MEMORY, Result.NOT_PERMITTED])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_whatever_call_fails_nothing_is_left(code: Result, number: int) -> None:
    inner = FakeDriver()
    driver = RefusingDriver(inner, code=code)
    backend = VmmBackend(cast("Driver", driver), "0")
    slab = backend.reserve(MIB)
    before = gpus.descriptors()
    driver.again(number)
    with pytest.raises(BackendError):
        make_and_reclaim(backend, slab.fileno)
    assert driver.calls[-1] == ["create", "export", "import_", "device_of"][number - 1]
    gc.collect()
    assert inner.left() == {}
    assert gpus.descriptors() == before
    driver.again()
    make_and_reclaim(backend, slab.fileno)
    assert len(driver.calls) == 4, "a call that is not tried here"


def test_a_readers_mapping_refuses_its_writes() -> None:
    slab = VmmBackend(FakeDriver(), "0").reserve(MIB)
    gpus.write(slab.fileno, MIB, b"weights")
    with gpus.mapped(slab.fileno, MIB, Access.READ) as (driver, address):
        with pytest.raises(DeviceError, match="cuMemcpyHtoD"):
            gpus.put(driver, address, b"x")
        assert gpus.ends_by_signal(lambda: ctypes.memset(address, 0, 1))
        assert ctypes.string_at(address, 7) == b"weights"


# The old kind of memory, through a helper.


def test_the_helper_ends_with_its_backend_and_its_slabs() -> None:
    backend = IpcBackend(Helper("0", FAKE))
    pid = backend._helper.pid
    slab = backend.reserve(4 * MIB)
    del backend
    gc.collect()
    assert psutil.pid_exists(pid), "the memory would be gone"
    del slab
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_a_slab_is_freed_with_its_object() -> None:
    backend = IpcBackend(Helper("0", FAKE))
    slab = backend.reserve(2 * MIB)
    ticket = os.dup(slab.fileno)
    del slab
    backend.reserve(2 * MIB)  # after it: orders are done in order
    gc.collect()
    backend.reserve(2 * MIB)
    with pytest.raises(DeviceError, match="MAP_FAILED"), gpus.opened(ticket):
        pass
    os.close(ticket)


def test_a_helper_that_dies_is_an_error_and_not_a_hang() -> None:
    backend = IpcBackend(Helper("0", FAKE))
    os.kill(backend._helper.pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="helper"):
        backend.reserve(2 * MIB)


def test_a_helper_that_is_slow_is_not_waited_for_and_no_free_is_lost() -> None:
    made = Helper("0", FAKE)
    files = Path(f"/proc/{made.pid}/fd")
    numbers = [made.allocate(2 * MIB)[0]]
    begun = len(list(files.iterdir()))
    numbers += [made.allocate(2 * MIB)[0] for _ in range(31)]
    made._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for a few words
    os.kill(made.pid, signal.SIGSTOP)
    try:
        for number in numbers:
            made.free(number)
        assert made._unsent, "the socket takes all of it: a test of nothing"
    finally:
        os.kill(made.pid, signal.SIGCONT)
    made.allocate(2 * MIB)  # after all of them: orders are done in order
    assert not made._unsent
    assert len(list(files.iterdir())) == begun


def test_frees_that_the_helper_does_not_hear_are_kept_and_no_error() -> None:
    made = Helper("0", FAKE)
    number, _ = made.allocate(2 * MIB)
    os.kill(made.pid, signal.SIGKILL)
    made._process.wait()
    made.free(number)
    assert list(made._unsent) == [number]
    with pytest.raises(DeviceError, match="helper"):
        made.allocate(2 * MIB)


def test_what_the_helper_cannot_do_it_says() -> None:
    backend = IpcBackend(Helper("0", FAKE))
    with pytest.raises(NoMemoryError, match="cuMemAlloc"):
        backend.reserve(1 << 50)
    assert backend.reserve(2 * MIB).nbytes == 2 * MIB
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        Helper("GPU-none", FAKE)


def test_memory_of_the_old_kind_says_what_it_cannot_promise() -> None:
    can = IpcBackend(Helper("0", FAKE)).capabilities
    promised = (can.hardware_readonly, can.seals, can.hashes_itself, can.outlives)
    assert not any(promised)
    assert can.device == fake_uuid(0)


@pytest.mark.parametrize("number", [1, 2])
def test_whatever_call_of_the_helper_fails_nothing_is_left(number: int) -> None:
    inner = FakeDriver()
    inner.init()
    driver = RefusingDriver(inner, refuse=number)
    held: dict[int, int] = {}
    inner.enter(0)
    failed = ipc._allocated(cast("Driver", driver), held, 1, 2 * MIB)
    inner.leave()
    assert isinstance(failed, ipc.Failed)
    assert failed.full
    assert held == {}
    assert inner.left() == {}
    assert driver.calls[-1] == ["allocate", "ipc_handle"][number - 1]


def test_a_ticket_is_sealed_and_nothing_else_is_one(tmp_path: Path) -> None:
    fd = write_ticket(bytes(64), 5)
    assert read_ticket(fd) == (bytes(64), 5)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    os.close(fd)
    other = tmp_path / "other"
    other.write_bytes(bytes(80))
    fd = os.open(other, os.O_RDONLY)
    with pytest.raises(NotSealedError, match="ticket"):
        read_ticket(fd)
    os.close(fd)
    with pytest.raises(NotSealedError, match="read"):
        read_ticket(fd)


def test_a_manager_of_a_gpu_that_is_not_there_says_what_to_install(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = (
        "import sys\n"
        "sys.modules['cuda.bindings.driver'] = None\n"
        "from tensor_dedup.memory_manager.server.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", code, "--device", "0", "--socket", str(tmp_path / "m.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install '.[cuda]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mib", [2, 4, 64])
def test_slabs_are_whole_handles_of_the_size_that_was_asked_for(mib: int) -> None:
    backend = VmmBackend(FakeDriver(), "0", mib * MIB)
    assert backend.capabilities.layout.unit == mib * MIB
    small = VmmBackend(FakeDriver(), "0")
    assert small.capabilities.layout.unit == GRANULARITY
    # What an earlier manager made in smaller handles is taken over all the same.
    slab = small.reserve(GRANULARITY)
    assert backend.reclaim(os.dup(slab.fileno), GRANULARITY).nbytes == GRANULARITY


def test_a_handle_that_the_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(DeviceError, match="multiples of"):
        VmmBackend(FakeDriver(), "0", GRANULARITY + 4096)
