"""A training with two tiers dies in place of every single operation of its drain.

After each death the disks of both tiers forget: nothing (a kill), the bytes that were not synced,
or names and bytes (a power cut); writes are torn in their middle too. Then the second tier alone
holds whole steps and the last one that was there before; what was saved is on one tier or the
other; a name means the same on both, unless the fast tier has a later state that is still to be
drained; and the next handle drains the rest.
"""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from store_runs.disk_faults import (
    CHANGES,
    NEEDS_SPACE,
    WRITES,
    Crash,
    Faults,
    FaultyFiles,
    Loss,
    some_changes,
)
from store_runs.stores import assert_same, handle, open_store, shares
from tensor_dedup.store.format.identity import writer_in
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.tiers import drain as drain_module
from tensor_dedup.training.tiers.drain import Drain
from training_runs.drains import ACTS, OLD, Act, Steps, drain, held, model_of

LOSSES: list[Loss] = ["everything", "bytes", "nothing"]
# Of the changes that come before a name appears or goes, short forms try one in so many.
_ONE_IN = {"next steps": 16}
_ONE_IN_OF_OTHERS = 60


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread drains: the test does, in its own, so that operations come in one order."""
    monkeypatch.setattr(Drain, "_run_thread", lambda self: None)
    monkeypatch.setattr(drain_module, "_FIRST_PAUSE_S", 0.0)


class Scene:
    """Runs one act on copies of two tiers, with a fault at each of its operations in turn."""

    points = 0

    def __init__(self, folder: Path, act: Act) -> None:
        self.folder, self._act = folder, act
        template = folder / "template"
        run = self.open(template, None)
        for step in OLD:
            run.save(model_of(step), step)
        drain(run)
        act.before(run)
        assert shares(run)
        kinds = {path.suffix for path in (template / "second" / "containers").rglob("*.*")}
        assert kinds == {".pack", ".delta"}

    def open(self, folder: Path, files: FaultyFiles | None, **more: Any) -> CheckpointStore:
        second = open_store(folder / "second", files)
        return handle(folder / "fast", files=files, drain=second, **(more or self._act.options))

    def stage(self, faults: Faults) -> tuple[Path, FaultyFiles]:
        folder = self.folder / "stage"
        shutil.copytree(self.folder / "template", folder)
        (folder / "limbo").mkdir()
        return folder, FaultyFiles(folder / "limbo", faults)

    def operations(self) -> list[tuple[int, str]]:
        """The operations of the act, undisturbed."""
        folder, files = self.stage(Faults())
        run = self.open(folder, files)
        began = 0 if self._act.opening else len(files.log)
        self._act.act(run)
        assert self.check(folder) == self._act.second[-1]
        shutil.rmtree(folder)
        return list(enumerate(files.log[began:], began))

    def check(self, folder: Path) -> Steps:
        """What the second tier was after the fault; then the next handle goes on."""
        Scene.points += 1
        second = held(handle(folder / "second"))
        assert second in self._act.second
        fast = handle(folder / "fast")
        run = self.open(folder, None)
        both = held(run)
        assert both in self._act.both
        kept = run.kept()
        assert kept in self._act.kept
        for step in {*fast.steps(), *second} - {*run.undrained()}:
            stores = fast.store, open_store(folder / "second")
            names = {store.manifest(f"run@{step}") for store in stores}
            assert len(names - {None}) == 1, step
        order = in_save_order(run._places())
        for store in (fast.store, open_store(folder / "second")):
            assert store.verify(full=True).faults == []
            store.gc(0)
        run = self.open(folder, None)
        drain(run)
        assert run.undrained() == []
        run.save(model_of(7), 7)
        drain(run)
        shutil.rmtree(folder / "fast")
        left = handle(folder / "second")
        assert left.kept() == kept
        final = [step for step in order if step in left.steps()]
        assert in_save_order(left._places()) == [*final, 7]
        if self._act.options.get("keep_last") is None:
            assert held(left) == {**both, 7: 7}
        assert left.store.verify(full=True).faults == []
        left.store.gc(0)
        assert held(left)[7] == 7
        return second


@pytest.fixture(params=["some losses", pytest.param("all losses", marks=pytest.mark.long)])
def every(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all losses"


@pytest.mark.parametrize("name", ACTS)
def test_dying_at_every_operation(folder: Path, name: str, every: bool) -> None:
    scene, seen = Scene(folder, ACTS[name]), list[Steps]()
    operations = scene.operations()
    commits = [number for number, operation in operations if operation == "unlink"]
    commits = commits[:: 3 if name in _ONE_IN else 16]
    some = some_changes(operations, _ONE_IN.get(name, _ONE_IN_OF_OTHERS))
    some |= {*commits, *(number + 1 for number in commits)}
    changes = 0
    for number, operation in operations:
        if operation not in CHANGES:
            if every and number % 7 == 0:
                die(scene, Faults(stop_at=number), "nothing")
            continue  # a death there leaves what one at the next change leaves
        changes += 1
        if not every and number not in some:
            continue
        # A name may be there, or not, that was not synced: both are tried.
        few = {"everything", "nothing"} if operation == "sync_folder" else {LOSSES[changes % 3]}
        for loss in LOSSES:
            if every or loss in few:
                seen.append(die(scene, Faults(stop_at=number), loss))
        if operation in WRITES and (every or changes % 3 == 0):
            seen.append(die(scene, Faults(stop_at=number, torn=True), "nothing"))
    assert changes >= 2
    assert all(state in seen for state in ACTS[name].second)


def die(scene: Scene, faults: Faults, loss: Loss) -> Steps:
    folder, files = scene.stage(faults)
    with pytest.raises(Crash):
        scene._act.act(scene.open(folder, files))
    files.lose(loss)
    if loss == "bytes":  # the index was ahead of the disk; here it is gone altogether
        for path in folder.glob("*/index.sqlite*"):
            path.unlink()
    found = scene.check(folder)
    shutil.rmtree(folder)
    return found


# Readers wait for a sweep, which nothing else is waiting for.
@pytest.mark.parametrize("name", [name for name in ACTS if name != "sweeping"])
def test_no_reader_of_a_tier_sees_what_is_half_there(folder: Path, name: str, every: bool) -> None:
    """Somebody loads every step of the second tier, and of both, before each single operation."""
    scene, act = Scene(folder, ACTS[name]), ACTS[name]
    operations = [number for number, _ in scene.operations()]
    one_in = (1 if len(operations) < 100 else 2) if every else len(operations) // 25
    stage, files = scene.stage(Faults())
    seen: list[Steps] = []

    def look() -> None:
        seen.append(held(handle(stage / "second")))
        assert seen[-1] in act.second
        assert held(scene.open(stage, None)) in act.both
        fast, second = handle(stage / "fast"), open_store(stage / "second")
        for step in {*fast.steps()} & {*seen[-1]} - {*scene.open(stage, None).undrained()}:
            assert fast.store.manifest(f"run@{step}") == second.manifest(f"run@{step}")

    run = scene.open(stage, files)
    files._faults = Faults(at=dict.fromkeys(operations[:: max(1, one_in)], look))
    act.act(run)
    look()
    assert len(seen) > 10
    assert [*dict.fromkeys(map(str, seen))] == [*dict.fromkeys(map(str, act.second))]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((name, "everything") for name in ACTS),
        ("next steps", "bytes"),
        *(
            pytest.param(name, "bytes", marks=pytest.mark.long)
            for name in ACTS
            if name != "next steps"
        ),
    ],
)
def test_what_is_drained_survives_a_power_cut(folder: Path, name: str, loss: Loss) -> None:
    scene = Scene(folder, ACTS[name])
    stage, files = scene.stage(Faults())
    scene._act.act(scene.open(stage, files))
    files.lose(loss)
    assert scene.check(stage) == ACTS[name].second[-1]


def test_two_deaths_in_one_drain(folder: Path, every: bool) -> None:
    """A kill before a name is synced; who goes on relies on that name, and then the power goes."""
    scene, dice = Scene(folder, ACTS["next steps"]), random.Random(1)
    operations = scene.operations()
    changes = [number for number, operation in operations if operation in CHANGES]
    killed = [number for number, operation in operations if operation == "sync_folder"]
    for first in killed[:: 1 if every else 5]:
        for second in (None, dice.choice(changes)) if every else (None,):
            stage, files = scene.stage(Faults(stop_at=first))
            with pytest.raises(Crash):
                drain(scene.open(stage, files))
            unsynced = [*files._journal]
            files.lose("nothing")
            (stage / "again").mkdir()
            again = FaultyFiles(stage / "again", Faults(stop_at=second))
            again._journal += unsynced
            with contextlib.suppress(Crash):
                drain(scene.open(stage, again))
            again.lose("everything")
            scene.check(stage)
            shutil.rmtree(stage)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_operation_that_fails_is_done_again(folder: Path, code: int, every: bool) -> None:
    scene, failed = Scene(folder, ACTS["next steps"]), 0
    changes = [number for number, operation in scene.operations() if operation in CHANGES]
    for number in changes[:: 1 if every else 13]:
        stage, files = scene.stage(Faults(fail={number: code}))
        run = scene.open(stage, files)
        assert run._drain is not None
        failures = 0
        while run._drain.work_once():
            failures += run._drain.error is not None
        failed += failures
        assert run.undrained() == []
        assert scene.check(stage) == ACTS["next steps"].second[-1]
        shutil.rmtree(stage)
    assert failed >= 5


def test_a_full_second_tier_loses_nothing(folder: Path, every: bool) -> None:
    scene = Scene(folder, ACTS["next steps"])
    needing = [number for number, operation in scene.operations() if operation in NEEDS_SPACE]
    failed = 0
    for number in needing[:: 1 if every else 17]:
        stage, files = scene.stage(Faults(full_from=number))
        run = scene.open(stage, files)
        assert run._drain is not None
        for _ in range(4):
            run._drain.work_once()
        # The last that needs space is the note of what was drained, which may be missing.
        assert (run._drain.error is None) == (run.undrained() == [])
        failed += run._drain.error is not None
        scene.check(stage)
        shutil.rmtree(stage)
    assert failed


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_is_saved_again_at_any_lock_is_not_lost(
    folder: Path, step: int, every: bool
) -> None:
    """Another handle saves it whenever the drain is about to take a lock."""
    scene = Scene(folder, ACTS["next steps"])
    locks = [number for number, operation in scene.operations() if operation == "flock"]
    assert len(locks) > 10
    for number in locks[:: 1 if every else 4 if step == 1 else 7]:
        stage, files = scene.stage(Faults())
        files._faults = Faults(at={number: partial(save_again, stage, step)})
        run = scene.open(stage, files)
        drain(run)
        assert held(run)[step] == 6
        run = scene.open(stage, None)
        drain(run)
        assert held(handle(stage / "second")) == {**OLD, 2: 2, 3: 3, step: 6}
        shutil.rmtree(stage)


def save_again(stage: Path, step: int) -> None:
    run = handle(stage / "fast")
    run._steps.at_least(1000)  # it may have no step that would tell it where to go on
    run.save(model_of(6), step)


_TRAINING = """
import sys
sys.path[:0] = {paths!r}
from training_runs.drains import model_of
from store_runs.stores import handle, open_store
root = sys.argv[1]
run = handle(root + "/fast", drain=open_store(root + "/second"), keep_fast=2)
latest = run.latest()
step = 0 if latest is None else latest + 1
while True:
    run.save(model_of(step % 6), step, {{"number": step % 6}})
    print(step, flush=True)
    step += 1
