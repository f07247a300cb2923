"""Steps that are numbered as they come: whoever appends at one moment gets another number."""

import multiprocessing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from store_runs.stores import Arrays, Model, assert_same, handle, network, shares, train
from tensor_dedup.store.errors import NameTakenError
from tensor_dedup.store.writing.run_cache import Places
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.piece_writer import PieceWriter

_FORK = multiprocessing.get_context("fork")
_EACH = 6


class Late(Arrays):
    """Is at its work while another handle appends: it has counted before, and commits after."""

    def __init__(self, other: CheckpointStore, times: int) -> None:
        super().__init__()
        self.other, self.left = other, times

    def extract(self, model: Model) -> Any:
        if self.left:
            self.left -= 1
            self.other.append(network(7))
        return super().extract(model)


def test_who_comes_late_gets_the_next_step(tmp_path: Path) -> None:
    other = handle(tmp_path)
    late = CheckpointStore(tmp_path, "run", Late(other, 2))
    saved = [late.append(network(1)).step, late.append(network(2)).step]
    assert saved == [2, 3]
    assert late.steps() == [0, 1, 2, 3]
    assert shares(late)
    for step, seed in enumerate([7, 7, 1, 2]):
        assert_same(late.load(step), network(seed))
    assert late.store.verify(full=True).faults == []


def test_it_counts_on_from_what_is_there(tmp_path: Path) -> None:
    run = handle(tmp_path)
    run.save(network(1), 4)
    assert run.append(network(1), {"loss": 0.5}).step == 5
    assert run.metrics() == {4: {}, 5: {"loss": 0.5}}
    run.delete(5)
    run.keep(4)
    assert run.append(network(2)).step == 5
    with pytest.raises(NameTakenError, match="run@5"):
        run.commit(run.snapshot(network(3), 5).as_new())
    assert_same(run.load(5), network(2))


def test_what_another_one_saves_meanwhile_is_not_stored_against_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was unknown when it was looked up, and stands in the step before when it is encoded."""
    mine, other = handle(tmp_path), handle(tmp_path)
    look_up, meanwhile = PieceWriter._look_up, [network(1)]

    def late(self: PieceWriter, digests: Collection[bytes]) -> dict[bytes, Places]:
        found = look_up(self, digests)
        if meanwhile:
            other.append(meanwhile.pop())
        return found

    monkeypatch.setattr(PieceWriter, "_look_up", late)
    assert mine.append(network(1)).step == 1
    assert mine.store.verify(full=True).faults == []
    for step in range(2):
        assert_same(mine.load(step), network(1))


def model_of(who: int, step: int) -> Model:
    model = network(1)
    train(model, 100 * who + step, "layer0.weight")
    return model


def appending(root: Path, who: int, ready: Any, found: Any) -> None:
    run = handle(root)
    ready.wait(60)
    for step in range(_EACH):
        found.put((run.append(model_of(who, step)).step, who, step))


def test_processes_never_get_one_step(tmp_path: Path) -> None:
    handle(tmp_path).close()
    found, ready = _FORK.Queue(), _FORK.Barrier(3)
    several = [_FORK.Process(target=appending, args=(tmp_path, n, ready, found)) for n in range(3)]
    for each in several:
        each.start()
    saved = sorted(found.get(timeout=120) for _ in range(3 * _EACH))
    for each in several:
        each.join()
        assert each.exitcode == 0
    run = handle(tmp_path)
    assert [step for step, _, _ in saved] == run.steps() == list(range(3 * _EACH))
    assert shares(run)
    for step, who, number in saved:
        assert_same(run.load(step), model_of(who, number))
