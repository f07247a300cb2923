"""Full collections are kept out of loads; nothing else of the collector is changed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from processes import process_state
from tensor_dedup.loader.process_state import WITHOUT_FULL_COLLECTIONS, WithoutFullCollections

WITHOUT = WITHOUT_FULL_COLLECTIONS


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Small ones, so that few objects bring a collection; back they are at the end."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(100, 5, 5)
    yield gc.get_threshold()
    assert gc.isenabled() == enabled
    gc.set_threshold(*before)


def collections(work: Callable[[], object]) -> list[int]:
    """The generations that were collected meanwhile."""
    seen: list[int] = []

    def heard(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(heard)
    try:
        work()
    finally:
        gc.callbacks.remove(heard)
    return seen


def fill() -> None:
    """Make much that stays: 500 young collections, 80 of what outlived one, 16 full ones."""
    kept = [[n] for n in range(50_000)]
    del kept


def plainly_and_within() -> tuple[list[int], list[int]]:
    """The collections that `fill` brings. In a child, where what is there already is set aside:
    a full collection waits until what is new is a quarter of what is old."""
    process_state.set_aside()

    def within() -> None:
        with WITHOUT:
            fill()

    return collections(fill), collections(within)


def test_what_is_old_is_not_looked_through_and_what_is_young_is() -> None:
    plainly, within = process_state.forked(plainly_and_within)
    assert set(plainly) == {0, 1, 2}
    assert set(within) == {0, 1}


def test_circles_go_within() -> None:
    with WITHOUT:
        circle = weakref.ref(Circle())
        fill()
        assert circle() is None


def test_who_asks_for_a_collection_gets_it() -> None:
    with WITHOUT:
        circle = Circle()
        seen = weakref.ref(circle)
        gc.collect()  # it is old now
        del circle
        fill()
        assert seen() is not None
        gc.collect()
        assert seen() is None


def test_thresholds_are_as_they_were_after_a_failure(thresholds: tuple[int, int, int]) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), WITHOUT, WITHOUT:
            raise error
        assert gc.get_threshold() == thresholds


def test_the_last_thread_to_go_gives_them_back(thresholds: tuple[int, int, int]) -> None:
    other_is_in, mine_is_over = threading.Event(), threading.Event()

    def other() -> None:
        with WITHOUT:
            other_is_in.set()
            mine_is_over.wait()

    with ThreadPoolExecutor() as pool:
        with WITHOUT:
            ended = pool.submit(other)
            other_is_in.wait()
            ours = gc.get_threshold()
        still = gc.get_threshold()
        mine_is_over.set()
        ended.result()
    assert still == ours != thresholds
    assert gc.get_threshold() == thresholds


def test_many_threads(thresholds: tuple[int, int, int]) -> None:
    seen = set()

    def often() -> None:
        for _ in range(500):
            with WITHOUT:
                seen.add(gc.get_threshold())

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(often) for _ in range(4)]:
            done.result()
    assert len(seen) == 1
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("enabled", [True, False])
def test_whether_it_is_enabled_is_the_users(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with WITHOUT:
            assert gc.isenabled() == enabled
            (gc.disable if enabled else gc.enable)()  # as a thread of the user's may
        assert gc.isenabled() != enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_thresholds_that_are_set_meanwhile_stay() -> None:
    with WITHOUT:
        gc.set_threshold(200, 7, 7)
    assert gc.get_threshold() == (200, 7, 7)


def test_a_forked_child_has_them_back_unless_it_is_within(
    thresholds: tuple[int, int, int],
) -> None:
    is_in, over = threading.Event(), threading.Event()

    def other() -> None:
        with WITHOUT:
            is_in.set()
            over.wait()

    def enter() -> tuple[tuple[int, ...], ...]:
        with WITHOUT:
            return gc.get_threshold(), thresholds

    def leave() -> tuple[tuple[int, ...], ...]:
        within = gc.get_threshold()
        WITHOUT.__exit__()
        return within, gc.get_threshold()

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(other)
        is_in.wait()
        ours = gc.get_threshold()
        assert process_state.forked(gc.get_threshold) == thresholds
        assert process_state.forked(enter) == (ours, thresholds)
        with WITHOUT:
            assert process_state.forked(leave) == (ours, thresholds)
        over.set()
        ended.result()


def test_a_lock_that_another_thread_holds_is_not_inherited() -> None:
    mine = WithoutFullCollections()

    def enter() -> bool:
        with mine:
            return True

    with mine._lock:
        assert process_state.forked(enter)
