"""Two tiers: what is saved on the fast one reaches the second one, and nothing is lost between."""

import errno
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_runs.damage import damage_piece
from store_runs.stores import (
    Arrays,
    Model,
    alone,
    assert_same,
    forest,
    handle,
    moving,
    network,
    open_store,
    safetensors,
    train,
    u8,
    write,
)
from tensor_dedup.errors import StoreError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.steps.errors import (
    BadOption,
    BadOptionError,
    KeptStepError,
    NotATrainingError,
    UnknownStepError,
)
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DrainError
from tensor_dedup.training.tiers import drain
from tensor_dedup.training.tiers.second_tier import StoreTier


class Mount(RealFiles):
    """A second tier that can be slow (while `open_` is not set) or away (`broken`)."""

    def __init__(self) -> None:
        self.open_ = threading.Event()
        self.open_.set()
        self.reached = threading.Event()
        self.broken: int | None = None

    def fsync(self, handle: Handle) -> None:
        self._fail()
        if threading.current_thread().name == "tensor-dedup-drain":
            self.reached.set()
            assert self.open_.wait(60)
        super().fsync(handle)

    def listdir(self, path: Path) -> list[str]:
        self._fail()
        return super().listdir(path)

    def _fail(self) -> None:
        if self.broken is not None:
            raise OSError(self.broken, os.strerror(self.broken))


def tiers(root: Path, mount: Mount | None = None, **more: Any) -> CheckpointStore:
    return handle(root / "fast", drain=open_store(root / "second", mount), **more)


def manifests(root: Path, tier: str) -> dict[int, str | None]:
    run = alone(root, tier)
    return {step: run.store.manifest(f"run@{step}") for step in run.steps()}


def save(run: CheckpointStore, *steps: int) -> None:
    for step in steps:
        run.save(moving(step), step, {"loss": 1.0 / (step + 1)})


def size(root: Path, tier: str) -> int:
    folder = root / tier / "containers"
    return sum(path.stat().st_size for path in folder.rglob("*.*"))


def test_the_second_tier_is_an_ordinary_store_with_the_same_steps(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_fast=None, config={"config.json": "{}"}) as run:
        save(run, 0, 1, 2)
        run.keep(1)
    assert run.undrained() == []
    assert manifests(tmp_path, "second") == manifests(tmp_path, "fast")
    second = alone(tmp_path)
    for step in range(3):
        assert_same(second.load(step), moving(step))
    assert second.metrics() == {0: {"loss": 1.0}, 1: {"loss": 0.5}, 2: {"loss": 1 / 3}}
    assert (second.latest(), second.kept()) == (2, {1})
    with second.store.checkpoint("run@1") as checkpoint:
        assert [file.path for file in checkpoint.files][:1] == ["config.json"]
    assert second.store.verify(full=True).faults == []


def test_only_what_is_missing_travels_and_deltas_stay_deltas(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_fast=None) as run:
        save(run, 0)
        run.drain()
        first = size(tmp_path, "second")
        before = size(tmp_path, "fast")
        save(run, 1)
        run.drain()
        added = size(tmp_path, "second") - first
        assert 0 < added <= 1.1 * (size(tmp_path, "fast") - before)
        assert added < first / 3
        save(run, 2, 3, 4)
    kinds = {path.suffix for path in (tmp_path / "second" / "containers").rglob("*.*")}
    assert ".delta" in kinds
    assert size(tmp_path, "second") <= 1.05 * size(tmp_path, "fast")
    shutil.rmtree(tmp_path / "fast")
    for step in range(5):
        assert_same(alone(tmp_path).load(step), moving(step))


def test_a_delta_brings_its_anchor_where_that_is_not(tmp_path: Path) -> None:
    """The step that has the anchor is gone before the second tier exists."""
    run = handle(tmp_path / "fast", compress="always")
    save(run, 0, 1, 2)
    run.delete(0)
    run.delete(1)
    with run.store.checkpoint("run@2") as checkpoint:
        bases = {checkpoint.stored(tensor)[2] for tensor in checkpoint} - {None}
        own = {tensor.digest for tensor in checkpoint}
    assert bases - own  # there is one that no step has any more
    with tiers(tmp_path):
        pass
    second = alone(tmp_path)
    assert_same(second.load(2), moving(2))
    with second.store.checkpoint("run@2") as checkpoint:
        assert {checkpoint.stored(tensor)[2] for tensor in checkpoint} - {None} == bases
    second.gc(0)
    assert second.store.verify(full=True).faults == []


