"""Two fast tiers in front of one second tier: one is the writer, nothing of the other is lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_runs.remotes import MemoryBucket, s3
from store_runs.stores import alone, assert_same, handle, moving, open_store
from tensor_dedup.cli import main
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, transfer
from tensor_dedup.store.errors import NoSpaceError, StoreIOError
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.format.identity import Writer, writer_in, writer_text
from tensor_dedup.store.steps.errors import DrainedRunError
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import DrainError, OtherTierError, RunTakenError
from tensor_dedup.training.tiers.drain import Drain
from tensor_dedup.training.tiers.remote_tier import RemoteTier
from tensor_dedup.training.tiers.second_tier import StoreTier
from tensor_dedup.training.tiers.two_tiers import TwoTiers
from training_runs.drains import pulled

TURN = 1 << 20


class Unreadable(RealFiles):
    """A disk that cannot read the files with a name for a time."""

    name = ""

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode == "read" and self.name and self.name in path.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, mode)


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


@pytest.fixture(params=["folder", "url", "memory", pytest.param("s3", marks=pytest.mark.long)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A second tier of each kind."""
    if request.param == "s3":
        with s3():
            yield "s3://bucket/runs"
    elif request.param == "memory":
        yield Remote(MemoryBucket())
    else:
        folder = tmp_path / "second"
        yield str(folder) if request.param == "folder" else folder.as_uri()


def one(root: Path, drain: Any, **more: Any) -> CheckpointStore:
    return handle(root / "one", drain=drain, **more)


def two(root: Path, drain: Any, **more: Any) -> CheckpointStore:
    return handle(root / "two", drain=drain, **more)


def save(run: CheckpointStore, *steps: int, plus: int = 0) -> None:
    for step in steps:
        run.save(moving(step + plus), step)


def read(root: Path, second: Any) -> CheckpointStore:
    """What the second tier has, read without becoming its writer."""
    if isinstance(second, str) and "://" not in second:
        return handle(Path(second))
    return pulled(root / "reader", second.bucket if isinstance(second, Remote) else second)


def token(second: Any) -> Writer | None:
    if isinstance(second, str) and "://" not in second:
        return writer_in((Path(second) / "writers" / "run").read_bytes(), "run")
    remote = second if isinstance(second, Remote) else Remote.open(second)
    found = remote.bucket.get("writers/run", 1 << 14)
    return None if found is None else writer_in(found[0], "run")


def written(fast: Path) -> list[Path]:
    """The files in which a save would leave something."""
    folders = ("containers", "manifests", "refs", "tmp")
    return sorted(path for folder in folders for path in (fast / folder).rglob("*"))


def stranded(run: CheckpointStore) -> object:
    return run.stats()["stranded"]


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
    run = read(root, second)
    assert (run.steps(), run.latest()) == ([0, 1, 2, 3, 4, 5, 6], 6)
    for step in run.steps():
        assert_same(run.load(step), moving(step))


# A writer that is replaced


