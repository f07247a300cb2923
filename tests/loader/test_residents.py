"""Slabs and residents: what is written once, sealed, and mapped by every model."""

import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel import fork, forked, slab_descriptors, slab_mappings, slab_memory
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.dtypes import TORCH_DTYPES, dtype_name, torch_dtype
from tensor_dedup.loader.geometry import dense
from tensor_dedup.loader.memory import (
    PAGE,
    OutOfMemoryError,
    SlabBusyError,
    SlabUsageError,
    capacity_for,
)
from tensor_dedup.loader.residents import (
    Resident,
    SlabBuilder,
    pack,
    resident_key,
    sharable,
    shares_memory,
    tensor_bytes,
)

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


def slabs() -> tuple[int, int]:
    return slab_mappings(), slab_descriptors()


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


def run(code: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import resource, torch",
        "from tensor_dedup.loader.residents import SlabBuilder, pack",
        "from kernel import slab_descriptors, slab_mappings",
        "from tensor_dedup.loader.memory import OutOfMemoryError",
        code,
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


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
        reserved = SlabBuilder(PAGE).reserve(torch.float32, (2,), (1,))
    assert mapped.device == reserved.device == torch.device("cpu")
    assert torch.equal(mapped, tensor)


# Filling in place


def test_a_reserved_tensor_is_zero_aligned_and_ends_in_the_slab() -> None:
    builder = SlabBuilder(1 << 20)
    small = builder.reserve(torch.bfloat16, (3, 5), (1, 3))
    large = builder.reserve(torch.float32, (20_000,), (1,))
    empty = builder.reserve(torch.float32, (0, 3), (3, 1))
    assert not small.any()
    assert small.data_ptr() % 64 == 0
    assert large.data_ptr() % PAGE == 0
    assert (empty.shape, empty.stride()) == ((0, 3), (3, 1))
    small.copy_(torch.arange(15.0).view(3, 5))
    large.copy_(torch.arange(20_000.0))
    offsets = [builder.offset_of(tensor) for tensor in (small, large, empty)]
    kept = [tensor.clone() for tensor in (small, large, empty)]
    keys = [resident_key(tensor, "digest") for tensor in kept]
    sizes = [tensor.nbytes for tensor in kept]
    del small, large, empty
    slab = builder.seal()
    assert slab.nbytes < 1 << 20
    for key, offset, nbytes, tensor in zip(keys, offsets, sizes, kept, strict=True):
        mapped = Resident(key, slab, offset, nbytes).map()
        assert mapped.stride() == tensor.stride()
        assert torch.equal(mapped, tensor)


def test_sealing_waits_for_the_last_writable_view() -> None:
    builder = SlabBuilder(PAGE)
    reserved = builder.reserve(torch.float32, (10,), (1,))
    view = reserved[3:]
    del reserved
    with pytest.raises(SlabBusyError, match="drop them"):
        builder.seal()
    view.fill_(1)  # still writable
    del view
    assert builder.seal().nbytes == PAGE


def test_an_abandoned_builder_leaves_nothing_but_the_views_in_use(before: tuple[int, int]) -> None:
    builder = SlabBuilder(1 << 20)
    reserved = builder.reserve(torch.float32, (10,), (1,))
    del builder
    reserved.fill_(1)
    assert slabs() == (before[0] + 1, before[1])
    del reserved
    assert slabs() == before


def test_a_builder_refuses_what_does_not_fit_it() -> None:
    builder = SlabBuilder(PAGE)
    with pytest.raises(SlabUsageError, match="do not fit"):
        builder.add(torch.zeros(PAGE))
    with pytest.raises(SlabUsageError, match="do not fit"):
        builder.reserve(torch.uint8, (PAGE + 1,), (1,))
    with pytest.raises(UnsupportedError, match="private"):
        builder.reserve(torch.uint8, (2, 2), (4, 1))
    with pytest.raises(SlabUsageError, match="not reserved here"):
        builder.offset_of(torch.zeros(1))
    builder.seal()
    with pytest.raises(SlabUsageError, match="sealed"):
        builder.add(torch.zeros(1))


def test_a_resident_must_lie_in_its_slab() -> None:
    resident = resident_of(torch.zeros(4))
    with pytest.raises(SlabUsageError):
        Resident(resident.key, resident.slab, PAGE - 8, 16)
    with pytest.raises(SlabUsageError):
        Resident(resident.key, resident.slab, 0, 12)
    with pytest.raises(SlabUsageError):
        resident.slab.map(PAGE, 1, None)


# The seal


def test_a_sealed_slab_cannot_be_written_by_any_means() -> None:
    resident = resident_of(torch.ones(4 * PAGE, dtype=torch.uint8))
    fd = resident.slab.fileno
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    attempts = (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 8 * PAGE),
        lambda: mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
    )
    for attempt in attempts:
        with pytest.raises(PermissionError):
            attempt()
    punch_hole_keep_size = 3
    assert libc.fallocate(fd, punch_hole_keep_size, 0, PAGE) == -1
    assert ctypes.get_errno() == errno.EPERM
    assert int(resident.map().sum()) == 4 * PAGE