def test_the_fast_tier_lets_go_of_what_is_drained(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_fast=2) as run:
        save(run, 0, 1, 2, 3)
        run.drain()
        assert alone(tmp_path, "fast").steps() == [2, 3]
        assert run.steps() == [0, 1, 2, 3]
        assert (run.latest(), run.best("loss")) == (3, 3)
        for step in range(4):
            assert_same(run.load(step), moving(step))
        assert list(run.metrics()) == [0, 1, 2, 3]
    run.store.gc(0)
    assert size(tmp_path, "fast") < size(tmp_path, "second")


def test_nothing_leaves_the_fast_tier_before_it_is_drained(tmp_path: Path) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount, keep_last=1)
    save(run, 0)
    run.drain()
    mount.open_.clear()
    mount.reached.clear()
    save(run, 1, 2, 3)
    assert mount.reached.wait(30)
    assert run.undrained() == [1, 2, 3]
    assert alone(tmp_path, "fast").steps() == [0, 1, 2, 3]
    assert alone(tmp_path).steps() == [0]
    mount.open_.set()
    run.close()
    assert alone(tmp_path, "fast").steps() == alone(tmp_path).steps() == [3]


def test_the_rules_hold_for_both_tiers(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_last=2, keep_best=("loss", 1, "max"), keep_fast=None) as run:
        save(run, 0, 1)
        run.drain()
        run.keep(1)
        save(run, 2, 3, 4)
    assert alone(tmp_path).steps() == alone(tmp_path, "fast").steps() == [0, 1, 3, 4]


def test_a_deleted_step_is_gone_from_both(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_fast=None) as run:
        save(run, 0, 1)
        run.drain()
        run.delete(0)
        assert run.steps() == [1]
        with pytest.raises(UnknownStepError):
            run.load(0)
        with pytest.raises(UnknownStepError):
            run.delete(0)
    with tiers(tmp_path) as run:
        assert run.undrained() == []
        assert run.steps() == [1]
        assert alone(tmp_path).steps() == [1]


def test_a_step_that_is_deleted_while_it_is_copied_does_not_appear(tmp_path: Path) -> None:
    mount = Mount()
    with tiers(tmp_path, mount) as run:
        save(run, 20)  # so that the second tier has been written to
        run.drain()
        mount.open_.clear()
        mount.reached.clear()
        save(run, 0)
        assert mount.reached.wait(30)
        run.delete(0)
        assert run.undrained() == []
        mount.open_.set()
    assert alone(tmp_path).steps() == alone(tmp_path, "fast").steps() == [20]


def test_a_step_that_is_saved_again_replaces_the_one_behind_it(tmp_path: Path) -> None:
    mount = Mount()
    with tiers(tmp_path, mount) as run:
        save(run, 0, 1)
        run.drain()
        mount.open_.clear()
        mount.reached.clear()
        run.save(moving(7), 0)
        assert mount.reached.wait(30)
        assert_same(alone(tmp_path).load(0), moving(0))
        assert_same(run.load(0), moving(7))
        run.save(moving(8), 0)  # while the one before it is on its way
        mount.open_.set()
    second = alone(tmp_path)
    assert_same(second.load(0), moving(8))
    assert in_save_order(second._steps.places()) == [1, 0]


def test_an_earlier_state_never_replaces_a_later_one(tmp_path: Path) -> None:
    with tiers(tmp_path) as run:
        save(run, 0)
    stale = tmp_path / "stale"
    shutil.copytree(tmp_path / "fast", stale)
    with tiers(tmp_path) as run:
        run.save(moving(5), 0)
    shutil.rmtree(tmp_path / "fast")
    stale.rename(tmp_path / "fast")
    assert_same(alone(tmp_path, "fast").load(0), moving(0))
    with tiers(tmp_path) as run:
        assert run.undrained() == []
        assert_same(run.load(0), moving(5))
    assert_same(alone(tmp_path).load(0), moving(5))


