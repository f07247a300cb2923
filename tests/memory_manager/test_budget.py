"""What is charged, what is evicted, and in which order."""

from tensor_dedup.memory_manager.core.budget import (
    RESIDENT_BYTES,
    SLAB_BYTES,
    Ledger,
    ResidentEntry,
    SlabState,
)
from tensor_dedup.memory_manager.core.records import KeyRecord, Records
from tensor_dedup.memory_manager.protocol.layout import PAGE, offsets_of

SIZE = 10
COST = SIZE + SLAB_BYTES + RESIDENT_BYTES
NAMES = 1000  # room for those of a few tensors


def filled(
    ledger: Ledger, name: str, now: float, checkpoint: str = ""
) -> tuple[SlabState, ResidentEntry]:
    """A slab with one tensor that nobody uses."""
    slab = ledger.add(SIZE, now)
    assert slab is not None
    resident = ledger.enter(slab, 0, SIZE, name)
    ledger.attribute(resident, checkpoint)
    ledger.disown(slab)
    return slab, resident


def test_what_was_not_used_for_longest_goes_first() -> None:
    ledger = Ledger(3 * COST)
    _, a = filled(ledger, "a", 1)
    filled(ledger, "b", 2)
    filled(ledger, "c", 3)
    ledger.hold(a, 4, leased=True)
    ledger.let_go(a, 5, leased=True)  # the end of a use counts, too
    filled(ledger, "d", 6)
    assert set(ledger.residents) == {"a", "c", "d"}
    filled(ledger, "e", 7)
    assert set(ledger.residents) == {"a", "d", "e"}
    assert ledger.evicted_bytes == 2 * SIZE


def test_no_more_is_evicted_than_is_needed_and_nothing_in_vain() -> None:
    ledger = Ledger(3 * COST)
    _, a = filled(ledger, "a", 1)
    filled(ledger, "b", 2)
    filled(ledger, "c", 3)
    ledger.hold(a, 4, leased=True)
    assert ledger.add(2 * COST, 5) is None  # could not fit anyway: nothing is lost for it
    assert set(ledger.residents) == {"a", "b", "c"}
    assert ledger.add(SIZE, 5) is not None
    assert set(ledger.residents) == {"a", "c"}


def test_pins_by_name_hold_what_comes_later() -> None:
    ledger = Ledger(2 * COST + NAMES)
    ledger.pins.add("base")
    filled(ledger, "a", 1, "base")
    filled(ledger, "b", 2, "tuned")
    filled(ledger, "c", 3)
    assert set(ledger.residents) == {"a", "c"}
    ledger.pins = {"c"}
    filled(ledger, "d", 4)
    assert set(ledger.residents) == {"c", "d"}


def test_memory_that_may_be_mapped_is_charged_until_the_process_has_ended() -> None:
    ledger = Ledger(2 * COST)
    slab, _ = filled(ledger, "a", 1)
    ledger.linger(slab, 7)
    filled(ledger, "b", 2)
    filled(ledger, "c", 3)
    assert set(ledger.residents) == {"a", "c"}
    ledger.drop(slab)
    assert (ledger.freed, ledger.charged) == ([2, 1], 2 * COST)  # closed, and still charged
    ledger.unlinger(slab, 7)
    assert ledger.charged == COST


def test_memory_that_no_mapping_holds_is_held_until_the_process_has_ended() -> None:
    ledger = Ledger(2 * COST, mappings_hold=False)
    slab, _ = filled(ledger, "a", 1)
    ledger.linger(slab, 7)
    ledger.drop(slab)
    assert (ledger.freed, ledger.charged) == ([], COST)
    ledger.unlinger(slab, 7)
    assert (ledger.freed, ledger.charged) == ([1], 0)
    idle, _ = filled(ledger, "b", 2)
    ledger.evict(idle)
    assert ledger.freed == [1, 2]


def test_a_slab_goes_when_the_backend_has_let_go_of_it() -> None:
    ledger = Ledger(COST)
    slab = ledger.add(SIZE, 1)
    assert slab is not None
    slab.busy = True
    ledger.drop(slab)
    assert ledger.freed == []
    assert not ledger.idle(slab)
    assert (ledger.freed, ledger.charged) == ([1], 0)


def test_records_are_bounded_and_the_oldest_goes_first() -> None:
    records = Records(max_bytes=2000)
    record = KeyRecord(bytes(300), ())
    for key in "ab":
        assert records.put(key, record)
    assert not records.put("a", record)
    assert records.get("a") == record  # used: now "b" is the oldest
    assert records.oldest_in_excess() is None
    records.put("c", record)
    assert records.oldest_in_excess() == "b"
    assert records.drop("b") > 0
    assert records.drop("b") == 0
    assert records.oldest_in_excess() is None


def test_small_tensors_lie_close_and_large_ones_on_pages() -> None:
    offsets, nbytes = offsets_of([1, 100, 64 << 10, 3])
    assert offsets == (0, 64, PAGE, PAGE + (64 << 10))
    assert nbytes == PAGE + (64 << 10) + PAGE
