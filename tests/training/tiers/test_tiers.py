"""A fast tier in front of a lasting one: which one that is, and the space of what has left it."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_runs.disk_faults import Crash, Faults, FaultyFiles
from store_runs.stores import Model, alone, assert_same, handle, moving, open_store
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.store import locks
from tensor_dedup.store.containers import Containers
from tensor_dedup.store.errors import NoSpaceError, NoStoreError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format import frames
from tensor_dedup.store.upkeep.gc import sweep_now
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DrainError, OtherTierError
from tensor_dedup.training.tiers.two_tiers import TwoTiers


def save(run: CheckpointStore, *steps: int) -> None:
    for step in steps:
        run.save(moving(step), step)


def size(root: Path, tier: str) -> int:
    folder = root / tier / "containers"
    return sum(path.stat().st_size for path in folder.rglob("*.*"))


@pytest.fixture(params=["folder", "url"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A second tier in a folder, as a store or as a remote."""
    folder = tmp_path / "second"
    return str(folder) if request.param == "folder" else folder.as_uri()


def test_a_second_tier_that_is_not_mounted_is_an_error(tmp_path: Path, second: str) -> None:
    folder, aside = tmp_path / "second", tmp_path / "unmounted"

    def run(drain: str = second) -> CheckpointStore:
        return handle(tmp_path / "fast", drain=drain, keep_fast=2)

    with run() as opened:
        save(opened, 0, 1, 2, 3)
    assert (opened.undrained(), alone(tmp_path, "fast").steps()) == ([], [2, 3])
    folder.rename(aside)
    for _ in range(2):  # with an empty mount point, and without
        with pytest.raises(OtherTierError, match="mount that disk") as caught:
            run()
        assert str(tmp_path / "fast") in str(caught.value)
        assert second in str(caught.value)
        folder.mkdir(exist_ok=True)
        assert list(folder.iterdir()) == []
    folder.rmdir()
    other = second.replace("/second", "/other")
    with handle(tmp_path / "elsewhere", drain=other) as opened:
        save(opened, 7)
    with pytest.raises(OtherTierError, match="is empty or another one") as caught:
        run(other)
    assert other in str(caught.value)
    aside.rename(folder)
    with run() as opened:
        save(opened, 4, 5)
        assert opened.steps() == [0, 1, 2, 3, 4, 5]
    folder.rename(aside)
    Path(str(caught.value.facts["note"])).unlink()  # to start over on purpose
    with run() as opened:
        save(opened, 6)
        assert opened.steps() == [4, 5, 6]
    with run() as opened:
        assert opened.steps() == [4, 5, 6]


def test_a_second_tier_that_another_process_is_making(tmp_path: Path) -> None:
    (tmp_path / "limbo").mkdir()
    whole = FaultyFiles(tmp_path / "limbo")
    open_store(tmp_path / "made", whole)
    assert len(whole.log) > 10
    for number in range(len(whole.log)):  # as far as the other one has come
        root, limbo = tmp_path / str(number), tmp_path / f"limbo {number}"
        limbo.mkdir()
        with pytest.raises(Crash):
            open_store(root / "second", FaultyFiles(limbo, Faults(stop_at=number)))
        if not (root / "second" / "FORMAT").exists():
            with pytest.raises(NoStoreError):
                Store.open(root / "second", create=False)
        with handle(root / "fast", drain=root / "second") as run:
            save(run, 0)
        assert alone(root, "second").steps() == [0]


def test_a_relative_folder_is_that_of_its_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with handle(Path("fast"), drain="second") as run:
        monkeypatch.chdir("elsewhere")
        save(run, 0)
    assert alone(tmp_path, "second").steps() == [0]
    assert [*Path().iterdir()] == []


def test_what_lets_go_of_nothing_is_drained_anywhere(tmp_path: Path, second: str) -> None:
    with handle(tmp_path / "fast", drain=second) as run:
        save(run, 0, 1)
    for name in ("one", "two"):  # as `runs drain` does, for a copy
        copy = second.replace("/second", f"/{name}")
        with handle(tmp_path / "fast", drain=copy, keep_fast=None) as run:
            run.drain()
        with handle(tmp_path / "elsewhere", drain=copy, keep_fast=None) as run:
            assert run.steps() == [1]
    with handle(tmp_path / "fast", drain=second) as run:
        assert run.steps() == [0, 1]


