"""Tensors of a fake GPU that differ in part have the rest in common, block by block."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY
from gpu_runs.gpu_loads import State, key_of
from manager_runs import managers
from manager_runs.sleepers import SleepyEngine
from tensor_dedup import shared_bytes, shares_memory
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.cuda.blocks import (
    BLOCK_BYTES,
    BLOCKS_FROM,
    BlockLog,
    TensorInBlocks,
    block_keys,
    blocks_in,
    may_be_in_blocks,
    record_of_blocks,
)
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents, device_session
from tensor_dedup.loader.cuda.provider import GpuProvider
from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.sleep import SleepingModel
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
from tensor_dedup.loader.residents.resident import ReplicaKey
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import BackendError
from tensor_dedup.memory_manager.protocol.limits import MAX_RECORD, MAX_RECORD_DIGESTS

MIB = 1 << 20
# Three blocks and a rest that is a number of leaves and a bit.
NBYTES = 3 * BLOCK_BYTES + 2 * LEAF_BYTES + 4096


def numbers(first: int, nbytes: int = NBYTES) -> torch.Tensor:
    """No two of its blocks are equal."""
    return torch.arange(first, first + nbytes // 4, dtype=torch.int32)


def changed(tensor: torch.Tensor, *at: int) -> torch.Tensor:
    """The same, but for the number at each of these bytes."""
    made = tensor.clone()
    for each in at:
        made[each // 4] -= 1
    return made


BASE = numbers(1)
TUNE = changed(BASE, BLOCK_BYTES + 8)  # in its second block
GROWN = torch.cat([BASE, torch.arange(1000, dtype=torch.int32)])  # in its last


def in_slabs(nbytes: int) -> int:
    return -(-nbytes // GRANULARITY) * GRANULARITY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def device(folder: Path) -> Iterator[gpus.GpuManager]:
    with gpus.running(folder, "--budget", str(512 * MIB)) as running:
        yield running


@pytest.fixture
def host(folder: Path) -> Iterator[managers.Manager]:
    with managers.running(folder) as running:
        yield running


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., SleepyEngine]]:
    made: list[SleepyEngine] = []

    def make(*tensors: torch.Tensor, managed: bool = True, tier: bool = False) -> SleepyEngine:
        made.append(SleepyEngine(folder, managed=managed, tier=tier))
        return made[-1].load(*([each] for each in tensors))

    yield make
    for each in made:
        each.close()


def resident_of(engine: SleepyEngine, tensor: torch.Tensor) -> TensorInBlocks:
    [found] = engine._residents([tensor])
    assert isinstance(found, TensorInBlocks)
    return found


def on_gpu(device: gpus.GpuManager) -> int:
    return device.overview().totals.resident_bytes


# In one process.


@pytest.mark.parametrize(
    ("tune", "own"), [(TUNE, BLOCK_BYTES), (GROWN, GROWN.nbytes - 3 * BLOCK_BYTES)]
)
def test_the_second_model_costs_the_blocks_that_differ(
    engine: Callable[..., SleepyEngine], tune: torch.Tensor, own: int
) -> None:
    process = engine(BASE, managed=False)
    before = gpus.in_use()
    assert before == in_slabs(BASE.nbytes)
    made = resident_of(process, tune)
    assert made.leaf_shared_bytes == tune.nbytes - own > 0
    assert gpus.in_use() == before + in_slabs(own)
    other = Views(CPU).tensor(made)
    assert torch.equal(other, tune)
    [base] = process.tensors
    assert process.is_right()
    assert shared_bytes(other, base) == shared_bytes(base, other) == made.leaf_shared_bytes
    assert not shares_memory(base, other)
    assert process.gpu.known(other) == ReplicaKey(key_of(tune), 0)
    assert process.gpu.known(base) == ReplicaKey(key_of(BASE), 0)


def test_large_tensors_that_are_built_together_share_blocks_and_are_waited_for_once(
    engine: Callable[..., SleepyEngine],
) -> None:
    process = engine(managed=False).load([BASE, TUNE, numbers(5)])
    assert process.fake.traffic["synchronize"] == 1
    assert process.is_right()
    base, tune, other = process.tensors
    assert shared_bytes(base, tune) == BASE.nbytes - BLOCK_BYTES
    assert shared_bytes(base, other) == 0
    assert gpus.in_use() == in_slabs(BASE.nbytes) * 2 + BLOCK_BYTES


def test_a_block_that_was_a_tensor_before_is_not_taken_for_one_written_here(
    engine: Callable[..., SleepyEngine],
) -> None:
    """Else no audit would compare it."""
    process = engine(BASE[: BLOCK_BYTES // BASE.itemsize].clone(), managed=False)
    made = resident_of(process, BASE)
    assert gpus.in_use() == in_slabs(BASE.nbytes)
    assert made.leaf_shared_bytes == BLOCK_BYTES


def test_a_tensor_whose_last_block_lies_among_others_is_whole(
    engine: Callable[..., SleepyEngine],
) -> None:
    tail = BASE[3 * BLOCK_BYTES // BASE.itemsize :].clone()
    process = engine(managed=False).load([numbers(7, 1 << 20), tail])  # in one slab
    before = gpus.in_use()
    [found] = process._residents([BASE])
    assert not isinstance(found, TensorInBlocks)
    assert gpus.in_use() == before + in_slabs(BASE.nbytes)
    assert torch.equal(Views(CPU).tensor(found), BASE)


def test_what_a_dropped_base_leaves_is_what_others_have_of_it(
    engine: Callable[..., SleepyEngine],
) -> None:
    process = engine(BASE, managed=False)
    other = Views(CPU).tensor(resident_of(process, TUNE))
    process.tensors.clear()
    process.wanted.clear()
    gc.collect()
    process.gpu.gpu.reap(wait=True)
    assert gpus.in_use() == in_slabs(TUNE.nbytes)
    assert torch.equal(other, TUNE)


@pytest.mark.parametrize("managed", [False, True])
def test_a_writer_has_all_of_its_tensor_for_itself(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, managed: bool
) -> None:
    process = engine(BASE, managed=managed)
    views = Views(CPU)
    tune = views.tensor(resident_of(process, TUNE))
    address = tune.data_ptr()
    assert shared_bytes(tune, process.tensors[0])
    assert views.make_private() == in_slabs(TUNE.nbytes)
    tune += 1
    assert torch.equal(tune, TUNE + 1)
    assert tune.data_ptr() == address
    assert process.is_right()
    assert shared_bytes(tune, process.tensors[0]) == 0
    assert process.gpu.known(tune) is None
    # Who comes later gets what was loaded, and not what was written.
    assert torch.equal(Views(CPU).tensor(resident_of(process, TUNE)), TUNE)


def test_equal_blocks_of_one_tensor_are_one_until_it_is_written(
    engine: Callable[..., SleepyEngine],
) -> None:
    zeros = torch.zeros(NBYTES // 4, dtype=torch.int32)
    process = engine(zeros, managed=False)
    rest = NBYTES - 3 * BLOCK_BYTES
    assert gpus.in_use() == BLOCK_BYTES + in_slabs(rest)
    made = resident_of(process, zeros)
    assert made.leaf_shared_bytes == 0  # nothing was there before
    [tensor] = process.tensors
    assert torch.equal(tensor, zeros)
    assert shared_bytes(tensor, Views(CPU).tensor(made)) == NBYTES
    process.views.make_private()
    tensor[0] = 7
    assert torch.equal(tensor[1:], zeros[1:])


def test_tensors_of_equal_bytes_do_not_become_one_for_a_writer(
    engine: Callable[..., SleepyEngine],
) -> None:
    flat, square = torch.zeros(NBYTES // 4), torch.zeros(NBYTES // 1024, 256)
    process = engine(flat, square, managed=False)
    first, second = process.tensors
    assert shared_bytes(first, second) == NBYTES
    process.views.make_private()
    first.fill_(3)
    assert not second.any()


def test_replicas_and_what_has_no_blocks_are_whole(engine: Callable[..., SleepyEngine]) -> None:
    process = engine(managed=False)
    key = key_of(BASE)
    wanted = (ReplicaKey(key, 1), "replica", process.gpu.copy_of(BASE))
    [(replica, made)] = DeviceBuilds(process.gpu, DeviceManagerResidents()).get_or_build([wanted])
    assert made
    assert len(replica.slabs) == 1
    assert may_be_in_blocks(key, BLOCKS_FROM)
    assert not may_be_in_blocks(key, BLOCKS_FROM - 1)
    assert not may_be_in_blocks(key, 1 << 40)
    assert not may_be_in_blocks(replace(key, digest=""), NBYTES)
    assert not may_be_in_blocks(replace(key, digest="blake2b:00"), NBYTES)
    assert not may_be_in_blocks(replace(key, digest="cast:F32:" + key.digest), NBYTES)


def test_the_largest_tensor_in_blocks_has_a_record_that_fits() -> None:
    nbytes = 1008 * LEAF_BYTES
    assert may_be_in_blocks(key_of(BASE), nbytes)
    assert not may_be_in_blocks(key_of(BASE), nbytes + 1)
    leaves = [n.to_bytes(32, "big") for n in range(1008)]
    keys = block_keys(nbytes, leaves)
    assert len(keys) <= MAX_RECORD_DIGESTS
    stand_in = cast(
        "TensorInBlocks",
        type(
            "",
            (),
            {
                "key": replace(key_of(BASE), shape=(10**9,) * 5, stride=(10**9,) * 5),
                "leaves": leaves,
                "blocks": [type("", (), {"key": key})() for key in keys],
            },
        )(),
    )
    record, digests = record_of_blocks(stand_in)
    assert len(record) <= MAX_RECORD
    assert digests == [each.digest for each in keys]
    found = blocks_in(record)
    assert found is not None
    assert (list(found.leaves), found.blocks) == (leaves, tuple(range(len(keys))))


def test_blocks_that_are_not_this_tensors_are_refused(engine: Callable[..., SleepyEngine]) -> None:
    process = engine(managed=False)
    base, tune = resident_of(process, BASE), resident_of(process, TUNE)
    assert base.blocks[0] is tune.blocks[0]
    TensorInBlocks(base.key, base.blocks, base.leaves)
    for blocks, leaves in (
        (tune.blocks, base.leaves),
        (base.blocks, tune.leaves),
        (base.blocks[:-1], base.leaves),
        (base.blocks[::-1], base.leaves),
        (base.blocks, base.leaves[:-1]),
        ((), base.leaves),
    ):
        with pytest.raises(SlabUsageError):
            TensorInBlocks(base.key, blocks, leaves)
    first, *others = base.blocks
    larger = DeviceResident(first.key, [*first.slabs, *others[0].slabs], 0)
    with pytest.raises(SlabUsageError, match="side by side"):
        TensorInBlocks(base.key, [larger, *others], base.leaves)


def test_what_changed_after_it_was_hashed_is_shared_with_nobody(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    process = engine()
    wanted = (ReplicaKey(key_of(BASE), 0), "recipe", process.gpu.copy_of(TUNE))
    assert process.device is not None
    residents = DeviceManagerResidents(device_session(process.device, process.gpu.gpu, "base"))
    with pytest.raises(BackendError, match="changed"):
        DeviceBuilds(process.gpu, residents).get_or_build([wanted])
    assert on_gpu(device) == gpus.in_use() == 0


def test_near_the_limit_of_descriptors_a_tensor_is_whole_and_it_is_said(
    engine: Callable[..., SleepyEngine],
) -> None:
    process = engine(managed=False)
    log = BlockLog()
    with gpus.few_descriptors():
        wanted = (ReplicaKey(key_of(BASE), 0), "recipe", process.gpu.copy_of(BASE))
        [(resident, _)] = DeviceBuilds(process.gpu, DeviceManagerResidents(), log).get_or_build(
            [wanted]
        )
    assert len(resident.slabs) == 1
    assert "ulimit -n" in (log.why_whole or "")


def test_whatever_call_fails_nothing_is_left(engine: Callable[..., SleepyEngine]) -> None:
    process = engine(BASE, managed=False)
    before, handles = gpus.in_use(), process.fake.left()
    key = ReplicaKey(key_of(TUNE), 0)
    number = 0
    while True:
        number += 1
        process.driver.again(number)
        try:
            wanted = (key, "recipe", process.gpu.copy_of(TUNE))
            found = Views(CPU).tensor(
                DeviceBuilds(process.gpu, DeviceManagerResidents()).get_or_build([wanted])[0][0]
            )
            break
        except BackendError:
            process.driver.again()
        gc.collect()
        process.gpu.gpu.reap(wait=True)
        assert (gpus.in_use(), process.fake.left()) == (before, handles)
    assert number > 10
    assert torch.equal(found, TUNE)
    assert shared_bytes(found, process.tensors[0]) == TUNE.nbytes - BLOCK_BYTES
    process.driver.again()


# Through the manager.


def started(state: State) -> None:
    state["engine"] = SleepyEngine(cast("Path", state["path"]).parent, tier=False)


def load_base(state: State) -> bool:
    one = cast("SleepyEngine", state["engine"]).load([BASE])
    return one.is_right()


def load_tune(state: State) -> tuple[bool, int]:
    one = cast("SleepyEngine", state["engine"])
    [found] = one._residents([TUNE])
    shared = found.leaf_shared_bytes
    return one.load([TUNE]).is_right(), shared


def put_base(state: State) -> int:
    return _put(state, BASE)


def put_tune(state: State) -> int:
    return _put(state, TUNE)


def _put(state: State, tensor: torch.Tensor) -> int:
    """Make a tensor resident and use it; how many bytes of it this process has written."""
    one = cast("SleepyEngine", state["engine"])
    [found] = one._residents([tensor])
    assert one.load([tensor]).is_right()
    return tensor.nbytes - found.leaf_shared_bytes


def test_another_process_costs_the_blocks_that_differ(device: gpus.GpuManager) -> None:
    first = managers.Actor(device.socket, started, load_base)
    second = managers.Actor(device.socket, started, load_tune)
    third = managers.Actor(device.socket, started, load_tune)
    for each in (first, second, third):
        each.step()
    assert first.step() is True
    assert on_gpu(device) == BASE.nbytes
    assert second.step() == (True, TUNE.nbytes - BLOCK_BYTES)
    totals = device.overview().totals
    assert (totals.resident_bytes, totals.slabs) == (BASE.nbytes + BLOCK_BYTES, 5)
    assert third.step() == (True, 0)  # it is there as a whole
    assert device.overview().totals.slabs == 5
    first.kill()
    # What was the base's alone can go.
    managers.until(lambda: device.overview().totals.leases == 8)
    with Admin(device.socket) as admin:
        assert admin.evict("base").nbytes == BLOCK_BYTES
    assert on_gpu(device) == TUNE.nbytes
    for each in (third, second):  # which was forked before the third, and ends after it
        each.join()
    managers.until(lambda: device.overview().totals.leases == 0)


def test_two_that_build_at_once_put_each_block_once(device: gpus.GpuManager) -> None:
    """What one of them waits for is the other's, and is compared in an audit as such."""
    both = [managers.Actor(device.socket, started, each) for each in (put_base, put_tune)]
    for each in both:
        each.step()
    for each in both:
        each.begin()
    wrote = [cast("int", each.result()) for each in both]
    assert on_gpu(device) == sum(wrote) == BASE.nbytes + BLOCK_BYTES
    for each in reversed(both):  # the later one has the pipe of the first, too
        each.join()


