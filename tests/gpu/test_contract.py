"""Memory of a real GPU keeps the contract that the fake one keeps."""

from pathlib import Path

import pytest

from gpu_runs import gpu_world, gpus
from store_runs.contracts import BackendTests
from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.backends.ipc import Helper, IpcBackend
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Driver
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver

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
