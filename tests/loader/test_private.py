"""Memory of one's own at the address the shared memory had: nothing that points there is misled."""

import errno
import faulthandler
import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_runs import gpus
from processes.process_state import forked, slab_mappings, slabs
from tensor_dedup import libc, sweep, unshare
from tensor_dedup.loader.residents.resident import Resident, pack, shares_memory
from tensor_dedup.loader.residents.slab import OutOfMemoryError, make_private
from tensor_dedup.memory_manager.protocol.layout import PAGE

# Whole pages and a part of one.
NUMBERS = 3 * PAGE // 4 + 100


@pytest.fixture
def before() -> tuple[int, int]:
    """Mappings and descriptors of slabs that other tests left behind."""
    gc.collect()
    return slabs()


def resident_of(*tensors: torch.Tensor) -> list[Resident]:
    return pack([(each, f"digest {number}") for number, each in enumerate(tensors)])


def own(tensor: torch.Tensor) -> int:
    return make_private(tensor.data_ptr(), tensor.nbytes)


def mapped(address: int) -> bool:
    """Does anything lie at this address?"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return True
    return False


def test_it_lies_where_it_lay_and_reaches_nobody() -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine, other = resident.map(), resident.map()
    assert shares_memory(mine, other)
    address, count = mine.data_ptr(), slab_mappings()

    assert own(mine) == mine.nbytes

    assert mine.data_ptr() == address
    assert torch.equal(mine, torch.arange(NUMBERS))
    assert not shares_memory(mine, other)
    assert slab_mappings() == count - 1
    mine += 1
    assert torch.equal(other, torch.arange(NUMBERS))
    assert torch.equal(resident.map(), torch.arange(NUMBERS))
    assert own(mine) == 0  # it is its own already
    assert own(torch.zeros(NUMBERS)) == 0


def test_the_shared_memory_is_let_go_and_the_own_with_the_tensor(before: tuple[int, int]) -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine = resident.map()
    assert slabs() == (before[0] + 1, before[1] + 1)

    own(mine)
    del resident

    assert slabs() == before
    assert torch.equal(mine, torch.arange(NUMBERS))
    address = mine.data_ptr()
    assert mapped(address)
    del mine
    assert not mapped(address)


def test_what_was_written_stays_and_neighbours_in_the_page_are_not_touched() -> None:
    small = [torch.full((10,), number) for number in range(4)]
    mine = [each.map() for each in resident_of(*small)]
    mine[1][3] = 77

    own(mine[1])
    own(mine[2])
    mine[2] += 5

    assert mine[1].tolist() == [1, 1, 1, 77, 1, 1, 1, 1, 1, 1]
    assert [each.tolist() for each in (mine[0], mine[3])] == [[0] * 10, [3] * 10]
    assert mine[2].tolist() == [7] * 10


def test_what_could_only_be_read_can_be_written() -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine = resident.map(writable=False)

    own(mine)
    mine += 1

    assert torch.equal(mine, torch.arange(NUMBERS) + 1)
    assert torch.equal(resident.map(), torch.arange(NUMBERS))


def test_a_thread_that_reads_meanwhile_always_finds_the_values() -> None:
    expected = torch.arange(NUMBERS)
    mine = [each.map() for each in resident_of(*(expected for _ in range(200)))]
    stop, wrong = threading.Event(), list[int]()

    def read() -> None:
        while not stop.is_set():
            wrong.extend(n for n, each in enumerate(mine) if not torch.equal(each, expected))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert all(own(each) for each in mine)
    finally:
        stop.set()
        reader.join()
    assert wrong == []


def test_a_child_makes_its_own_and_not_its_parents() -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine, other = resident.map(), resident.map()

    def in_child() -> bool:
        own(mine)
        mine.add_(1)
        return torch.equal(mine, torch.arange(NUMBERS) + 1)

    assert forked(in_child)
    assert torch.equal(mine, torch.arange(NUMBERS))
    assert shares_memory(mine, other)


_REFUSED = """
import resource, torch
from tensor_dedup.loader.residents.slab import OutOfMemoryError, make_private
from tensor_dedup.loader.residents.resident import pack, shares_memory
[resident] = pack([(torch.ones(64 << 20, dtype=torch.uint8), "digest")])
mine, other = resident.map(), resident.map()
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), before[1]))
try:
    make_private(mine.data_ptr(), mine.nbytes)
except OutOfMemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, before)
    print(error.facts["nbytes"], shares_memory(mine, other), bool(mine.all()))
"""


def test_where_no_memory_is_left_nothing_changes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == f"{64 << 20} True True\n", done.stderr


def test_an_unshared_module_computes_where_it_did(before: tuple[int, int]) -> None:
    """The same module, once shared and once unshared; and names of one memory stay that."""
    torch.manual_seed(0)
    first, second = nn.Linear(256, 256), nn.Linear(256, 256)
    second.load_state_dict(first.state_dict())
    weight = second.get_parameter("weight")
    second.register_parameter("name", weight)
    for each in (first, second):
        sweep(each)
    assert shares_memory(first.weight, second.weight)
    given = torch.randn(3, 256)
    expected = second(given)
    addresses = [each.data_ptr() for each in second.parameters()]

    assert unshare(second) == sum(each.nbytes for each in second.parameters())

    assert [each.data_ptr() for each in second.parameters()] == addresses
    assert second.get_parameter("name") is second.get_parameter("weight") is weight
    assert torch.equal(second(given), expected)
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(first(given), expected)
    del first, each
    gc.collect()
    assert slabs() == before


def nothing_there(source: int, target: int, nbytes: int) -> None:
    """As Linux fails when it has no memory for its tables: what lay there is gone by then."""
    libc.munmap(target, nbytes)
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def refuse(*_: int) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_where_the_kernel_has_left_a_hole_the_copy_is_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine, other = resident.map(), resident.map()
    mine[0] = 77
    address, count = mine.data_ptr(), slab_mappings()
    monkeypatch.setattr(libc, "_mremap", nothing_there)

    assert own(mine) == mine.nbytes

    assert mine.data_ptr() == address
    assert mine[:3].tolist() == [77, 1, 2]
    assert torch.equal(mine[1:], torch.arange(1, NUMBERS))
    assert slab_mappings() == count - 1
    mine += 1
    assert torch.equal(other, torch.arange(NUMBERS))


def test_what_the_kernel_refuses_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    [resident] = resident_of(torch.arange(NUMBERS))
    mine, other = resident.map(), resident.map()
    monkeypatch.setattr(libc, "_mremap", refuse)

    with pytest.raises(OutOfMemoryError, match="mremap"):
        own(mine)

    assert shares_memory(mine, other)
    assert torch.equal(mine, torch.arange(NUMBERS))
    monkeypatch.undo()
    assert own(mine) == mine.nbytes


def test_a_process_whose_tensors_have_lost_their_memory_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody else's memory would be read there next, or written to."""
    [resident] = resident_of(torch.arange(NUMBERS))
    mine = resident.map()

    def in_child() -> None:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        monkeypatch.setattr(libc, "_mremap", nothing_there)
        original = libc.own_memory
        monkeypatch.setattr(libc, "own_memory", lambda n, at=0: refuse() if at else original(n))
        own(mine)

    assert gpus.ends_by_signal(in_child)
    assert "no memory left" in capfd.readouterr().err
    assert torch.equal(mine, torch.arange(NUMBERS))
