"""Which steps stay: by rule, by mark, by name; what stays can be read when the rest is gone."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_runs.stores import assert_same, copied, handle, network, shares, train
from tensor_dedup.store.steps.errors import (
    BadOption,
    BadOptionError,
    KeptStepError,
    UnknownGoalError,
    UnknownMetricError,
    UnknownStepError,
)
from tensor_dedup.store.steps.retention import Retention, goal, ranked
from tensor_dedup.store.steps.runs import parse_step_name, step_name
from tensor_dedup.training import CheckpointStore, Saved
from tensor_dedup.training.snapshot import StepSource


def metrics(*losses: float) -> dict[int, dict[str, float]]:
    return {step: {"loss": loss} for step, loss in enumerate(losses)}


@pytest.mark.parametrize(
    ("rules", "dropped"),
    [
        (Retention(), []),
        (Retention(last=2), [0, 1, 2, 3]),
        (Retention(every=2), [1, 3]),
        (Retention(last=1, every=3), [1, 2, 4]),
        (Retention(best=("loss", 2, "min")), [0, 2, 4]),
        (Retention(best=("loss", 1, "max")), [1, 2, 3, 4]),
        # A name that no step has: nothing goes, whatever the other rules say.
        (Retention(best=("other", 1, "min")), []),
        (Retention(last=1, best=("other", 1, "min")), []),
    ],
)
def test_rules(rules: Retention, dropped: list[int]) -> None:
    losses = metrics(5.0, 1.0, 4.0, 2.0, 3.0, 9.0)
    losses[5] = {}
    assert rules.dropped(losses, (), 5, range(6)) == dropped


@given(
    st.dictionaries(st.integers(0, 40), st.floats() | st.none(), min_size=1),
    st.sets(st.integers(0, 40)),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
)
def test_what_a_rule_keeps_stays(
    losses: dict[int, float | None],
    kept: set[int],
    last: int | None,
    every: int | None,
    best: int | None,
) -> None:
    found = {step: {} if loss is None else {"loss": loss} for step, loss in losses.items()}
    rules = Retention(last, every, None if best is None else ("loss", best, "min"))
    saved = next(iter(losses))
    left = set(losses) - set(rules.dropped(found, kept, saved, sorted(losses)))
    assert saved in left
    assert left >= kept & set(losses)
    if rules.any and (best is None or any("loss" in each for each in found.values())):
        most = len(kept) + 1 + (last or 0) + (best or 0)
        most += sum(step % every == 0 for step in losses) if every else 0
        assert len(left) <= most
    else:
        assert left == set(losses)
    if best is not None:
        assert left >= set(ranked(found, "loss", "min")[:best])


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_last": "5"},
        {"keep_last": True},
        {"keep_every": 0},
        {"keep_every": 2.5},
        {"keep_best": ("loss", 0, "min")},
        {"keep_best": "val_loss"},
        {"keep_best": ("a", 3)},
        {"keep_best": ("a", "3", "min")},
        {"keep_best": ("a", 3, "least")},
        {"keep_best": 3},
    ],
    ids=str,
)
def test_rules_that_make_no_sense(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BadOptionError, match=r'keep_best=\("val_loss", 3, "min"\)') as error:
        CheckpointStore(tmp_path / "store", "run", **options)
    assert error.value.kind is BadOption.RETENTION
    assert not (tmp_path / "store").exists()


def test_a_misspelt_metric_deletes_nothing_and_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [3.0, 1.0, 2.0, 4.0]
    rules: dict[str, Any] = {"keep_last": 1}
    with handle(tmp_path, keep_best=("val_los", 1, "min"), **rules) as run:
        for step, loss in enumerate(losses):
            run.save(network(step), step, {"val_loss": loss})
        assert run.steps() == [0, 1, 2, 3]
    [warning] = caplog.messages
    assert "step run@0 has no metric 'val_los', perhaps 'val_loss'" in warning
    with handle(tmp_path, keep_best=("val_loss", 1, "min"), **rules) as run:
        run.save(network(9), 4, {"val_loss": 9.0})
        assert run.steps() == [1, 4]
    assert caplog.messages == [warning]


def test_a_metric_that_comes_late_lets_go_from_then_on(tmp_path: Path) -> None:
    with handle(tmp_path, keep_best=("loss", 1, "min")) as run:
        for step in range(3):
            run.save(network(step), step)
        assert run.steps() == [0, 1, 2]
        run.save(network(3), 3, {"loss": 1.0})
        assert run.steps() == [3]


def test_a_metric_that_was_never_a_number_deletes_nothing(tmp_path: Path) -> None:
    with handle(tmp_path, keep_best=("loss", 1, "min"), keep_last=1) as run:
        for step in range(3):
            run.save(network(step), step, {"loss": math.nan})
        assert run.steps() == [0, 1, 2]
        run.save(network(3), 3, {"loss": 1.0})
        run.save(network(4), 4, {"loss": math.nan})
        assert run.steps() == [3, 4]


def test_nan_is_warned_of_once_and_never_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with handle(tmp_path, keep_best=("loss", 1, "min")) as run:
        for step, loss in enumerate([2.0, math.nan, math.nan, 3.0]):
            run.save(network(step), step, {"loss": loss})
        assert run.steps() == [0, 3]
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "the step run@1 has NaN as its metric 'loss', which is never the best"
    ]


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("val_loss", "min"),
        ("eval/mlogloss", "min"),
        ("validation_0-rmse", "min"),
        ("word error", "min"),
        ("acc", "max"),
        ("eval_Accuracy", "max"),
        ("top1/acc1", "max"),
        ("f1-macro", "max"),
        ("loss_accuracy", None),
        ("steps_per_second", None),
        ("faccia", None),
    ],
)
def test_names_that_say_which_value_is_best(metric: str, best: str | None) -> None:
    assert goal(metric) == best


def test_the_best_step_goes_by_what_is_known_of_its_metric(tmp_path: Path) -> None:
    with handle(tmp_path, keep_best=("speed", 9, "max")) as run:
        for step, value in enumerate([1.0, 3.0, 2.0]):
            run.save(network(step), step, {"speed": value, "acc": value, "x": value})
        assert run.best("speed") == 1
    later = handle(tmp_path)
    # What the rule said is noted in the steps, for those who come without it.
    assert [step.goals for step in later.store.steps("run")] == [{"speed": "max"}] * 3
    assert (later.best("speed"), later.best("speed", "min"), later.best("acc")) == (1, 0, 1)
    with pytest.raises(UnknownGoalError, match="least or the greatest 'x' is best"):
        later.best("x")
    assert later.best("x", "max") == 1
    with pytest.raises(UnknownMetricError, match=r"'spead', perhaps 'speed'; they have acc, speed"):
        later.best("spead")


def test_what_stays_can_be_read_when_the_rest_is_gone(tmp_path: Path) -> None:
    run, model = handle(tmp_path, keep_last=2, keep_best=("loss", 1, "min")), network(1)
    kept = {}
    for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0]):
        train(model, step, "layer0.weight", "layer0.bias")
        run.save(model, step, {"loss": loss})
        kept[step] = copied(model)
    assert run.steps() == [1, 3, 4]
    assert shares(run)
    run.gc(0)
    for step in run.steps():
        assert_same(run.load(step), kept[step])
    with pytest.raises(UnknownStepError, match="it has 3 steps, from 1 to 4"):
        run.load(0)
    assert run.store.verify(full=True).fine


def test_kept_steps_stay_and_are_not_replaced(tmp_path: Path) -> None:
    run, model = handle(tmp_path, keep_last=1), network(1)
    run.save(model, 0)
    first = copied(model)
    run.keep(0)
    other = handle(tmp_path)
    for step in (1, 2):
        train(model, step, "layer0.weight")
        run.save(model, step)
    assert run.steps() == [0, 2]
    assert other.kept() == {0}
    assert shares(run)
    for act in (lambda: other.delete(0), lambda: run.save(model, 0)):
        with pytest.raises(KeptStepError, match="unkeep"):
            act()
    run.gc(0)
    assert_same(run.load(0), first)
    run.unkeep(0)
    run.unkeep(0)
    run.save(model, 3)
    assert run.steps() == [3]
    with pytest.raises(UnknownStepError):
        run.keep(1)
    assert run.kept() == set()


def test_the_bytes_of_deleted_steps_come_back(tmp_path: Path) -> None:
    run, model = handle(tmp_path, compress=None), network(1)
    run.save(model, 0)
    train(model, 1, "layer0.weight")
    run.save(model, 1)
    assert shares(run)
    both = run.store.stats().disk_bytes
    run.delete(1)
    freed = run.gc(0).freed_bytes
    assert freed > 160 * 200 * 4
    assert run.store.stats().disk_bytes < both
    run.delete(0)
    run.gc(0)
    assert run.stats()["total_bytes"] == 0


def test_a_handle_writes_again_what_gc_took_meanwhile(tmp_path: Path) -> None:
    """What it remembers of its last step is no longer there: it must not refer to it."""
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    other = handle(tmp_path)
    other.delete(0)
    other.gc(0)
    assert run.save(model, 1).new_tensors == 6
    run.save(model, 2)
    assert shares(run)
    assert_same(run.load(1), model)
    assert run.store.verify(full=True).fine


@pytest.mark.parametrize("by", ["the next save", "prune"])
def test_a_step_stays_while_a_save_counts_on_it(tmp_path: Path, by: str) -> None:
    """Its tensors are only in a step that the rules would delete meanwhile."""
    saves = handle(tmp_path, in_flight=2, compress=None, keep_last=1)
    commit, started, seen = saves.commit, threading.Event(), []

    def commit_in_turn(snapshot: StepSource) -> Saved:
        if snapshot.notes.step == 1:
            started.wait()
        else:
            if by == "prune":
                assert saves.prune(dry_run=True) == saves.prune() == []
            seen.extend(saves.steps())
            saves.store.gc(0)
        return commit(snapshot)

    with saves as run:
        # Without small tensors, which are copied in any case.
        model = {"weight": network(0)["layer0.weight"]}
        run.save(model, 0)
        run._saves._commit = commit_in_turn
        run.save_async(network(1), 1)
        again = copied(model)
        last = run.save_async(again, 2)
        again["weight"] += 1  # what it was is nowhere but in the step 0
        started.set()
        assert last.wait().new_tensors == 0
        assert seen == [0, 1]
        assert run.steps() == [2]
        run.store.gc(0)
        assert_same(run.load(2), model)
        run.save(network(3), 3)
        assert run.steps() == [3]


def test_the_steps_of_a_run_are_not_touched_by_a_step_of_another(tmp_path: Path) -> None:
    run, other = handle(tmp_path), CheckpointStore(tmp_path, "other")
    for step in range(3):
        run.save(network(step), step)
    run.keep(2)
    ruled = handle(tmp_path, keep_last=1)
    ruled.commit(other.snapshot(network(3), 2))
    assert run.steps() == [0, 1, 2]
    assert other.steps() == [2]
    other.keep(2)
    with pytest.raises(KeptStepError, match="step 2 of 'other' is kept"):
        ruled.commit(other.snapshot(network(4), 2))
    assert ruled.prune() == [0, 1]


def test_a_handle_outlives_the_index(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0)
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    train(model, 1, "layer0.weight")
    run.save(model, 1)
    assert_same(run.load(1), model)
    run.close()
    assert handle(tmp_path).save(model, 2).new_tensors == 0
    assert shares(run)


@pytest.mark.parametrize("run", ["a", "org/run-1", "a@5", "x@keep", "7"])
def test_names_of_steps(run: str) -> None:
    for step in (0, 7, 10**18 - 1):
        for mark in (False, True):
            found = parse_step_name(step_name(run, step, kept=mark))
            assert found is not None
            assert (found.run, found.step, found.kept) == (run, step, mark)


@pytest.mark.parametrize(
    "name", ["run", "run@", "run@01", "run@x", "run@-1", "@5", "run@1@keep@keep"]
)
def test_names_that_are_no_steps(name: str) -> None:
    found = parse_step_name(name)
    assert found is None or found.run != "run"