def diverge(root: Path) -> None:
    """Two fast tiers in turn: "fast" dies before its step 3 is drained, another one saves 3, 4."""
    with tiers(root) as run:
        save(run, 0, 1)
    died = alone(root, "fast")
    died._steps.next()  # of a save that failed
    died.save(moving(7), 3, {"loss": 7.0})
    with handle(root / "other", drain=open_store(root / "second")) as run:
        save(run, 3, 4)
    assert manifests(root, "fast")[3] != manifests(root, "second")[3]


def test_a_step_that_another_tier_saved_meanwhile_is_named_and_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diverge(tmp_path)
    run = tiers(tmp_path, keep_last=2)
    assert "1 step of the run 'run' here will not be drained (3)" in caplog.text
    save(run, 5, 6, 7)  # so that keep_fast=1 lets go of the others, and no rule keeps 3
    run.close()
    assert (run.undrained(), run.stats()["stranded"]) == ([], [3])
    assert_same(run.load(3), moving(3))
    assert run.metrics()[3] == {"loss": 0.25}
    assert run.latest() == 7
    assert alone(tmp_path).steps() == [3, 6, 7]
    assert_same(alone(tmp_path).load(3), moving(3))
    assert alone(tmp_path, "fast").steps() == [3, 7]
    assert_same(alone(tmp_path, "fast").load(3), moving(7))


def test_a_second_tier_that_is_made_anew_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> CheckpointStore:
        return handle(tmp_path / "fast", drain=tmp_path / "second")

    for first in range(2):  # nothing is new for a run without steps, nor when it is there
        with run() as opened:
            save(opened, first)
    assert caplog.records == []
    (tmp_path / "second").rename(tmp_path / "unmounted")
    shutil.rmtree(tmp_path / "fast" / "tiers")
    with run() as opened:
        assert opened.steps() == [1]
    assert "a new store is made in" in caplog.text
    assert "mount that disk" in caplog.text


def test_what_a_dead_tier_has_not_drained_replaces_nothing(tmp_path: Path) -> None:
    with tiers(tmp_path) as run:
        save(run, 0, 1, 2)
    died = alone(tmp_path, "fast")
    for step in range(3, 9):  # more than the other one will save
        died.save(moving(100 + step), step)
    with handle(tmp_path / "other", drain=open_store(tmp_path / "second")) as run:
        assert run.latest() == 2
        save(run, 5, 10)
    run = tiers(tmp_path, keep_fast=None)
    run.drain()
    assert (run.undrained(), run.stats()["stranded"]) == ([], [3, 4, 5, 6, 7, 8])
    assert run.latest() == alone(tmp_path).latest() == 10
    assert alone(tmp_path).steps() == [0, 1, 2, 5, 10]
    for each in (run, alone(tmp_path)):
        assert_same(each.load(5), moving(5))
    assert_same(run.load(8), moving(108))  # nothing is lost of what was not drained
    assert_same(alone(tmp_path, "fast").load(5), moving(105))
    save(run, 11)
    run.save(moving(7), 5)  # which replaces both
    run.close()
    assert run.stats()["stranded"] == [3, 4, 6, 7, 8]
    assert alone(tmp_path).latest() == 5
    assert in_save_order(alone(tmp_path)._places())[-3:] == [10, 11, 5]


def test_a_drained_step_that_another_tier_saves_anew_is_superseded(tmp_path: Path) -> None:
    """A training goes back on another node, and then returns to the first one."""
    with tiers(tmp_path, keep_fast=2) as run:
        save(run, 1, 2, 3)
    with handle(tmp_path / "other", drain=open_store(tmp_path / "second")) as run:
        run.save(moving(30), 3)
        save(run, 4)
    assert alone(tmp_path, "fast").steps() == [2, 3]
    assert manifests(tmp_path, "fast")[3] != manifests(tmp_path, "second")[3]
    with tiers(tmp_path, keep_fast=2) as run:
        assert (run.undrained(), run.latest()) == ([], 4)
        assert_same(run.load(3), moving(30))
        save(run, 5, 6)
    # That the earlier version was drained before is not known: it stays, and is named.
    assert (alone(tmp_path, "fast").steps(), run.stats()["stranded"]) == ([3, 5, 6], [3])
    assert_same(alone(tmp_path).load(3), moving(30))


