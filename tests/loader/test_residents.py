"""Residents: written once, and mapped by every model."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from processes.process_state import forked, slab_mappings, slab_memory, slabs
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.residents.resident import (
    Resident,
    Write,
    dense,
    pack,
    read_into_slab,
    resident_key,
    sharable,
    shares_memory,
    tensor_bytes,
)
from tensor_dedup.loader.residents.slab import capacity_for
from tensor_dedup.loader.torch_dtypes import TORCH_DTYPES, dtype_name, torch_dtype
from tensor_dedup.memory_manager.protocol.layout import PAGE

GEOMETRIES = {
    "vector": torch.arange(7.0),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "matrix": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "length one": torch.arange(4.0).view(1, 4, 1),
    "larger than a page": torch.arange(40_000.0),
}


@pytest.fixture
def before() -> tuple[int, int]:
    """Mappings and descriptors of slabs that other tests left behind."""
    gc.collect()
    return slabs()


def resident_of(tensor: torch.Tensor) -> Resident:
    (resident,) = pack([(tensor, "digest")])
    return resident


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bytes(tensor_bytes(a)) == bytes(tensor_bytes(b))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_mapped_resident_is_the_tensor_it_was_made_of(name: str) -> None:
    tensor = GEOMETRIES[name]
    resident = resident_of(tensor)
    mapped = resident.map()
    assert mapped.shape == tensor.shape
    assert mapped.stride() == tensor.stride()
    assert mapped.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(mapped, tensor)
    assert resident_key(mapped, "digest") == resident.key


def test_what_is_poured_in_by_several_threads_is_one_resident(before: tuple[int, int]) -> None:
    tensor = torch.arange(300_000.0).view(1000, 300).t()
    data = tensor_bytes(tensor)

    def source(write: Write) -> str:
        pieces = range(0, data.nbytes, 50_000)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: write(data[at : at + 50_000], at), pieces))
        return "digest"

    resident = read_into_slab(resident_key(tensor, ""), tensor.nbytes, source)
    assert resident.key == resident_key(tensor, "digest")
    assert torch.equal(resident.map(), tensor)
    assert shares_memory(resident.map(), resident.map())


def test_what_cannot_be_poured_leaves_nothing(before: tuple[int, int]) -> None:
    def source(write: Write) -> str:
        write(memoryview(b"some"), 0)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        read_into_slab(resident_key(torch.zeros(100), ""), 400, source)
    gc.collect()
    assert slabs() == before


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_is_mapped_with_its_bytes(name: str) -> None:
    dtype = torch_dtype(name)
    # 0 and 1 only are bytes of a bool.
    pattern = torch.arange(48, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = pattern.view(dtype)
    resident = resident_of(tensor)
    assert resident.key.dtype == name == dtype_name(resident.map().dtype)
    assert same_bytes(resident.map(), tensor)


def test_a_dtype_without_a_name_stays_private() -> None:
    assert not sharable(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match="private"):
        dtype_name(torch.complex128)
    with pytest.raises(UnsupportedError, match="private"):
        torch_dtype("gguf:Q4_K")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4)[:, :2],
        torch.zeros(4)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_what_is_not_plain_bytes_is_refused(tensor: torch.Tensor, before: tuple[int, int]) -> None:
    assert not sharable(tensor)
    with pytest.raises(UnsupportedError, match="private"):
        pack([(tensor, "digest")])
    assert slabs() == before


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), max_size=4))
def test_dense_is_one_range_without_gap_or_overlap(dims: list[tuple[int, int]]) -> None:
    shape, stride = [n for n, _ in dims], [s for _, s in dims]
    places = [
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    assert dense(shape, stride) == (sorted(places) == list(range(len(places))))


def test_one_pack_is_one_slab_and_keeps_the_order(before: tuple[int, int]) -> None:
    tensors = list(GEOMETRIES.values())
    residents = pack([(tensor, str(i)) for i, tensor in enumerate(tensors)])
    assert slabs() == (before[0], before[1] + 1)
    assert [resident.key.digest for resident in residents] == [str(i) for i in range(len(tensors))]
    assert len({resident.slab.serial for resident in residents}) == 1
    for resident, tensor in zip(residents, tensors, strict=True):
        assert torch.equal(resident.map(), tensor)
        assert resident.map().data_ptr() % 64 == 0


def test_small_tensors_share_a_page_and_large_ones_begin_one() -> None:
    sizes = (100, 100, 64 << 10, 100)
    residents = pack([(torch.zeros(n, dtype=torch.uint8), str(i)) for i, n in enumerate(sizes)])
    assert [r.offset for r in residents] == [0, 128, PAGE, PAGE + (64 << 10)]
    assert residents[0].slab.nbytes == 2 * PAGE + (64 << 10) == capacity_for(sizes)


def test_a_write_of_either_side_is_its_own() -> None:
    original = torch.arange(10_000.0)
    resident = resident_of(original)
    one, two = resident.map(), resident.map()
    assert shares_memory(one, two)
    one[5] = -1
    assert torch.equal(two, original)
    two.zero_()
    assert one[5] == -1
    assert torch.equal(one[6:], original[6:])
    assert torch.equal(resident.map(), original)


def test_neighbours_on_one_page_do_not_see_each_other_write() -> None:
    first, second = pack([(torch.zeros(10), "a"), (torch.ones(10), "b")])
    one, two = first.map(), second.map()
    one.fill_(7)
    assert torch.equal(two, torch.ones(10))
    assert torch.equal(second.map(), torch.ones(10))


def test_a_parameter_over_a_resident_can_be_trained() -> None:
    resident = resident_of(torch.ones(4))
    parameter = torch.nn.Parameter(resident.map())
    torch.autograd.backward(parameter.square().sum())
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad)
    assert torch.equal(parameter, -torch.ones(4))
    assert torch.equal(resident.map(), torch.ones(4))


def test_one_copy_in_memory_until_somebody_writes() -> None:
    nbytes = 4 << 20
    gc.collect()
    others = slab_memory()
    resident = resident_of(torch.ones(nbytes, dtype=torch.uint8))
    one, two = resident.map(), resident.map()
    assert int(one.sum()) == int(two.sum()) == nbytes
    memory = slab_memory() - others
    assert memory["Rss"] == 2 * nbytes
    # Some kernels estimate how often a large page is mapped.
    assert memory["Pss"] == pytest.approx(nbytes, rel=0.1)
    assert memory["Anonymous"] == 0
    one[nbytes // 2] = 3
    assert (slab_memory() - others)["Anonymous"] == PAGE


def test_a_view_alone_keeps_the_mapping_and_its_death_ends_it(before: tuple[int, int]) -> None:
    resident = resident_of(torch.arange(40_000.0))
    watch, slab = weakref.ref(resident), weakref.ref(resident.slab)
    view = torch.nn.Parameter(resident.map())[30_000:].detach()
    del resident
    assert watch() is not None
    assert slabs() == (before[0] + 1, before[1] + 1)
    assert view[0] == 30_000
    gc.disable()  # reference counts alone must do
    try:
        del view
        assert (watch(), slab()) == (None, None)
        assert slabs() == before
    finally:
        gc.enable()


def test_the_bytes_of_a_tensor_keep_it_alive(before: tuple[int, int]) -> None:
    data = tensor_bytes(resident_of(torch.tensor([1, 2], dtype=torch.uint8)).map())
    assert slabs() == (before[0] + 1, before[1] + 1)
    assert bytes(data) == b"\1\2"
    del data
    assert slabs() == before


def test_threads_may_map_and_drop_at_once(before: tuple[int, int]) -> None:
    tensor = torch.arange(50_000.0)
    resident = resident_of(tensor)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            mine = resident.map()
            mine[number] = -1
            if int((mine != tensor).sum()) != 1 or shares_memory(mine, tensor):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert slabs() == (before[0], before[1] + 1)


def test_a_default_device_does_not_matter() -> None:
    tensor = torch.arange(4.0)
    with torch.device("meta"):
        mapped = resident_of(tensor).map()
    assert mapped.device == torch.device("cpu")
    assert torch.equal(mapped, tensor)


# Forked children


def test_a_forked_child_reads_writes_and_drops_without_the_parent_noticing() -> None:
    original = torch.arange(10_000.0)
    resident = resident_of(original)
    mapped = resident.map()

    def child() -> tuple[bool, bool, int]:
        nonlocal mapped
        own = resident.map()
        equal = torch.equal(own, original) and torch.equal(mapped, original)
        own.zero_()
        mapped[0] = -1
        alone = torch.equal(resident.map(), original)
        with_mine = slab_mappings()
        del own, mapped
        return equal, alone, with_mine - slab_mappings()

    assert forked(child) == (True, True, 2)
    assert torch.equal(mapped, original)
    assert torch.equal(resident.map(), original)
