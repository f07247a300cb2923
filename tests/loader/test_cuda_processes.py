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

from gpu_runs import gpus
from gpu_runs.fake_driver import FakeDriver, fake_uuid
from gpu_runs.gpu_loads import (
    STEPS,
    Lender,
    Load,
    State,
    connected,
    key_of,
    kill_after,
    read,
    weights,
)
from manager_runs import managers
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
from tensor_dedup.loader.cuda.residents import DeviceRequest, Views, copy_of
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.resident import digest_of, resident_key, shares_memory
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import (
    BackendError,
    ManagerGoneError,
    RefusedError,
)

KIB = 1 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def manager(folder: Path) -> Iterator[gpus.GpuManager]:
    with gpus.running(folder) as running:
        yield running


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

    unknown = DeviceRequest("recipe", replace(right, digest=""), tensor.nbytes, write)
    [resident] = mine.lender.put([unknown])
    assert resident is not None
    assert resident.key == right
    assert torch.equal(load().find(tensor), tensor)
    liar = DeviceRequest("other", replace(right, digest="0" * 64), tensor.nbytes, write)
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
    assert 64 * KIB <= totals.charged < 80 * KIB  # and what the manager remembers of it
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
    assert digest_of(tensor) == key_of(weights(1)).digest


def test_another_gpus_manager_is_refused(manager: gpus.GpuManager) -> None:
    other = Gpu(FakeDriver(visible=(1,)), "0")
    beside = manager.socket.with_name("m.sock")
    with pytest.raises(ManagerGoneError, match="serve"):
        connect(beside, keep_connected=False, device=other.device.uuid)
    client = connect(manager.socket.with_name("m.sock"), device=fake_uuid(0), keep_connected=False)
    with client, pytest.raises(UnsupportedError, match="device="):
        Lender(client, other, "base")
    with pytest.raises(ManagerGoneError, match="not of the machine"):
        connect(manager.socket, keep_connected=False)


def test_visible_devices_may_differ(manager: gpus.GpuManager, load: Callable[[], Load]) -> None:
    load().put(weights(1))
    mine = load()
    mine.fake._visible = (5, 0)
    gpu = Gpu(mine.fake, fake_uuid(0))
    assert gpu.device.ordinal == 1
    found = Lender(mine.client, gpu, "base").by_content(key_of(weights(1)))
    assert found is not None
    assert torch.equal(mine.views.tensor(found), weights(1))
    gc.collect()
    assert gpu.reap(wait=True) == 0


# What fails.


def test_a_lease_of_another_size_is_not_taken_for_the_tensor(load: Callable[[], Load]) -> None:
    first, second = load(), load()
    short, neighbour, asked = weights(1, 10), weights(2, 1000), weights(3, 500)
    liar = replace(first.wanted(short), key=replace(key_of(short), digest=key_of(asked).digest))
    assert all(first.lender.put([liar, first.wanted(neighbour)]))
    # Neither found nor put, and the others are.
    session, other = second.lender.session, weights(4, 700)
    found = session.by_content([key_of(asked), key_of(neighbour)])
    assert [each is not None for each in found] == [False, True]
    assert "1000 bytes where 20 are lent" in str(session.unusable)
    put = second.put(asked, other)
    assert [each is not None for each in put] == [False, True]
    assert torch.equal(second.find(neighbour), neighbour)
    assert torch.equal(second.find(other), other)
    third = load()
    assert third.put(asked) == [None]
    assert "privately" in str(third.lender.session.unusable)
    assert not second.client.closed


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


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[s.__name__ for s in STEPS])
def test_a_client_killed_after_any_step_leaves_nothing(
    manager: gpus.GpuManager, count: int
) -> None:
    kill_after(count, manager)


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


def test_what_is_leased_only_until_it_is_unmapped_makes_room(
    load: Callable[[], Load],
) -> None:
    """The manager has room for one of the two."""
    mine = load()
    borrowing = DeviceManagerResidents(mine.lender.session)
    first, second = (torch.full((10 << 20,), float(number)) for number in (1, 2))
    [lent] = borrowing.put([mine.wanted(first)])
    assert lent is not None
    tensor = mine.views.tensor(lent[0])
    [none] = borrowing.put([mine.wanted(second)])
    assert none is None, "it is in use"
    assert borrowing.refused
    mine.fake.begin(7)
    del tensor, lent
    gc.collect()
    [found] = borrowing.put([mine.wanted(second)])
    assert found is not None
    assert torch.equal(mine.views.tensor(found[0]), second)