def test_a_state_that_was_not_drained_stays_though_later_ones_are(tmp_path: Path) -> None:
    diverge(tmp_path)
    for step in (5, 6):
        with tiers(tmp_path) as run:
            save(run, step)
        assert run.stats()["stranded"] == [3]
    assert alone(tmp_path).steps() == [0, 1, 3, 4, 5, 6]
    assert alone(tmp_path, "fast").steps() == [3, 6]
    assert_same(alone(tmp_path, "fast").load(3), moving(7))


def test_a_mark_of_another_state_keeps_the_one_that_counts(tmp_path: Path) -> None:
    diverge(tmp_path)
    with tiers(tmp_path) as run:
        run.keep(3)
    assert alone(tmp_path).kept() == {3}
    assert alone(tmp_path, "fast").kept() == set()


def test_a_stranded_step_is_saved_under_another_number(tmp_path: Path) -> None:
    diverge(tmp_path)
    died = alone(tmp_path, "fast")
    with tiers(tmp_path) as run:
        run.save(died.load(3), 8)
        died.delete(3)
        run.drain()
        assert run.stats()["stranded"] == []
        assert_same(run.load(3), moving(3))
        assert_same(run.load(8), moving(7))
    assert alone(tmp_path).steps() == [0, 1, 3, 4, 8]


def test_a_stranded_step_is_replaced_by_the_next_save(tmp_path: Path) -> None:
    diverge(tmp_path)
    with tiers(tmp_path) as run:
        save(run, 3)
        assert run.latest() == 3
    assert run.stats()["stranded"] == []
    assert manifests(tmp_path, "fast")[3] == manifests(tmp_path, "second")[3]


def test_a_step_with_the_same_place_is_not_replaced(tmp_path: Path) -> None:
    """As after a save into the second tier itself."""
    with tiers(tmp_path) as run:
        save(run, 0)
    alone(tmp_path, "fast").save(moving(1), 1)
    alone(tmp_path).save(moving(11), 1)
    places = [alone(tmp_path, tier)._places()[1].sequence for tier in ("fast", "second")]
    assert places[0] == places[1]
    with tiers(tmp_path) as run:
        assert (run.undrained(), run.stats()["stranded"]) == ([], [1])
        assert_same(run.load(1), moving(11))
    assert_same(alone(tmp_path).load(1), moving(11))
    assert_same(alone(tmp_path, "fast").load(1), moving(1))


@pytest.mark.parametrize("what", ["saved", "deleted"])
def test_the_failure_of_a_state_that_is_gone_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The attempt fails after the step was saved again or deleted."""
    died = alone(tmp_path, "fast")
    save(died, 3)
    damage_piece(died.store, "run@3", "layer0.weight")
    failing, gone = threading.Event(), threading.Event()

    def late(message: str, *args: object) -> None:
        failing.set()
        assert gone.wait(60)

    monkeypatch.setattr(drain._log, "error", late)
    with tiers(tmp_path) as run:
        assert failing.wait(60)
        if what == "saved":
            save(run, 3)
        else:
            run.delete(3)
        gone.set()  # and no drain(), which tries anew whatever has failed
    assert run._drain
    assert run._drain.error is None
    fast, second = manifests(tmp_path, "fast"), manifests(tmp_path, "second")
    assert (3 in fast, 3 in second) == (what == "saved", what == "saved")
    assert fast.get(3) == second.get(3)


def test_a_later_state_that_appears_during_the_copy_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is saved on the second tier alone. What was not known there stays, too."""
    mount = Mount()
    run = tiers(tmp_path, mount)
    save(run, 20)  # so that the second tier has been written to
    run.drain()
    mount.open_.clear()
    mount.reached.clear()
    save(run, 0)
    assert mount.reached.wait(30)
    other = alone(tmp_path)
    other._steps.at_least(100)
    other.save(moving(5), 0)
    mount.open_.set()
    run.close()
    assert (run.undrained(), run.stats()["stranded"]) == ([], [0])
    assert "will not be drained (0)" in caplog.text
    assert_same(alone(tmp_path).load(0), moving(5))
    assert_same(alone(tmp_path, "fast").load(0), moving(0))


