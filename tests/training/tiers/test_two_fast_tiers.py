"""Two fast tiers used in turn in front of one second tier: none undoes what the other one did."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from store_runs.stores import alone, assert_same, handle, moving, open_store
from tensor_dedup.remote import transfer
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.files import RealFiles
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DivergedStepError, DivergedTierError, DrainError
from tensor_dedup.training.tiers.remote_tier import RemoteTier
from tensor_dedup.training.tiers.second_tier import StoreTier


class Away(RealFiles):
    """A second tier that can be away."""

    away = False

    def listdir(self, path: Path) -> list[str]:
        if self.away:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().listdir(path)


@pytest.fixture(params=["folder", "url"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A second tier in a folder, as a store or as a remote."""
    folder = tmp_path / "second"
    return str(folder) if request.param == "folder" else folder.as_uri()


def one(root: Path, drain: Any, **more: Any) -> CheckpointStore:
    return handle(root / "one", drain=drain, **more)


def two(root: Path, drain: Any, **more: Any) -> CheckpointStore:
    return handle(root / "two", drain=drain, **more)


def save(run: CheckpointStore, *steps: int, plus: int = 0) -> None:
    for step in steps:
        run.save(moving(step + plus), step)


def without(folder: Path, run: CheckpointStore, *steps: int, plus: int) -> None:
    """Save steps while the second tier is away, and end."""
    folder.rename(folder.with_name("unmounted"))
    try:
        save(run, *steps, plus=plus)
        with pytest.raises(DrainError):
            run.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name("unmounted").rename(folder)


def gone_on(root: Path, second: str) -> None:
    """Two saves 3 to 5 and cannot drain them; one, which does not know of that, drains 3 to 6."""
    with one(root, second) as run:
        save(run, 0, 1, 2)
    run = two(root, second)
    assert run.latest() == 2
    without(root / "second", run, 3, 4, 5, plus=10)
    with one(root, second) as run:
        save(run, 3, 4, 5, 6)


def assert_as_one_left_it(root: Path, second: str) -> None:
    run = handle(root / "reader", drain=second)
    assert (run.steps(), run.latest()) == ([0, 1, 2, 3, 4, 5, 6], 6)
    for step in run.steps():
        assert_same(run.load(step), moving(step))


def test_a_fast_tier_without_which_the_other_one_went_on_is_refused(
    tmp_path: Path, second: str
) -> None:
    gone_on(tmp_path, second)
    for _ in range(2):
        with pytest.raises(DivergedTierError, match="4 steps from 3 to 6") as caught:
            two(tmp_path, second)
    assert (caught.value.facts["steps"], caught.value.facts["theirs"]) == ([3, 4, 5], [3, 4, 5, 6])
    for text in (str(tmp_path / "two"), second, "runs delete run --step", "push run@STEP"):
        assert text in str(caught.value)
    assert_as_one_left_it(tmp_path, second)
    left = alone(tmp_path, "two")
    assert left.steps() == [3, 4, 5]
    for step in (3, 4, 5):
        assert_same(left.load(step), moving(step + 10))
    with one(tmp_path, second) as run:  # which nobody refuses
        save(run, 7)
        assert run.latest() == 7


def test_what_the_error_says_ends_the_quarrel(tmp_path: Path, second: str) -> None:
    gone_on(tmp_path, second)
    left = alone(tmp_path, "two")
    left.delete(3)
    with pytest.raises(DivergedTierError, match="2 steps from 4 to 5 here"):
        two(tmp_path, second)
    transfer.push(left.store, second, "run@5", replace=True)
    left.delete(4)
    with two(tmp_path, second) as run:
        assert (run.undrained(), run.latest()) == ([], 5)
        assert_same(run.load(5), moving(15))
        assert_same(run.load(4), moving(4))
        save(run, 8)
        assert run.latest() == 8
    with one(tmp_path, second) as run:
        assert run.latest() == 8
        assert_same(run.load(5), moving(15))


