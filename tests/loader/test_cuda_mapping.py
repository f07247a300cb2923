"""What a process maps of a GPU, over the fake driver: nothing is left, whatever call fails."""

import ctypes
import gc
import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch

import gpus
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda import tensors
from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
from tensor_dedup.loader.cuda.opening import Extent, opener_for
from tensor_dedup.loader.cuda.places import PLACES
from tensor_dedup.loader.cuda.residents import DeviceResident, DeviceSlab, Views
from tensor_dedup.loader.cuda.tensors import CPU, CUDA, held, tensor_at
from tensor_dedup.loader.memory import SlabUsageError
from tensor_dedup.loader.residents import shares_memory
from tensor_dedup.memory_manager.backends.vmm import DeviceSlab as ManagerSlab
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, Result, current
from tensor_dedup.memory_manager.cuda.fake import GRANULARITY, FakeDriver
from tensor_dedup.memory_manager.cuda.testing import RefusingDriver
from tensor_dedup.memory_manager.errors import BackendError, DeviceError
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
            Extent(slab.fileno, slab.nbytes, 0),
            self.opener,
            lambda address: gpus.put(self.fake, address, data),
        )

    def mapping(self, *slabs: ManagerSlab) -> DeviceMapping:
        extents = [Extent(each.fileno, each.nbytes, n) for n, each in enumerate(slabs, 1)]
        return self.gpu.map(extents, self.opener, slabs)

    def shared(self, slab: ManagerSlab) -> DeviceSlab:
        return DeviceSlab(self.gpu, self.opener, slab, slab.nbytes)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    gc.collect()
    made.driver.again()
    assert made.gpu.reap(wait=True) == 0
    assert made.fake.left() == {}
    assert len(PLACES) == 0
    assert held() == 0


def floats(count: int, at: int = 0) -> tuple[ResidentKey, int]:
    return ResidentKey("F32", (count,), (1,), "d" * 64), at


def test_what_was_written_is_read_and_cannot_be_written(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(2, b"weights"))
    assert ctypes.string_at(mapping.address, 7) == b"weights"
    assert bench.fake.access(mapping.address) == Access.READ
    with current(bench.fake, 0), pytest.raises(DeviceError):
        gpus.put(bench.fake, mapping.address, b"x")


def test_a_writer_leaves_nothing_mapped_and_has_waited_for_its_kernels(bench: Bench) -> None:
    slab = bench.slab(1)

    def write(address: int) -> None:
        assert bench.fake.access(address) == Access.READ_WRITE
        bench.fake.begin(7)

    bench.gpu.fill(Extent(slab.fileno, slab.nbytes, 1), bench.opener, write)
    assert bench.fake.left() == {}
    with pytest.raises(KeyError):
        bench.fake.end(7)  # it has ended


def test_a_writer_that_fails_leaves_nothing_mapped(bench: Bench) -> None:
    slab = bench.slab(1)

    def write(address: int) -> None:
        raise UnsupportedError("no such kernel")

    with pytest.raises(UnsupportedError):
        bench.gpu.fill(Extent(slab.fileno, slab.nbytes, 1), bench.opener, write)
    assert bench.fake.left() == {}


def test_who_cannot_unmap_does_not_say_that_all_is_written(bench: Bench) -> None:
    slab = bench.slab(1)
    bench.driver.cleaning = True
    bench.driver.again()
    bench.fill(slab, b"")
    last = bench.driver.calls.index("unmap") + 1
    bench.driver.again(last)
    with pytest.raises(BackendError, match="unmap"):
        bench.fill(slab, b"")
    bench.driver.cleaning = False
    [address] = bench.fake._space.mapped
    bench.fake.unmap(address, UNIT)
    bench.fake.free(address, UNIT)


def test_several_slabs_lie_side_by_side(bench: Bench) -> None:
    first, second = bench.slab(2, b"a" * 2 * UNIT), bench.slab(1, b"b" * UNIT)
    mapping = bench.mapping(first, second)
    assert ctypes.string_at(mapping.address + 2 * UNIT - 2, 4) == b"aabb"
    assert PLACES.of(mapping.address + 2 * UNIT - 2, 4) == [(1, 2 * UNIT - 2, 2), (2, 0, 2)]
    assert PLACES.of(mapping.address + 3 * UNIT - 1, 2) == []


def test_a_mapping_goes_after_the_last_work_that_was_begun(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1))
    address = mapping.address
    bench.fake.begin(7)
    del mapping
    gc.collect()
    assert bench.gpu.waiting == 1
    assert bench.gpu.reap() == 1, "unmapped under a kernel"
    assert bench.fake.access(address) == Access.READ
    bench.fake.begin(8)  # later work does not matter
    bench.fake.end(7)
    assert bench.gpu.reap() == 0
    assert bench.fake.access(address) == Access.NONE
    assert bench.fake.left() == {}
    bench.fake.end(8)


def test_nothing_of_the_driver_is_called_from_a_finalizer(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1))
    bench.driver.cleaning = True
    bench.driver.again()
    del mapping
    gc.collect()
    assert bench.driver.calls == []
    bench.driver.cleaning = False