def test_an_empty_fast_tier_goes_on_behind_what_is_drained(tmp_path: Path) -> None:
    with tiers(tmp_path) as run:
        save(run, 5, 6, 7)
    shutil.rmtree(tmp_path / "fast")
    with tiers(tmp_path) as run:
        assert (run.steps(), run.latest()) == ([5, 6, 7], 7)
        assert_same(run.load(7), moving(7))
        save(run, 6)
        assert run.latest() == 6
        assert run.append(moving(8)).step == 8
    assert in_save_order(alone(tmp_path)._steps.places()) == [5, 7, 6, 8]


def test_what_was_saved_before_there_was_a_second_tier_is_drained_first(tmp_path: Path) -> None:
    run = alone(tmp_path, "fast")
    for step in (3, 1, 2):
        save(run, step)
    order: list[int] = []
    copy = StoreTier.copy

    def noted(self: StoreTier, step: int, *more: Any) -> None:
        order.append(step)
        copy(self, step, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreTier, "copy", noted)
        with tiers(tmp_path) as run:
            save(run, 0)
    assert order == [3, 1, 2, 0]


def test_a_second_tier_that_is_away_holds_up_nobody_until_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount, drain_backlog=3)
    save(run, 0)
    run.drain()
    mount.broken = errno.ENOSPC
    with caplog.at_level(logging.WARNING):
        save(run, 1, 2, 3)
        with pytest.raises(DrainError, match="3 steps") as caught:
            run.drain()
    assert isinstance(caught.value.__cause__, StoreError)
    assert caught.value.facts["steps"] == [1, 2, 3]
    assert not any("saves of the run" in message for message in caplog.messages)
    assert (run.latest(), run.steps()) == (3, [0, 1, 2, 3])
    assert_same(run.load(2), moving(2))
    assert repr(run).endswith("undrained=3)")
    assert run.stats()["undrained"] == 3
    assert "ENOSPC" in str(run.stats()["drain_error"]) or "space" in str(run.stats()["drain_error"])
    assert sum("is not drained yet" in record.message for record in caplog.records) == 1

    waiting = threading.Thread(target=save, args=(run, 4))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert 4 not in run.steps()
    mount.broken = None
    run.drain()
    waiting.join(60)
    assert not waiting.is_alive()
    run.close()
    assert run.stats()["drain_error"] is None
    assert alone(tmp_path).steps() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_close_says_what_is_not_drained_and_the_next_handle_drains_it(
    tmp_path: Path, code: int
) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount)
    mount.broken = code
    save(run, 0, 1)
    with pytest.raises(DrainError, match=r"2 steps of the run 'run', from 0"):
        run.close()
    assert not any(each.name == "tensor-dedup-drain" for each in threading.enumerate())
    assert alone(tmp_path, "fast").steps() == [0, 1]
    mount.broken = None
    with tiers(tmp_path):
        pass
    assert alone(tmp_path).steps() == [0, 1]


def test_a_closed_handle_that_saves_again_drains_again(tmp_path: Path) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount)
    mount.broken = errno.EIO
    save(run, 0)
    with pytest.raises(DrainError):
        run.close()
    mount.broken = None
    save(run, 1)
    run.close()
    assert alone(tmp_path).steps() == [0, 1]


def test_waiting_for_room_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = Mount()
    with tiers(tmp_path, mount, drain_backlog=1) as run:
        for step in range(0, 6, 2):
            mount.open_.clear()
            save(run, step)
            waiting = run.save_async(moving(step), step + 1)
            deadline = time.monotonic() + 60
            while not any("wait while" in message for message in caplog.messages):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.05)  # later ones say nothing when they begin to wait
            assert not waiting.done()
            mount.open_.set()
            waiting.wait()
            run.drain()
    said = [message for message in caplog.messages if "wait while" in message]
    assert len(said) == 1
    assert "saves of the run 'run' wait while a step is not drained to" in said[0]