def test_a_fast_tier_goes_on_where_nobody_else_has(tmp_path: Path, second: str) -> None:
    with one(tmp_path, second) as run:
        save(run, 0, 1, 2)
    run = two(tmp_path, second)
    without(tmp_path / "second", run, 1, 3, plus=10)
    for _ in range(2):  # saved again by now, and drained
        with two(tmp_path, second) as run:
            run.drain()
            assert (run.undrained(), run.latest()) == ([], 3)
            assert_same(run.load(1), moving(11))
            save(run, 3, plus=20)
    with one(tmp_path, second) as run:
        assert_same(run.load(3), moving(23))
        save(run, 4)
    with two(tmp_path, second) as run:
        assert run.latest() == 4


def test_a_fast_tier_that_is_open_meanwhile_drains_no_more(tmp_path: Path) -> None:
    place = open_store(tmp_path / "second", disk := Away())
    with one(tmp_path, tmp_path / "second") as other:
        save(other, 0, 1, 2)
    run = two(tmp_path, place)
    disk.away = True
    save(run, 3, 4, plus=10)
    with one(tmp_path, tmp_path / "second") as other:
        save(other, 3, 4, 5)
    disk.away = False
    save(run, 6)  # no save is held up
    with pytest.raises(DrainError, match="3 steps") as caught:
        run.close()
    assert isinstance(caught.value.__cause__, DivergedTierError)
    assert alone(tmp_path).steps() == [0, 1, 2, 3, 4, 5]
    for step in range(6):
        assert_same(alone(tmp_path).load(step), moving(step))
    assert alone(tmp_path, "two").steps() == [3, 4, 6]
    with pytest.raises(DivergedTierError):
        two(tmp_path, tmp_path / "second")


def test_what_comes_late_and_before_is_not_replaced(tmp_path: Path) -> None:
    """One dies undrained, two goes on; then each of them drains what it has left."""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1)
    save(alone(tmp_path, "one"), 4, 5)
    with two(tmp_path, tmp_path / "second") as run:
        save(run, 2)
    without(tmp_path / "second", two(tmp_path, tmp_path / "second"), 4, 6, plus=10)
    with one(tmp_path, tmp_path / "second") as run:
        assert run.latest() == 2  # what it drains late comes before that
    run = two(tmp_path, tmp_path / "second")
    with pytest.raises(DrainError, match="from 4, is not") as caught:
        run.close()
    assert isinstance(caught.value.__cause__, DivergedTierError)
    assert (run.steps(), run.latest()) == ([0, 1, 2, 4, 5, 6], 6)
    assert_same(run.load(6), moving(16))
    for root in (alone(tmp_path), run):
        assert_same(root.load(4), moving(4))
    assert_same(alone(tmp_path, "two").load(4), moving(14))
    alone(tmp_path, "two").delete(4)
    with two(tmp_path, tmp_path / "second") as run:
        assert run.undrained() == []


@pytest.mark.parametrize("keep", [None, 2])
def test_a_step_that_is_saved_as_it_was_is_the_same(tmp_path: Path, keep: int | None) -> None:
    """A resumed training saves the step that it has loaded; of one's own there is no note."""
    with one(tmp_path, tmp_path / "second", keep_fast=keep) as run:
        save(run, 2, 3)
    # As when it is killed before that.
    shutil.rmtree(tmp_path / "one" / "drains", ignore_errors=True)
    with two(tmp_path, tmp_path / "second") as run:
        run.save(run.load(3), 3)
    assert alone(tmp_path, "one").manifest(3) != alone(tmp_path).manifest(3)
    with one(tmp_path, tmp_path / "second", keep_fast=keep) as run:
        run.drain()
        assert (run.undrained(), run.latest()) == ([], 3)
        assert_same(run.load(3), moving(3))