def test_while_a_graph_is_captured_nothing_is_unmapped_and_nothing_is_lost(bench: Bench) -> None:
    slab = bench.slab(1)
    mapping = bench.mapping(slab)
    del mapping
    bench.fake.capturing = True
    with pytest.raises(DeviceError, match="CAPTURE"):
        bench.gpu.reap()
    assert bench.gpu.waiting == 1
    other = bench.mapping(slab)  # can be mapped all the same
    bench.fake.capturing = False
    assert bench.gpu.reap() == 0
    del other


def test_the_next_mapping_unmaps_what_is_done_with(bench: Bench) -> None:
    slab = bench.slab(1)
    for _ in range(5):
        bench.mapping(slab)
    assert bench.fake.left()["mappings"] <= 2


def test_the_owner_is_held_until_it_is_unmapped(bench: Bench) -> None:
    slab = bench.slab(1)
    mapping = bench.mapping(slab)
    fd = slab.fileno
    del slab
    bench.fake.begin(7)
    del mapping
    gc.collect()
    bench.gpu.reap()
    os.fstat(fd)
    bench.fake.end(7)
    bench.gpu.reap()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_what_cannot_be_unmapped_is_kept_with_its_owner(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1))
    address = mapping.address
    del mapping
    bench.driver.cleaning = True
    bench.driver.code = Result.INVALID_VALUE
    bench.driver.again()
    calls = ["enter", "mark", "done", "unmap"]
    bench.driver.again(len(calls))
    assert bench.gpu.reap() == 0
    assert bench.driver.calls[: len(calls)] == calls
    assert [grave.address for grave in bench.gpu.stuck] == [address]
    bench.driver.cleaning = False
    bench.opener.close(address, bench.gpu.stuck.pop().extents)


# Whatever call fails.


def mapped_calls() -> list[str]:
    return ["reserve", "import_", "map", "import_", "map", "allow"]


@pytest.mark.parametrize("number", range(1, 7))
def test_mapping_takes_back_what_it_has_done(bench: Bench, number: int) -> None:
    first, second = bench.slab(1), bench.slab(2)
    before = gpus.descriptors()
    bench.driver.again(number)
    with pytest.raises(BackendError):
        bench.mapping(first, second)
    assert bench.driver.calls == mapped_calls()[:number]
    assert bench.fake.left() == {}
    assert gpus.descriptors() == before
    assert len(PLACES) == 0
    bench.driver.again()
    assert bench.mapping(first, second).nbytes == 3 * UNIT
    assert [call for call in bench.driver.calls if call != "enter"] == mapped_calls()


def test_whatever_call_of_becoming_private_fails_it_is_shared_as_before(bench: Bench) -> None:
    first, second = bench.slab(1, b"first"), bench.slab(2, b"second")
    mapping = bench.mapping(first, second)
    before = bench.fake.left()
    files = gpus.descriptors()
    number = 0
    while not mapping.private:
        number += 1
        bench.driver.again(number)
        try:
            mapping.make_private()
        except BackendError:
            assert bench.fake.left() == before
            assert gpus.descriptors() == files
            assert bench.fake.access(mapping.address) == Access.READ
            assert ctypes.string_at(mapping.address, 5) == b"first"
            assert ctypes.string_at(mapping.address + UNIT, 6) == b"second"
            assert len(PLACES) == 2
    assert number == 1 + len(bench.driver.calls)
    # Two imports, a wait, for each slab (create, reserve, map, allow, copy, wait), two maps, allow.
    assert number == 20


def test_unmapping_that_fails_midway_is_taken_back(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1, b"first"), bench.slab(1, b"second"))
    bench.driver.cleaning = True
    bench.driver.again()
    mapping.make_private()
    names = bench.driver.calls
    bench.driver.cleaning = False
    # The last two unmap the shared slabs; those before, where the copies were written.
    unmaps = [index + 1 for index, name in enumerate(names) if name == "unmap"][-2:]
    for number in unmaps:
        other = bench.mapping(bench.slab(1, b"first"), bench.slab(1, b"second"))
        before = bench.fake.left()
        bench.driver.cleaning = True
        bench.driver.again(number)
        with pytest.raises(BackendError, match="unmap"):
            other.make_private()
        bench.driver.cleaning = False
        bench.driver.again()
        assert bench.fake.left() == before
        assert ctypes.string_at(other.address + UNIT, 6) == b"second"
        assert bench.fake.access(other.address) == Access.READ
        del other
        gc.collect()
        bench.gpu.reap(wait=True)


# Private at the same address.


def test_a_model_becomes_private_where_it_is_and_others_do_not(bench: Bench) -> None:
    slab = bench.slab(1, b"weights")
    mine, others = bench.mapping(slab), bench.mapping(slab)
    assert mine.address != others.address
    assert PLACES.same(mine.address, others.address, 7)
    address = mine.address
    bench.fake.begin(7)
    mine.make_private()
    with pytest.raises(KeyError):
        bench.fake.end(7)  # it waited for it
    assert (mine.address, mine.private) == (address, True)
    with current(bench.fake, 0):
        gpus.put(bench.fake, address, b"changed")
    assert ctypes.string_at(address, 7) == b"changed"
    assert ctypes.string_at(others.address, 7) == b"weights"
    assert not PLACES.same(address, others.address, 7)
    mine.make_private()
    assert ctypes.string_at(address, 7) == b"changed"


