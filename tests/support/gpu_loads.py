"""A process's load from a manager of a fake GPU, and its steps, after each of which it may die."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

import gpus
import managers
from fake_driver import FakeDriver, fake_uuid
from refusing_driver import RefusingDriver
from tensor_dedup.digest import digest
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceMemory, device_session
from tensor_dedup.loader.cuda.residents import DeviceRequest, DeviceResident, Views, copy_of
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.residents.resident import resident_key, tensor_bytes
from tensor_dedup.memory_manager.client import Client, Put, connect
from tensor_dedup.memory_manager.cuda.driver import Access, Driver
from tensor_dedup.types import ResidentKey

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
