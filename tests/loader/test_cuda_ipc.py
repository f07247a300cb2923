"""Processes share a fake GPU's memory of the old kind: what it can, and what it cannot."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from gpu_runs import gpus
from gpu_runs.gpu_loads import (
    STEPS,
    Load,
    State,
    allocate,
    connected,
    key_of,
    kill_after,
    map_to_write,
    of,
    read,
    reserve,
    seal,
    weights,
)
from manager_runs import managers
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.provider import GpuProvider
from tensor_dedup.loader.cuda.residents import Views
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.registry import LEAF_SHARED_FROM
from tensor_dedup.loader.residents.resident import shares_memory
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.memory_manager.client import Put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def old(folder: Path) -> Iterator[gpus.GpuManager]:
    """A manager with the backend `ipc`."""
    with gpus.running(folder, "--backend", "ipc") as running:
        yield running


@pytest.mark.parametrize("step", [map_to_write, seal, read])
def test_a_client_of_the_old_kind_killed_leaves_nothing(
    old: gpus.GpuManager, step: Callable[[State], object]
) -> None:
    kill_after(STEPS.index(step) + 1, old)


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
        first.lender.opener.open([MappedExtent(0, 1, 1), MappedExtent(1, 1, 2)], Access.READ)
    del found
    finish(first)
    finish(second)


@pytest.mark.parametrize("backend", ["ipc", "vmm"])
def test_large_tensors_are_shared_whole_and_ipc_says_why(folder: Path, backend: str) -> None:
    """A fine-tune of which one number differs has nothing of its base, and neither changes."""
    base = weights(1, 5_000_000)
    tune = base.clone()
    tune[-1] = 7
    assert base.nbytes >= LEAF_SHARED_FROM
    with gpus.running(folder, "--backend", backend) as manager:
        first, second = Load(manager.socket), Load(manager.socket)
        [held] = first.put(base)
        [again] = second.put(base)
        assert held is not None
        assert again is not None
        assert second.lender.session.not_by_leaf is None  # it has put nothing
        [own] = second.put(tune)
        assert own is not None
        totals = manager.overview().totals
        assert (totals.slabs, totals.resident_bytes) == (2, 2 * base.nbytes)
        shared = second.views.tensor(again)
        found = second.views.tensor(own)
        assert not shares_memory(shared, found)
        assert torch.equal(shared, base)
        assert torch.equal(found, tune)
        provider = GpuProvider(
            cast("SharedGpu", SimpleNamespace(kind=CPU)),
            DeviceManagerResidents(second.lender.session),
        )
        assert ("`ipc`" in (provider.not_by_leaf or "")) == (backend == "ipc")
        del held, again, own, shared, found, provider
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
    doomed = managers.Actor(old.socket, connected, reserve, allocate, map_to_write, hang_up, touch)
    for _ in range(5):
        assert doomed.step() is None
    managers.until(lambda: old.overview().totals.lingering_bytes > 0)
    assert doomed.step() == ord("w")
    doomed.kill()
    managers.until(lambda: old.overview().totals.charged == 0)


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
