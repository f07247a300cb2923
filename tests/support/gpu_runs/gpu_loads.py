"""Loads from a fake GPU: in one process with a driver that can refuse, and from a manager.

A `Bench` is a fake GPU of one process, with a manager's memory to map. The load from a manager of a
fake GPU is a sequence of `STEPS`, after each of which its process may die.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, FakeDriver, RefusingDriver, fake_uuid
from manager_runs import managers
from tensor_dedup.digest import digest
from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceMemory, device_session
from tensor_dedup.loader.cuda.openers import MappedExtent, opener_for
from tensor_dedup.loader.cuda.residents import (
    DeviceRequest,
    DeviceResident,
    DeviceSlab,
    Views,
    copy_of,
)
from tensor_dedup.loader.cuda.tensors import CPU, held
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.loader.residents.resident import resident_key, tensor_bytes
from tensor_dedup.memory_manager.backends.vmm import VmmAllocation as ManagerSlab
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.client import Client, Put, connect
from tensor_dedup.memory_manager.cuda.driver import Access, Driver
from tensor_dedup.types import ResidentKey

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


State = dict[str, object]


class Lender:
    """One load's session with a GPU's manager; every error is raised."""

    def __init__(self, client: Client, gpu: Gpu, checkpoint: str) -> None:
        self.session = device_session(client, gpu, checkpoint)
        self.opener = cast("DeviceMemory", self.session.memory).opener

    def by_content(self, key: ResidentKey) -> DeviceResident | None:
        return self.session.by_content([key])[0]

    def by_recipe(self, recipe: str, geometry: ResidentKey) -> DeviceResident | None:
        return self.session.by_recipe([ResidentQuery(recipe, geometry)])[0]

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident | None]:
        found: dict[str, tuple[DeviceResident, bool]] = {}
        self.session.put(wanted, found)
        return [found[each.recipe][0] if each.recipe in found else None for each in wanted]


class Load:
    """A process's load: its connection, its GPU and what its model sees of it."""

    def __init__(self, socket: Path) -> None:
        self.fake = FakeDriver()
        self.driver = RefusingDriver(self.fake)
        self.gpu = Gpu(cast("Driver", self.driver), fake_uuid(0))
        beside = socket.with_name("m.sock")
        self.client: Client = connect(beside, keep_connected=False, device=self.gpu.device.uuid)
        self.lender = Lender(self.client, self.gpu, "base")
        self.views = Views(CPU)

    def put(self, *tensors: torch.Tensor) -> list[DeviceResident | None]:
        return self.lender.put([self.wanted(each) for each in tensors])

    def wanted(self, tensor: torch.Tensor) -> DeviceRequest:
        return DeviceRequest(
            f"recipe {key_of(tensor)}", key_of(tensor), tensor.nbytes, copy_of(tensor, self.gpu)
        )

    def find(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.lender.by_content(key_of(tensor))
        assert found is not None
        return self.views.tensor(found)


def key_of(tensor: torch.Tensor) -> ResidentKey:
    return resident_key(tensor, digest(tensor_bytes(tensor)))


def weights(seed: int, count: int = 50_000) -> torch.Tensor:
    return torch.arange(seed, seed + count, dtype=torch.float32).to(torch.bfloat16)


def connected(state: State) -> None:
    state["load"] = Load(cast("Path", state["path"]))


def of(state: State) -> Load:
    return cast("Load", state["load"])


def reserve(state: State) -> None:
    reserved = of(state).client.reserve(["layer"], "base").put
    assert reserved is not None
    state["put"] = reserved


def allocate(state: State) -> None:
    put = cast("Put", state["put"])
    put.allocate([100], [digest(b"w" * 100)])


def map_to_write(state: State) -> None:
    put = cast("Put", state["put"])
    fd, nbytes, _ = put.place
    if of(state).client.welcome.backend == "ipc":
        state["mapped"] = gpus.opened(fd, of(state).fake)
    else:
        state["mapped"] = gpus.mapped(fd, nbytes, Access.READ_WRITE, of(state).fake)
    _, address = state["mapped"].__enter__()  # type: ignore[attr-defined]
    state["address"] = address
    ctypes.memset(address, ord("w"), 100)


def unmap(state: State) -> None:
    state["mapped"].__exit__(None, None, None)  # type: ignore[attr-defined]


def seal(state: State) -> None:
    state["leases"] = cast("Put", state["put"]).seal()


def publish(state: State) -> None:
    put = cast("Put", state["put"])
    put.publish("layer", b"record", [digest(b"w" * 100)])


def read(state: State) -> int:
    key = ResidentKey("U8", (100,), (1,), digest(b"w" * 100))
    found = of(state).lender.by_content(key)
    assert found is not None
    state["tensor"] = of(state).views.tensor(found)
    return int(cast("torch.Tensor", state["tensor"])[99])


STEPS: tuple[Callable[[State], object], ...] = (
    connected, reserve, allocate, map_to_write, unmap, seal, publish, read,
)  # fmt: skip


def kill_after(count: int, manager: gpus.GpuManager) -> None:
    idle = managers.steady(manager.descriptors)
    doomed = managers.Actor(manager.socket, *STEPS[:count])
    for _ in range(count):
        assert doomed.step() in (None, ord("w"))
    doomed.kill()
    sealed = STEPS.index(seal) < count

    def settled() -> bool:
        totals = manager.overview().totals
        held = (totals.leases, totals.builds, totals.lingering_bytes)
        return held == (0, 0, 0) and totals.slabs == totals.residents == sealed

    managers.until(settled)
    managers.until(lambda: manager.descriptors() == idle + sealed)
    other = managers.Actor(manager.socket, connected, *([read] if sealed else STEPS[1:]))
    for _ in range(2 if sealed else len(STEPS)):
        answer = other.step()
    assert answer == ord("w")
    other.join()