@pytest.mark.parametrize(("mapped", "left_behind"), [(0, 0), (3, 0), (4, BASE.nbytes)])
def test_a_builder_killed_in_the_middle_leaves_whole_blocks_or_none(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, mapped: int, left_behind: int
) -> None:
    """The four blocks are mapped to be written, all at the same time, and then to be read."""

    def doomed(state: State) -> None:
        one = cast("SleepyEngine", state["engine"])
        left = [mapped]
        call = one.fake.map

        def deadly(*arguments: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*arguments)

        one.fake.map = deadly  # type: ignore[method-assign,assignment]

    actor = managers.Actor(device.socket, started, doomed, load_base)
    actor.step()
    actor.step()
    with pytest.raises(EOFError):
        actor.step()
    managers.until(lambda: device.overview().totals.builds == 0)
    managers.until(lambda: device.overview().totals.leases == 0)
    assert on_gpu(device) == left_behind
    other = engine(TUNE, BASE)
    assert other.is_right()
    assert on_gpu(device) == BASE.nbytes + BLOCK_BYTES


def test_a_record_that_lies_is_not_believed(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    """Somebody of this user publishes the base's blocks as the fine-tune."""
    liar = engine(BASE)
    base = resident_of(liar, BASE)
    assert liar.device is not None
    session = device_session(liar.device, liar.gpu.gpu, "base")
    record, digests = record_of_blocks(base)
    lie = record.replace(key_of(BASE).digest.encode(), key_of(TUNE).digest.encode())
    assert blocks_in(lie) is not None
    liar.device.publish([session._content_key(key_of(TUNE))], lie, digests)
    assert session.by_content([key_of(TUNE)]) == [None]
    assert "is not that tensor" in (session.unusable or "")
    honest = engine(TUNE)
    assert honest.is_right()
    assert on_gpu(device) == BASE.nbytes + BLOCK_BYTES


def test_slabs_larger_than_blocks_are_whole_and_it_is_said(folder: Path) -> None:
    with gpus.running(
        folder, "--budget", str(512 * MIB), "--handle", str(2 * BLOCK_BYTES)
    ) as device:
        one = SleepyEngine(folder, tier=False)
        assert one.device is not None
        manager = DeviceManagerResidents(device_session(one.device, one.gpu.gpu, "base"))
        provider = GpuProvider(one.gpu, manager)
        request = ResidentRequest("recipe", BASE, key_of(BASE).digest)
        [(made, new)] = provider.get_or_build([request])
        assert new
        assert len(made.slabs) == 1
        assert "--handle" in (provider.not_by_leaf or "")
        assert torch.equal(provider.map(made), BASE)
        del made, provider
        one.close()
        del device


def test_who_may_not_have_the_descriptors_of_blocks_has_a_whole_copy(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    one, two = engine(BASE), engine()
    assert two.device is not None
    session = device_session(two.device, two.gpu.gpu, "base")
    recipe = f"recipe {key_of(BASE).digest}"
    queries = [ResidentQuery(recipe, replace(key_of(BASE), digest="")) for _ in range(2)]
    with gpus.few_descriptors():
        assert session.by_content([key_of(BASE)]) == session.by_recipe(queries[:1]) == [None]
        assert "ulimit -n" in (session.not_by_leaf or "")
        two.load([BASE])
    # Under the recipe there are the blocks already, so the copy is this process's alone.
    assert (on_gpu(device), gpus.in_use()) == (BASE.nbytes, 2 * in_slabs(BASE.nbytes))
    assert one.is_right()
    assert two.is_right()
    assert all(session.by_content([key_of(TUNE), key_of(BASE)])[1:])
    assert all(session.by_recipe(queries))


def test_a_load_of_vllm_uploads_what_differs(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    """By the provider that such a load has: from host memory, through its buffers."""
    one, two = engine(), engine()
    for process, tensor, shared in ((one, BASE, 0), (two, TUNE, TUNE.nbytes - BLOCK_BYTES)):
        assert process.device is not None
        session = device_session(process.device, process.gpu.gpu, "base")
        provider = GpuProvider(process.gpu, DeviceManagerResidents(session))
        [(made, new)] = provider.get_or_build(
            [ResidentRequest("recipe", tensor, key_of(tensor).digest)]
        )
        assert (new, made.leaf_shared_bytes, provider.not_by_leaf) == (True, shared, None)
        process.tensors.append(provider.map(made))
        process.wanted.append(tensor)
        # Another load of this process finds it, as does one that knows the recipe only.
        assert provider.by_content(key_of(tensor)) is made
        del made, provider
    assert one.is_right()
    assert two.is_right()
    assert on_gpu(device) == BASE.nbytes + BLOCK_BYTES


def test_the_next_manager_has_the_blocks_and_the_whole(
    folder: Path, engine: Callable[..., SleepyEngine], device: gpus.GpuManager
) -> None:
    one = engine(BASE, TUNE)
    device.kill()
    with gpus.running(folder, "--budget", str(512 * MIB)) as heir:
        assert one.device is not None
        assert one.device.reconnect() == 5
        assert on_gpu(heir) == BASE.nbytes + BLOCK_BYTES
        later = engine()
        assert later.device is not None
        residents = DeviceManagerResidents(device_session(later.device, later.gpu.gpu, "base"))
        found = later.gpu.find([ReplicaKey(key_of(each), 0) for each in (BASE, TUNE)], residents)
        assert all(isinstance(each, TensorInBlocks) for each in found)
        del found
        later.load([BASE], [TUNE])
        assert later.is_right()
        assert one.is_right()
        assert on_gpu(heir) == BASE.nbytes + BLOCK_BYTES
        for each in (one, later):
            each.tensors.clear()
        gc.collect()


def test_a_manager_without_room_for_all_leaves_the_rest_in_the_process(folder: Path) -> None:
    with gpus.running(folder, "--budget", str(36 * MIB)) as device:
        one = SleepyEngine(folder, tier=False)
        one.load([BASE])
        assert one.is_right()
        made = resident_of(one, BASE)
        assert {block.lease is None for block in made.blocks} == {True, False}
        assert 0 < on_gpu(device) < BASE.nbytes
        del made
        one.close()


# Asleep.


def test_a_fine_tune_sleeps_and_wakes_beside_its_base(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    base, tune = engine(BASE, tier=True), engine(TUNE, tier=True)
    addresses = tune.addresses()
    report = tune.sleep()
    assert report.reasons == []
    assert report.copied == BLOCK_BYTES  # the others are the base's, which is awake
    assert tune.is_unmapped()
    assert base.is_right()
    assert (on_gpu(device), host.overview().totals.resident_bytes) == (BASE.nbytes, BLOCK_BYTES)
    assert tune.model.wake() == report.unmapped == in_slabs(TUNE.nbytes)
    assert tune.is_right()
    assert tune.addresses() == addresses
    assert on_gpu(device) == BASE.nbytes + BLOCK_BYTES
    for each in (base, tune):
        each.sleep()
    managers.until(lambda: on_gpu(device) == 0)
    managers.until(lambda: gpus.in_use() == 0)  # a thread may just have ended its last copy
    assert host.overview().totals.resident_bytes == BASE.nbytes + BLOCK_BYTES
    for each in (tune, base):
        each.model.wake()
        assert each.is_right()
    assert tune.addresses() == addresses
    assert on_gpu(device) == BASE.nbytes + BLOCK_BYTES  # each block once
    assert tune.gpu.known(tune.tensors[0]) == ReplicaKey(key_of(TUNE), 0)
    third = engine(TUNE)
    assert resident_of(third, TUNE).leaf_shared_bytes == 0  # found as a whole, and not made
    assert third.is_right()


def test_without_a_manager_of_the_gpu_blocks_sleep_and_wake_too(
    engine: Callable[..., SleepyEngine], host: managers.Manager
) -> None:
    one = engine(BASE, managed=False, tier=True)
    other = Views(CPU).tensor(resident_of(one, TUNE))
    report = one.sleep()
    assert (report.copied, report.reasons) == (BLOCK_BYTES, [])  # the model of `other` is awake
    assert one.is_unmapped()
    assert torch.equal(other, TUNE)
    one.model.wake()
    assert one.is_right()
    assert gpus.in_use() == in_slabs(BASE.nbytes) + BLOCK_BYTES
    assert shared_bytes(other, one.tensors[0]) == TUNE.nbytes - BLOCK_BYTES


def test_two_models_of_a_process_that_both_slept_have_one_memory_again(
    engine: Callable[..., SleepyEngine], host: managers.Manager
) -> None:
    one = engine(BASE, managed=False, tier=True)
    assert one.host is not None
    second, views = SleepingModel(one.gpu, one.host), Views(CPU)
    tune = views.tensor(resident_of(one, TUNE))
    assert shared_bytes(tune, one.tensors[0])
    assert one.sleep().reasons == second.sleep([tune]).reasons == []
    managers.until(lambda: gpus.in_use() == 0)
    one.model.wake()
    assert gpus.in_use() == in_slabs(BASE.nbytes)
    second.wake()
    assert gpus.in_use() == in_slabs(BASE.nbytes) + BLOCK_BYTES
    assert one.is_right()
    assert torch.equal(tune, TUNE)


def test_whatever_call_of_sleeping_and_waking_fails_it_wakes_with_what_it_had(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    zeros = torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)  # a block that is twice in it
    one = engine(TUNE, zeros, tier=True)
    addresses = one.addresses()
    failed, number = 0, 0
    while True:
        number += 7
        one.driver.again(number)
        one.sleep()
        one.driver.again(number)
        try:
            one.model.wake()
            done = not one.driver.refuse or len(one.driver.calls) < number
        except BackendError:
            failed += 1
            done = False
        one.driver.again()
        one.model.wake()
        assert one.is_right()
        assert one.addresses() == addresses
        if done:
            break
    assert failed
    assert on_gpu(device) == TUNE.nbytes + BLOCK_BYTES


def asleep(state: State) -> list[str]:
    return cast("SleepyEngine", state["engine"]).sleep().reasons


def started_with_tier(state: State) -> None:
    state["engine"] = SleepyEngine(cast("Path", state["path"]).parent)


def test_one_killed_in_its_sleep_takes_nothing_along(
    engine: Callable[..., SleepyEngine], device: gpus.GpuManager, host: managers.Manager
) -> None:
    doomed = managers.Actor(device.socket, started_with_tier, load_base, asleep)
    doomed.step()
    assert doomed.step() is True
    tune = engine(TUNE, tier=True)
    assert doomed.step() == []
    doomed.kill()
    managers.until(lambda: device.overview().totals.leases == 4)
    assert tune.is_right()
    tune.sleep()
    managers.until(lambda: gpus.in_use() == 0)
    tune.model.wake()
    assert tune.is_right()
