"""Which step is the last: what was imported is none, and who goes back to a step goes on there."""

import errno
import logging
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from processes.process_state import fork, forked
from store_runs.clocks import JUMPS, ClockedFiles, SetClock
from store_runs.disk_faults import FaultyFiles
from store_runs.stores import Gate, Model, assert_same, gated, handle, network, shares, train
from tensor_dedup.errors import StoreError
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.steps.errors import KeptStepError, NotATrainingError
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.retention import Retention
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.training import CheckpointStore

_FORK = multiprocessing.get_context("fork")


def reference(run: CheckpointStore, step: int) -> Path:
    return run.store.path / "refs" / file_of(f"{run.run_id}@{step}")


def test_what_was_imported_is_no_step_by_any_count(tmp_path: Path) -> None:
    run, model = handle(tmp_path / "store", keep_last=2), network(1)
    run.save(model, 1)
    run.store.export("run@1", tmp_path / "out")
    for step in (7, 8, 9):
        run.store.import_(tmp_path / "out", f"run@{step}")
    for _ in range(2):  # the second time it is remembered
        assert (run.steps(), run.latest()) == ([1], 1)
    run.save(model, 2)
    assert run.steps() == [1, 2]  # imports do not count among the last two
    run.save(model, 3)
    assert (run.steps(), run.latest()) == ([2, 3], 3)
    run.store.delete("run@9")
    run.save(model, 9)  # in the place that an import had: from now on it is a step
    assert (run.steps(), run.latest()) == ([3, 9], 9)
    assert {"run@7", "run@8"} <= set(run.store.handle.objects.names())
    assert shares(run)


def test_a_new_handle_encodes_against_the_last_step_not_against_an_import(tmp_path: Path) -> None:
    took = []
    for imported in (False, True):
        run, model = handle(tmp_path / f"store{imported}"), network(1)
        run.save(model, 1)
        if imported:
            run.store.export("run@1", tmp_path / "out")
            run.store.import_(tmp_path / "out", "run@2")
        run.close()
        model["layer0.weight"] *= 1.001  # little without the step before
        took.append(handle(tmp_path / f"store{imported}").save(model, 3).stored_bytes)
        assert shares(run)
    assert took[0] == took[1]


def test_a_step_that_is_kept_while_it_is_saved_again_is_not_replaced(tmp_path: Path) -> None:
    handle(tmp_path).save(network(1), 1)
    gate = Gate()
    run = gated(tmp_path, gate)
    pending = run.save_async(network(2), 1)
    assert gate.waiting.wait(60)
    handle(tmp_path).keep(1)
    gate.opened.set()
    with pytest.raises(KeptStepError, match="unkeep"):
        pending.wait()
    assert_same(run.load(1), network(1))
    assert list((tmp_path / "tmp").iterdir()) == []
    run.unkeep(1)
    assert run.save(network(2), 1).step == 1
    assert_same(run.load(1), network(2))


def test_a_training_that_goes_back_keeps_what_it_saves_from_there(tmp_path: Path) -> None:
    run, model = handle(tmp_path, keep_last=3), network(1)
    for step in range(11):
        run.save(model, step)
    assert (run.steps(), run.latest()) == ([8, 9, 10], 10)
    run.save(model, 6)
    assert (run.steps(), run.latest()) == ([6, 9, 10], 6)
    run.save(model, 7)
    run.save(model, 8)
    assert (run.steps(), run.latest()) == ([6, 7, 8], 8)
    assert handle(tmp_path).latest() == 8
    assert shares(run)


def order(run: CheckpointStore) -> list[int]:
    return in_save_order(run._steps.places())


