"""Which step is the last: what was imported is none, and who goes back to a step goes on there."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import fresh
from stores import Gate, assert_same, gated, handle, network, shares, train
from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import PinnedStepError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format.names import file_of

TICK_S = 0.02  # files are dated by a clock of a few milliseconds


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
    run.save(model, 9)  # in place of an import: from now on it is a step
    assert (run.steps(), run.latest()) == ([3, 9], 9)
    assert {"run@7", "run@8"} <= set(run.store._objects.names())
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


def test_a_step_that_is_pinned_while_it_is_saved_again_is_not_replaced(tmp_path: Path) -> None:
    handle(tmp_path).save(network(1), 1)
    gate = Gate()
    run = gated(tmp_path, gate)
    pending = run.save_async(network(2), 1)
    assert gate.waiting.wait(60)
    handle(tmp_path).pin(1)
    gate.opened.set()
    with pytest.raises(PinnedStepError, match="unpin"):
        pending.wait()
    assert_same(run.load(1), network(1))
    assert list((tmp_path / "tmp").iterdir()) == []
    run.unpin(1)
    assert run.save(network(2), 1).step == 1
    assert_same(run.load(1), network(2))


def test_a_training_that_goes_back_keeps_what_it_saves_from_there(tmp_path: Path) -> None:
    run, model = handle(tmp_path, keep_last=3), network(1)
    for step in range(11):
        run.save(model, step)
    assert (run.steps(), run.latest()) == ([8, 9, 10], 10)
    time.sleep(TICK_S)
    run.save(model, 6)
    assert (run.steps(), run.latest()) == ([6, 9, 10], 6)
    run.save(model, 7)
    run.save(model, 8)
    assert (run.steps(), run.latest()) == ([6, 7, 8], 8)
    assert handle(tmp_path).latest() == 8
    assert shares(run)


def test_steps_of_one_time_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    for step in (3, 10, 9):
        time.sleep(TICK_S)
        run.save(model, step)
    assert run.latest() == 9
    for step in run.steps():
        os.utime(reference(run, step), (1000, 1000))
    assert run.latest() == 10
    assert shares(run)


@pytest.mark.parametrize("rules", [{"keep_best": ("loss", 1, "min")}, {"keep_last": 1}])
def test_a_damaged_step_fails_no_later_save(
    tmp_path: Path, rules: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run, model = handle(tmp_path, **rules), network(1)
    damaged = run.save(model, 1, {"loss": 0.5}).manifest
    run.store._objects.layout.manifest(damaged).write_bytes(b"damaged")
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
    layout = run.store._objects.layout
    name = run.store._objects.ref("run@2")
    page = run.store._objects.manifest(name).pages[0].hex()
    found = [layout.table(each.name, each.kind) for each in run.store._objects.containers()]
    for path in [layout.manifest(page), *found]:
        assert {path.parent, path.parent.parent} <= files.before


def encoding_in_a_child(root: str) -> int:
    """A child is forked while its parent encodes: it holds what the encoder keeps."""
    run, model = handle(Path(root)), network(1)
    run.save(model, 0)
    deltas = run._saver._deltas
    assert deltas is not None
    with deltas.anchors._lock:
        child = os.fork()
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
    assert fresh.call(encoding_in_a_child, str(tmp_path)) == 0
    assert handle(tmp_path).steps() == [0, 1]
