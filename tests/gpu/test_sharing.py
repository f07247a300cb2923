"""Processes share a GPU's memory: it counts once, is right, and deaths stay where they happen."""

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_runs import gpu_world
from gpu_runs.answers import Worker
from gpu_runs.gpu_world import Load, Manager, weights, workers
from manager_runs import managers

pytestmark = pytest.mark.gpu
SIDE = 8192  # 256 MiB a matrix
SMALL = 1024


@pytest.fixture
def manager(folder: Path) -> Iterator[Manager]:
    with gpu_world.running(folder) as running:
        yield running


def expected(seed: int) -> list[float]:
    y = torch.ones(64, SMALL, device=gpu_world.PLACE) @ weights(seed).to(gpu_world.PLACE)
    return [float(number) for number in y[0, :8]]


def right(worker: Worker, seed: int = 1) -> bool:
    found = torch.tensor(worker.do("forward"))
    return torch.allclose(found, torch.tensor(expected(seed)), atol=1e-2)


@pytest.mark.alone
@pytest.mark.parametrize("count", [2, 4])
def test_memory_counts_once(manager: Manager, count: int) -> None:
    if gpu_world.REHEARSAL:
        pytest.skip("NVML counts no memory files")
    with workers(manager, count) as processes:
        before = gpu_world.used_bytes()
        processes[0].do("put", [1, 2], SIDE)
        for each in processes:
            each.do("attach", [1, 2], SIDE)
        sums = {each.do("read_all") for each in processes}
        used = gpu_world.used_bytes() - before
        unique = 2 * SIDE * SIDE * 4
        assert len(sums) == 1
        assert used <= 1.03 * unique + (2 << 20), f"{used} bytes for {unique}"  # it rounds to MiB


def test_four_processes_compute_the_same(manager: Manager) -> None:
    with workers(manager, 4) as processes:
        processes[0].do("put", [1])
        for each in processes:
            each.do("attach", [1])
        assert [right(each) for each in processes] == [True] * 4


@pytest.mark.parametrize("way", ["write", "copy_over"])
def test_who_writes_to_a_shared_page_ends_its_own_process_only(manager: Manager, way: str) -> None:
    """A kernel, and a copy by the driver: whether that is refused or faults is not documented."""
    with workers(manager, 2) as (good, faulty):
        good.do("put", [1])
        for each in (good, faulty):
            each.do("attach", [1])
        answer = faulty.attempt(way)
        assert answer is None or "error" in answer
        if way == "write":
            again = faulty.attempt("forward") if answer is not None else None
            assert again is None or "error" in again, "its context should be gone"
        assert right(good)
        with workers(manager, 1) as [other]:
            other.do("attach", [1])
            assert right(other)


def test_a_killed_client_leaves_the_memory_to_others(manager: Manager) -> None:
    with workers(manager, 2) as (good, doomed):
        doomed.do("put", [1])
        good.do("attach", [1])
        doomed.do("attach", [1])
        doomed.kill()
        assert right(good)
        managers.until(lambda: manager.overview().totals.leases == 1)


def test_a_killed_manager_leaves_what_is_mapped_and_takes_it_back(
    folder: Path, manager: Manager
) -> None:
    with workers(manager, 1) as [good]:
        good.do("put", [1])
        good.do("attach", [1])
        manager.kill()
        assert right(good)
        with gpu_world.running(folder) as heir:
            assert good.do("reconnect") == 1
            with workers(heir, 1) as [other]:
                other.do("attach", [1])
                assert right(other)
                assert right(good)
                assert other.do("let_go") == 0


@pytest.mark.alone
def test_memory_is_given_back_when_nobody_uses_it(manager: Manager) -> None:
    if gpu_world.REHEARSAL:
        pytest.skip("NVML counts no memory files")
    with workers(manager, 1) as [one]:
        before = gpu_world.used_bytes()
        one.do("put", [1], SIDE)
        one.do("attach", [1], SIDE)
        assert one.do("let_go") == 0
        with manager.admin() as admin:
            managers.until(lambda: admin.totals().leases == 0)
            admin.evict("test")
        managers.until(lambda: gpu_world.used_bytes() - before < SIDE * SIDE * 4 // 10)


def test_expandable_segments_make_no_difference(manager: Manager) -> None:
    with workers(manager, 2, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as processes:
        processes[0].do("put", [1])
        for each in processes:
            each.do("attach", [1])
            assert right(each)


def test_a_compiled_function_reads_shared_memory(manager: Manager) -> None:
    if gpu_world.REHEARSAL:
        pytest.skip("nothing of a GPU would be compiled")
    pytest.importorskip("triton")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("Triton builds its launchers with a C compiler, and there is none")
    with workers(manager, 1) as [one]:
        one.do("put", [1])
        one.do("attach", [1])
        found = torch.tensor(one.do("compiled"))
        assert torch.allclose(found, torch.tensor(expected(1)), atol=1e-2)


def test_the_old_kind_is_shared_between_processes(folder: Path) -> None:
    with (
        gpu_world.running(folder, "--backend", "ipc") as manager,
        workers(manager, 2) as (first, second),
    ):
        first.do("put", [1])
        for each in (first, second):
            each.do("attach", [1])
            assert right(each)


def test_a_process_maps_what_it_has_put_read_only_too(manager: Manager) -> None:
    load = Load(str(manager.socket.with_name("m.sock")))
    load.put(weights(1))
    found = load.find(weights(1))
    assert torch.equal(found.cpu(), weights(1))
    assert found.data_ptr() % 512 == 0
    del found
    gc.collect()
    assert load.gpu.reap(wait=True) == 0
    load.client.close()