def test_a_write_to_a_read_only_mapping_stops_the_process() -> None:
    code = """
(resident,) = pack([(torch.ones(4), "digest")])
tensor = resident.map(writable=False)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(int(tensor.sum()), flush=True)
tensor[0] = 2
print("wrote", flush=True)
"""
    done = run(code)
    assert done.stdout == "4\n"
    assert done.returncode == -signal.SIGSEGV


def test_an_interpreter_ends_well_with_residents_in_use() -> None:
    code = """
(resident,) = pack([(torch.ones(4), "digest")])
tensor = resident.map()
builder = SlabBuilder(4096)
reserved = builder.reserve(torch.float32, (4,), (1,))
torch.kept = (tensor, reserved)
print(int(tensor.sum()))
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


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


def test_a_child_forked_while_a_slab_is_filled_does_not_hold_up_its_seal() -> None:
    builder = SlabBuilder(PAGE)
    reserved = builder.reserve(torch.float32, (4,), (1,))
    stop_reading, stop_writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(stop_writing)
        os.read(stop_reading, 1)
        os._exit(0)
    try:
        reserved.fill_(2)
        key = resident_key(reserved, "digest")
        del reserved
        resident = Resident(key, builder.seal(), 0, 16)
        assert torch.equal(resident.map(), torch.full((4,), 2.0))
    finally:
        os.close(stop_writing)
        os.close(stop_reading)
        assert os.waitpid(pid, 0)[1] == 0


# What the system refuses

NOW = "int(open('/proc/self/statm').read().split()[0]) * 4096"
REFUSALS = {
    "a mapping": ("AS", NOW, "resident.map()", "mmap"),
    "a view": ("AS", NOW, "builder.reserve(torch.uint8, (64 << 20,), (1,))", "mmap"),
    "a descriptor": ("NOFILE", "3", "SlabBuilder(4096)", "memfd_create"),
    "a new slab": ("FSIZE", "4096", "SlabBuilder(8192)", "ftruncate"),
    "a write": ("FSIZE", "4096", "builder.add(big)", "pwrite"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_system_refuses_is_a_typed_error_and_leaks_nothing(name: str) -> None:
    limit, value, attempt, call = REFUSALS[name]
    code = f"""
big = torch.zeros(64 << 20, dtype=torch.uint8)
(resident,) = pack([(big, "digest")])
builder = SlabBuilder(64 << 20)
before = slab_descriptors(), slab_mappings()
old = resource.getrlimit(resource.RLIMIT_{limit})
resource.setrlimit(resource.RLIMIT_{limit}, ({value}, old[1]))
try:
    {attempt}
except OutOfMemoryError as error:
    refused = error.facts["call"]
resource.setrlimit(resource.RLIMIT_{limit}, old)
print(refused, before == (slab_descriptors(), slab_mappings()), int(resident.map().sum()))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [call, "True", "0"]


def test_errors_survive_pickling() -> None:
    error = OutOfMemoryError("no memory", call="mmap", nbytes=1, errno=errno.ENOMEM)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.facts) == (OutOfMemoryError, str(error), error.facts)
