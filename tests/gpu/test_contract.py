"""Memory of a real GPU keeps the contract that the fake one keeps, and so do copies to and from it.

In a rehearsal copies are made as late as CUDA allows.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpu_runs import gpu_world, gpus
from gpu_runs.fake_driver import FakeDriver
from store_runs.contracts import BackendTests
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.loader.cuda.transfers import (
    BUFFER_BYTES,
    Ring,
    Transfers,
    file_part,
    memory_part,
)
from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.backends.ipc import Helper, IpcBackend
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, current
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.errors import DeviceError

pytestmark = pytest.mark.gpu
FAKE = "gpu_runs.fake_driver:FakeDriver"


@pytest.fixture(scope="module")
def driver() -> Driver:
    """One, with everything that it opens on first use open: tests count descriptors."""
    made = gpu_world.new_driver()
    backend = VmmBackend(made, "0")
    slab = backend.reserve(gpu_world.UNIT)
    gpus.write(slab.fileno, slab.nbytes, b"warm", made)
    return made


class TestVmm(BackendTests):
    size = gpu_world.UNIT
    driver: Driver

    @pytest.fixture(autouse=True)
    def _share(self, driver: Driver) -> None:
        self.driver = driver

    def make(self, folder: Path) -> Backend:
        return VmmBackend(self.driver, "0")

    def write(self, memory: Memory, data: bytes) -> None:
        gpus.write(memory.fileno, memory.nbytes, data, self.driver)

    def read(self, memory: Memory, nbytes: int) -> bytes:
        return gpus.read(memory.fileno, memory.nbytes, nbytes, self.driver)


class TestIpc(BackendTests):
    size = gpu_world.UNIT
    driver: Driver
    helper: Helper

    @pytest.fixture(autouse=True)
    def _share(self, driver: Driver, helper: Helper) -> None:
        self.driver, self.helper = driver, helper

    def make(self, folder: Path) -> Backend:
        return IpcBackend(self.helper)

    def write(self, memory: Memory, data: bytes) -> None:
        with gpus.opened(memory.fileno, self.driver) as (used, address):
            gpus.put(used, address, data)

    def read(self, memory: Memory, nbytes: int) -> bytes:
        with gpus.opened(memory.fileno, self.driver) as (used, address):
            return gpus.get(used, address, nbytes)


@pytest.fixture(scope="module")
def helper() -> Helper:
    return Helper("0", FAKE if gpu_world.REHEARSAL else "")


def test_the_manager_needs_no_context(driver: Driver) -> None:
    """In a process of its own: this one has a context by now."""
    if not isinstance(driver, NvidiaDriver):
        pytest.skip("the fake driver cannot tell")
    code = (
        "from cuda.bindings import driver as api\n"
        "from tensor_dedup.memory_manager.backends.vmm import VmmBackend\n"
        "from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver\n"
        "import os\n"
        f"size = {gpu_world.UNIT}\n"
        "backend = VmmBackend(NvidiaDriver(), '0')\n"
        "slab = backend.reserve(size)\n"
        "backend.reclaim(os.dup(slab.fileno), size)\n"
        "print([int(value) for value in api.cuDevicePrimaryCtxGetState(0)])\n"
    )
    assert gpu_world.output_of(code) == "[0, 0, 0]"


def test_slabs_have_the_granularity_that_the_documentation_speaks_of(driver: Driver) -> None:
    assert gpu_world.UNIT % driver.granularity(0) == 0


# Copies in the background.


@pytest.fixture
def copying(driver: Driver) -> Driver:
    """A driver with which copies end some time after they were begun."""
    if not gpu_world.REHEARSAL:
        return driver
    late = FakeDriver(late=True)
    late.init()
    return late


@contextmanager
def device_memory(driver: Driver, nbytes: int) -> Iterator[int]:
    """Writable memory of the GPU, whose context is current, and nothing left of it afterwards."""
    slab = VmmBackend(driver, "0").reserve(nbytes)
    with gpus.mapped(slab.fileno, nbytes, Access.READ_WRITE, driver) as (_, address):
        yield address


@contextmanager
def page_locked(driver: Driver, nbytes: int) -> Iterator[int]:
    """Page-locked memory of the host."""
    address = driver.page_lock(nbytes)
    try:
        yield address
    finally:
        driver.page_unlock(address)


def awaited(driver: Driver, stream: int) -> None:
    """Wait for what was begun on a stream."""
    event = driver.record(stream)
    driver.wait(event)
    assert driver.done(event)
    driver.forget(event)


def test_page_locked_memory_is_written_and_read_and_freed(copying: Driver) -> None:
    nbytes = 4 * gpu_world.UNIT
    with current(copying, 0):
        with page_locked(copying, nbytes) as address:
            ctypes.memset(address, 7, nbytes)
            assert ctypes.string_at(address, nbytes) == bytes([7]) * nbytes
        with pytest.raises(DeviceError):
            copying.page_unlock(address)


def test_a_stream_copies_in_its_order_there_and_back(copying: Driver) -> None:
    unit = gpu_world.UNIT
    with (
        device_memory(copying, unit) as device,
        page_locked(copying, 3 * unit) as host,
    ):
        stream = copying.stream()
        for number, value in enumerate(b"ab"):
            ctypes.memset(host + number * unit, value, unit)
            copying.begin_copy_in(device, host + number * unit, unit, stream)
        copying.begin_copy_out(host + 2 * unit, device, unit, stream)
        awaited(copying, stream)
        assert ctypes.string_at(host + 2 * unit, unit) == b"b" * unit
        assert gpus.get(copying, device, unit) == b"b" * unit


def test_a_copy_is_still_under_way_when_it_was_begun(copying: Driver) -> None:
    """Who fills the buffer again before the event has passed may change what arrives."""
    nbytes = 2 * gpu_world.UNIT if gpu_world.REHEARSAL else 512 << 20  # 9 ms at 55 GB/s
    with device_memory(copying, nbytes) as device, page_locked(copying, nbytes) as host:
        stream = copying.stream()
        ctypes.memset(host, 1, nbytes)
        copying.begin_copy_in(device, host, nbytes, stream)
        event = copying.record(stream)
        under_way = not copying.done(event)
        if gpu_world.REHEARSAL:  # on a GPU it depends on how far the copy has come
            ctypes.memset(host, 2, nbytes)
        copying.wait(event)
        copying.forget(event)
        assert under_way
        arrived = gpus.get(copying, device, nbytes)
        assert arrived == bytes([2 if gpu_world.REHEARSAL else 1]) * nbytes


def test_a_stream_waits_for_no_other(copying: Driver) -> None:
    nbytes = 2 * gpu_world.UNIT if gpu_world.REHEARSAL else 512 << 20
    with device_memory(copying, nbytes) as device, page_locked(copying, nbytes) as host:
        busy, other = copying.stream(), copying.stream()
        for _ in range(4):
            copying.begin_copy_in(device, host, nbytes, busy)
        last = copying.record(busy)
        awaited(copying, other)
        assert not copying.done(last)
        copying.wait(last)
        copying.forget(last)


@pytest.mark.parametrize("most", [2, 64])
def test_what_was_fenced_is_right_however_often_a_buffer_was_filled(
    copying: Driver, most: int, tmp_path: Path
) -> None:
    """From a file and from memory, larger than the ring of 2, at an odd address, and back."""
    nbytes = 12 * BUFFER_BYTES - 5
    data = random.Random(most).randbytes(1009) * (nbytes // 1009 + 1)
    file, tensor = tmp_path / "weights", torch.frombuffer(bytearray(data), dtype=torch.uint8)
    file.write_bytes(b"header" + data)
    transfers = Transfers(copying, 0, Ring(most))
    with device_memory(copying, 32 * BUFFER_BYTES) as device, file.open("rb") as opened:
        second = device + 16 * BUFFER_BYTES
        made = [
            transfers.upload(device + 3, nbytes, [file_part(opened.fileno(), 6, nbytes)]),
            transfers.upload(second, nbytes, [memory_part(tensor[:nbytes])]),
        ]
        for each in made:
            each.wait()
            assert each.digest == digest(data[:nbytes])
        transfers.fence()
        for start in (device + 3, second):
            assert gpus.get(copying, start, nbytes) == data[:nbytes]
        back = bytearray(nbytes)

        def write(piece: memoryview, offset: int) -> None:
            back[offset : offset + len(piece)] = piece

        down = transfers.download(second, nbytes, write, hashed=True)
        down.wait()
        assert back == data[:nbytes]
        assert down.digest == digest(data[:nbytes])
        assert nbytes % LEAF_BYTES


def test_copies_and_kernels_go_on_side_by_side(copying: Driver) -> None:
    """What PyTorch computes on its stream neither waits for copies nor disturbs them."""
    nbytes = 8 * BUFFER_BYTES
    tensor = torch.arange(nbytes // 4, dtype=torch.int32)
    transfers = Transfers(copying, 0)
    with device_memory(copying, nbytes) as device:
        matrix = torch.eye(1024, device=gpu_world.PLACE)
        made = transfers.upload(device, nbytes, [memory_part(tensor)], hashed=False)
        for _ in range(100):
            matrix = matrix @ matrix
        made.wait()
        transfers.fence()
        assert gpus.get(copying, device, nbytes) == tensor.numpy().tobytes()
        assert torch.equal(matrix.cpu(), torch.eye(1024))
