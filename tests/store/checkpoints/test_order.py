"""Which step is the last: what was imported is none, and who goes back to a step goes on there."""

from pathlib import Path

import pytest

from gates import Gate, gated
from steps import assert_same, handle, network, shares
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import PinnedStepError
from tensor_dedup.store.names import file_of


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
    assert {"run@7", "run@8"} <= set(run.store.objects.names())
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
