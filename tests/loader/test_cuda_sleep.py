"""Models sleep and wake over the fake driver: the right bytes at the same addresses, or none."""

import errno
import gc
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from blake3 import blake3

from files.counted_hashes import Counted
from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, FakeDriver
from gpu_runs.gpu_loads import key_of, weights
from manager_runs import managers
from manager_runs.sleepers import SleepyEngine
from tensor_dedup import digest
from tensor_dedup.loader.cuda import host_backup, new_slabs, transfers
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.residents import UnreadTensor
from tensor_dedup.loader.cuda.sleep import SleepReport
from tensor_dedup.loader.cuda.sleeping_slabs import key_asleep
from tensor_dedup.loader.cuda.transfers import HostContent, memory_part
from tensor_dedup.memory_manager.client import Client
from tensor_dedup.memory_manager.client.puts import Put
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.errors import BackendError, ManagerGoneError, MemoryManagerError

BIG, SMALL, OTHER = weights(1, 200_000), weights(2, 100), weights(3, 70_000)
BASE = [[BIG], [SMALL, OTHER]]
NBYTES = sum(each.nbytes for group in BASE for each in group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def device(folder: Path) -> Iterator[gpus.GpuManager]:
    with gpus.running(folder) as running:
        yield running


@pytest.fixture
def host(folder: Path) -> Iterator[managers.Manager]:
    with managers.running(folder) as running:
        yield running


@pytest.fixture
def engine(
    folder: Path, device: gpus.GpuManager, host: managers.Manager
) -> Iterator[Callable[..., SleepyEngine]]:
    made: list[SleepyEngine] = []

    def make(*groups: list[torch.Tensor], managed: bool = True, late: bool = True) -> SleepyEngine:
        made.append(SleepyEngine(folder, managed=managed, late=late).load(*groups))
        return made[-1]

    yield make
    for each in made:
        each.close()


def on_gpu(device: gpus.GpuManager) -> int:
    return device.overview().totals.resident_bytes


def kept(host: managers.Manager) -> int:
    return host.overview().totals.resident_bytes


def test_the_only_one_leaves_the_gpu_and_comes_back_to_its_addresses(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    one = engine(*BASE)
    addresses = one.addresses()
    assert on_gpu(device) == NBYTES
    for _ in range(2):
        report = one.sleep()
        assert report.reasons == []
        assert report.unmapped == one.model.asleep > NBYTES
        assert one.is_unmapped()
        assert (on_gpu(device), kept(host), gpus.in_use()) == (0, NBYTES, 0)
        assert one.model.wake() == report.unmapped
        assert one.is_right()
        assert one.addresses() == addresses
        assert on_gpu(device) == NBYTES
    assert report.copied == 0  # host memory still had it
    assert one.model.wake() == 0


def test_nothing_is_copied_while_somebody_awake_has_it_and_the_last_one_copies(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    first, second = engine(*BASE), engine(*BASE)
    assert on_gpu(device) == NBYTES
    report = first.sleep()
    assert (report.copied, report.reasons) == (0, [])
    assert first.is_unmapped()
    assert second.is_right()
    assert (on_gpu(device), kept(host)) == (NBYTES, 0)
    assert second.sleep().copied == NBYTES
    assert on_gpu(device) == NBYTES  # the first one's leases, until it has looked
    managers.until(lambda: on_gpu(device) == 0)  # as its thread does by itself
    assert kept(host) == NBYTES
    assert gpus.in_use() == 0
    for each in (first, second):
        each.model.wake()
        assert each.is_right()
    assert on_gpu(device) == NBYTES  # once


def test_who_wakes_while_another_is_awake_maps_what_that_one_has(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    first, second = engine(*BASE), engine(*BASE)
    first.sleep()
    first.driver.again()
    first.model.wake()
    assert "copy_in" not in first.driver.calls
    assert "create" not in first.driver.calls
    assert first.is_right()
    assert kept(host) == 0
    # Awake again, it counts as such.
    assert second.sleep().copied == 0
    assert kept(host) == 0
    second.model.wake()


def test_sleeping_fine_tunes_cost_the_base_and_what_differs(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    base = [[weights(1, 1_000_000)], [weights(2, 500_000)]]
    heads = [weights(10 + number, 50_000) for number in range(5)]
    tunes = [engine(*base, [head]) for head in heads]
    unique = sum(e.nbytes for group in base for e in group) + sum(head.nbytes for head in heads)
    assert on_gpu(device) == unique
    for each in tunes:
        assert each.sleep().reasons == []
        each.model.settle()
    managers.until(lambda: on_gpu(device) == 0)
    assert kept(host) == unique
    totals = host.overview().totals
    assert totals.charged <= 1.02 * unique
    for each in tunes:
        each.model.wake()
        assert each.is_right()
    assert on_gpu(device) == unique


def test_without_a_manager_of_the_gpu_a_process_keeps_what_its_other_model_uses(
    engine: Callable[..., SleepyEngine], host: managers.Manager
) -> None:
    one = engine(*BASE, managed=False)
    other = one.views.__class__(one.gpu.kind)
    seen = [other.tensor(each) for each in one._residents([BIG])]
    report = one.sleep()
    assert report.copied == SMALL.nbytes + OTHER.nbytes
    assert torch.equal(seen[0], BIG)
    seen.clear()
    one.gpu.gpu.reap(wait=True)
    assert one.model.settle() == []
    assert kept(host) == NBYTES
    assert gpus.in_use() == 0
    one.model.wake()
    assert one.is_right()


def test_mappings_of_a_model_that_is_gone_are_no_use_of_it(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    """They are unmapped with the next mapping, and a process that sleeps makes none."""
    one = engine(*BASE)
    other = one.views.__class__(one.gpu.kind)
    for goes_first in (True, False):
        seen = [other.tensor(each) for each in one._residents([BIG])]
        if not goes_first:
            assert one.sleep().copied == 0
            assert on_gpu(device) == BIG.nbytes
        seen.clear()
        assert one.gpu.gpu.waiting == 1
        if goes_first:
            assert one.sleep().copied == NBYTES
        managers.until(lambda: on_gpu(device) == 0)
        assert one.gpu.gpu.waiting == 0
        assert kept(host) == NBYTES
        one.model.wake()
        assert one.is_right()


def test_a_slab_of_another_layout_is_not_mapped(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    one, part = engine(*BASE), weights(9, 300)
    one.sleep()
    assert on_gpu(device) == 0
    other = engine([part, SMALL])  # a slab in which it lies elsewhere
    one.model.wake()
    assert one.is_right()
    assert other.is_right()
    again = engine([OTHER])
    assert again.is_right()


def test_a_model_that_uses_a_part_of_a_slab_wakes_with_that_part(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    whole = engine(*BASE)
    part = engine([OTHER])
    assert on_gpu(device) == NBYTES
    whole.sleep()
    part.sleep()
    managers.until(lambda: on_gpu(device) == 0 or whole.model.settle() is None)
    for each in (part, whole):
        each.model.wake()
        assert each.is_right()


@pytest.mark.parametrize("count", [300, 1100])
def test_engines_that_wake_have_many_small_tensors_once(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, count: int
) -> None:
    """They were read from files, in slabs that were written before a digest was known."""
    small = [weights(number, 10) for number in range(count)]
    first = engine()
    assert first.device is not None
    manager = DeviceManagerResidents(device_session(first.device, first.gpu.gpu, "base"))
    unread = [
        UnreadTensor(
            replace(key_of(each), digest=""),
            HostContent(each.nbytes, [memory_part(each)]),
            partial("recipe {}".format, number),
        )
        for number, each in enumerate(small)
    ]
    made = DeviceBuilds(first.gpu, manager).build_unread(unread)
    first.tensors += [first.views.tensor(each) for each, _ in made]
    first.wanted += small
    del made
    second = engine(small)
    size = sum(each.nbytes for each in small)
    assert on_gpu(device) == size
    for each in (first, second):
        assert each.sleep().reasons == []
    managers.until(lambda: on_gpu(device) == 0)
    for each in (first, second):
        each.model.wake()
        assert each.is_right()
    assert on_gpu(device) == size
    assert device.overview().totals.leases == 2 * count


# What it costs.

MANY = [[weights(1000 * number, 500_000)] for number in range(7)]
ALL = sum(each.nbytes for group in [*MANY, *BASE] for each in group)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> int:
    """Batches of three slabs of `MANY`, each put in up to three parts; the number of batches."""
    monkeypatch.setattr(new_slabs, "ROUND_BYTES", 3_200_000)
    monkeypatch.setattr(host_backup, "_PUT_BYTES", 1_000_000)
    return 3


@pytest.mark.parametrize("managed", [False, True])
def test_each_byte_is_copied_once_each_way_and_hashed_by_the_manager_alone(
    engine: Callable[..., SleepyEngine],
    host: managers.Manager,
    small_batches: int,
    managed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engine(*MANY, *BASE, managed=managed)
    hashed = Counted(blake3)
    for module in (digest, transfers):
        monkeypatch.setattr(module, "blake3", hashed)
    before, one.fake.traffic = one.fake.traffic, Counter()
    one.driver.again()
    assert one.sleep().copied == ALL == kept(host)
    assert (one.fake.traffic["copy_out"], one.fake.traffic["copy_in"]) == (ALL, 0)
    assert one.fake.traffic["synchronize"] == 1
    assert fences(one) <= small_batches
    # A batch was put over several connections, and one has all leases.
    assert len(host.lines("connected")) > 1
    there = host.overview()
    assert [client.leases for client in there.clients] == [len(one.tensors)]
    assert there.totals.lingering_bytes == 0
    one.driver.again()
    one.fake.traffic.clear()
    assert one.model.wake() > ALL
    assert one.is_right()
    assert (one.fake.traffic["copy_out"], one.fake.traffic["copy_in"]) == (0, ALL)
    assert one.fake.traffic["synchronize"] == 0
    assert fences(one) <= small_batches
    assert hashed.taken() == 0
    locked = before["page_lock"] + one.fake.traffic["page_lock"]
    assert locked <= transfers.RING.nbytes <= transfers.MOST_BUFFERS * transfers.BUFFER_BYTES


@pytest.mark.parametrize("managed", [False, True])
def test_a_slab_that_is_mapped_twice_comes_back_once(
    engine: Callable[..., SleepyEngine], managed: bool
) -> None:
    one = engine(*BASE, managed=managed)
    other = one.views.__class__(one.gpu.kind)
    one.tensors += [other.tensor(each) for each in one._residents([BIG])]
    one.wanted.append(BIG)
    assert len({*map(id, map(one.gpu.mapping_behind, one.tensors))}) == 4
    assert one.sleep().reasons == []
    assert gpus.in_use() == 0
    one.fake.traffic.clear()
    one.model.wake()
    assert one.is_right()
    assert one.fake.traffic["copy_in"] == NBYTES


def test_one_that_wakes_waits_for_one_batch_at_most(
    engine: Callable[..., SleepyEngine], small_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, write = engine(*MANY), Put.write
    begun, go = threading.Event(), threading.Event()

    def held_up(*arguments: Any) -> None:
        begun.set()
        go.wait()
        write(*arguments)

    monkeypatch.setattr(Put, "write", held_up)
    threads = [threading.Thread(target=each) for each in (one.sleep, one.model.wake)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    managers.until(one.model._waking.is_set)
    go.set()
    for each in threads:
        each.join()
    assert one.is_right()
    assert one.fake.traffic["copy_out"] == 3 * MANY[0][0].nbytes < ALL / 2


def fences(one: SleepyEngine) -> int:
    """How often the driver was waited for, but for a copy from or to a buffer."""
    begun = {"begin_copy_in", "begin_copy_out"}
    return one.driver.calls.count("record") - sum(call in begun for call in one.driver.calls)


# What fails.


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cleaning", [False, True])
def test_whatever_call_of_falling_asleep_fails_the_model_wakes_with_what_it_had(
    engine: Callable[..., SleepyEngine],
    cleaning: bool,
    late: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = engine(*BASE, late=late)
    addresses = one.addresses()
    assert one.host is not None
    caplog.set_level(logging.CRITICAL, "tensor_dedup")
    number, said, copied, evicted = 0, 0, 0, 0
    calls: set[str] = set()
    while True:
        number += 1
        one.driver.cleaning = cleaning
        one.driver.again(number)
        report = one.sleep()
        done = len(one.driver.calls) < number
        calls |= set(one.driver.calls)
        one.driver.cleaning = False
        one.driver.again()
        if done:
            assert report.reasons == []
            break
        said += bool(report.reasons)
        copied += report.copied > 0
        # No mapping is left, as one would be under a copy that goes on.
        assert cleaning or {*one.fake._space.reserved} == {m.address for m in one.gpu.gpu._alive}
        settle_leftovers(one)
        one.model.wake()
        assert one.is_right(), number
        assert one.addresses() == addresses
        evicted += evict(one.host) > 0  # so that it is copied again
    assert {"begin_copy_out", "synchronize", "record", "wait"} <= calls
    assert said > 3  # a slab that cannot be unmapped
    # A batch that failed is tried again, slab by slab. What still has a lease is not copied again.
    assert copied >= evicted > 0
    one.model.wake()
    assert one.is_right()


def evict(host: Client) -> int:
    """Have the copies evicted, after errors have been collected, whose frames have leases."""
    gc.collect(1)
    if evicted := host.evict("base"):
        return evicted
    gc.collect()  # of those that a collection has missed before
    return host.evict("base")


def settle_leftovers(one: SleepyEngine) -> None:
    """Give back what a call that cleans up, and failed, has left."""
    while one.fake._stack():
        one.fake.leave()
    one.gpu.gpu.transfers.fence()  # no event of the ring's is left
    for event in list(one.fake._events):
        one.fake.forget(event)
    for handle in list(one.fake._handles):
        one.fake.release(handle)
    mine = {m.address: m for m in list(one.gpu.gpu._alive)}
    for start, nbytes in list(one.fake._space.reserved.items()):
        if start not in mine:
            for at, each in list(one.fake._space.mapped.items()):
                if start <= at < start + nbytes:
                    one.fake.unmap(at, each.nbytes)
            one.fake.free(start, nbytes)


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_whatever_call_of_waking_fails_it_sleeps_on_and_wakes_later(
    engine: Callable[..., SleepyEngine], late: bool, managed: bool
) -> None:
    one = engine(*BASE, managed=managed, late=late)
    addresses = one.addresses()
    number, refused = 0, 0
    while True:
        number += 1
        assert one.sleep().reasons == []
        one.driver.again(number)
        try:
            one.model.wake()
        except MemoryManagerError:
            refused += 1
            assert one.model.asleep
        done = len(one.driver.calls) < number
        calls = set(one.driver.calls)
        one.driver.again()
        settle_leftovers(one)
        one.model.wake()
        assert one.is_right(), number
        assert one.addresses() == addresses
        if done:
            break
    assert {"begin_copy_in", "record", "wait", "map"} <= calls
    assert refused > 5


def test_one_that_another_is_just_putting_is_waited_for(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    """Waiting for it, an engine that wakes holds no reservation that others wait for."""
    one = engine(*BASE)
    one.sleep()
    assert one.device is not None
    with one.device.beside() as other:
        put = other.reserve([key_asleep(key_of(each).digest) for each in (SMALL, OTHER)]).put
        assert put is not None
        waking = threading.Thread(target=one.model.wake)
        waking.start()
        managers.until(lambda: on_gpu(device) == BIG.nbytes)  # the rest of the batch
        put.abandon()
        waking.join()
    assert one.is_right()
    assert on_gpu(device) == NBYTES  # lent, and not this process's own


def test_what_cannot_be_reserved_beside_what_others_put_is_put_later(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    one = engine(*BASE)
    one.sleep()
    assert one.device is not None
    most = Settings(0).max_puts
    others = [one.device.reserve([f"other-{number}"]).put for number in range(most - 1)]
    one.model.wake()
    assert one.is_right()
    assert on_gpu(device) == NBYTES
    for put in others:
        assert put is not None
        put.abandon()


def test_a_wake_that_is_interrupted_while_it_waits_does_not_keep_memory_on_the_gpu(
    engine: Callable[..., SleepyEngine], host: managers.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(*BASE)

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        __enter__ = acquire

        def __exit__(self, *_: object) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(one.model, "_lock", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            one.model.wake()
    assert one.sleep().copied == NBYTES == kept(host)
    one.model.wake()
    assert one.is_right()


def test_a_gpu_that_is_full_when_it_wakes_is_said_and_it_wakes_when_there_is_room(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    one = engine(*BASE)
    one.sleep()
    device.refuse("create")
    one.driver.again()
    create = cast("dict[str, object]", vars(one.fake))
    create["create"] = gpus.Full.create.__get__(one.fake)
    create["room"] = 0
    with pytest.raises(BackendError, match="the GPU has no"):
        one.model.wake()
    assert one.model.asleep > NBYTES
    del create["create"]
    device.refuse()
    one.model.wake()
    assert one.is_right()


def test_bytes_that_are_not_those_of_the_digest_never_reach_host_memory(
    engine: Callable[..., SleepyEngine], host: managers.Manager, device: gpus.GpuManager
) -> None:
    """What a faulty write has changed under the mapping wakes as it fell asleep."""
    one = engine(*BASE)
    mapping = one.gpu.mapping_behind(one.tensors[0])
    assert mapping is not None
    fd = one.fake._space.mapped[mapping.address].fd
    with Path(f"/proc/self/fd/{fd}").open("r+b") as file:
        file.write(b"\xff" * 8)
    report = one.sleep()
    [reason] = report.reasons
    assert "refused" in reason
    assert one.model._watch is None  # the next try would meet the same
    # The others of its batch sleep.
    assert report.copied == kept(host) == SMALL.nbytes + OTHER.nbytes
    assert on_gpu(device) == BIG.nbytes
    one.model.wake()
    assert one.tensors[0].view(torch.uint8)[:8].tolist() == [255] * 8
    assert on_gpu(device) == NBYTES
    one.wanted[0] = one.tensors[0].clone()


@pytest.mark.parametrize("room", [GRANULARITY, 2_500_000])
def test_what_has_no_room_in_host_memory_sleeps_on_the_gpu_and_is_not_copied(
    folder: Path, device: gpus.GpuManager, small_batches: int, room: int
) -> None:
    budget, each = 16 << 20, MANY[0][0].nbytes
    with managers.running(folder, "--budget", str(budget)) as small, small.client() as greedy:
        leases = managers.build(greedy, "all", bytes(budget - room))
        one = SleepyEngine(folder, late=True).load(*MANY)
        report = one.sleep()
        fits = room // each
        assert report.copied == fits * each
        assert len(report.reasons) == len(MANY) - fits > 0
        assert all("no room" in reason for reason in report.reasons)
        assert one.fake.traffic["copy_out"] == report.copied
        assert one.model._watch is None
        assert one.is_unmapped()
        assert on_gpu(device) == ALL - NBYTES - report.copied
        one.model.wake()
        assert one.is_right()
        one.close()
        del leases


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_the_system_is_reported_and_copying_is_tried_again(
    engine: Callable[..., SleepyEngine],
    device: gpus.GpuManager,
    host: managers.Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engine(*BASE)
    monkeypatch.setattr(Put, "write", full)
    report = one.sleep()
    assert report.unmapped == one.model.asleep > NBYTES
    assert [each for each in report.reasons if "No space" not in each] == []
    assert len(report.reasons) == 3
    assert (on_gpu(device), kept(host)) == (NBYTES, 0)
    one.model.wake()
    assert one.is_right()
    one.sleep()
    monkeypatch.undo()
    managers.until(lambda: on_gpu(device) == 0)  # its thread has tried again
    assert kept(host) == NBYTES
    one.model.wake()
    assert one.is_right()


def test_what_fails_while_it_sleeps_does_not_end_the_thread(
    engine: Callable[..., SleepyEngine],
    device: gpus.GpuManager,
    host: managers.Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, awake = engine(*BASE), engine(*BASE)
    assert one.sleep().reasons == []
    tried = []

    def fails(*_: object) -> None:
        tried.append(1)
        full()

    monkeypatch.setattr(Put, "write", fails)
    awake.tensors.clear()
    awake.gpu.gpu.reap(wait=True)
    managers.until(lambda: len(tried) > 1)
    assert on_gpu(device) == NBYTES
    monkeypatch.undo()
    managers.until(lambda: on_gpu(device) == 0)
    assert kept(host) == NBYTES
    one.model.wake()
    assert one.is_right()


def test_managers_that_die_take_nothing_along(
    folder: Path, device: gpus.GpuManager, host: managers.Manager
) -> None:
    one = SleepyEngine(folder).load(*BASE)
    one.sleep()
    host.kill()
    device.kill()
    one.model.wake()
    assert one.is_right()
    report = one.sleep()  # there is nobody to keep it
    assert report.reasons
    assert gpus.in_use() > NBYTES
    one.model.wake()
    assert one.is_right()
    one.close()


def test_puts_that_failed_are_let_go_without_a_garbage_collection(
    engine: Callable[..., SleepyEngine], small_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sleeps makes none, and what a put holds would stay in host memory."""
    one = engine(*MANY)

    def refuses(*_: object) -> None:
        raise BackendError("it is refused")

    gc.collect()
    monkeypatch.setattr(Put, "write", refuses)
    gc.disable()
    try:
        assert len(one.sleep().reasons) == len(MANY)
        assert not [each for each in gc.get_objects() if isinstance(each, Put)]
    finally:
        gc.enable()
    one.model.wake()
    assert one.is_right()


def test_a_manager_that_does_not_answer_is_asked_once_a_batch(
    engine: Callable[..., SleepyEngine], small_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an answer is waited for long, and `wake` waits meanwhile."""
    one = engine(*MANY)
    asked = []

    def hangs(*_: object) -> None:
        asked.append(1)
        raise ManagerGoneError("it does not answer")

    monkeypatch.setattr(one.host, "lease", hangs)
    report = one.sleep()
    assert len(asked) == small_batches
    assert len(report.reasons) == len(MANY)
    assert all("does not answer" in each for each in report.reasons)
    one.model.wake()
    assert one.is_right()


def test_when_the_gpus_manager_dies_while_another_is_awake_nothing_is_lost(
    folder: Path, device: gpus.GpuManager, host: managers.Manager
) -> None:
    first, second = (SleepyEngine(folder).load(*BASE) for _ in range(2))
    first.sleep()
    device.kill()
    assert first.model.settle() == []
    assert kept(host) == 0  # nobody can say who is awake
    with gpus.running(folder) as heir:
        for each in (first, second):
            assert each.device is not None
            each.device.reconnect()
        assert first.model.settle() == []
        assert kept(host) == 0
        second.close()
        managers.until(lambda: first.model.settle() == [] and kept(host) == NBYTES)
        managers.until(lambda: on_gpu(heir) == 0)
        first.model.wake()
        assert first.is_right()
        first.close()


# Who dies.

State = dict[str, object]


def start(state: State) -> None:
    state["engine"] = SleepyEngine(cast("Path", state["path"]).parent).load(*BASE)


def _of(state: State) -> SleepyEngine:
    return cast("SleepyEngine", state["engine"])


def stand_by(state: State) -> None:
    one = _of(state)
    mapping = one.gpu.mapping_behind(one.tensors[0])
    assert mapping is not None
    state["slabs"] = one.model._stood_by([mapping], SleepReport())


def copy_half(state: State) -> None:
    """Killed in the middle of a copy to host memory."""
    one = _of(state)
    assert one.host is not None
    put = one.host.reserve(["asleep:half"]).put
    assert put is not None
    put.allocate([BIG.nbytes], [key_of(BIG).digest])
    put.write(0, b"half")
    state["put"] = put


def sleep(state: State) -> list[str]:
    return _of(state).sleep().reasons


def wake(state: State) -> bool:
    _of(state).model.wake()
    return _of(state).is_right()


STEPS = (start, stand_by, copy_half, sleep, wake)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(number, id=step.__name__, marks=[pytest.mark.long] * (number < 3))
        for number, step in enumerate(STEPS, 1)
    ],
)
@pytest.mark.parametrize("others", [pytest.param(0, marks=pytest.mark.long), 1])
def test_one_killed_after_any_step_leaves_nothing_and_others_are_right(
    engine: Callable[..., SleepyEngine],
    device: gpus.GpuManager,
    host: managers.Manager,
    count: int,
    others: int,
) -> None:
    doomed = managers.Actor(device.socket, *STEPS[:count])
    sleeper = managers.Actor(device.socket, start, sleep, wake)
    sleeper.step()
    sleeper.step()
    for _ in range(count):
        assert doomed.step() in (None, [], True)
    awake = [engine(*BASE) for _ in range(others)]
    doomed.kill()
    managers.until(lambda: host.overview().totals.builds == 0)
    assert sleeper.step() is True
    sleeper.join()
    for each in awake:
        assert each.is_right()
        each.sleep()
    managers.until(lambda: device.overview().totals.leases == 0)
    later = engine(*BASE)
    assert later.is_right()
    assert later.sleep().reasons == []
    later.model.wake()
    assert later.is_right()
    for each in awake:
        each.model.wake()
        assert each.is_right()


class DeadlyDriver:
    """A fake driver whose process is killed at its call number `last` (from 1)."""

    def __init__(self, inner: FakeDriver, last: int) -> None:
        self._inner = inner
        self._left = last

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._inner, name)


@pytest.mark.long
@pytest.mark.parametrize("others", [0, 1])
def test_one_killed_at_any_call_of_its_driver_leaves_nothing(
    engine: Callable[..., SleepyEngine],
    device: gpus.GpuManager,
    host: managers.Manager,
    others: int,
) -> None:
    awake = [engine(*BASE) for _ in range(others)]
    last = 0
    while True:
        last += 1

        def deadly(state: State, last: int = last) -> None:
            one = _of(state)
            one.driver._inner = DeadlyDriver(one.fake, last)

        doomed = managers.Actor(device.socket, start, deadly, sleep, wake)
        doomed.step()
        doomed.step()
        try:
            assert doomed.step() == []
            assert doomed.step() is True
            doomed.join()
            break
        except EOFError:
            doomed.join()
        managers.until(lambda: host.overview().totals.builds == 0)
        for each in awake:
            assert each.is_right()
        later = engine(*BASE)
        assert later.is_right()
        assert later.sleep().reasons == []
        later.model.wake()
        assert later.is_right()
        later.tensors.clear()
    assert last > 20


def test_the_one_awake_is_killed_and_who_slept_by_it_copies_and_wakes(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    awake = managers.Actor(device.socket, start)
    awake.step()
    one = engine(*BASE)
    assert one.sleep().copied == 0
    assert kept(host) == 0
    awake.kill()
    managers.until(lambda: on_gpu(device) == 0)  # its thread has seen to it
    assert kept(host) == NBYTES
    one.model.wake()
    assert one.is_right()


def test_two_that_fall_asleep_at_once_leave_the_gpu(
    device: gpus.GpuManager, host: managers.Manager
) -> None:
    pair = [managers.Actor(device.socket, start, sleep, wake, sleep) for _ in range(2)]
    for each in pair:
        each.step()
    for _ in range(3):
        for each in pair:
            each.begin()
        for each in pair:
            assert each.result() in ([], True)
    managers.until(lambda: on_gpu(device) == 0)
    assert kept(host) == NBYTES
    for each in reversed(pair):  # each has the pipes of those before it
        each.join()