def test_a_second_tier_that_goes_away_loses_nothing(tmp_path: Path, second: str) -> None:
    folder, aside = tmp_path / "second", tmp_path / "unmounted"
    run = handle(tmp_path / "fast", drain=second)
    save(run, 0, 1, 2, 3)
    run.drain()
    assert alone(tmp_path, "fast").steps() == [3]
    folder.rename(aside)
    folder.mkdir()
    save(run, 4, 5, 6, 7)
    assert run.steps() == [0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(DrainError):
        run.close()
    assert alone(tmp_path, "fast").steps() == [3, 4, 5, 6, 7]
    assert run.undrained() == [4, 5, 6, 7]
    assert not (folder / "FORMAT").exists()
    shutil.rmtree(folder)
    with handle(tmp_path / "elsewhere", drain=second) as other:  # another one in its place
        save(other, 9)
    for call in (lambda: run.delete(4), run.prune, run.metrics, run.drain):
        with pytest.raises(StoreError, match="is empty or another one"):
            call()
    with pytest.raises(DrainError):
        run.close()
    shutil.rmtree(folder)
    aside.rename(folder)
    with handle(tmp_path / "fast", drain=second) as run:
        run.drain()
        assert run.steps() == [0, 1, 2, 3, 4, 5, 6, 7]
        for step in range(8):
            assert_same(run.load(step), moving(step))


def test_a_fast_tier_without_a_note_gets_one(tmp_path: Path, second: str) -> None:
    with handle(tmp_path / "fast", drain=second, keep_fast=2) as run:
        save(run, 0, 1)
    note, identity = tmp_path / "fast" / "tiers" / "run", tmp_path / "second" / "identity"
    first = note.read_bytes()
    note.unlink()
    identity.unlink()
    with handle(tmp_path / "fast", drain=second, keep_fast=2) as run:
        save(run, 2)
        assert run.steps() == [0, 1, 2]
    assert note.read_bytes() != first
    again = identity.read_bytes()
    note.write_bytes(b"damaged")  # which protects no more, and stops nobody
    with handle(tmp_path / "fast", drain=second) as run:
        save(run, 3)
    assert identity.read_bytes() == again
    assert b"second tier" in note.read_bytes()


def test_a_note_that_says_more_protects_all_the_same(tmp_path: Path, second: str) -> None:
    """As those from before version 1 do, which counted what was drained."""
    with handle(tmp_path / "fast", drain=second, keep_fast=2) as run:
        save(run, 0, 1)
    note = tmp_path / "fast" / "tiers" / "run"
    lines = frames.decode_text(note.read_bytes(), note)
    note.write_bytes(frames.encode_text([*lines, "drained 0"]))
    with pytest.raises(OtherTierError):
        handle(tmp_path / "fast", drain=str(tmp_path / "empty"))
    assert not (tmp_path / "empty").exists()
    with handle(tmp_path / "fast", drain=second) as run:
        save(run, 2)
        assert run.steps() == [0, 1, 2]


class SmallDisk(RealFiles):
    """A disk on which the files of one store have no more than so many bytes together."""

    def __init__(self, root: Path, capacity: int) -> None:
        self.root, self.capacity = root, capacity

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        if self.used() + len(data) > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
        super().pwrite(handle, data, offset)

    def used(self) -> int:
        """Bytes of the files; other threads remove some of them while they are counted."""
        total = 0
        for path in self.root.rglob("*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return total


def noise(seed: int) -> Model:
    return {"weight": np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)}


def test_the_space_of_what_was_let_go_of_is_freed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"drain_backlog": 2, "compress": None}
    with handle(tmp_path / "fast", drain=tmp_path / "second", **options) as run:
        assert run.save({"a": noise(0)["weight"], "b": noise(0)["weight"]}, 0).new_tensors == 1
        for step in range(1, 12):
            run.save(noise(step), step)
        run.drain()
        assert alone(tmp_path, "fast").steps() == [11]
    assert size(tmp_path, "second") > 12 << 20
    # Its last step, and what was let go of since the last sweep.
    assert size(tmp_path, "fast") < 4 << 20
    assert alone(tmp_path, "fast").store.verify(full=True).faults == []


def test_a_save_to_a_store_that_is_gone_keeps_no_other_one_from_its_space(tmp_path: Path) -> None:
    with handle(tmp_path / "other") as other:
        other.save(noise(0), 0)
        base = other._saver.base()
        assert base.is_there()
        (tmp_path / "other").rename(tmp_path / "away")
        assert not base.is_there()
        try:
            test_the_space_of_what_was_let_go_of_is_freed(tmp_path)
        finally:
            (tmp_path / "away").rename(tmp_path / "other")
            base.release()


