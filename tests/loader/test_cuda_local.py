"""Models of one process share a fake GPU's memory without a manager."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from gpu_runs import gpus
from gpu_runs.fake_driver import RefusingDriver
from gpu_runs.gpu_loads import key_of, weights
from tensor_dedup.loader.cuda.devices import DEVICES, _let_go, with_room
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.local import LocalDevice
from tensor_dedup.loader.cuda.new_slabs import OWN_SLAB_BYTES
from tensor_dedup.loader.cuda.residents import DeviceRequest, Views, copy_of
from tensor_dedup.loader.cuda.shared import SharedGpu
from tensor_dedup.loader.cuda.tensors import CPU
from tensor_dedup.loader.residents.resident import shares_memory
from tensor_dedup.memory_manager.cuda.driver import Access, Driver
from tensor_dedup.memory_manager.errors import BackendError, NoMemoryError


class Process:
    def __init__(self) -> None:
        self.fake = gpus.Full()
        self.driver = RefusingDriver(self.fake)
        self.unused: list[str] = []
        self.gpu = Gpu(cast("Driver", self.driver), "0", self.let_go)
        self.local = LocalDevice(self.gpu)
        self.begun = gpus.descriptors()

    def let_go(self) -> bool:
        """As torch's allocator, which keeps memory for later."""
        kept, self.unused = bool(self.unused), []
        self.fake.room += kept << 40
        return kept

    def wanted(self, tensor: torch.Tensor) -> DeviceRequest:
        return DeviceRequest("", key_of(tensor), tensor.nbytes, copy_of(tensor, self.gpu))

    def model(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        views = Views(CPU)
        made = self.local.put([self.wanted(t) for t in tensors])
        return [views.tensor(each) for each, _ in made]


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    gc.collect()
    made.driver.again()
    assert made.gpu.reap(wait=True) == 0
    assert made.fake.left() == {}
    gc.collect()
    assert gpus.descriptors() <= made.begun, "the memory outlives its models"


def test_the_second_model_costs_what_differs(process: Process) -> None:
    first = process.model(weights(1), weights(2))
    files = gpus.descriptors()
    second = process.model(weights(1), weights(3))
    # One slab more, of what differs; each mapping has a descriptor of its own in the fake.
    assert gpus.descriptors() == files + 1 + 2
    assert shares_memory(first[0], second[0])
    assert not shares_memory(first[1], second[1])
    for found, right in zip([*first, *second], [1, 2, 1, 3], strict=True):
        assert torch.equal(found, weights(right))
        assert process.fake.access(found.data_ptr()) == Access.READ


def test_large_tensors_have_slabs_of_their_own_and_are_waited_for_together(
    process: Process,
) -> None:
    count = OWN_SLAB_BYTES // 2
    tensors = [weights(1, count), weights(2, count), weights(3), weights(4)]
    made = [each for each, _ in process.local.put([process.wanted(t) for t in tensors])]
    slabs = [each.slabs[0].serial for each in made]
    assert len(set(slabs)) == 3
    assert slabs[2] == slabs[3]
    assert process.fake.traffic["synchronize"] == 1
    views = Views(CPU)
    assert all(torch.equal(views.tensor(r), t) for r, t in zip(made, tensors, strict=True))


def test_equal_bytes_of_one_model_and_other_geometries_are_one_memory(process: Process) -> None:
    first, twin = process.model(weights(1), weights(1))
    assert shares_memory(first, twin)
    square = weights(1).view(500, 100)
    found = process.local.by_content(key_of(square))
    assert found is not None
    seen = Views(CPU).tensor(found)
    assert torch.equal(seen, square)
    assert shares_memory(first, seen)
    assert process.local.by_content(key_of(weights(2))) is None


def test_equal_bytes_put_together_keep_their_own_geometries(process: Process) -> None:
    zeros = (torch.zeros(64, 64), torch.zeros(4096), torch.zeros(4096, dtype=torch.int32))
    found = process.model(*zeros)
    for seen, right in zip(found, zeros, strict=True):
        assert (seen.dtype, seen.shape, seen.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(seen, right)
    assert len({seen.data_ptr() for seen in found}) == 1
    del seen
    again = process.model(*reversed(zeros))  # now there already
    assert [each.dtype for each in again] == [each.dtype for each in reversed(found)]
    assert all(shares_memory(again[0], each.view(torch.int32).view(-1)) for each in found)


def test_a_digest_may_become_known_while_writing(process: Process) -> None:
    each = process.wanted(weights(1))

    def write(address: int) -> str:
        copy_of(weights(1), process.gpu)(address)
        return each.key.digest

    unknown = replace(each, key=replace(each.key, digest=""), content=write)
    [(made, new)] = process.local.put([unknown])
    assert (made.key, new) == (each.key, True)
    assert process.local.put([each]) == [(made, False)]


@pytest.mark.parametrize("number", range(1, 10))
def test_whatever_call_fails_nothing_is_left(process: Process, number: int) -> None:
    process.driver.again(number)
    with pytest.raises(BackendError):
        process.model(weights(1))
    names = ["create", "export", "enter", "reserve", "import_", "map", "allow", "copy_in"]
    assert process.driver.calls[:number] == [*names, "synchronize"][:number]
    assert process.fake.left() == {}
    gc.collect()
    assert gpus.descriptors() <= process.begun
    process.driver.again()
    assert torch.equal(process.model(weights(1))[0], weights(1))


def test_memory_of_a_model_that_is_gone_makes_room(process: Process) -> None:
    model = process.model(weights(1))
    process.fake.begin(7)  # a kernel that may read it
    del model
    gc.collect()
    assert process.gpu.reap() == 1
    process.fake.room = gpus.in_use()
    assert torch.equal(process.model(weights(2))[0], weights(2))
    with pytest.raises(KeyError):
        process.fake.end(7)  # it was waited for


def test_memory_that_torch_keeps_for_later_makes_room(process: Process) -> None:
    process.fake.room = gpus.in_use()
    with pytest.raises(NoMemoryError):
        process.model(weights(1))
    process.unused.append("a block")
    assert torch.equal(process.model(weights(1))[0], weights(1))


def test_a_model_that_becomes_private_takes_what_nobody_uses(process: Process) -> None:
    kept, gone = process.model(weights(1)), process.model(weights(2))
    mapping = process.gpu.mapping_at(kept[0].data_ptr())
    assert mapping is not None
    process.fake.begin(7)
    del gone
    gc.collect()
    assert process.gpu.reap() == 1
    process.fake.room = gpus.in_use()
    mapping.make_private()
    assert mapping.private
    del mapping


def test_what_torch_has_no_room_for_is_tried_again(process: Process) -> None:
    place, gpu = torch.device("cpu"), SharedGpu(process.gpu, torch.device("cpu"), CPU)
    tries: list[int] = []

    def allocate() -> int:
        tries.append(process.gpu.waiting)
        if process.gpu.waiting or not tries[1:]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 5

    with DEVICES.replaced("cpu", lambda _: gpu):
        with pytest.raises(torch.OutOfMemoryError):
            with_room(place, allocate)
        assert tries == [0], "nothing could be given back"
        tries.clear()
        model = process.model(weights(1))
        process.fake.begin(7)
        del model
        gc.collect()
        assert with_room(place, allocate) == 5
        assert tries == [1, 0]


@pytest.mark.parametrize(("capturing", "after", "gave"), [(0, 60, 1), (0, 100, 0), (1, 60, 0)])
def test_torch_is_asked_for_what_it_keeps_but_not_while_a_graph_is_captured(
    capturing: int, after: int, gave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = [100]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.append(after))
    assert _let_go(torch.device("cuda:0")) == bool(gave)
    assert len(reserved) == 2 - capturing
