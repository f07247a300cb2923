"""A fake GPU of one process, with a driver that can refuse, and a manager's memory to map."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import gpus
from fake_driver import GRANULARITY, FakeDriver
from refusing_driver import RefusingDriver
from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.opening import MappedExtent, opener_for
from tensor_dedup.loader.cuda.residents import DeviceSlab
from tensor_dedup.loader.cuda.tensors import held
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.memory_manager.backends.vmm import VmmAllocation as ManagerSlab
from tensor_dedup.memory_manager.backends.vmm import VmmBackend

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.cuda.driver import Driver

UNIT = GRANULARITY


class Bench:
    """A manager's memory, and a process's GPU with a driver that can refuse."""

    def __init__(self) -> None:
        self.manager = VmmBackend(FakeDriver(), "0")
        self.fake = FakeDriver()
        self.driver = RefusingDriver(self.fake)
        self.gpu = Gpu(cast("Driver", self.driver), "0")
        self.opener = opener_for("vmm", cast("Driver", self.driver), self.gpu.device)

    def slab(self, units: int, data: bytes = b"") -> ManagerSlab:
        made = self.manager.reserve(units * UNIT)
        self.fill(made, data)
        return made

    def fill(self, slab: ManagerSlab, data: bytes) -> None:
        self.gpu.fill(
            MappedExtent(slab.fileno, slab.nbytes, 0),
            self.opener,
            lambda address: gpus.put(self.fake, address, data),
        )

    def mapping(self, *slabs: ManagerSlab) -> DeviceMapping:
        extents = [MappedExtent(each.fileno, each.nbytes, n) for n, each in enumerate(slabs, 1)]
        return self.gpu.map(extents, self.opener, slabs)

    def shared(self, slab: ManagerSlab) -> DeviceSlab:
        return DeviceSlab(self.gpu, self.opener, slab, slab.nbytes)


@contextmanager
def checked() -> Iterator[Bench]:
    """A bench, of which nothing may be left afterwards."""
    made = Bench()
    yield made
    gc.collect()
    made.driver.again()
    assert made.gpu.reap(wait=True) == 0
    left = made.fake.left()
    assert left == {}, left
    assert len(DEVICE_MAPPINGS) == 0
    assert held() == 0