@pytest.mark.parametrize("anywhere", ["folder", "url", "memory", "s3"], indirect=True)
def test_an_earlier_writer_meets_the_token_and_keeps_its_steps(
    tmp_path: Path, anywhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = one(tmp_path, anywhere)
    save(first, 0, 1)
    first.drain()
    with two(tmp_path, anywhere) as other:
        (said,) = (text for text in caplog.messages if "in place of" in text)
        assert f"{tmp_path / 'one'} (generation 1)" in said
        save(other, 2, 3)
        assert first.undrained() == []
        save(first, 2, plus=10)  # no save reads the second tier for it
        with pytest.raises(RunTakenError) as caught:
            first.drain()
        where = str(getattr(anywhere, "url", anywhere))
        facts = dict(caught.value.facts)
        assert str(facts.pop("where")).endswith(f":{tmp_path / 'two'}")
        path = str(tmp_path / "one")
        expected = {"run": "run", "path": path, "second": where, "generation": 2, "steps": [2]}
        assert facts == expected
        assert "open the run again here" in str(caught.value)
        before = written(tmp_path / "one")
        for act in (
            lambda: save(first, 4),
            lambda: first.append(moving(4)),
            lambda: first.save_async(moving(4), 4),
            lambda: first.keep(2),
            lambda: first.unkeep(2),
            lambda: first.delete(2),
            first.drain,
            first.close,
            lambda: first.drain(wait=False),
        ):
            with pytest.raises(RunTakenError):
                act()
        assert written(tmp_path / "one") == before
        assert first.undrained() == [2]
        assert "is written to" in str(first.stats()["drain_error"])
        for thread in threading.enumerate():
            if thread.name == "tensor-dedup-drain":
                thread.join(30)
                assert not thread.is_alive()
        save(other, 4)
    left = read(tmp_path, anywhere)
    assert (left.steps(), left.latest()) == ([0, 1, 2, 3, 4], 4)
    for step in left.steps():
        assert_same(left.load(step), moving(step))
    assert_same(alone(tmp_path, "one").load(2), moving(12))


@pytest.mark.parametrize("act", ["delete", "prune", "keep", "unkeep", "let go"])
def test_an_earlier_writer_changes_nothing_on_the_second_tier(
    tmp_path: Path, anywhere: Any, act: str
) -> None:
    first = one(tmp_path, anywhere, keep_fast=None if act in ("keep", "let go") else 1)
    save(first, 0, 1)
    first.keep(1)
    first.drain()
    pruning = one(tmp_path, anywhere, keep_last=1)
    two(tmp_path, anywhere).close()

    def keep() -> None:
        first.keep(0)  # its mark is copied by the drain
        first.drain()

    acts: dict[str, Callable[[], object]] = {
        "delete": lambda: first.delete(0),
        "prune": pruning.prune,
        "keep": keep,
        "unkeep": lambda: first.unkeep(1),
    }
    if act == "let go":
        assert isinstance(first._tiers, TwoTiers)
        first._tiers._keep_fast = 1
        first._tiers.tidy()
        assert alone(tmp_path, "one").steps() == [0, 1]
        with pytest.raises(RunTakenError):
            first.drain()
    else:
        with pytest.raises(RunTakenError):
            acts[act]()
    left = read(tmp_path, anywhere)
    assert (left.steps(), left.kept()) == ([0, 1], {1})


def test_a_step_on_the_second_tier_alone_is_not_kept_by_an_earlier_writer(
    tmp_path: Path, anywhere: Any
) -> None:
    first = one(tmp_path, anywhere)
    save(first, 0, 1)
    first.drain()
    assert alone(tmp_path, "one").steps() == [1]
    two(tmp_path, anywhere).close()
    with pytest.raises(RunTakenError):
        first.keep(0)
    assert read(tmp_path, anywhere).kept() == set()


@pytest.mark.parametrize("what", ["step", "mark"])
def test_the_token_is_met_where_a_name_appears(tmp_path: Path, anywhere: Any, what: str) -> None:
    """Another tier becomes the writer while a step, or the mark of one, is on its way."""
    first = one(tmp_path, anywhere)
    save(first, 0)
    first.drain()
    assert isinstance(first._tiers, TwoTiers)
    taken = list[CheckpointStore]()
    content = first._tiers.second.content

    def meanwhile() -> Any:
        found = content()
        if not taken:
            taken.append(two(tmp_path, anywhere))
        return found

    if what == "mark":
        alone(tmp_path, "one").keep(0)
    first._tiers.second.content = meanwhile  # type: ignore[method-assign]
    if what == "mark":
        first._tiers.on_keep(0)
    else:
        save(first, 1)
    with pytest.raises(RunTakenError):
        first.close()
    (other,) = taken
    left = read(tmp_path, anywhere)
    assert (left.steps(), left.kept(), other.steps()) == ([0], set(), [0])
    other.close()


@pytest.mark.parametrize("act", ["delete", "prune", "unkeep", "keep"])
def test_what_another_writer_writes_just_then_stays(tmp_path: Path, act: str) -> None:
    """It becomes the writer, and saves the step, in the middle of a change on a remote."""
    remote = Remote(MemoryBucket())
    first = one(tmp_path, remote)
    save(first, 0, 1)
    if act == "unkeep":
        first.keep(0)
    first.drain()
    first = one(tmp_path, remote, keep_last=1)
    assert isinstance(first._tiers, TwoTiers)
    second, taken = first._tiers.second, list[CheckpointStore]()
    looks = {"unkeep": "check_mark", "keep": "place"}.get(act, "check_deletable")
    look = getattr(second, looks)

    def meanwhile(step: int) -> Any:
        found = look(step)
        if not taken:
            taken.append(two(tmp_path, remote))
            taken[0].unkeep(0)
            save(taken[0], 0, plus=10)
            if act == "unkeep":
                taken[0].keep(0)
            taken[0].close()
        return found

    setattr(second, looks, meanwhile)
    acts: dict[str, Callable[[], object]] = {
        "delete": lambda: first.delete(0),
        "prune": first.prune,
        "unkeep": lambda: first.unkeep(0),
        "keep": lambda: first.keep(0),
    }
    with pytest.raises(RunTakenError):
        acts[act]()
    assert taken
    left = read(tmp_path, remote)
    assert (left.steps(), left.kept()) == ([0, 1], {0} if act == "unkeep" else set())
    assert_same(left.load(0), moving(10))


def test_a_waiting_save_is_told(tmp_path: Path, second: str) -> None:
    first = one(tmp_path, second, drain_backlog=1)
    save(first, 0)
    first.drain()
    two(tmp_path, second).close()
    with pytest.raises(RunTakenError):
        save(first, *range(1, 10))  # the second one waits for the drain of the first
    assert alone(tmp_path, "one").steps() in ([0, 1], [0, 1, 2])


def test_a_block_that_ends_by_it_raises_it_once(tmp_path: Path, second: str) -> None:
    def train() -> None:
        with one(tmp_path, second, drain_backlog=1) as run:
            two(tmp_path, second).close()
            for step in range(9):
                save(run, step)

    with pytest.raises(RunTakenError) as caught:
        train()
    assert any("not drained" in note for note in caught.value.__notes__)


def test_the_writer_of_before_takes_it_back(tmp_path: Path, anywhere: Any) -> None:
    first = one(tmp_path, anywhere)
    save(first, 0)
    first.drain()
    with two(tmp_path, anywhere) as other:
        save(other, 1)
    save(first, 1, plus=10)
    with pytest.raises(RunTakenError):
        first.close()
    with one(tmp_path, anywhere) as again:  # in another process, say
        assert stranded(again) == [1]
        save(again, 2)
    found = token(anywhere)
    assert found is not None
    assert found.generation == 3
    first.drain()  # which looks again
    assert (first.undrained(), stranded(first)) == ([], [1])
    save(first, 3)
    first.close()
    left = read(tmp_path, anywhere)
    assert (left.steps(), left.latest()) == ([0, 1, 2, 3], 3)
    assert_same(left.load(1), moving(1))


def test_a_second_tier_that_is_away_leaves_an_earlier_writer_replaced(tmp_path: Path) -> None:
    place = open_store(tmp_path / "second", disk := Away())
    first = one(tmp_path, place)
    save(first, 0)
    first.drain()
    two(tmp_path, tmp_path / "second").close()
    save(first, 1)
    for away in (False, True):
        disk.away = away
        with pytest.raises(RunTakenError):
            first.drain()
    assert first.undrained() == [1]


# Taking the token


def test_a_handle_that_is_open_gives_places_of_the_generation_of_another(
    tmp_path: Path, second: str
) -> None:
    """The other one of the same fast tier took the token back, and died before its first place."""
    run = one(tmp_path, second)
    save(run, 0)
    run.drain()
    own = token(second)
    assert own is not None
    text = writer_text("run", Writer(5, own.holder, own.where))
    assert isinstance(run._tiers, TwoTiers)
    tier = run._tiers.second
    found = tier.writer()
    assert found is not None
    assert tier.put_writer(text, found[1])
    save(run, 1)
    run.drain()
    save(run, 2)
    run.close()
    assert stranded(run) == [1]
    assert read(tmp_path, second).steps() == [0, 2]


def test_who_has_the_token_leaves_it_as_it_is(tmp_path: Path, anywhere: Any) -> None:
    with one(tmp_path, anywhere) as run:
        save(run, 0)
    found = token(anywhere)
    assert found is not None
    assert found.generation == 1
    first, later = one(tmp_path, anywhere), one(tmp_path, anywhere)
    save(first, 1)
    save(later, 2)
    first.close()
    later.close()
    assert token(anywhere) == found
    assert read(tmp_path, anywhere).steps() == [0, 1, 2]


def test_places_of_two_writers_are_never_equal(tmp_path: Path, second: str) -> None:
    with one(tmp_path, second) as run:
        save(run, 0, 1)
    plain, ready = alone(tmp_path, "two"), handle(tmp_path / "two")
    save(plain, 5)
    with two(tmp_path, second) as run:
        assert stranded(run) == [5]
        save(run, 2)
        save(plain, 3)  # other users of the fast tier know of it
        save(ready, 4)
        run.drain()
    with one(tmp_path, second) as run:
        save(run, 6)
    places = read(tmp_path, second)._places()
    assert [places[step].sequence // TURN for step in (0, 1, 2, 3, 4, 6)] == [0, 0, 1, 1, 1, 2]
    assert 5 not in places


def test_a_writer_that_died_before_its_first_place_is_known(tmp_path: Path, second: str) -> None:
    with one(tmp_path, second) as run:
        save(run, 0)
    run = two(tmp_path, second)
    (tmp_path / "two" / "sequence").unlink()  # as after a power cut
    with two(tmp_path, second):
        save(alone(tmp_path, "two"), 1)
    with two(tmp_path, second) as run:
        assert (stranded(run), run.latest()) == ([], 1)
    assert read(tmp_path, second).steps() == [0, 1]


def test_what_was_pushed_by_hand_before_is_nobody_else_s(tmp_path: Path, second: str) -> None:
    plain = alone(tmp_path, "one")
    save(plain, 0, 1)
    open_store(tmp_path / "second") if "://" not in second else None
    transfer.push(plain.store, second, "run")
    save(plain, 2)
    with one(tmp_path, second) as run:
        assert stranded(run) == []
    found = token(second)
    assert found is not None
    assert found.generation == 1
    assert read(tmp_path, second).steps() == [0, 1, 2]


@pytest.mark.parametrize("at", ["the token", "the content"])
def test_a_race_of_two_openings(
    tmp_path: Path, anywhere: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Two opens the run in the middle of one's opening; one is the last, and so the writer."""
    made = list[CheckpointStore]()
    names = {"the token": "put_writer", "the content": "content"}
    for kind in (StoreTier, RemoteTier):
        real = getattr(kind, names[at])

        def slow(self: Any, *given: Any, _real: Any = real) -> Any:
            if self._fast.path == tmp_path / "one" and not made:
                made.append(two(tmp_path, anywhere))
            return _real(self, *given)

        monkeypatch.setattr(kind, names[at], slow)
    first = one(tmp_path, anywhere)
    found, (other,) = token(anywhere), made
    assert found is not None
    assert (found.generation, found.where.rpartition(":")[2]) == (2, str(tmp_path / "one"))
    save(first, 0)
    first.close()
    save(other, 1)
    with pytest.raises(RunTakenError):
        other.close()
    assert read(tmp_path, anywhere).steps() == [0]


def test_others_that_keep_taking_it_are_an_error(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (StoreTier, RemoteTier):
        monkeypatch.setattr(kind, "put_writer", lambda *_: False)
    with pytest.raises(StoreError, match="keep becoming the writer"):
        one(tmp_path, second)


def drop_token(second: Any, text: bytes | None = None) -> None:
    """Remove the token, or write this in its place."""
    if isinstance(second, str) and "://" not in second:
        path = Path(second) / "writers" / "run"
        path.unlink() if text is None else path.write_bytes(text)
        return
    remote = second if isinstance(second, Remote) else Remote.open(second)
    if text is None:
        remote.bucket.delete("writers/run")
    else:
        remote.bucket.put("writers/run", [memoryview(text)])


def test_a_token_that_is_gone_is_written_again(tmp_path: Path, anywhere: Any) -> None:
    run = one(tmp_path, anywhere)
    save(run, 0)
    run.drain()
    found = token(anywhere)
    drop_token(anywhere)
    save(run, 1)
    run.close()
    assert token(anywhere) == found
    drop_token(anywhere)
    run.delete(0)
    assert read(tmp_path, anywhere).steps() == [1]


def test_a_damaged_token_is_another_writer_s(
    tmp_path: Path, anywhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = one(tmp_path, anywhere)
    save(run, 0)
    run.drain()
    others = writer_text("another", Writer(1, "0" * 32, "host:/fast"))
    for number, text in enumerate((b"damaged", b"", others)):
        drop_token(anywhere, text)
        save(run, 1, plus=number)
        with pytest.raises(RunTakenError, match="token is damaged") as caught:
            run.drain()
        assert caught.value.facts["steps"] == [1]
        run = one(tmp_path, anywhere)
        found = token(anywhere)
        assert found is not None
        assert found.generation == number + 2
        assert "its damaged token does not name" in caplog.text
        assert stranded(run) == [1]
    run.close()


@pytest.mark.parametrize("name", ["writers", "identity"])
def test_a_second_tier_that_cannot_be_read_for_a_time_takes_no_run_away(
    tmp_path: Path, name: str
) -> None:
    place = open_store(tmp_path / "second", disk := Unreadable())
    run = one(tmp_path, place)
    save(run, 0)
    run.drain()
    tier = (tmp_path / "second" / "identity").read_bytes()
    disk.name = name
    save(run, 1)
    with pytest.raises(DrainError):
        run.drain(timeout=30)
    save(run, 2)
    with pytest.raises(StoreIOError):
        one(tmp_path, place)
    disk.name = ""
    run.close()
    with one(tmp_path, place) as run:
        assert stranded(run) == []
    found = token(str(tmp_path / "second"))
    assert found is not None
    assert found.generation == 1
    assert (tmp_path / "second" / "identity").read_bytes() == tier
    assert alone(tmp_path).steps() == [0, 1, 2]


def test_a_fast_tier_whose_identity_cannot_be_read_for_a_time_keeps_it(tmp_path: Path) -> None:
    fast = open_store(tmp_path / "one", disk := Unreadable())
    with CheckpointStore(fast, "run", drain=tmp_path / "second") as run:
        save(run, 0)
    before = (tmp_path / "one" / "identity").read_bytes()
    disk.name = "identity"
    with pytest.raises(StoreIOError):
        CheckpointStore(fast, "run", drain=tmp_path / "second")
    assert (tmp_path / "one" / "identity").read_bytes() == before


def test_no_token_is_written_to_a_disk_that_is_not_the_right_one(
    tmp_path: Path, second: str
) -> None:
    with one(tmp_path, second, keep_fast=1) as run:
        save(run, 0, 1)
    folder = tmp_path / "second"
    folder.rename(tmp_path / "unmounted")
    with two(tmp_path, second):
        pass
    found = token(second)
    with pytest.raises(OtherTierError):
        one(tmp_path, second)
    assert token(second) == found


def test_a_run_that_is_drained_to_a_store_is_not_renamed_there(tmp_path: Path) -> None:
    with one(tmp_path, tmp_path / "second", keep_fast=None) as run:
        save(run, 0)
    with pytest.raises(DrainedRunError, match="drained to this store"):
        open_store(tmp_path / "second").rename("run", "other")
    assert alone(tmp_path).steps() == [0]


def test_a_remote_s_gc_and_verify_leave_the_token(tmp_path: Path) -> None:
    server = MemoryBucket()
    with one(tmp_path, Remote(server)) as run:
        save(run, 0, 1)
        run.drain()
        run.delete(0)
    before = server.objects["writers/run"]
    remote = Remote(server)
    assert remote.verify(full=True).fine
    for _ in range(2):
        remote.gc(0)
    assert server.objects["writers/run"] == before
    with two(tmp_path, remote) as run:
        assert run.steps() == [1]
    assert remote.verify(full=True).fine


# What is stranded


def test_what_a_fast_tier_did_not_drain_before_another_one_went_on_is_stranded(
    tmp_path: Path, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    gone_on(tmp_path, second)
    for number in range(2):
        caplog.clear()
        with two(tmp_path, second) as run:
            assert (run.undrained(), stranded(run)) == ([], [3, 4, 5])
            assert (run.steps(), run.latest()) == ([0, 1, 2, 3, 4, 5, 6], 6)
            for step in run.steps():
                assert_same(run.load(step), moving(step))
        said = [text for text in caplog.messages if "will not be drained (3, 4, 5)" in text]
        assert len(said) == 1 - number  # when it becomes the writer
        for part in (str(tmp_path / "two"), second, "runs delete run --step 3", "push run@3"):
            assert number or part in said[0]
    assert_as_one_left_it(tmp_path, second)
    left = alone(tmp_path, "two")
    assert left.steps() == [3, 4, 5]
    for step in (3, 4, 5):
        assert_same(left.load(step), moving(step + 10))
    with one(tmp_path, second) as run:
        save(run, 7)
        assert (run.latest(), stranded(run)) == (7, [])


def test_what_the_warning_says_puts_an_end_to_it(tmp_path: Path, second: str) -> None:
    gone_on(tmp_path, second)
    left = alone(tmp_path, "two")
    left.delete(3)
    with two(tmp_path, second) as run:
        assert stranded(run) == [4, 5]
    transfer.push(left.store, second, "run@5", replace=True)
    left.delete(4)
    with two(tmp_path, second) as run:
        assert (run.undrained(), stranded(run)) == ([], [])
        assert_same(run.load(5), moving(15))
        assert_same(run.load(4), moving(4))
        save(run, 8)
        assert run.latest() == 8
    with one(tmp_path, second) as run:
        assert run.latest() == 8
        assert_same(run.load(5), moving(15))


def test_the_rules_delete_no_step_whose_number_a_stranded_version_has(
    tmp_path: Path, second: str
) -> None:
    gone_on(tmp_path, second)
    with two(tmp_path, second, keep_last=2) as run:
        assert stranded(run) == [3, 4, 5]
        save(run, 7)
        run.drain()
        assert run.steps() == [3, 4, 5, 6, 7]
        assert (run.prune(dry_run=True), run.prune()) == ([], [])
        assert stranded(run) == [3, 4, 5]
        for step in (3, 4, 5):
            assert_same(run.load(step), moving(step))
    left = alone(tmp_path, "two")
    left.delete(4)
    with two(tmp_path, second, keep_last=2) as run:
        assert run.prune() == [4]
        assert run.steps() == [3, 5, 6, 7]
    for step in (3, 5):
        assert_same(left.load(step), moving(step + 10))


def test_a_fast_tier_goes_on_where_nobody_else_has(tmp_path: Path, second: str) -> None:
    with one(tmp_path, second) as run:
        save(run, 0, 1, 2)
    run = two(tmp_path, second)
    without(tmp_path / "second", run, 1, 3, plus=10)
    for _ in range(2):  # saved again by now, and drained
        with two(tmp_path, second) as run:
            run.drain()
            assert (run.undrained(), stranded(run), run.latest()) == ([], [], 3)
            assert_same(run.load(1), moving(11))
            save(run, 3, plus=20)
    with one(tmp_path, second) as run:
        assert_same(run.load(3), moving(23))
        save(run, 4)
    with two(tmp_path, second) as run:
        assert run.latest() == 4


def test_a_fast_tier_that_is_open_meanwhile_drains_no_more(tmp_path: Path) -> None:
    """The second tier is away from it while another one goes on."""
    place = open_store(tmp_path / "second", disk := Away())
    with one(tmp_path, tmp_path / "second") as other:
        save(other, 0, 1, 2)
    run = two(tmp_path, place)
    disk.away = True
    save(run, 3, 4, plus=10)
    with one(tmp_path, tmp_path / "second") as other:
        save(other, 3, 4, 5)
    disk.away = False
    with pytest.raises(RunTakenError):
        run.close()
    assert run.undrained() == [3, 4]
    assert alone(tmp_path).steps() == [0, 1, 2, 3, 4, 5]
    for step in range(6):
        assert_same(alone(tmp_path).load(step), moving(step))
    assert alone(tmp_path, "two").steps() == [3, 4]
    with two(tmp_path, tmp_path / "second") as run:
        assert stranded(run) == [3, 4]


def test_what_comes_back_late_is_not_drained(tmp_path: Path) -> None:
    """One dies undrained, two goes on and dies undrained, too; then both come back."""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1)
    save(alone(tmp_path, "one"), 4, 5)
    with two(tmp_path, tmp_path / "second") as run:
        save(run, 2)
    without(tmp_path / "second", two(tmp_path, tmp_path / "second"), 4, 6, plus=10)
    with one(tmp_path, tmp_path / "second") as run:
        assert (run.latest(), stranded(run)) == (2, [4, 5])
    run = two(tmp_path, tmp_path / "second")
    assert (run.undrained(), stranded(run)) == ([], [4, 6])
    run.close()
    assert alone(tmp_path).steps() == [0, 1, 2]
    assert (run.steps(), run.latest()) == ([0, 1, 2, 4, 6], 2)
    for name, plus, steps in (("one", 0, (4, 5)), ("two", 10, (4, 6))):
        for step in steps:
            assert_same(alone(tmp_path, name).load(step), moving(step + plus))
    with two(tmp_path, tmp_path / "second") as run:
        save(run, 7)
    assert (alone(tmp_path).steps(), alone(tmp_path).latest()) == ([0, 1, 2, 7], 7)


def test_a_stranded_step_is_never_the_latest(tmp_path: Path, second: str) -> None:
    """Whatever its place: another run of the same store may have had many writers."""
    with one(tmp_path, second) as run:
        save(run, 0)
    died = alone(tmp_path, "one")
    died._steps.at_least(50 * TURN)
    save(died, 1, 2, plus=10)
    with two(tmp_path, second) as run:
        save(run, 1)
    with one(tmp_path, second) as run:
        assert (stranded(run), run.steps(), run.latest()) == ([1, 2], [0, 1, 2], 1)
        assert_same(run.load(1), moving(1))
        assert_same(run.load(2), moving(12))
        save(run, 3)
        assert run.latest() == 3
    assert (read(tmp_path, second).steps(), read(tmp_path, second).latest()) == ([0, 1, 3], 3)


@pytest.mark.parametrize("keep", [None, 2])
def test_a_step_that_is_saved_as_it_was_is_the_same(tmp_path: Path, keep: int | None) -> None:
    """A resumed training saves the step that it has loaded."""
    with one(tmp_path, tmp_path / "second", keep_fast=keep) as run:
        save(run, 2, 3)
    with two(tmp_path, tmp_path / "second") as run:
        run.save(run.load(3), 3)
    assert alone(tmp_path, "one").manifest(3) != alone(tmp_path).manifest(3)
    with one(tmp_path, tmp_path / "second", keep_fast=keep) as run:
        run.drain()
        assert (run.undrained(), stranded(run), run.latest()) == ([], [], 3)
        assert_same(run.load(3), moving(3))


def test_each_second_tier_has_a_writer_of_its_own(tmp_path: Path) -> None:
    with one(tmp_path, tmp_path / "second", keep_fast=None) as run:
        save(run, 3)
    with one(tmp_path, tmp_path / "third", keep_fast=None) as run:
        run.drain()
    with two(tmp_path, tmp_path / "second") as run:
        run.save(moving(30), 3)
    with one(tmp_path, tmp_path / "third", keep_fast=None) as run:
        assert stranded(run) == []
        assert_same(run.load(3), moving(3))
    with one(tmp_path, tmp_path / "second", keep_fast=None) as run:
        run.drain()
        assert stranded(run) == [3]
        assert_same(run.load(3), moving(30))


def test_a_run_that_was_trained_apart_replaces_nothing(tmp_path: Path) -> None:
    """The first time that a fast tier meets the second one, which has another training's steps."""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1, 2)
    apart = alone(tmp_path, "two")
    save(apart, 5, 6, 7, 8, plus=10)
    apart.save(moving(11), 1)
    with two(tmp_path, tmp_path / "second") as run:
        assert stranded(run) == [1, 5, 6, 7, 8]
        assert_same(run.load(1), moving(1))
    assert_same(alone(tmp_path).load(1), moving(1))
    assert alone(tmp_path).steps() == [0, 1, 2]
    assert_same(apart.load(1), moving(11))


def test_what_a_second_tier_got_directly_is_not_replaced(tmp_path: Path) -> None:
    """A training goes on without a fast tier, and goes back a step further than that had drained"""
    with one(tmp_path, tmp_path / "second") as run:
        save(run, 0, 1)
    save(alone(tmp_path, "one"), 2, 3, plus=10)
    save(alone(tmp_path), 1, 2, 3, plus=20)
    run = one(tmp_path, tmp_path / "second")
    run.close()
    assert (run.undrained(), stranded(run)) == ([], [1, 2, 3])
    for step in (1, 2, 3):
        assert_same(alone(tmp_path).load(step), moving(step + 20))
        assert_same(run.load(step), moving(step + 20))
    for step in (2, 3):
        assert_same(alone(tmp_path, "one").load(step), moving(step + 10))


def test_what_was_there_before_any_writer_is_not_replaced(tmp_path: Path) -> None:
    save(alone(tmp_path), 0, 1)
    save(alone(tmp_path, "one"), 1, 2, 3, plus=10)
    with one(tmp_path, tmp_path / "second") as run:
        assert stranded(run) == [1, 2, 3]
        save(run, 4)
    assert alone(tmp_path).steps() == [0, 1, 4]
    assert_same(alone(tmp_path).load(1), moving(1))


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


def test_a_step_that_is_drained_meanwhile_is_listed(tmp_path: Path, second: str) -> None:
    """It reaches the second tier and leaves the fast one while a reader looks at both."""
    with one(tmp_path, second) as run:
        save(run, 0)
    reader = one(tmp_path, second)
    assert isinstance(reader._tiers, TwoTiers)
    content = reader._tiers.second.content
    for step, look in ((1, reader.steps), (3, lambda: [*reader.metrics()])):
        save(alone(tmp_path, "one"), step, step + 1)
        acts = [step + 1]

        def meanwhile(acts: list[int] = acts) -> Any:
            found = content()
            if acts:
                left = acts.pop()
                one(tmp_path, second).close()
                assert alone(tmp_path, "one").steps() == [left]
            return found

        reader._tiers.second.content = meanwhile  # type: ignore[method-assign]
        assert look() == [*range(step + 2)]
        assert not acts


def test_a_step_that_is_saved_as_it_was_stays_the_latest(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rule takes it before its new place is drained."""
    with one(tmp_path, second, keep_fast=None) as run:
        save(run, 0, 1, 2)
    plain = alone(tmp_path, "one")
    plain.save(plain.load(0), 0)
    with monkeypatch.context() as patch:
        patch.setattr(Drain, "_run_thread", lambda _: None)
        pruning = one(tmp_path, second, keep_last=1)
        assert isinstance(pruning._tiers, TwoTiers)
        pruning._tiers.tidy()
        assert pruning.undrained() == [0]
    pruning.close()
    assert (pruning.steps(), pruning.latest()) == ([0], 0)


@pytest.mark.parametrize("again", [3, 4])
def test_a_copy_that_failed_claims_no_step_that_another_one_drains_then(
    tmp_path: Path, second: str, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """Both go on from the same step."""
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
    with two(tmp_path, second) as run:
        assert stranded(run) == sorted({3, again})
    left = read(tmp_path, second)
    assert left.steps() == [2, 3]
    assert_same(left.load(3), moving(3))


def test_the_shell_names_what_is_stranded(
    tmp_path: Path, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gone_on(tmp_path, second)
    save(alone(tmp_path, "two"), 9)  # which the second tier has in no version
    words = ["runs", "drain", "run", second, "--store", str(tmp_path / "two")]
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if more:
            expected = {"run": "run", "folder": second, "steps": [0, 1, 2, 3, 4, 5, 6]}
            assert json.loads(out) == {**expected, "stranded": [3, 4, 5, 9]}
        else:
            assert "7 steps of run" in (said := " ".join(out.split()))
            assert "4 steps (3, 4, 5, 9)" in said
            assert any(line.startswith("left here, as") for line in out.splitlines())
    assert_as_one_left_it(tmp_path, second)


# Processes

_PROGRAM = """
import sys, threading
sys.path[:0] = {paths!r}
from pathlib import Path
from store_runs.stores import handle, moving
from tensor_dedup.training.errors import RunTakenError
fast, second, drained = sys.argv[1:4]
run = handle(Path(fast), drain=second)
print("open", flush=True)
for line in sys.stdin:
    step, number = map(int, line.split())
    try:
        run.save(moving(number), step)
        if drained == "yes":
            run.drain()
        print("saved", step, flush=True)
    except RunTakenError as error:
        print("taken", *error.facts["steps"], flush=True)
try:
    run.close()
except RunTakenError:
    print("taken", flush=True)
"""


class Host:
    """A process that has the run open with a fast tier, and saves what it is told."""

    def __init__(self, fast: Path, second: str, *, drained: bool = True) -> None:
        program = _PROGRAM.format(paths=[str(Path(__file__).parents[2] / "support")])
        words = [sys.executable, "-c", program, str(fast), second, "yes" if drained else "no"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.answer() == "open"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def save(self, step: int, number: int | None = None) -> str:
        assert self.process.stdin is not None
        print(step, step if number is None else number, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> str:
        out, said = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, said
        return out.strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_two_hosts(tmp_path: Path, second: str) -> None:
    first = Host(tmp_path / "one", second)
    assert [first.save(step) for step in (0, 1)] == ["saved 0", "saved 1"]
    other = Host(tmp_path / "two", second)
    assert [other.save(step) for step in (2, 3)] == ["saved 2", "saved 3"]
    assert first.save(2, 12) == "taken 2"
    assert first.save(3, 13) == "taken 2"  # nothing of it was written
    assert other.save(4) == "saved 4"
    assert (first.end(), other.end()) == ("taken", "")
    left = read(tmp_path, second)
    assert (left.steps(), left.latest()) == ([0, 1, 2, 3, 4], 4)
    for step in left.steps():
        assert_same(left.load(step), moving(step))
    assert alone(tmp_path, "one").steps() == [1, 2]
    assert_same(alone(tmp_path, "one").load(2), moving(12))


def test_a_host_that_is_killed_and_comes_back(tmp_path: Path, second: str) -> None:
    first = Host(tmp_path / "one", second)
    assert [first.save(step) for step in (0, 1)] == ["saved 0", "saved 1"]
    first.kill()
    # What it saved last, and had not drained.
    save(alone(tmp_path, "one"), 2, 3, plus=10)
    other = Host(tmp_path / "two", second)
    assert [other.save(step) for step in (2, 4)] == ["saved 2", "saved 4"]
    other.kill()
    again = Host(tmp_path / "one", second)
    assert again.save(5) == "saved 5"
    assert again.end() == ""
    left = read(tmp_path, second)
    assert (left.steps(), left.latest()) == ([0, 1, 2, 4, 5], 5)
    for step in left.steps():
        assert_same(left.load(step), moving(step))
    with one(tmp_path, second) as run:
        assert stranded(run) == [2, 3]
        assert_same(run.load(3), moving(13))
        assert_same(run.load(2), moving(2))


def test_ranks_of_one_job_share_the_token(tmp_path: Path, second: str) -> None:
    ranks = [Host(tmp_path / "one", second, drained=rank < 2) for rank in range(4)]
    for step in range(0, 12, 4):
        for rank, host in enumerate(ranks):
            assert host.save(step + rank) == f"saved {step + rank}"
    assert [host.end() for host in ranks] == [""] * 4
    found = token(second)
    assert found is not None
    assert found.generation == 1
    left = read(tmp_path, second)
    assert left.steps() == [*range(12)]
    for step in range(12):
        assert_same(left.load(step), moving(step))