"""


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.long)])
def test_a_training_that_is_killed(tmp_path: Path, kills: int) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    program, dice, saved = _TRAINING.format(paths=paths), random.Random(kills), -1
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        saved = int(process.stdout.readline())
        time.sleep(dice.random() / 2)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        saved = int(rest[-1]) if rest else saved
        second = handle(tmp_path / "second")
        for step in second.steps()[-3:]:
            assert_same(second.load(step), model_of(step % 6))
        assert second.steps() == [*range(len(second.steps()))]  # in order, without a gap
        run = handle(tmp_path / "fast", drain=second.store, keep_fast=2)
        assert run.steps()[: saved + 1] == [*range(saved + 1)]
        assert_same(run.load(saved), model_of(saved % 6))
    drain(run)
    assert handle(tmp_path / "second").steps() == run.steps()
    assert handle(tmp_path / "second").store.verify(full=True).faults == []


def test_a_tier_that_takes_over_dies_at_every_operation(folder: Path, every: bool) -> None:
    """It drains nothing; the first one goes on, and it comes back: nothing is replaced or lost.

    It dies in front of the token, after it, or while it saves.
    """

    def open_(where: Path, name: str, files: FaultyFiles | None = None) -> CheckpointStore:
        second = open_store(where / "second", files)
        return handle(where / name, files=files, drain=second, compress=None)

    first = open_(folder / "template", "fast")
    for step in OLD:
        first.save(model_of(step), step)
    drain(first)
    open_store(folder / "template" / "other")

    def stage(faults: Faults) -> tuple[Path, FaultyFiles]:
        where = folder / "stage"
        shutil.copytree(folder / "template", where)
        (where / "limbo").mkdir()
        return where, FaultyFiles(where / "limbo", faults)

    def save(where: Path, files: FaultyFiles) -> None:
        run = open_(where, "other", files)
        for step in (2, 3):
            run.save(model_of(step), step)

    where, files = stage(Faults())
    save(where, files)
    shutil.rmtree(where)
    some = some_changes(enumerate(files.log), 1 if every else 16)
    seen = set[tuple[int, tuple[int, ...]]]()
    for at, number in enumerate(sorted(some)):
        for loss in LOSSES if every else LOSSES[at % 3 : at % 3 + 1]:
            where, files = stage(Faults(stop_at=number))
            with pytest.raises(Crash):
                save(where, files)
            files.lose(loss)
            Scene.points += 1
            run = open_(where, "fast")
            for step in (2, 3, 4):
                run.save(model_of(step + 2), step)
            drain(run)
            assert (run.undrained(), run.stats()["stranded"]) == ([], [])
            taken = writer_in((where / "second" / "writers" / "run").read_bytes(), "run")
            assert taken is not None
            left = {step: step for step in handle(where / "other").steps()}
            run = open_(where, "other")
            drain(run)
            assert (run.undrained(), run.stats()["stranded"]) == ([], [*left])
            assert held(run) == {**OLD, 2: 4, 3: 5, 4: 6}
            seen.add((taken.generation, (*left,)))
            second = handle(where / "second")
            assert held(second) == {**OLD, 2: 4, 3: 5, 4: 6}
            assert second.latest() == 4
            assert held(handle(where / "other")) == left
            shutil.rmtree(where)
    # Of the first one: it was not replaced, or took the token back.
    assert seen == {(1, ()), (3, ()), (3, (2,)), (3, (2, 3))}
