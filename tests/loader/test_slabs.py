"""Slabs: filling, sealing, and what happens when the system refuses."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from processes.process_state import fork, slabs
from tensor_dedup.loader.residents.resident import Resident, SlabBuilder, pack, resident_key
from tensor_dedup.loader.residents.slab import (
    OutOfMemoryError,
    SharedMemoryError,
    SlabExtent,
    SlabUsageError,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE


@pytest.fixture
def before() -> tuple[int, int]:
    """Mappings and descriptors of slabs that other tests left behind."""
    gc.collect()
    return slabs()


def resident_of(tensor: torch.Tensor) -> Resident:
    (resident,) = pack([(tensor, "digest")])
    return resident


def run(code: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import resource, torch",
        "from tensor_dedup.loader.residents.resident import SlabBuilder, pack",
        "from processes.process_state import slab_descriptors, slab_mappings",
        "from tensor_dedup.loader.residents.slab import OutOfMemoryError",
        code,
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# Filling


def descriptor_of(builder: SlabBuilder) -> int:
    descriptor = builder._writer._descriptor
    assert descriptor is not None
    return descriptor.fileno


def test_a_writable_mapping_somebody_else_made_holds_up_the_seal_too() -> None:
    builder = SlabBuilder(PAGE)
    builder.add(torch.ones(4))
    with mmap.mmap(descriptor_of(builder), PAGE), pytest.raises(SharedMemoryError, match="kernel"):
        builder.seal()
    assert builder.seal().nbytes == PAGE


def test_a_builder_refuses_what_does_not_fit_it() -> None:
    builder = SlabBuilder(PAGE)
    with pytest.raises(SlabUsageError, match="do not fit"):
        builder.add(torch.zeros(PAGE))
    builder.seal()
    with pytest.raises(SlabUsageError, match="sealed"):
        builder.add(torch.zeros(1))


def test_a_resident_must_lie_in_its_slab() -> None:
    resident = resident_of(torch.zeros(4))
    with pytest.raises(SlabUsageError):
        Resident(resident.key, [SlabExtent(resident.slab, PAGE - 8, 16)])
    with pytest.raises(SlabUsageError):
        Resident(resident.key, [SlabExtent(resident.slab, 0, 12)])
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
torch.kept = tensor
print(int(tensor.sum()))
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# Forked while it is filled


def test_a_child_forked_while_a_slab_is_filled_does_not_hold_up_its_seal() -> None:
    builder = SlabBuilder(PAGE)
    filling = torch.full((4,), 2.0)
    stop_reading, stop_writing = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(stop_writing)
        os.read(stop_reading, 1)
        os._exit(0)
    try:
        key = resident_key(filling, "digest")
        builder.add(filling)
        resident = Resident(key, [SlabExtent(builder.seal(), 0, 16)])
        assert torch.equal(resident.map(), torch.full((4,), 2.0))
    finally:
        os.close(stop_writing)
        os.close(stop_reading)
        assert os.waitpid(pid, 0)[1] == 0


# What the system refuses

NOW = "int(open('/proc/self/statm').read().split()[0]) * 4096"
REFUSALS = {
    "a mapping": ("AS", NOW, "resident.map()", "mmap"),
    "a descriptor": ("NOFILE", "3", "SlabBuilder(4096)", "memfd_create"),
    "a new slab": ("FSIZE", "4096", "SlabBuilder(8192)", "ftruncate"),
    "a write": ("FSIZE", "4096", "builder.add(big)", "pwrite"),
}


@pytest.fixture(scope="module")
def refused() -> dict[str, list[str]]:
    """What one process says of each: what was refused, whether nothing leaked, and what it read."""
    attempts = [
        f"""
big = torch.zeros(64 << 20, dtype=torch.uint8)
(resident,) = pack([(big, "digest")])
builder = SlabBuilder(64 << 20)
before = slab_descriptors(), slab_mappings()
old = resource.getrlimit(resource.RLIMIT_{limit})
resource.setrlimit(resource.RLIMIT_{limit}, ({value}, old[1]))
call = "none"
try:
    {attempt}
except OutOfMemoryError as error:
    call = error.facts["call"]
resource.setrlimit(resource.RLIMIT_{limit}, old)
print(call, before == (slab_descriptors(), slab_mappings()), int(resident.map().sum()))
"""
        for limit, value, attempt, _ in REFUSALS.values()
    ]
    done = run("".join(attempts))
    assert done.returncode == 0, done.stderr
    return dict(zip(REFUSALS, map(str.split, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_system_refuses_is_a_typed_error_and_leaks_nothing(
    name: str, refused: dict[str, list[str]]
) -> None:
    *_, call = REFUSALS[name]
    assert refused[name] == [call, "True", "0"]


def test_errors_survive_pickling() -> None:
    error = OutOfMemoryError("no memory", call="mmap", nbytes=1, errno=errno.ENOMEM)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.facts) == (OutOfMemoryError, str(error), error.facts)
