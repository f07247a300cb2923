"""The registry: one resident a key, held weakly, whoever publishes first."""

import gc
import itertools
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from processes.process_state import fork, forked, slab_descriptors
from tensor_dedup.loader import report
from tensor_dedup.loader.residents.registry import Registry, registry
from tensor_dedup.loader.residents.resident import Resident, pack
from tensor_dedup.types import ResidentKey

THREADS = 8


class Record:
    """A layer record: anything that can be referred to weakly."""


def residents(*names: str, nbytes: int = 100) -> list[Resident]:
    return pack([(torch.zeros(nbytes, dtype=torch.uint8), name) for name in names])


def test_a_published_resident_is_found_by_its_key() -> None:
    table = Registry()
    (one,) = residents("one")
    assert table.lookup(one.key) is None
    assert table.register(one) is one
    same_key = ResidentKey(one.key.dtype, one.key.shape, one.key.stride, one.key.digest)
    assert table.lookup(same_key) is one
    assert table.residents() == [one]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(100, dtype=torch.int8),
        torch.zeros(50, 2, dtype=torch.uint8),
        torch.zeros(2, 50, dtype=torch.uint8).t(),
    ],
)
def test_equal_bytes_of_another_dtype_or_geometry_are_another_resident(
    other: torch.Tensor,
) -> None:
    table = Registry()
    (one,) = residents("digest")
    (two,) = pack([(other, "digest")])
    assert table.register(one) is one
    assert table.register(two) is two
    assert table.lookup(one.key) is one


def test_the_first_of_a_key_wins_and_the_other_leaves_nothing() -> None:
    table = Registry()
    gc.collect()
    before = slab_descriptors()
    (first,), (second,) = residents("same"), residents("same")
    assert table.register(first) is first
    assert table.register(second) is first
    del second
    assert slab_descriptors() == before + 1


def test_threads_that_publish_at_once_all_get_the_same_one() -> None:
    table = Registry()
    for round_number in range(30):
        mine = [residents(str(round_number))[0] for _ in range(THREADS)]
        start = threading.Barrier(THREADS)
        got: list[Resident] = []

        def publish(
            resident: Resident, start: threading.Barrier = start, got: list[Resident] = got
        ) -> None:
            start.wait()
            got.append(table.register(resident))

        threads = [threading.Thread(target=publish, args=(resident,)) for resident in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == THREADS
        assert len({id(resident) for resident in got}) == 1
        assert got[0] in mine
        assert table.lookup(mine[0].key) is got[0]


def test_a_resident_is_gone_with_the_last_tensor_and_without_the_collector() -> None:
    table = Registry()
    gc.collect()
    before = slab_descriptors()
    (one,) = residents("one")
    key = one.key
    tensors = [table.register(one).map(), table.register(one).map()]
    del one
    gc.disable()  # reference counts alone must do: memory is not returned some time later
    try:
        tensors.pop()
        assert table.lookup(key) is not None
        tensors.pop()
        assert table.lookup(key) is None
        assert table.residents() == []
        assert slab_descriptors() == before
    finally:
        gc.enable()


def test_a_gone_resident_can_be_published_anew() -> None:
    table = Registry()
    (one,) = residents("one")
    table.register(one)
    del one
    (again,) = residents("one")
    assert table.register(again) is again


def test_a_slab_counts_once_and_whole_while_one_of_its_residents_lives() -> None:
    table = Registry()
    many = residents("a", "b", "c", nbytes=10_000)
    slab_bytes = many[0].slab.nbytes
    for resident in many:
        table.register(resident)
    (other,) = residents("d", nbytes=1)
    table.register(other)
    assert table.resident_bytes() == slab_bytes + other.slab.nbytes
    del resident, other
    del many[1:]
    assert table.resident_bytes() == slab_bytes
    many.clear()
    assert table.resident_bytes() == 0


def test_overhead_grows_with_the_entries_and_not_with_their_bytes() -> None:
    table = Registry()
    empty = table.overhead_bytes()
    small = residents(*map(str, range(100)), nbytes=1)
    for resident in small:
        table.register(resident)
    hundred = table.overhead_bytes()
    assert 100 * sys.getsizeof(small[0]) < hundred - empty < 100 * 1000
    (large,) = residents("large", nbytes=10 << 20)
    table.register(large)
    assert table.overhead_bytes() - hundred < 1000


def test_layer_records_are_weak_and_the_first_wins() -> None:
    table = Registry()
    first, second = Record(), Record()
    assert table.lookup_record("layer") is None
    assert table.register_record("layer", first) is first
    assert table.register_record("layer", second) is first
    assert table.records() == {"layer": first}
    watch = weakref.ref(first)
    del first
    assert watch() is None
    assert table.lookup_record("layer") is None
    assert table.register_record("layer", second) is second


def test_residents_and_records_are_listed_while_others_come_and_go() -> None:
    table = Registry()
    kept = Record()
    table.register_record("kept", kept)
    ended = threading.Event()

    def come_and_go() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            records = [Record() for _ in range(20)]
            for each, record in enumerate(records):
                table.register_record(f"{number} {each}", record)
            for resident in residents(f"{number}"):
                table.register(resident)

    interval = sys.getswitchinterval()
    with ThreadPoolExecutor() as pool:
        sys.setswitchinterval(1e-6)
        try:
            others = pool.submit(come_and_go)
            most = 0
            for _ in range(2000):
                most = max(most, len(table.records()))
                table.residents()
        finally:
            ended.set()
            sys.setswitchinterval(interval)
        others.result()
    assert most > 1
    assert table.records() == {"kept": kept}


def test_a_forked_child_may_publish_while_a_thread_of_the_parent_did() -> None:
    # The lock is held in the parent at the time of the fork, by a thread the child lacks.
    (one,) = residents("forked")
    registry.register(one)
    with registry._lock:
        pid = fork()
        if pid == 0:
            signal.alarm(30)  # instead of waiting for ever
            os._exit(0 if registry.register(residents("forked")[0]) is one else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert registry.lookup(one.key) is one
    assert forked(lambda: registry.lookup(one.key) is not None)


def test_the_report_measures_the_process_wide_registry() -> None:
    (one,) = residents("measured")
    registry.register(one)
    made = report.report()
    assert made.resident_bytes >= registry.resident_bytes() >= one.slab.nbytes
    assert made.registry_bytes >= registry.overhead_bytes() > 0
