"""A training dies, or the disk is full, at every single operation of a save, a delete, a retention.

After each death the disk forgets: nothing (a kill), bytes that were not synced, or names and bytes
(a power cut); writes are torn in their middle too. Then every step that is there is whole, nothing
that was saved is gone, and the run goes on. The clock of every other training is set back and forth
by hours from one operation to the next; the steps are in the order in which they were saved.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from store_runs.clocks import JUMPS, ClockedFiles, SetClock, stand_still
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
from store_runs.stores import (
    KIB,
    Model,
    assert_same,
    copied,
    forest,
    handle,
    network,
    shares,
    train,
)
from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.steps.runs import in_save_order
from tensor_dedup.store.writing import containers
from tensor_dedup.training import CheckpointStore, HostPool, piece_writer
from tensor_dedup.training.capture import CaptureContext, StepCapture

LOSSES: list[Loss] = ["everything", "bytes", "nothing"]
CONFIG = {"config.json": "{}"}
_READS_TRIED = 7
# Of the changes of an act short forms try one in so many; of this one the most.
_MOST, _ONE_IN_OF_MOST, _ONE_IN = "next save", 2, 8


@pytest.fixture(autouse=True)
def _equal_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still(monkeypatch)


@cache
def model_of(step: int) -> Model:
    """A network of which a tensor of each size moves, and an ensemble that grows."""
    model = network(1)
    for seed in range(step + 1):
        train(model, seed, "layer1.weight", "layer2.weight", "layer2.bias")
    return {**model, **forest(20 + 3 * step)}


@cache
def embedding_of(step: int) -> Model:
    """A table of a leaf and a bit that grows, and of which numbers behind the leaf move."""
    dice = np.random.default_rng(0)
    table = dice.integers(0, 256, LEAF_BYTES + (300 + 3 * step) * KIB, np.uint8)
    table[LEAF_BYTES : LEAF_BYTES + step] += 1
    return {"embedding": table, "frozen": np.arange(10), "step": np.full(10, step)}


@cache
def touched_of(step: int) -> Model:
    """A table of two leaves and a bit, of which each step replaces another one."""
    table = np.random.default_rng(0).integers(0, 256, 2 * LEAF_BYTES + 300 * KIB, np.uint8)
    for number in range(1, step + 1):
        leaf = table[number % 3 * LEAF_BYTES :][:LEAF_BYTES]
        leaf[:] = np.random.default_rng(number).integers(0, 256, leaf.size, np.uint8)
    return {"embedding": table, "frozen": np.arange(10), "step": np.full(10, step)}


@cache
def rows_of(step: int) -> Model:
    """A table of two leaves, of which few numbers move."""
    table = np.random.default_rng(0).integers(0, 256, 2 * LEAF_BYTES, np.uint8)
    table[LEAF_BYTES : LEAF_BYTES + 100 * step] += 1
    return {"embedding": table, "frozen": np.arange(10), "step": np.full(10, step)}


# How the table of step 1 is stored.
BY_LEAF: dict[Callable[[int], Model], str] = {
    embedding_of: "parts",
    touched_of: "parts",
    rows_of: "leaves",
}


@dataclass(frozen=True)
class Act:
    """What is done to a run with the steps 0 and 1: first undisturbed, then with a fault."""

    before: Callable[[CheckpointStore], object]
    act: Callable[[CheckpointStore], object]
    states: tuple[set[int], ...]
    options: dict[str, Any]
    model: Callable[[int], Model] = model_of


def delete_and_gc(run: CheckpointStore) -> None:
    run.delete(0)
    run.gc(0)


def delete_and_gc_a_middle_one(run: CheckpointStore) -> None:
    run.delete(1)
    run.gc(0)


def nothing(run: CheckpointStore) -> None:
    """A new process: what follows is its first save."""


def streamed(run: CheckpointStore) -> None:
    """A save in the background that writes what is captured before it knows the rest."""
    extracted = run._extract(model_of(2), 2, None, None)
    context = CaptureContext(HostPool(1 << 24), [], set(), run._saver.base().pieces)
    step = StepCapture(extracted, context)
    step.hold()
    assert sum(want.private for _, want in step.arriving()) >= 2
    # Piece by piece, each on its way to the disk before the next is looked at.
    with patch.object(piece_writer, "_BATCH", 1), patch.object(containers, "_TOGETHER", 1):
        run.commit(step)


ACTS = {
    "streamed save": Act(nothing, streamed, ({0, 1}, {0, 1, 2}), {}),
    "next streamed save": Act(
        lambda run: run.save(model_of(1), 1), streamed, ({0, 1}, {0, 1, 2}), {"compress": None}
    ),
    "first save": Act(nothing, lambda run: run.save(model_of(2), 2), ({0, 1}, {0, 1, 2}), {}),
    "next save": Act(
        lambda run: run.save(model_of(2), 2),
        lambda run: run.save(model_of(3), 3, {"loss": 1.0}),
        ({0, 1, 2}, {0, 1, 2, 3}),
        {},
    ),
    "replacing": Act(
        lambda run: run.save(model_of(1), 1), lambda run: run.save(model_of(1), 1), ({0, 1},), {}
    ),
    "delete": Act(nothing, lambda run: run.delete(0), ({0, 1}, {1}), {}),
    "retention": Act(
        nothing,
        lambda run: run.save(model_of(2), 2),
        ({0, 1}, {0, 1, 2}, {1, 2}, {2}),
        {"keep_last": 1},
    ),
    "mark": Act(nothing, lambda run: run.keep(0), ({0, 1},), {}),
    "save of leaves in common": Act(
        nothing,
        lambda run: run.save(embedding_of(2), 2),
        ({0, 1}, {0, 1, 2}),
        {"compress": None},
        embedding_of,
    ),
    "save beside parts": Act(
        nothing,
        lambda run: run.save(touched_of(2), 2),
        ({0, 1}, {0, 1, 2}),
        {"compress": None},
        touched_of,
    ),
    "save of changed rows": Act(
        nothing, lambda run: run.save(rows_of(2), 2), ({0, 1}, {0, 1, 2}), {}, rows_of
    ),
    # Step 2 has the leaf that step 1 has changed.
    "delete and gc of who stored a part": Act(
        lambda run: run.save(touched_of(2), 2),
        delete_and_gc_a_middle_one,
        ({0, 1, 2}, {0, 2}),
        {"compress": None},
        touched_of,
    ),
    # Step 1 has leaves of what step 0 has put, which stays.
    "delete and gc of what leaves are of": Act(
        nothing, delete_and_gc, ({0, 1}, {1}), {}, embedding_of
    ),
}


class Scene:
    """Runs one act on copies of a store, with a fault at each of its operations in turn."""

    points = jumps = 0

    def __init__(self, folder: Path, act: Act) -> None:
        self.folder, self._act = folder, act
        self._disk: ClockedFiles | None = None
        files = FaultyFiles(self._made(folder / "limbo"))
        run = handle(folder / "template", files=files, config=CONFIG)
        for step in (0, 1):
            run.save(act.model(step), step)
        assert shares(run)
        kinds = {path.suffix for path in (folder / "template" / "containers").rglob("*.*")}
        by_leaf = BY_LEAF.get(act.model)
        assert kinds == {".pack", ".delta", *([".slab"] if by_leaf else [])}
        assert {"leaves", "parts"} & run.store.stats().codecs.keys() == {by_leaf} - {None}
        run.close()

    def _made(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        return folder

    def _handle(self, store: Path, files: FaultyFiles) -> CheckpointStore:
        return handle(store, files=files, config=CONFIG, **self._act.options)

    def stage(self, name: str, faults: Faults) -> tuple[Path, FaultyFiles]:
        folder = self.folder / name
        shutil.copytree(self.folder / "template", folder / "store")
        return folder, self._files(folder / "limbo", faults)

    def _files(self, limbo: Path, faults: Faults | None = None) -> FaultyFiles:
        return FaultyFiles(self._made(limbo), faults, inner=self._disk)

    def next(self) -> None:
        """Another case; every other one has a clock that jumps."""
        jumps = Scene.points % 2 > 0
        self._disk = ClockedFiles(SetClock(jumps=JUMPS)) if jumps else None
        Scene.points += 1
        Scene.jumps += jumps

    def operations(self) -> Iterator[tuple[int, str]]:
        """The operations of the act, undisturbed."""
        folder, files = self.stage("undisturbed", Faults())
        run = self._handle(folder / "store", files)
        self._act.before(run)
        began = len(files.log)
        self._act.act(run)
        log = files.log[began:]
        run.close()
        shutil.rmtree(folder)
        yield from enumerate(log, began)

    def play(self, store: Path, files: FaultyFiles) -> CheckpointStore:
        run = self._handle(store, files)
        self._act.before(run)
        self._act.act(run)
        return run

    def check(self, folder: Path) -> set[int]:
        """Which steps are there; each is what was saved, and the run can go on."""
        files = self._files(folder / "after")
        run = handle(folder / "store", files=files, config=CONFIG)
        steps = set(run.steps())
        assert steps in self._act.states
        order = in_save_order(run._steps.places())
        assert order == sorted(steps)
        assert run.latest() == order[-1]
        self._check_all(run, steps)
        assert run.store.verify(full=True).faults == []
        run.gc(0)
        run.save(self._act.model(5), 5)
        assert in_save_order(run._steps.places()) == [*order, 5]
        self._check_all(run, {*steps, 5})
        assert run.store.verify(full=True).faults == []
        run.close()
        return steps

    def _check_all(self, run: CheckpointStore, steps: set[int]) -> None:
        for step in steps:
            assert_same(run.load(step), self._act.model(step))


@pytest.fixture(params=["some losses", pytest.param("all losses", marks=pytest.mark.long)])
def every(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all losses"


def _one_in(name: str, every: bool) -> int:
    return 1 if every else _ONE_IN_OF_MOST if name == _MOST else _ONE_IN


@pytest.mark.parametrize("name", ACTS)
def test_dying_at_every_operation(tmp_path: Path, name: str, every: bool) -> None:
    scene, seen = Scene(tmp_path, ACTS[name]), set[int]()
    operations, one_in = [*scene.operations()], _one_in(name, every)
    some, turn = some_changes(operations, one_in), itertools.count()
    for number, operation in operations:
        if number not in some and (operation in CHANGES or number % (one_in * _READS_TRIED)):
            continue  # a death there leaves what one at the next change leaves
        losses = LOSSES if every and operation in CHANGES else LOSSES[next(turn) % 3 :][:1]
        cases = [(Faults(stop_at=number), loss) for loss in losses]
        if operation == "sync_folder" and "nothing" not in losses:  # the name may be there
            cases.append((Faults(stop_at=number), "nothing"))
        if operation in WRITES:
            cases.append((Faults(stop_at=number, torn=True), "nothing"))
        for faults, loss in cases:
            scene.next()
            folder, files = scene.stage("stage", faults)
            with pytest.raises(Crash):
                scene.play(folder / "store", files)
            files.lose(loss)
            if loss == "bytes":  # the index was ahead of the disk; here it is gone altogether
                for path in (folder / "store").glob("index.sqlite*"):
                    path.unlink()
            seen.add(len(scene.check(folder)))
            shutil.rmtree(folder)
    assert len(seen) == len({len(state) for state in ACTS[name].states})


# A reader waits for a gc to end, which here would wait for the reader.
@pytest.mark.parametrize("name", [name for name in ACTS if "gc" not in name])
def test_no_reader_sees_a_step_before_its_pieces(tmp_path: Path, name: str, every: bool) -> None:
    """Steps that have names are loaded before each operation; in short runs, of one act only."""
    scene, seen = Scene(tmp_path, ACTS[name]), list[set[int]]()
    log, one_in = [*scene.operations()], 1 if name == _MOST else _one_in(name, every)
    some = some_changes(log, one_in)
    operations = [number for number, _ in log if number in some or number % one_in == 0]
    folder, files = scene.stage("stage", Faults())

    def look() -> None:
        run = handle(folder / "store")
        steps = set(run.steps())
        scene._check_all(run, steps)
        seen.append(steps)

    files._faults = Faults(at=dict.fromkeys(operations, look))
    scene.play(folder / "store", files).close()
    assert len(seen) == len(operations)
    look()
    assert all(steps in ACTS[name].states or steps == {0, 1} for steps in seen)
    assert seen[-1] == ACTS[name].states[-1]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((name, "everything") for name in ACTS),
        *(
            pytest.param(name, "bytes", marks=[] if "save" in name else pytest.mark.long)
            for name in ACTS
        ),
    ],
)
def test_what_has_returned_survives_a_power_cut(tmp_path: Path, name: str, loss: Loss) -> None:
    scene = Scene(tmp_path, ACTS[name])
    folder, files = scene.stage("stage", Faults())
    scene.play(folder / "store", files)
    files.lose(loss)
    assert scene.check(folder) == ACTS[name].states[-1]


@pytest.mark.parametrize("name", ["first save", "next save", "retention"])
def test_a_full_disk_loses_nothing(tmp_path: Path, name: str, every: bool) -> None:
    scene, tried = Scene(tmp_path, ACTS[name]), 0
    operations = [*scene.operations()]
    some = some_changes(operations, 1 if every else 3)
    for number, operation in operations:
        if operation in NEEDS_SPACE and number in some:
            scene.next()
            folder, files = scene.stage("stage", Faults(full_from=number))
            with pytest.raises(NoSpaceError, match="gc"):
                scene.play(folder / "store", files)
            assert scene.check(folder) == ACTS[name].states[0]
            shutil.rmtree(folder)
            tried += 1
    assert tried >= 8


def test_a_handle_goes_on_when_there_is_space_again(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path / "limbo")
    (tmp_path / "limbo").mkdir()
    run, model = handle(tmp_path / "store", files=files), network(1)
    run.save(model, 0)
    kept = copied(model)
    train(model, 1, "layer0.weight")
    files._faults = Faults(full_from=0)
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            run.save(model, 1)
    files._faults = Faults()
    assert run.steps() == [0]
    assert run.save(model, 1).new_tensors == 1
    assert shares(run)
    assert_same(run.load(0), kept)
    assert_same(run.load(1), model)


@pytest.mark.parametrize("code", [errno.EIO, pytest.param(errno.EACCES, marks=pytest.mark.long)])
def test_an_operation_that_fails_once_can_be_done_again(
    tmp_path: Path, code: int, every: bool
) -> None:
    scene = Scene(tmp_path, ACTS["next save"])
    operations, one_in = [*scene.operations()], 1 if every else 6
    some = some_changes(operations, one_in)
    for number, operation in operations:
        if number not in some and (operation in CHANGES or number % (3 * one_in * _READS_TRIED)):
            continue
        scene.next()
        folder, files = scene.stage("stage", Faults(fail={number: code}))
        run = scene._handle(folder / "store", files)
        run.save(model_of(2), 2)
        try:
            run.save(model_of(3), 3)
        except StoreError:
            run.save(model_of(3), 3)
        assert run.steps() == [0, 1, 2, 3]
        assert_same(run.load(3), model_of(3))
        run.close()
        scene.check(folder)
        shutil.rmtree(folder)


class _LastSyncFails(FaultyFiles):
    """A disk that fails to make references durable, as when the process is killed just before."""

    failing = False

    def sync_folder(self, path: Path) -> None:
        if self.failing and path.name == "refs":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().sync_folder(path)


@pytest.mark.parametrize("act", ["replace", "delete"])
def test_gc_deletes_nothing_that_a_power_cut_gives_a_name_again(tmp_path: Path, act: str) -> None:
    (tmp_path / "limbo").mkdir()
    files = _LastSyncFails(tmp_path / "limbo")
    run = handle(tmp_path / "store", files=files)
    run.save(model_of(0), 0)
    files.failing = True
    with pytest.raises(StoreError):
        run.save(model_of(3), 0) if act == "replace" else run.delete(0)
    assert run.steps() == ([0] if act == "replace" else [])  # seen, and not durable
    files.failing = False
    assert run.gc(0).freed_bytes > 0
    run.close()
    files.lose("everything")
    run = handle(tmp_path / "store")
    assert run.steps() == ([0] if act == "replace" else [])
    for step in run.steps():
        assert_same(run.load(step), model_of(3))
    assert run.store.verify(full=True).faults == []


def test_that_was_often_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        jumps = f"{Scene.jumps} of them with a clock that jumps"
        print(f"\nfaults of runs: {Scene.points}, {jumps}")  # noqa: T201 (the number is a result)
    assert Scene.points >= 300
    assert Scene.jumps >= 150