def test_a_tier_that_lets_go_of_nothing_knows_what_it_has_drained(tmp_path: Path) -> None:
    with one(tmp_path, tmp_path / "second", keep_fast=None) as run:
        save(run, 3)
    with one(tmp_path, tmp_path / "third", keep_fast=None) as run:
        run.drain()
    with two(tmp_path, tmp_path / "second") as run:
        run.save(moving(30), 3)
    with one(tmp_path, tmp_path / "third", keep_fast=None) as run:
        assert_same(run.load(3), moving(3))
    with one(tmp_path, tmp_path / "second", keep_fast=None) as run:
        run.drain()  # what is here was drained before, so nothing is named
        assert_same(run.load(3), moving(30))


def test_a_run_that_was_trained_apart_replaces_nothing(tmp_path: Path) -> None:
    """The first time that a fast tier meets the second one, which has another training's steps."""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1, 2)
    apart = alone(tmp_path, "two")
    save(apart, 5, 6, 7, 8, plus=10)
    apart.save(moving(11), 1)
    with pytest.raises(DivergedTierError, match="the step 1 here"):
        two(tmp_path, tmp_path / "second")
    assert_same(alone(tmp_path).load(1), moving(1))
    apart.delete(1)
    with two(tmp_path, tmp_path / "second") as run:  # nothing is in the way of the others
        run.drain()
    assert alone(tmp_path).steps() == [0, 1, 2, 5, 6, 7, 8]


def test_what_a_second_tier_got_directly_is_not_taken_for_what_was_drained(tmp_path: Path) -> None:
    """A training goes on without a fast tier, and goes back a step further than that had drained"""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1)
    save(alone(tmp_path, "one"), 2, 3, plus=10)
    save(alone(tmp_path), 1, 2, 3, plus=20)
    run = one(tmp_path, tmp_path / "second")
    with pytest.raises(DrainError) as caught:
        run.close()
    assert isinstance(caught.value.__cause__, DivergedStepError)
    assert run.undrained() == [2, 3]
    for step in (1, 2, 3):
        assert_same(alone(tmp_path).load(step), moving(step + 20))
    for step in (2, 3):
        assert_same(alone(tmp_path, "one").load(step), moving(step + 10))


def test_what_another_handle_has_drained_is_known(tmp_path: Path) -> None:
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0)
    reader = one(tmp_path, tmp_path / "second")
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 1)
        run.drain()
        alone(tmp_path, "one").save(moving(11), 1)
        assert_same(reader.load(1), moving(11))
        reader.drain()
    assert_same(alone(tmp_path).load(1), moving(11))


def test_a_damaged_note_counts_as_none(tmp_path: Path) -> None:
    gone_on(tmp_path, str(tmp_path / "second"))
    (tmp_path / "two" / "drains" / "run").write_bytes(b"damaged")
    with pytest.raises(DivergedTierError):
        two(tmp_path, tmp_path / "second")
    (tmp_path / "one" / "drains" / "run").write_bytes(b"damaged")
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 7)
    assert alone(tmp_path).steps() == [*range(8)]


@pytest.mark.parametrize("again", [3, 4])
def test_a_copy_that_failed_claims_no_step_that_another_one_drains_then(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """Both go on from the same step, and give the same places."""
    with one(tmp_path, second) as run:
        save(run, 2)

    def full(*_: object) -> None:
        raise NoSpaceError.at(tmp_path, "the disk is full")

    run = two(tmp_path, second)
    with monkeypatch.context() as patch:
        for kind in (StoreTier, RemoteTier):
            patch.setattr(kind, "copy", full)
        save(run, 3, plus=10)
        with pytest.raises(DrainError):
            run.drain()
        save(run, again, plus=11)
        with pytest.raises(DrainError):
            run.close()
    other = handle(tmp_path / "three", drain=second)
    save(other, 3)
    other.close()
    with pytest.raises(DivergedTierError):
        two(tmp_path, second)
    reader = handle(tmp_path / "reader", drain=second)
    assert reader.steps() == [2, 3]
    assert_same(reader.load(3), moving(3))