def test_saves_in_flight_count_on_nothing_that_is_swept(tmp_path: Path) -> None:
    """A tensor that goes back and forth is found in a step that is let go of meanwhile."""
    back, forth = (noise(seed)["weight"] for seed in (100, 101))
    options: dict[str, Any] = {"drain_backlog": 1, "in_flight": 2, "compress": None}

    def model(step: int) -> Model:
        return {"flips": (back, forth)[step % 2].copy(), **noise(step)}

    with handle(tmp_path / "fast", drain=tmp_path / "second", **options) as run:
        pending = [run.save_async(model(step), step) for step in range(30)]
        saved = [each.wait() for each in pending]
    assert [each.step for each in saved if each.new_tensors == 1]
    assert alone(tmp_path).steps() == [*range(30)]
    for step in (0, 15, 29):
        assert_same(alone(tmp_path).load(step), model(step))
    # It is swept all the same, and lets go of all but its last.
    assert alone(tmp_path, "fast").steps() == [29]
    assert size(tmp_path, "fast") < 8 << 20
    assert alone(tmp_path, "fast").store.verify(full=True).faults == []


def test_nothing_is_swept_while_a_save_counts_on_a_deleted_step(tmp_path: Path) -> None:
    with handle(tmp_path / "fast", drain=tmp_path / "second", compress=None) as run:
        for step in range(2):
            run.save(noise(step), step)
        run.drain()
        assert isinstance(run._tiers, TwoTiers)
        base = run._saver.base()
        assert len(base.pieces) == 1
        run.delete(1)
        for left in (2, 0):
            run._tiers.space.sweep(10)
            assert size(tmp_path, "fast") >> 20 == left
            assert not run._saver.base().pieces  # what begins now counts on nothing
            base.release()


def test_a_full_fast_tier_is_swept_before_a_save_fails(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "fast", 5 << 20)
    run = handle(
        tmp_path / "fast",
        files=disk,
        drain=open_store(tmp_path / "second"),
        drain_backlog=20,  # so that nothing is swept before
        compress=None,
    )
    with run:
        for step in range(9):
            run.save(noise(step), step)
            if step < 5:  # later on what is undrained fills the disk, which is waited for
                run.drain()
            assert_same(run.load(step), noise(step))
    assert alone(tmp_path).steps() == [*range(9)]
    # What is not drained, or not let go of, stays: then the disk is full.
    run = handle(
        tmp_path / "fast",
        files=disk,
        drain=open_store(tmp_path / "second"),
        keep_fast=None,
        compress=None,
    )

    def fill() -> None:
        for step in range(9, 15):
            run.save(noise(step), step)

    with pytest.raises(NoSpaceError):
        fill()
    run.close()
    assert [s for s in run.steps() if s >= 9]
    for step in run.steps():
        assert_same(run.load(step), noise(step))


def test_a_sweep_reads_before_anybody_has_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in the store it reads no table, page or manifest again, and sees what came since."""
    run, other = handle(tmp_path, compress=None), handle(tmp_path, "other", compress=None)
    for step in range(3):
        run.save(noise(step), step)
        other.save(noise(10 + step), step)
    run.delete(1)
    read, before = list[Path](), list[int]()
    whole, ending = StoreFolder.read, Containers._trailer

    def reading(self: StoreFolder, path: Path, limit: int = 1 << 30) -> bytes:
        read.append(path)
        return whole(self, path, limit)

    def trailer(self: Containers, path: Path) -> bytes:
        read.append(path)
        return ending(self, path)

    monkeypatch.setattr(StoreFolder, "read", reading)
    monkeypatch.setattr(Containers, "_trailer", trailer)
    meanwhile(monkeypatch, lambda: other.save(noise(20), 20))
    plan = sweep_now(run.store.handle.objects, 10, lambda: before.append(len(read)))
    again = [path for path in read[before[0] :] if path.parent.name != "refs"]
    assert {*again} & {*read[: before[0]]} == set()
    assert len(again) == 3  # of the step that came since: manifest, page, container
    assert plan.freed_bytes >= 1 << 20
    assert other.steps() == [0, 1, 2, 20]
    assert_same(other.load(20), noise(20))
    assert run.store.verify(full=True).fine


def test_a_sweep_that_another_one_was_quicker_than_is_sure_of_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = handle(tmp_path, compress=None)
    for step in range(3):
        run.save(noise(step), step)

    def collected() -> None:
        for step in (0, 1):
            run.delete(step)
        run.store.gc(0)
        run.save({**noise(5), "first": noise(1)["weight"]}, 1)
        run.delete(2)

    meanwhile(monkeypatch, collected)
    sweep_now(run.store.handle.objects, 10, lambda: None)
    sweep_now(run.store.handle.objects, 10, lambda: None)
    assert size_of(tmp_path) >> 20 == 2
    assert_same(run.load(1), {**noise(5), "first": noise(1)["weight"]})
    assert run.store.verify(full=True).fine


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen once, between the look at a store and the sweep."""
    acts = [act]

    @contextmanager
    def sweep(*args: Any, **options: Any) -> Iterator[None]:
        for each in acts[:1]:
            acts.clear()
            each()
        with real(*args, **options):
            yield

    real = locks.sweep
    monkeypatch.setattr(locks, "sweep", sweep)


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "containers").rglob("*.*"))
