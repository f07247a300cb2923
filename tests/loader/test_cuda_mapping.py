"""What a process maps of a GPU, over the fake driver: nothing is left, whatever call fails."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpu_runs import gpus
from gpu_runs.gpu_loads import UNIT, Bench, checked
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.openers import MappedExtent, opener_for
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.memory_manager.cuda.driver import Access, Result, current
from tensor_dedup.memory_manager.errors import BackendError, DeviceError


@pytest.fixture
def bench() -> Iterator[Bench]:
    with checked() as made:
        yield made


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

    bench.gpu.fill(MappedExtent(slab.fileno, slab.nbytes, 1), bench.opener, write)
    assert bench.fake.left() == {}
    with pytest.raises(KeyError):
        bench.fake.end(7)  # it has ended


def test_a_writer_that_fails_leaves_nothing_mapped(bench: Bench) -> None:
    slab = bench.slab(1)

    def write(address: int) -> None:
        raise UnsupportedError("no such kernel")

    with pytest.raises(UnsupportedError):
        bench.gpu.fill(MappedExtent(slab.fileno, slab.nbytes, 1), bench.opener, write)
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
    assert DEVICE_MAPPINGS.ranges(mapping.address + 2 * UNIT - 2, 4) == [
        (1, 2 * UNIT - 2, 2),
        (2, 0, 2),
    ]
    assert DEVICE_MAPPINGS.ranges(mapping.address + 3 * UNIT - 1, 2) == []


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


def two_marked(bench: Bench) -> None:
    """Two mappings that are done with, each before a mark of its own that has been passed."""
    mappings = [bench.mapping(bench.slab(1)), bench.mapping(bench.slab(2))]
    bench.fake.begin(7)
    for left in (1, 2):
        mappings.pop()
        assert bench.gpu.reap() == left
    bench.fake.end(7)
    bench.driver.cleaning = True


UNMAPPING = ["enter", *["done", "unmap", "free", "forget"] * 2, "leave"]


@pytest.mark.parametrize("number", range(1, len(UNMAPPING) + 1))
def test_whatever_call_of_unmapping_fails_nothing_is_unmapped_twice_or_lost(
    bench: Bench, number: int
) -> None:
    two_marked(bench)
    bench.driver.again(number)
    with suppress(BackendError):  # none where the memory stays mapped, or only an event is lost
        bench.gpu.reap()
    failed = UNMAPPING[number - 1]
    assert bench.driver.calls[number - 1] == failed
    bench.driver.cleaning = False
    bench.driver.again()
    other = bench.mapping(bench.slab(1, b"other"))  # which tries again; addresses are used again
    assert bench.gpu.reap() == 0
    assert ctypes.string_at(other.address, 5) == b"other"
    assert len(bench.gpu.stuck) == (failed in ("unmap", "free"))
    for grave in bench.gpu.stuck:
        if failed == "unmap":
            bench.fake.unmap(grave.address, grave.extents[0].nbytes)
        bench.fake.free(grave.address, grave.extents[0].nbytes)
    if failed == "leave":
        bench.fake.leave()
    assert bench.fake.left().pop("events", 0) == (failed == "forget")
    bench.fake._events.clear()
    del other  # the records of what was logged hold errors, and those this frame


def mapped_calls() -> list[str]:
    return ["enter", "reserve", "import_", "map", "import_", "map", "allow"]


@pytest.mark.parametrize("number", range(1, 8))
def test_mapping_takes_back_what_it_has_done(bench: Bench, number: int) -> None:
    first, second = bench.slab(1), bench.slab(2)
    before = gpus.descriptors()
    bench.driver.again(number)
    with pytest.raises(BackendError):
        bench.mapping(first, second)
    assert bench.driver.calls == mapped_calls()[:number]
    assert bench.fake.left() == {}
    assert gpus.descriptors() == before
    assert len(DEVICE_MAPPINGS) == 0
    bench.driver.again()
    assert bench.mapping(first, second).nbytes == 3 * UNIT
    made = bench.driver.calls
    assert made[made.index("reserve") - 1 :] == mapped_calls()  # what was put aside goes before


def test_a_context_that_cannot_be_left_leaves_nothing_mapped(bench: Bench) -> None:
    slab = bench.slab(1)
    calls = ["enter", "reserve", "import_", "map", "release", "allow", "leave"]
    bench.driver.cleaning = True
    bench.driver.again(len(calls))
    with pytest.raises(BackendError):
        bench.mapping(slab)
    assert bench.driver.calls[: len(calls)] == calls
    bench.driver.cleaning = False
    bench.fake.leave()
    assert bench.fake.left() == {}
    assert len(DEVICE_MAPPINGS) == 0


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
            assert len(DEVICE_MAPPINGS) == 2
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
    assert DEVICE_MAPPINGS.same(mine.address, others.address, 7)
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
    assert not DEVICE_MAPPINGS.same(address, others.address, 7)
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


def test_a_child_that_is_forked_unmaps_nothing(bench: Bench) -> None:
    mapping = bench.mapping(bench.slab(1, b"weights"))

    def child() -> None:
        aside = bench.gpu.retired
        mapping._end()
        if not aside:
            os.kill(os.getpid(), 9)

    assert gpus.ends_by_signal(child)
    assert ctypes.string_at(mapping.address, 7) == b"weights"


def test_a_backend_that_lends_no_device_memory_is_refused(bench: Bench) -> None:
    with pytest.raises(UnsupportedError, match="memfd"):
        opener_for("memfd", bench.fake, bench.gpu.device)