def test_a_step_without_a_place_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such steps were saved before version 1; the time of their reference stood for the place."""
    run, texts = handle(tmp_path), Notes.to_texts
    run.save(network(1), 3)
    with monkeypatch.context() as former:
        former.setattr(
            Notes,
            "to_texts",
            lambda self: {k: v for k, v in texts(self).items() if k != "sequence"},
        )
        run.save(network(1), 4)
    run = handle(tmp_path)
    assert (run.steps(), run.latest()) == ([3], 3)
    for act in (run.load, run.delete, lambda step: run.save(network(1), step)):
        with pytest.raises(NotATrainingError, match="'run@4'"):
            act(4)
    run.store.export("run@4", tmp_path / "out")
    assert run.append(network(1)).step == 5
    assert order(run) == [3, 5]


@pytest.mark.parametrize("hours", [-1, 1, 0])
def test_a_clock_that_is_set_changes_no_order(tmp_path: Path, hours: float) -> None:
    """Back, forth, or standing still."""
    clock = SetClock()
    run, model = handle(tmp_path, files=ClockedFiles(clock), keep_last=2), network(1)
    for step in (0, 1, 2, 9, 5, 6):
        run.save(model, step)
        clock.hours += hours
        assert run.latest() == handle(tmp_path).latest() == step
    assert order(run) == [5, 6]
    dated = [reference(run, step).stat().st_mtime_ns for step in (5, 6)]
    assert (dated[0] < dated[1]) == (hours >= 0)
    assert run.save(model, 5).step == order(run)[-1] == 5  # once more
    assert order(handle(tmp_path)) == [6, 5]
    assert shares(run)


def test_steps_of_two_machines_are_in_the_order_of_saving(tmp_path: Path) -> None:
    late, early = SetClock(hours=2), SetClock(hours=-2)
    runs = [handle(tmp_path, files=ClockedFiles(clock)) for clock in (late, early)]
    saved = [7, 3, 8, 1, 9, 0, 3, 2]
    for number, step in enumerate(saved):
        runs[number % 2].save(network(1), step)
        assert [run.latest() for run in runs] == [step, step]
    assert order(runs[0]) == order(runs[1]) == [7, 8, 1, 9, 0, 3, 2]
    assert shares(runs[0])


@pytest.mark.parametrize("ruin", [None, b"", b"no text", frames.encode_text(["a", "last 9"])])
def test_the_order_outlives_the_number_that_was_given_last(
    tmp_path: Path, ruin: bytes | None
) -> None:
    model, path = network(1), tmp_path / "sequence"
    for step in (5, 4):
        handle(tmp_path).save(model, step)
    assert path.read_bytes()
    path.unlink()
    if ruin is not None:
        path.write_bytes(ruin)
    for step in (3, 2):
        handle(tmp_path).save(model, step)
    assert order(handle(tmp_path)) == [5, 4, 3, 2]
    assert handle(tmp_path).store.verify(full=True).fine


@pytest.mark.parametrize("ruin", [None, b"", b"tensor-dedup sequence\nlast 4\nchec", bytes(5000)])
def test_who_finds_no_whole_number_looks_at_the_steps(tmp_path: Path, ruin: bytes | None) -> None:
    """Whoever was killed while it wrote one leaves a part of it, and others have handles."""
    one, two = handle(tmp_path), handle(tmp_path)
    one.save(network(1), 5)
    for step in (4, 3):
        two.save(network(1), step)
    path = tmp_path / "sequence"
    path.unlink() if ruin is None else path.write_bytes(ruin)
    one.save(network(1), 2)
    two.save(network(1), 1)
    assert order(one) == order(two) == order(handle(tmp_path)) == [5, 4, 3, 2, 1]
    assert path.read_bytes() == frames.encode_text(["tensor-dedup sequence", "last 5"])


class _Others(RealFiles):
    """A disk on which the file with the number is another user's."""

    refused = 0

    def open(self, path: Path, mode: Mode) -> Handle:
        if path.name == "sequence" and mode == "modify":
            self.refused += 1
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().open(path, mode)


def test_the_number_may_be_in_another_user_s_file(tmp_path: Path) -> None:
    files = _Others()
    one, two = handle(tmp_path), handle(tmp_path, files=files)
    for step, run in enumerate([one, two, two, one, two]):
        run.save(network(1), 9 - step)
    assert order(one) == [9, 8, 7, 6, 5]
    assert files.refused == 3
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_step_in_which_nothing_changed_writes_two_files(tmp_path: Path) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    run = handle(tmp_path / "store", files=files)
    for step in range(3):
        run.save(network(1), step)
    began = len(files.log)
    assert run.save(network(1), 3).new_tensors == 0
    log = Counter(files.log[began:])
    # The manifest and the reference; its number is written where the last one stood.
    assert (log["create"], log["fsync"], log["rename"], log["pwrite"]) == (2, 2, 2, 3)
    assert log["sync_folder"] <= 3
    assert shares(run)


def test_an_unreadable_step_keeps_its_place_by_its_date(tmp_path: Path) -> None:
    clock = SetClock()
    run, model = handle(tmp_path, files=ClockedFiles(clock)), network(1)
    ruined = {}
    for step in (1, 2, 3, 4):
        train(model, step, "layer0.bias")
        clock.hours += 1
        ruined[step] = run.save(model, step).manifest
    for step in (1, 3):
        run.store.handle.objects.layout.manifest(ruined[step]).write_bytes(b"ruined")
    assert order(handle(tmp_path)) == [1, 2, 3, 4]
    run.store.handle.objects.layout.manifest(ruined[4]).write_bytes(b"ruined")
    assert handle(tmp_path).latest() == 4  # who loads it learns of the damage
    clock.hours += 1
    run = handle(tmp_path, files=ClockedFiles(clock))
    run.save(model, 3)  # who went back to 2 saves it again
    assert order(run)[-1] == 3
    assert_same(run.load(3), model)