def test_closing_does_not_wait_for_room(tmp_path: Path) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount, drain_backlog=1)
    mount.broken = errno.EIO
    save(run, 0)
    run.save_async(moving(1), 1)
    with pytest.raises(DrainError):
        run.close()
    assert alone(tmp_path, "fast").steps() == [0, 1]


def test_a_second_tier_that_is_away_when_the_run_is_opened_is_an_error(tmp_path: Path) -> None:
    tiers(tmp_path).close()
    second = open_store(tmp_path / "second", mount := Mount())
    mount.broken = errno.EIO
    with pytest.raises(StoreError):
        handle(tmp_path / "fast", drain=second)


def test_waiting_ends_in_time(tmp_path: Path) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount)
    mount.open_.clear()
    save(run, 0)
    with pytest.raises(DrainError, match=r"not drained in 0\.05 s"):
        run.drain(timeout=0.05)
    mount.open_.set()
    run.close()


def test_a_damaged_step_holds_up_no_other(tmp_path: Path) -> None:
    run = alone(tmp_path, "fast")
    save(run, 0)
    damage_piece(run.store, "run@0", "layer0.weight")
    run.save({"other": network(9)["layer0.weight"]}, 1)
    run = tiers(tmp_path)
    with pytest.raises(DrainError, match=r"1 step of the run 'run', from 0"):
        run.drain()
    assert run.undrained() == [0]
    assert alone(tmp_path).steps() == [1]
    assert alone(tmp_path, "fast").steps() == [0, 1]
    run.save(moving(0), 0)
    run.close()
    assert_same(alone(tmp_path).load(0), moving(0))


def test_what_is_damaged_on_the_fast_tier_is_read_from_the_second(tmp_path: Path) -> None:
    with tiers(tmp_path) as run:
        save(run, 0)
    damage_piece(run.store, "run@0", "layer0.weight")
    with pytest.raises(StoreError):
        alone(tmp_path, "fast").load(0)
    assert_same(tiers(tmp_path).load(0), moving(0))


def test_marks_are_those_of_both_tiers(tmp_path: Path) -> None:
    with tiers(tmp_path, keep_last=1) as run:
        save(run, 0)
        run.keep(0)
        run.drain()
        assert alone(tmp_path).kept() == {0}
        save(run, 1, 2)
        run.drain()
        assert alone(tmp_path, "fast").steps() == [2]  # and what kept 0 went with it
        assert run.steps() == [0, 2]
        assert run.kept() == {0}
        for act in (lambda: run.save(moving(0), 0), lambda: run.delete(0)):
            with pytest.raises(KeptStepError):
                act()
        run.unkeep(0)
        assert run.kept() == alone(tmp_path).kept() == set()
        save(run, 3)
        run.drain()
        assert run.steps() == [3]
        with pytest.raises(UnknownStepError):
            run.keep(0)


def test_an_import_behind_a_step_is_found_before_the_save(tmp_path: Path) -> None:
    second = open_store(tmp_path / "second")
    second.import_(write(tmp_path / "in", {"a.safetensors": safetensors(u8(a=b"x"))}), "run@0")
    with tiers(tmp_path) as run:
        with pytest.raises(NotATrainingError):
            save(run, 0)
        assert run.append(moving(1)).step == 1


def test_saves_in_the_background_are_drained(tmp_path: Path) -> None:
    with tiers(tmp_path, in_flight=2) as run:
        for step in range(5):
            model = moving(step)
            run.save_async(model, step)
            train(model, 99, "layer0.weight")  # copied when it returned
    for step in range(5):
        assert_same(alone(tmp_path).load(step), moving(step))
    assert in_save_order(alone(tmp_path)._steps.places()) == [0, 1, 2, 3, 4]


def test_an_ensemble_of_many_steps_stays_in_few_containers(tmp_path: Path) -> None:
    with tiers(tmp_path) as run:
        for step in range(70):
            run.save(forest(step + 1), step)
            run.drain()
    second = alone(tmp_path)
    with second.store.checkpoint("run@69") as checkpoint:
        assert len(checkpoint._copies._origins) < 64
    assert_same(second.load(69), forest(70))