def test_a_private_copy_holds_no_slab(bench: Bench) -> None:
    slab = bench.slab(1)
    mapping = bench.mapping(slab)
    fd = slab.fileno
    mapping.make_private()
    del slab
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


# Tensors.


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bool,
        torch.uint16,
        torch.complex64,
    ],
)
def test_a_tensor_is_of_its_dtype_and_over_the_address(dtype: torch.dtype) -> None:
    owner = ctypes.create_string_buffer(bytes(range(64)), 64)
    address = ctypes.addressof(owner)
    tensor = tensor_at(address, (dtype, (2, 4), (1, 2)), (CPU, 0), owner)
    assert (tensor.dtype, tensor.stride(), tensor.data_ptr()) == (dtype, (1, 2), address)
    assert tensor.untyped_storage().nbytes() == 8 * dtype.itemsize
    del tensor
    assert held() == 0


def test_a_storage_that_outlives_the_interpreter_calls_nobody() -> None:
    owner = ctypes.create_string_buffer(64)
    tensor = tensor_at(ctypes.addressof(owner), (torch.uint8, (8,), (1,)), (CPU, 0), owner)
    tensors._stay_silent()  # what is done at exit
    del tensor
    assert held() == 1
    tensors._held.clear()


def test_without_a_gpu_torch_sees_none() -> None:
    if torch.cuda.is_available():
        return
    with pytest.raises(UnsupportedError, match="CUDA"):
        tensor_at(4096, (torch.uint8, (1,), (1,)), (CUDA, 0), None)


def test_tensors_of_one_model_share_one_mapping(bench: Bench) -> None:
    data = torch.arange(UNIT // 4, dtype=torch.float32)
    slab = bench.shared(bench.slab(1, bytes(data.view(torch.uint8).numpy())))
    views, others = Views(CPU), Views(CPU)
    first, second = (DeviceResident(k, [slab], at) for k, at in (floats(100), floats(50, 512)))
    a, b, c = views.tensor(first), views.tensor(second), others.tensor(first)
    assert torch.equal(a, data[:100])
    assert torch.equal(b, data[128:178])
    assert len(views.mappings()) == 1
    assert a.data_ptr() + 512 == b.data_ptr()
    assert a.data_ptr() != c.data_ptr()
    assert shares_memory(a, c)
    assert not shares_memory(a, b)
    assert views.make_private() == UNIT
    assert not shares_memory(a, c)
    a[0] = 7.0
    assert c[0] == 0.0
    assert views.make_private() == 0
    again = views.tensor(first)
    assert again[0] == 0.0, "the resident is not what this model made of it"
    assert shares_memory(again, c)


def test_a_mapping_lives_as_long_as_a_view_of_a_tensor(bench: Bench) -> None:
    slab = bench.shared(bench.slab(1, b"\1" * UNIT))
    views = Views(CPU)
    tensor = views.tensor(DeviceResident(floats(100)[0], [slab], 0))
    part = tensor[50:]
    storage = part.untyped_storage()
    del tensor, part
    gc.collect()
    assert len(views.mappings()) == 1
    assert storage[0] == 1
    del storage
    gc.collect()
    assert views.mappings() == []


def test_a_tensor_over_several_slabs(bench: Bench) -> None:
    slabs = [bench.shared(bench.slab(1, bytes([n]) * UNIT)) for n in (1, 2, 3)]
    key = ResidentKey("U8", (3 * UNIT - 10,), (1,), "d" * 64)
    tensor = Views(CPU).tensor(DeviceResident(key, slabs, 5))
    assert [int(tensor[index]) for index in (0, UNIT - 6, UNIT - 5, -1)] == [1, 1, 2, 3]
    other = Views(CPU).tensor(DeviceResident(key, slabs, 5))
    assert shares_memory(tensor, other)


@pytest.mark.parametrize(("shape", "stride", "offset"), [((3,), (2,), 0), ((9,), (1,), UNIT - 32)])
def test_what_does_not_fit_is_refused(
    bench: Bench, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    slab = bench.shared(bench.slab(1))
    with pytest.raises(SlabUsageError):
        DeviceResident(ResidentKey("F32", shape, stride, "d" * 64), [slab], offset)


def test_a_child_that_is_forked_unmaps_nothing(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1, b"weights"))

    def child() -> None:
        aside = bench.gpu.aside
        mapping._end()
        if not aside:
            os.kill(os.getpid(), 9)

    assert gpus.ends_by_signal(child)
    assert ctypes.string_at(mapping.address, 7) == b"weights"


def test_a_backend_that_lends_no_device_memory_is_refused(bench: Bench) -> None:
    with pytest.raises(UnsupportedError, match="memfd"):
        opener_for("memfd", bench.fake, bench.gpu.device)
