"""A training that stands still is not kept waiting for saves that encode."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stores import Gate, Model, assert_same, copied, gated, handle
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.commit import Saved
from tensor_dedup.store.checkpoints.errors import BadOptionError
from tensor_dedup.store.checkpoints.policy import Backpressure
from tensor_dedup.store.format.tables import PLAIN

ELEMENTS = 200_000


def weights(step: int) -> Model:
    """A tensor that is another in each step, and one of which a few numbers are."""
    dice = np.random.default_rng(step)
    few = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
    few[dice.integers(0, ELEMENTS, 20)] += 1
    return {"rough": dice.standard_normal(ELEMENTS).astype(np.float32), "few": few}


def save(run: CheckpointStore, step: int, awaited: Callable[[], bool] | None) -> Saved:
    """Save weights that nobody has seen."""
    taken = run.snapshot(weights(step), step)
    return run.commit(replace(taken, awaited=awaited))


def codecs(run: CheckpointStore, step: int) -> dict[str, bool]:
    """Which tensors are encoded."""
    with run.store.checkpoint(f"run@{step}") as opened:
        return {each.name: opened.stored(each)[0] != PLAIN for each in opened}


ALL = {"rough": True, "few": True}
NONE = {"rough": False, "few": False}
QUICK = {"rough": False, "few": True}


@pytest.fixture
def run(tmp_path: Path) -> CheckpointStore:
    return handle(tmp_path)


def test_a_save_that_nobody_waits_for_encodes(run: CheckpointStore) -> None:
    for step, awaited in enumerate((lambda: False, None, lambda: False)):
        save(run, step, awaited)
        assert codecs(run, step) == ALL


def test_one_that_is_waited_for_stores_what_is_left_as_it_is(run: CheckpointStore) -> None:
    save(run, 0, lambda: True)
    assert codecs(run, 0) == NONE  # nothing is known yet of what would get small
    assert_same(run.load(0), weights(0))


def test_where_few_numbers_change_it_is_encoded_in_any_case(run: CheckpointStore) -> None:
    for step in range(2):
        save(run, step, None)
        assert codecs(run, step) == ALL
    save(run, 2, lambda: True)
    assert codecs(run, 2) == QUICK
    assert_same(run.load(2), weights(2))


def test_a_training_that_begins_to_wait_meanwhile_gets_what_is_done(run: CheckpointStore) -> None:
    asked = []

    def awaited() -> bool:
        asked.append(1)
        return len(asked) > 2

    model = {f"rough{n}": weights(n)["rough"] for n in range(4)}
    run.commit(replace(run.snapshot(model, 0), awaited=awaited))
    found = codecs(run, 0)
    assert set(found.values()) == {True, False}
    assert_same(run.load(0), model)
    assert run.store.verify(full=True).faults == []
    # Nothing was learnt of those for which there was no time.
    other = {name: array + 1 for name, array in model.items()}
    run.save(other, 1)
    assert set(codecs(run, 1).values()) == {True}
    assert_same(run.load(1), other)


def test_what_was_stored_as_it_is_is_what_later_steps_are_stored_against(
    run: CheckpointStore,
) -> None:
    model, kept = weights(1), {}
    for step, awaited in enumerate((None, lambda: True, None, None)):
        model["rough"] += np.float32(1e-4)
        kept[step] = copied(model)
        run.commit(replace(run.snapshot(model, step), awaited=awaited))
    with run.store.checkpoint("run@3") as third, run.store.checkpoint("run@1") as first:
        assert third.stored(third["rough"])[2] == first["rough"].digest
    for step, expected in kept.items():
        assert_same(run.load(step), expected)


def test_it_is_tried_again_later_each_time(run: CheckpointStore) -> None:
    tried: list[int] = []

    def noting(step: int) -> Callable[[], bool]:
        def awaited() -> bool:
            tried.append(step)
            return True

        return awaited

    for step in range(16):
        save(run, step, noting(step))
    assert sorted({*tried}) == [0, 3, 8]


def test_what_it_does_by_turns() -> None:
    haste, skipped = Backpressure(), []
    # Waited for, seven times; never again after that.
    for number in range(40):
        haste.begin((lambda: True) if number < 7 else (lambda: False))
        skipped += [number] if haste.from_the_start else []
    assert skipped == [1, 2, 4, 5, 6, 7]
    haste.begin(None)
    assert not haste()


def test_saves_in_between_that_are_not_in_the_background_change_nothing() -> None:
    haste = Backpressure()
    haste.begin(lambda: True)
    for _ in range(3):
        haste.begin(None)
        assert not haste()
    haste.begin(lambda: False)
    assert haste.from_the_start


def test_a_next_step_that_is_there_already_waits_for_no_encoding(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    run = gated(tmp_path, gate)
    for step in range(2):
        run.save(weights(step), step)
    gate.opened, gate.waiting = threading.Event(), threading.Event()
    first = run.save_async(weights(2), 2)
    assert gate.waiting.wait(60)
    assert not first._awaited.is_set()
    thread = threading.Thread(target=run.save_async, args=(weights(3), 3))
    thread.start()
    assert first._awaited.wait(60)
    gate.opened.set()
    thread.join()
    run.close()
    assert codecs(run, 2) == ALL  # it had been encoded by then
    assert codecs(run, 3) == QUICK
    for step in (4, 5, 6):
        run.save_async(weights(step), step).wait()  # who waits for the end himself is in no haste
    assert codecs(run, 6) == ALL
    for step in range(7):
        assert_same(run.load(step), weights(step))


@pytest.mark.parametrize("pool_bytes", [None, 9 * ELEMENTS])
def test_what_is_waited_for_is_in_haste_with_all_that_it_waits_for(
    tmp_path: Path, pool_bytes: int | None
) -> None:
    """A small pool has room for one save: the second waits in `save_async` for the first's."""
    gate = Gate()
    run = gated(tmp_path, gate, in_flight=2, pool_bytes=pool_bytes)
    first = run.save_async(weights(0), 0)
    assert gate.waiting.wait(60)

    def wait() -> None:
        second = run.save_async(weights(1), 1)
        if pool_bytes is None:
            second.hurry()

    thread = threading.Thread(target=wait)
    thread.start()
    awaited = first._awaited.wait(20)
    gate.opened.set()
    thread.join()
    run.close()
    assert awaited
    for step in range(2):
        assert_same(run.load(step), weights(step))


def test_who_wants_everything_encoded_gets_it(tmp_path: Path) -> None:
    run = handle(tmp_path, compress="always")
    for step in range(3):
        save(run, step, lambda: True)
        assert codecs(run, step) == ALL


@pytest.mark.parametrize("compress", ["", "zstd", "Always", True])
def test_what_is_no_way_to_compress_is_refused(tmp_path: Path, compress: Any) -> None:
    with pytest.raises(BadOptionError, match='give "auto", "always" or None'):
        handle(tmp_path, compress=compress)
