"""Device memory for tests: what a process does with a descriptor, over any driver."""

import ctypes
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpu_runs.fake_driver import FakeDriver, fake_uuid
from manager_runs import managers
from processes import process_state
from tensor_dedup.memory_manager.backends.ipc import read_ticket
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, Result, current, refused
from tensor_dedup.memory_manager.protocol.paths import device_socket

# The helper of the backend `ipc` is a process of its own and imports the fake driver by its name.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


class Full(FakeDriver):
    """A fake GPU that has only so much memory."""

    room = 1 << 40

    def create(self, device: int, nbytes: int) -> int:
        if in_use() + nbytes > self.room:
            raise refused("cuMemCreate", Result.OUT_OF_MEMORY, nbytes)
        return super().create(device, nbytes)


def in_use() -> int:
    """Bytes of the fake GPU that this process keeps alive, by whatever reference."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "fake-gpu:" in str(entry.readlink()):
                found[entry.stat().st_ino] = entry.stat().st_size
        except FileNotFoundError:
            continue
    return sum(found.values())


def descriptors() -> int:
    """How many this process has open, when the garbage of earlier tests has closed its own."""
    return len(process_state.descriptors())


@contextmanager
def few_descriptors() -> Iterator[None]:
    """This process may have so few that it opens no blocks, and enough for everything else.

    Three quarters of all are for blocks. What earlier tests left may look for its manager
    meanwhile, in threads, each with a descriptor for a moment.
    """
    there = descriptors()
    with process_state.descriptor_limit(max(there + 10, there * 4 // 3)):
        yield


@contextmanager
def mapped(
    fd: int, nbytes: int, access: Access, driver: Driver | None = None
) -> Iterator[tuple[Driver, int]]:
    """A slab at an address of this process, with a context, and nothing left of it afterwards."""
    driver = driver or FakeDriver()
    driver.init()
    handle = driver.import_(fd)
    address = driver.reserve(nbytes, 0)
    driver.map(address, nbytes, handle)
    driver.release(handle)
    driver.allow(address, nbytes, 0, access)
    try:
        with current(driver, 0):
            yield driver, address
            driver.synchronize()
    finally:
        driver.unmap(address, nbytes)
        driver.free(address, nbytes)


@contextmanager
def opened(ticket: int, driver: Driver | None = None) -> Iterator[tuple[Driver, int]]:
    """Memory of the old kind at an address of this process."""
    driver = driver or FakeDriver()
    driver.init()
    handle, _ = read_ticket(ticket)
    with current(driver, 0):
        address = driver.ipc_open(handle)
        try:
            yield driver, address
            driver.synchronize()
        finally:
            driver.ipc_close(address)


def put(driver: Driver, address: int, data: bytes) -> None:
    """Copy bytes to the device."""
    buffer = ctypes.create_string_buffer(data, len(data))
    driver.copy_in(address, ctypes.addressof(buffer), len(data))


def get(driver: Driver, address: int, nbytes: int) -> bytes:
    """Copy bytes from the device."""
    buffer = ctypes.create_string_buffer(nbytes)
    driver.copy_out(ctypes.addressof(buffer), address, nbytes)
    return buffer.raw


def write(fd: int, nbytes: int, data: bytes, driver: Driver | None = None) -> None:
    """Write to the beginning of a slab, as its writer does."""
    with mapped(fd, nbytes, Access.READ_WRITE, driver) as (used, address):
        put(used, address, data)


def read(fd: int, nbytes: int, wanted: int, driver: Driver | None = None) -> bytes:
    """Read the beginning of a slab, as its readers do."""
    with mapped(fd, nbytes, Access.READ, driver) as (used, address):
        return get(used, address, wanted)


def ends_by_signal(action: Callable[[], object]) -> bool:
    """Does this end the process that does it? Tried in a child."""
    with warnings.catch_warnings():
        # Of Python 3.12 on: this process may have threads. The child uses none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        with suppress(BaseException):
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class GpuManager(managers.Manager):
    """A manager of the fake GPU 0, in a process of its own."""

    command = (str(Path(__file__).with_name("fake_gpu_manager.py")), "--device", fake_uuid(0))

    def served(self, path: Path) -> Path:
        return device_socket(path, fake_uuid(0))

    def refuse(self, *calls: str) -> None:
        """Let these calls of its driver fail from now on."""
        (self.socket.parent / "refuse").write_text(" ".join(calls))


@contextmanager
def running(folder: Path, *options: str) -> Iterator[GpuManager]:
    """A manager of a GPU's memory with its socket in this folder."""
    manager = GpuManager(folder / "m.sock", "--budget", str(64 << 20), *options)
    try:
        yield manager
    finally:
        manager.close()