def test_a_forked_child_drains_what_it_saves(tmp_path: Path) -> None:
    mount = Mount()
    run = tiers(tmp_path, mount)
    mount.open_.clear()
    save(run, 0)
    assert mount.reached.wait(30)  # the parent's thread is in the middle of it

    def child() -> None:
        assert run.undrained() == []
        mount.open_.set()
        save(run, 1)
        run.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert 1 in alone(tmp_path).steps()
    mount.open_.set()
    run.close()
    assert alone(tmp_path).steps() == [0, 1]


@pytest.mark.parametrize(
    "what", ["itself", "itself by URL", "keep_fast", "backlog", "no drain", "no drain, backlog"]
)
def test_options_that_make_no_sense(tmp_path: Path, what: str) -> None:
    root, second = tmp_path / "fast", tmp_path / "second"
    options: dict[str, dict[str, Any]] = {
        "itself": {"drain": root},
        "itself by URL": {"drain": root.as_uri()},
        "keep_fast": {"drain": second, "keep_fast": 0},
        "backlog": {"drain": second, "drain_backlog": 0},
        "no drain": {"keep_fast": 3},
        "no drain, backlog": {"drain_backlog": 1},
    }
    with pytest.raises(BadOptionError) as caught:
        CheckpointStore(root, "run", Arrays(), **options[what])
    assert caught.value.kind is (BadOption.DRAIN if "itself" in what else BadOption.FAST)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"in_flight": "2"}, BadOption.LIMIT),
        ({"in_flight": 1.5}, BadOption.LIMIT),
        ({"pool_bytes": "1G"}, BadOption.LIMIT),
        ({"pool_bytes": 1.5}, BadOption.LIMIT),
        ({"drain_backlog": "x"}, BadOption.FAST),
        ({"keep_fast": True}, BadOption.FAST),
        ({"drain": 5}, BadOption.DRAIN),
        ({"config": 5}, BadOption.FILES),
        ({"weights": 5}, BadOption.WEIGHTS),
    ],
    ids=str,
)
def test_options_of_another_kind(tmp_path: Path, options: Any, kind: BadOption) -> None:
    (name,) = options
    with pytest.raises(BadOptionError, match=name) as caught:
        handle(tmp_path / "fast", **({"drain": tmp_path / "second"} | options))
    assert caught.value.kind is kind
    assert repr(options[name]) in str(caught.value)


def test_whole_numbers_of_numpy_are_options(tmp_path: Path) -> None:
    with handle(tmp_path, in_flight=np.int64(2), pool_bytes=np.int64(1 << 20)) as run:
        run.save_async(moving(0), 0)
    assert run.steps() == [0]


def larger_model_of(step: int) -> Model:
    """With a tensor whose differences are so large that several threads hash them."""
    dice = np.random.default_rng(0)
    weight = dice.standard_normal(1 << 18, np.float32)
    for _ in range(step):
        weight *= 1 + dice.standard_normal(weight.size, np.float32) / 1000
    return {**moving(step), "larger": weight}


_PROGRAM = """
import sys
sys.path.insert(0, {support!r})
from store_runs.stores import handle, open_store
sys.path.insert(0, {here!r})
from test_drain import Mount, larger_model_of, tiers
from pathlib import Path
root, code = Path(sys.argv[1]), int(sys.argv[2])
mount = Mount()
run = tiers(root, mount, compress="always")
mount.broken = code or None
for step in range(3):
    run.save_async(larger_model_of(step), step)
"""


def run_program(root: Path, code: int) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    program = _PROGRAM.format(support=str(here.parents[1] / "support"), here=str(here))
    command = [sys.executable, "-c", program, str(root), str(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_program_that_ends_has_drained_its_steps(tmp_path: Path) -> None:
    done = run_program(tmp_path, 0)
    assert (done.returncode, done.stderr) == (0, "")
    for step in range(3):
        assert_same(alone(tmp_path).load(step), larger_model_of(step))


def test_a_program_that_cannot_drain_ends_and_says_so(tmp_path: Path) -> None:
    done = run_program(tmp_path, errno.EIO)
    assert done.returncode == 0
    assert "3 steps of the run 'run' are left to drain" in done.stderr
    assert alone(tmp_path).steps() == []
    with tiers(tmp_path):
        pass
    assert alone(tmp_path).steps() == [0, 1, 2]
