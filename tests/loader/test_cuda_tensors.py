"""Tensors over a GPU's memory that several models map: dtypes, lifetimes, what is shared."""

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from gpu_runs.gpu_loads import UNIT, Bench, checked
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda import tensors
from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.tensors import CPU, CUDA, held, tensor_at
from tensor_dedup.loader.residents.resident import shares_memory
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.types import ResidentKey


@pytest.fixture
def bench() -> Iterator[Bench]:
    with checked() as made:
        yield made


def floats(count: int, at: int = 0) -> tuple[ResidentKey, int]:
    return ResidentKey("F32", (count,), (1,), "d" * 64), at


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_torch_sees_none() -> None:
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
