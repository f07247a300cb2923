"""Processes share the memory of a fake GPU; deaths and refusals cost nobody else anything."""

import ctypes
import faulthandler
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

import gpus
import managers
from tensor_dedup.digest import digest
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.lender import (
    DeviceLender,
    DeviceWanted,
    bytes_on_host,
    copy_of,
)
from tensor_dedup.loader.cuda.opening import Extent
from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents import resident_key, shares_memory, tensor_bytes
from tensor_dedup.memory_manager.client import Client, Put, connect
from tensor_dedup.memory_manager.cuda.driver import Access, Driver
from tensor_dedup.memory_manager.cuda.fake import FakeDriver, fake_uuid
from tensor_dedup.memory_manager.cuda.testing import RefusingDriver
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    RefusedError,
)
from tensor_dedup.types import ResidentKey

KIB = 1 << 10
State = dict[str, object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def manager(folder: Path) -> Iterator[gpus.GpuManager]:
    with gpus.running(folder, "--build-timeout", "1") as running:
        yield running


class Load:
    """A process's load: its connection, its GPU and what its model sees of it."""

    def __init__(self, socket: Path) -> None:
        self.fake = FakeDriver()
        self.driver = RefusingDriver(self.fake)
        self.gpu = Gpu(cast("Driver", self.driver), fake_uuid(0))
        beside = socket.with_name("m.sock")
        self.client: Client = connect(beside, keep_connected=False, device=self.gpu.device.uuid)
        self.lender = DeviceLender(self.client, self.gpu, "base")
        self.views = Views(CPU)

    def put(self, *tensors: torch.Tensor) -> list[DeviceResident | None]:
        return self.lender.put([self.wanted(each) for each in tensors])

    def wanted(self, tensor: torch.Tensor) -> DeviceWanted:
        return DeviceWanted(
            f"recipe {key_of(tensor)}", key_of(tensor), tensor.nbytes, copy_of(tensor, self.gpu)
        )

    def find(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.lender.by_content(key_of(tensor))
        assert found is not None
        return self.views.tensor(found)


@pytest.fixture
def load(manager: gpus.GpuManager) -> Iterator[Callable[[], Load]]:
    made: list[Load] = []

    def make() -> Load:
        made.append(Load(manager.socket))
        return made[-1]

    yield make
    gc.collect()
    for each in made:
        each.client.close()
        assert each.gpu.reap(wait=True) == 0
        assert each.fake.left() == {}


@pytest.fixture
def old(folder: Path) -> Iterator[gpus.GpuManager]:
    """A manager with the backend `ipc`."""
    with gpus.running(folder, "--build-timeout", "1", "--backend", "ipc") as running:
        yield running


def key_of(tensor: torch.Tensor) -> ResidentKey:
    return resident_key(tensor, digest(tensor_bytes(tensor)))


def weights(seed: int, count: int = 50_000) -> torch.Tensor:
    return torch.arange(seed, seed + count, dtype=torch.float32).to(torch.bfloat16)


def test_what_one_load_puts_another_sees(load: Callable[[], Load]) -> None:
    first, second = load(), load()
    small, large = weights(1, 10), weights(2)
    put = first.put(small, large)
    assert all(put)
    for tensor in (small, large):
        found = second.find(tensor)
        assert torch.equal(found, tensor)
        assert second.fake.access(found.data_ptr()) == Access.READ
    by_recipe = second.lender.by_recipe(f"recipe {key_of(large)}", key_of(large))
    assert by_recipe is not None
    assert second.lender.by_recipe("recipe of nothing", key_of(large)) is None
    square = resident_key(large.view(500, 100), "")
    assert second.lender.by_recipe(f"recipe {key_of(large)}", square) is None


def test_a_digest_may_become_known_while_writing(load: Callable[[], Load]) -> None:
    mine, tensor = load(), weights(1)
    right = key_of(tensor)
    copy = copy_of(tensor, mine.gpu)

    def write(address: int) -> str:
        copy(address)
        return right.digest

    unknown = DeviceWanted("recipe", replace(right, digest=""), tensor.nbytes, write)
    [resident] = mine.lender.put([unknown])
    assert resident is not None
    assert resident.key == right
    assert torch.equal(load().find(tensor), tensor)
    liar = DeviceWanted("other", replace(right, digest="0" * 64), tensor.nbytes, write)
    with pytest.raises(RefusedError) as caught:
        mine.lender.put([liar])
    assert caught.value.code == "mismatch"


def test_the_writer_has_no_writable_mapping_afterwards(load: Callable[[], Load]) -> None:
    mine = load()
    mine.put(weights(1))
    assert mine.fake.left() == {}
    found = mine.find(weights(1))
    assert mine.fake.access(found.data_ptr()) == Access.READ


def test_equal_bytes_are_one_memory_and_two_models_two_mappings(load: Callable[[], Load]) -> None:
    mine = load()
    first, again = mine.put(weights(1)), mine.put(weights(1))
    other = Views(CPU)
    assert first[0] is not None
    assert again[0] is not None
    a, b = mine.views.tensor(first[0]), other.tensor(again[0])
    assert shares_memory(a, b)
    other.make_private()
    assert not shares_memory(a, b)
    assert torch.equal(a, b)


def test_a_manager_charges_whole_slabs_of_the_gpu_and_keeps_no_mapping(
    manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    kept = mine.put(weights(1, 10))
    assert kept[0] is not None
    totals = manager.overview().totals
    assert totals.charged == 64 * KIB
    assert mine.client.welcome.backend == "vmm"
    assert mine.client.welcome.hardware_readonly
    assert not mine.client.welcome.hashes_itself
    maps = Path(f"/proc/{manager.pid}/maps").read_text()
    assert "fake-gpu" not in maps


def test_a_lease_ends_when_the_memory_is_unmapped_not_before(
    manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    mine.put(weights(1))
    tensor = mine.find(weights(1))
    managers.until(lambda: manager.overview().totals.leases == 1)
    mine.fake.begin(7)
    del tensor
    gc.collect()
    assert mine.gpu.reap() == 1
    assert manager.overview().totals.leases == 1
    mine.fake.end(7)
    assert mine.gpu.reap() == 0
    managers.until(lambda: manager.overview().totals.leases == 0)


def test_a_model_that_became_private_has_no_lease(
    manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    mine.put(weights(1))
    tensor = mine.find(weights(1))
    mine.views.make_private()
    managers.until(lambda: manager.overview().totals.leases == 0)
    tensor.zero_()
    assert torch.equal(load().find(weights(1)), weights(1))


def test_bytes_come_back_to_be_hashed(load: Callable[[], Load]) -> None:
    mine = load()
    mine.put(weights(1))
    tensor = mine.find(weights(1))
    found = bytes_on_host(mine.gpu, tensor.data_ptr(), tensor.nbytes)
    assert digest(found) == key_of(weights(1)).digest


def test_another_gpus_manager_is_refused(manager: gpus.GpuManager) -> None:
    other = Gpu(FakeDriver(visible=(1,)), "0")
    beside = manager.socket.with_name("m.sock")
    with pytest.raises(ManagerGoneError, match="serve"):
        connect(beside, keep_connected=False, device=other.device.uuid)
    client = connect(manager.socket.with_name("m.sock"), device=fake_uuid(0), keep_connected=False)
    with client, pytest.raises(UnsupportedError, match="device="):
        DeviceLender(client, other, "base")
    with pytest.raises(ManagerGoneError, match="not of the machine"):
        connect(manager.socket, keep_connected=False)


def test_visible_devices_may_differ(manager: gpus.GpuManager, load: Callable[[], Load]) -> None:
    load().put(weights(1))
    mine = load()
    mine.fake._visible = (5, 0)
    gpu = Gpu(mine.fake, fake_uuid(0))
    assert gpu.device.ordinal == 1
    found = DeviceLender(mine.client, gpu, "base").by_content(key_of(weights(1)))
    assert found is not None
    assert torch.equal(mine.views.tensor(found), weights(1))
    gc.collect()
    assert gpu.reap(wait=True) == 0


# What fails.


def test_a_full_gpu_and_a_full_budget_are_refusals(
    manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    manager.refuse("create")
    with pytest.raises(RefusedError) as caught:
        mine.put(weights(1))
    assert caught.value.code == "no_memory"
    manager.refuse("export")
    with pytest.raises(RefusedError) as caught:
        mine.put(weights(1))
    assert caught.value.code == "no_memory"
    manager.refuse()
    idle = managers.steady(manager.descriptors)
    with pytest.raises(RefusedError) as caught:
        mine.put(torch.zeros(65 << 20, dtype=torch.uint8))
    assert caught.value.code == "no_room"
    assert mine.put(weights(1))[0] is not None
    managers.until(lambda: manager.descriptors() == idle + 1)


def test_whatever_call_of_a_put_fails_the_put_is_given_up(
    manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    tensor = weights(1)
    number = 0
    while mine.lender.by_content(key_of(tensor)) is None:
        number += 1
        mine.driver.again(number)
        try:
            mine.put(tensor)
        except BackendError:
            assert mine.fake.left() == {}
            totals = manager.overview().totals
            assert (totals.builds, totals.charged, totals.residents) == (0, 0, 0)
    assert number == 8  # enter, import, reserve, map, allow, copy, wait; then none refused
    mine.driver.again()
    assert torch.equal(mine.find(tensor), tensor)


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
    state["mapped"] = gpus.mapped(fd, nbytes, Access.READ_WRITE, of(state).fake)
    _, address = state["mapped"].__enter__()  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[s.__name__ for s in STEPS])
def test_a_client_killed_after_any_step_leaves_nothing(
    manager: gpus.GpuManager, count: int
) -> None:
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


def test_when_the_manager_dies_what_is_mapped_stays_and_goes_to_the_next_one(
    folder: Path, manager: gpus.GpuManager, load: Callable[[], Load]
) -> None:
    mine = load()
    mine.put(weights(1))
    tensor = mine.find(weights(1))
    manager.kill()
    assert torch.equal(tensor, weights(1))
    with pytest.raises(ManagerGoneError):
        mine.put(weights(2))
    with gpus.running(folder) as heir:
        assert mine.client.reconnect() == 1
        assert heir.overview().totals.residents == 1
        other = Load(heir.socket)
        found = other.find(weights(1))
        assert torch.equal(found, tensor)
        del found
        gc.collect()
        other.gpu.reap(wait=True)
        other.client.close()


def test_two_processes_share_and_one_that_writes_dies_alone(manager: gpus.GpuManager) -> None:
    def write(state: State) -> None:
        faulthandler.disable()
        ctypes.memset(cast("torch.Tensor", state["tensor"]).data_ptr(), 0, 1)

    def look(state: State) -> int:
        return int(cast("torch.Tensor", state["tensor"])[0])

    builder = managers.Actor(manager.socket, *STEPS, look)
    for _ in STEPS:
        builder.step()
    faulty = managers.Actor(manager.socket, connected, read, write)
    assert [faulty.step(), faulty.step()] == [None, ord("w")]
    faulty.begin()
    managers.until(lambda: faulty._process.exitcode is not None)
    faulty.join()
    assert builder.step() == ord("w")
    builder.join()
    assert os.getpid() != faulty.pid


# The old kind of memory.


def finish(load: Load) -> None:
    gc.collect()
    assert load.gpu.reap(wait=True) == 0
    assert load.fake.left() == {}
    load.client.close()


def test_the_old_kind_is_shared_too_and_is_writable(old: gpus.GpuManager) -> None:
    first, second = Load(old.socket), Load(old.socket)
    assert not first.client.welcome.hardware_readonly
    put = first.put(weights(1), weights(2, 10))
    assert all(put)
    found = second.find(weights(1))
    assert torch.equal(found, weights(1))
    assert second.fake.access(found.data_ptr()) == Access.READ_WRITE
    with pytest.raises(UnsupportedError, match="vmm"):
        second.views.make_private()
    assert torch.equal(found, weights(1))
    other = Views(CPU)
    again = second.lender.by_content(key_of(weights(1)))
    assert again is not None
    seen = other.tensor(again)
    assert shares_memory(found, seen), "the driver gives every opening one address"
    del seen
    gc.collect()
    second.gpu.reap()
    assert torch.equal(found, weights(1))
    with pytest.raises(UnsupportedError, match="side by side"):
        first.lender._opener.open([Extent(0, 1, 1), Extent(1, 1, 2)], Access.READ)
    del found
    finish(first)
    finish(second)


@pytest.mark.parametrize("number", range(1, 4))
def test_whatever_call_of_opening_fails_nothing_is_left(old: gpus.GpuManager, number: int) -> None:
    mine = Load(old.socket)
    mine.driver.again(number)
    with pytest.raises(BackendError):
        mine.put(weights(1))
    names = ["enter", "enter", "ipc_open"]
    assert mine.driver.calls[:number] == names[:number]
    assert mine.fake.left() == {}
    totals = old.overview().totals
    assert (totals.builds, totals.charged, totals.residents) == (0, 0, 0)
    mine.driver.again()
    assert mine.put(weights(1))[0] is not None
    finish(mine)


def test_what_a_writer_may_still_have_open_is_not_freed_under_it(old: gpus.GpuManager) -> None:
    doomed = managers.Actor(old.socket, connected, reserve, allocate, open_ticket, hang_up, touch)
    for _ in range(5):
        assert doomed.step() is None
    managers.until(lambda: old.overview().totals.lingering_bytes > 0)
    assert doomed.step() == ord("w")
    doomed.kill()
    managers.until(lambda: old.overview().totals.charged == 0)


def open_ticket(state: State) -> None:
    fd, _, _ = cast("Put", state["put"]).place
    state["opened"] = gpus.opened(fd, of(state).fake)
    _, state["address"] = state["opened"].__enter__()  # type: ignore[attr-defined]


def hang_up(state: State) -> None:
    of(state).client.close()


def touch(state: State) -> int:
    address = cast("int", state["address"])
    ctypes.memset(address, ord("w"), 100)
    with gpus.opened(cast("Put", state["put"]).place[0]) as (driver, again):
        return gpus.get(driver, again, 1)[0]


def test_memory_of_the_old_kind_goes_with_its_manager(folder: Path, old: gpus.GpuManager) -> None:
    mine = Load(old.socket)
    mine.put(weights(1))
    tensor = mine.find(weights(1))
    old.kill()
    with gpus.running(folder, "--backend", "ipc") as heir:
        assert mine.client.reconnect() == 0, "it was taken back"
        assert heir.overview().totals.residents == 0
        assert mine.put(weights(1))[0] is not None
        del tensor
        finish(mine)