def test_a_step_that_is_saved_again_meanwhile_is_not_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has chosen the old one; what has its name now is the latest."""
    run, other, model = handle(tmp_path, keep_last=2), handle(tmp_path), network(1)
    for step in (1, 2):
        run.save(model, step)
    dropped = Retention.dropped

    def late(self: Retention, *arguments: Any) -> list[int]:
        found = dropped(self, *arguments)
        assert found == [1]
        train(model, 7, "layer0.bias")
        other.save(model, 1)
        return found

    monkeypatch.setattr(Retention, "dropped", late)
    run.save(model, 3)
    monkeypatch.undo()
    assert order(run) == [2, 3, 1]
    assert_same(run.load(1), model)
    assert shares(run)


def model_of(who: int, step: int) -> Model:
    model = network(1)
    train(model, 100 * who + step, "layer0.bias")
    return model


def saving(root: Path, who: int, ready: Any, found: Any) -> None:
    clock = SetClock(jumps=JUMPS[who:])
    run = handle(root, files=ClockedFiles(clock))
    ready.wait(60)
    for number in range(8):
        step = 100 * (2 - who) - number  # each one counts down
        began = len(order(run))
        run.save(model_of(who, number), step)
        found.put((who, step, began))
    run.close()


def test_processes_at_once_keep_the_order_that_each_saved_in(tmp_path: Path) -> None:
    handle(tmp_path).close()
    found, ready = _FORK.Queue(), _FORK.Barrier(2)
    several = [_FORK.Process(target=saving, args=(tmp_path, who, ready, found)) for who in (0, 1)]
    for each in several:
        each.start()
    saved = [found.get(timeout=120) for _ in range(16)]
    for each in several:
        each.join()
        assert each.exitcode == 0
    run = handle(tmp_path)
    there = order(run)
    for who in (0, 1):
        own = [step for saver, step, _ in saved if saver == who]
        assert [step for step in there if step in own] == own
    sequences = [place.sequence for place in run._steps.places().values()]
    assert len(set(sequences)) == 16
    assert run.latest() in {saved[-1][1], there[-1]}
    assert shares(run)
    for who, step, _ in saved:
        assert_same(run.load(step), model_of(who, 100 * (2 - who) - step))


@pytest.mark.parametrize("rules", [{"keep_best": ("loss", 1, "min")}, {"keep_last": 1}])
def test_a_damaged_step_fails_no_later_save(
    tmp_path: Path, rules: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run, model = handle(tmp_path, **rules), network(1)
    damaged = run.save(model, 1, {"loss": 0.5}).manifest
    run.store.handle.objects.layout.manifest(damaged).write_bytes(b"damaged")
    run = handle(tmp_path, **rules)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            train(model, step, "layer0.bias")
            assert run.save(model, step, {"loss": 1.0 / step}).step == step
    assert run.steps() == [1, 3]  # it is not let go of: somebody may repair it
    assert run.metrics() == {3: {"loss": 1.0 / 3}}
    assert "step 1" in caplog.text
    with pytest.raises(StoreError):
        run.load(1)
    run.delete(1)
    assert run.steps() == [3]


class _Syncs(RealFiles):
    """What was made durable before each name of a step."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()
        self.before: set[Path] = set()

    def sync_folder(self, path: Path) -> None:
        self.folders.add(path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == "refs":
            self.before = set(self.folders)
        super().rename(source, target)


def test_what_others_have_written_is_durable_before_it_is_referred_to(tmp_path: Path) -> None:
    """Whoever wrote it may not have made its name durable yet, and fail to."""
    handle(tmp_path).save(network(1), 1)
    files = _Syncs()
    run = handle(tmp_path, files=files)
    files.folders.clear()
    assert run.save(network(1), 2).new_tensors == 0
    layout = run.store.handle.objects.layout
    name = run.store.handle.objects.ref("run@2")
    page = run.store.handle.objects.manifest(name).pages[0].hex()
    found = [layout.table(each.name, each.kind) for each in run.store.handle.objects.containers]
    for path in [layout.manifest(page), *found]:
        assert {path.parent, path.parent.parent} <= files.before


def encoding_in_a_child(root: str) -> int:
    """A child is forked while its parent encodes: it holds what the encoder keeps."""
    run, model = handle(Path(root)), network(1)
    run.save(model, 0)
    with run._saver._encoder.decisions.anchors._lock:
        child = fork()
        if not child:
            signal.alarm(60)
            code = 1
            try:
                model["layer0.weight"] *= 1.001
                code = run.save(model, 1).step - 1
            finally:
                os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_encodes(tmp_path: Path) -> None:
    assert forked(lambda: encoding_in_a_child(str(tmp_path))) == 0
    assert handle(tmp_path).steps() == [0, 1]
