"""What DeepSpeed's files become in the store, also where DeepSpeed is not installed.

The engine is called as DeepSpeed calls it; nothing that DeepSpeed itself does is tested.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from processes import fresh
from store_runs.disk_faults import Faults, FaultyFiles
from tensor_dedup import Store
from tensor_dedup.errors import ConfigError, StoreError
from tensor_dedup.integrations import datastates
from tensor_dedup.integrations.datastates import DecoupledStoreEngine, newest_tag
from tensor_dedup.integrations.deepspeed import TITLE, DamagedPointerError, Pointer
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.training import CheckpointStore
from training_runs import killed_training

Start = Callable[..., DecoupledStoreEngine]
MODEL = "mp_rank_00_model_states.pt"
TAGS = ("step0", "step1", "step2")
TORN, OF_NO_STEP = f'["{TITLE}", ', json.dumps([TITLE, "run/{}@x", "", "", None])


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start an engine of one training as DeepSpeed does, with these entries of its JSON."""
    monkeypatch.setattr(datastates, "usable", lambda _: True)
    monkeypatch.setattr(datastates, "TorchCheckpointEngine", lambda _: None)
    zero = SimpleNamespace(offload_optimizer=None, offload_param=None, zenflow=None)

    def start(rank: int = 0, /, **options: Any) -> DecoupledStoreEngine:
        entry = {"store": str(tmp_path / "fast"), "run": "run", "compress": None, **options}
        config = SimpleNamespace(datastates_config=SimpleNamespace(config=entry), zero_config=zero)
        return DecoupledStoreEngine(config, rank)

    return start


def save(engine: DecoupledStoreEngine, file: Path, number: int, ranks: int = 1) -> None:
    """Start saving one of DeepSpeed's files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {"number": number, "weight": torch.full((200, 200), float(number))}
    if file.name == MODEL:
        state |= {"dp_world_size": ranks, "mp_world_size": 1, "param_shapes": []}
    engine.save(state, str(file))


@pytest.mark.parametrize("emptied", [False, True])
def test_every_tag_loads_when_steps_are_drained(
    tmp_path: Path, start: Start, emptied: bool
) -> None:
    engine = start(drain=str(tmp_path / "second"))
    for number, tag in enumerate(TAGS):
        for name in (MODEL, optimizer(0)):
            save(engine, tmp_path / "files" / tag / name, number)
        engine.wait(persist=True)
    near = CheckpointStore(tmp_path / "fast", "run/mp_rank_00_model_states")
    assert near.steps() == [2]
    if emptied:
        shutil.rmtree(tmp_path / "fast")
    # Another training begins with what this one has saved.
    for later in (engine, start(drain=str(tmp_path / "second"), run="other")):
        for number, tag in enumerate(TAGS):
            for name in (MODEL, optimizer(0)):
                assert later.load(str(tmp_path / "files" / tag / name))["number"] == number
        if emptied:
            assert near.steps() == []


def test_a_tag_is_whole_again_after_a_save_that_failed(tmp_path: Path, start: Start) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    first, second = start(), start(1)
    second._session = first._session  # as the ranks of one training have it
    first._store = Store.open(tmp_path / "fast", files=files)
    folder = tmp_path / "files" / "last"
    refused = list[int]()

    def checkpoint(number: int) -> None:
        """What DeepSpeed does: a rank saves nothing more of a checkpoint once a save raises."""
        try:
            save(first, folder / MODEL, number, ranks=2)
            first.wait()
            for run in first._runs.values():
                run._saves.finish()
            save(first, folder / optimizer(0), number)
        except StoreError:
            refused.append(number)
        save(second, folder / optimizer(1), number)

    checkpoint(0)
    for engine in (first, second):
        engine.wait(persist=True)
    assert first.load(str(folder / MODEL))["number"] == 0
    files._faults = Faults(full_from=0)
    checkpoint(1)
    files._faults = Faults()
    for number in range(2, 7):
        checkpoint(number)
    assert refused  # otherwise no file was left out
    assert len(refused) < 4
    for engine in (first, second):
        engine.wait(persist=True)
    for name in (MODEL, optimizer(0), optimizer(1)):
        assert start().load(str(folder / name))["number"] == 6


def test_a_checkpoint_that_was_lost_with_the_fast_tier_is_told_from_one_that_changed(
    tmp_path: Path, start: Start
) -> None:
    fast, second, files = tmp_path / "fast", tmp_path / "second", tmp_path / "files"
    engine = start(drain=str(second))
    for number, tag in enumerate(TAGS[:2]):
        for name in (MODEL, optimizer(0)):
            save(engine, files / tag / name, number)
        engine.wait(persist=True)
    # What a kill before the drain leaves behind: the second tier lacks the last step of one file.
    undrained = start()
    for name in (MODEL, optimizer(0)):
        save(undrained, files / TAGS[2] / name, 2)
    undrained.wait(persist=True)
    assert (files / "latest").read_text() == TAGS[2]
    with CheckpointStore(fast, "run/mp_rank_00_model_states", drain=second) as run:
        assert run.steps() == [0, 1, 2]
    assert newest_tag(files, fast) == TAGS[2]

    shutil.rmtree(fast)
    assert newest_tag(files, fast, drain=str(second)) == TAGS[1]
    resumed = start(drain=str(second))
    what = rf"optim_states@2 is absent: .*every file is there is 'step1'.*tag='{TAGS[1]}'\)"
    with pytest.raises(UnknownStepError, match=what):
        resumed.load(str(files / TAGS[2] / optimizer(0)))
    for name in (MODEL, optimizer(0)):
        assert resumed.load(str(files / TAGS[1] / name))["number"] == 1
    # The numbers of lost steps are given again, to other states.
    for name in (MODEL, optimizer(0)):
        save(resumed, files / "again" / name, 7)
    resumed.wait(persist=True)
    with pytest.raises(UnknownStepError, match=r"is not what it was .*tag='again'"):
        resumed.load(str(files / TAGS[2] / optimizer(0)))
    shutil.rmtree(second)
    shutil.rmtree(fast)
    with pytest.raises(UnknownStepError, match="no checkpoint beside it has all its files"):
        start().load(str(files / "again" / MODEL))
    assert newest_tag(files, fast) is None


@pytest.mark.parametrize("drained", [False, True])
def test_as_many_checkpoints_are_kept_of_every_file(
    tmp_path: Path, start: Start, drained: bool
) -> None:
    drain: dict[str, Any] = {"drain": str(tmp_path / "second")} if drained else {}
    files = tmp_path / "files"

    def train(*tags: str) -> DecoupledStoreEngine:
        """Save these checkpoints; the first rank, which is returned, is always done first."""
        first, second = start(0, keep_last=2, **drain), start(1, keep_last=2, **drain)
        second._session = first._session
        for number, tag in enumerate(tags):
            for engine, names in ((first, (MODEL, optimizer(0))), (second, (optimizer(1),))):
                for name in names:
                    save(engine, files / tag / name, number, ranks=2)
                engine.wait(persist=True)
        return first

    train("0", "1", "2", "3")
    (files / "3" / "notes.txt").touch()  # somebody else's
    first = train("4", "5", "6", "7", "8", "9")
    if drained:
        first.wait(persist=True)
    for name in (MODEL, optimizer(0), optimizer(1)):
        run = CheckpointStore(tmp_path / "fast", f"run/{name.removesuffix('.pt')}", **drain)
        assert run.steps() == [8, 9]
    assert {path.parent.name for path in files.glob("*/*.pt")} == {"8", "9"}
    assert {path.name for path in files.iterdir()} == {"3", "8", "9", "latest"}
    with pytest.raises(UnknownStepError, match=r"'7' was pruned, .*tag='9'"):
        first.load(str(files / "7" / MODEL))
    assert first.load(str(files / "8" / MODEL))["number"] == 4
    # A tag of which nothing was left is saved again.
    for name in (MODEL, optimizer(0)):
        save(first, files / "1" / name, 6, ranks=1)
    first.wait(persist=True)
    assert (files / "latest").read_text() == "1"


def test_a_number_given_again_after_a_loss_is_not_that_of_a_replaced_step(
    tmp_path: Path, start: Start
) -> None:
    files = tmp_path / "files"
    first = start(keep_last=2)
    for number, tag in enumerate("ab"):
        for name in (MODEL, optimizer(0)):
            save(first, files / tag / name, number)
    first.wait(persist=True)
    shutil.rmtree(tmp_path / "fast")
    again = start(keep_last=2)  # its steps are 0, 1, 2, and the pointer of "b" still says 1
    for number, tag in enumerate("bcd"):
        for name in (MODEL, optimizer(0)):
            save(again, files / tag / name, 10 + number)
    again.wait(persist=True)
    for name in (MODEL, optimizer(0)):
        assert [again.load(str(files / tag / name))["number"] for tag in "cd"] == [11, 12]
    assert {path.parent.name for path in files.glob("*/*.pt")} == {"c", "d"}


def checkpoint(engine: DecoupledStoreEngine, folder: Path, number: int, ranks: int = 1) -> None:
    """Save what the first of so many ranks has of a checkpoint, and wait until it is durable."""
    for name in (MODEL, optimizer(0)):
        save(engine, folder / name, number, ranks)
    engine.wait(persist=True)


def test_checkpoints_that_a_rank_left_in_parts_are_not_counted(
    tmp_path: Path, start: Start
) -> None:
    files = tmp_path / "files"

    def train(number: int, *, killed: bool = False) -> None:
        first, second = start(0, keep_last=2), start(1, keep_last=2)
        second._session = first._session
        if not killed:
            save(second, files / str(number) / optimizer(1), number)
            second.wait(persist=True)
        checkpoint(first, files / str(number), number, ranks=2)

    for number in range(3):
        train(number)
    train(3, killed=True)
    train(4, killed=True)
    train(5)
    for number in (2, 5):
        for name in (MODEL, optimizer(0), optimizer(1)):
            assert start().load(str(files / str(number) / name))["number"] == number
    assert {path.name for path in files.iterdir()} == {"2", "3", "4", "5", "latest"}
    train(6)
    assert {path.name for path in files.iterdir()} == {"5", "6", "latest"}
    run = CheckpointStore(tmp_path / "fast", "run/mp_rank_00_model_states")
    assert run.steps() == [5, 6]


def test_a_run_that_began_after_a_loss_is_newer(tmp_path: Path, start: Start) -> None:
    fast, drain, files = tmp_path / "fast", str(tmp_path / "second"), tmp_path / "files"

    def train(run: str, *tags: str) -> None:
        engine = start(run=run, drain=drain)
        for tag in tags:
            checkpoint(engine, files / tag, 0)

    def touch(*tags: str) -> None:
        for at, tag in enumerate(tags):
            for path in files.glob(f"{tag}/*.pt"):
                os.utime(path, (at, at))

    train("first", *TAGS)
    shutil.rmtree(fast)  # with the places in the order of saving
    train("later", "b", "a")
    touch("a", "b", *TAGS)  # as a copy may do
    assert newest_tag(files, fast, drain=drain) == (files / "latest").read_text() == "a"
    touch(*TAGS, "b", "a")
    (files / "a" / MODEL).write_text(TORN)  # it makes nothing whole
    assert newest_tag(files, fast, drain=drain) == "b"


@pytest.mark.parametrize(
    "entries",
    [
        ["run@0"],
        [None, "", "", [1, 0]],
        ["run@0", 5],
        ["run@0", "", ["key"]],
        ["run@0", "", "", 7],
        ["run@0", "", "", [1, "0"]],
        ["run@0", "", "", None, "more"],
    ],
)
def test_what_is_no_pointer_is_told_from_one(tmp_path: Path, entries: list[object]) -> None:
    path = tmp_path / MODEL
    path.write_text(json.dumps([TITLE, *entries]))
    with pytest.raises(DamagedPointerError):
        Pointer.read(path)


def test_whether_a_checkpoint_is_whole_is_asked_once_for_all_files(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_whole = list[tuple[Path, str]](), datastates._is_whole

    def watched(folder: Path, key: str) -> bool:
        asked.append((folder, key))
        return is_whole(folder, key)

    engine = start()
    for number in range(3):
        checkpoint(engine, tmp_path / "files" / str(number), number)
    monkeypatch.setattr(datastates, "_is_whole", watched)
    start(keep_last=2)._prune_others(tmp_path / "files" / "2", f"{engine._session}.0")
    assert {folder.name for folder, _ in asked} == {"1", "2"}
    assert len(asked) == 2


def test_a_save_that_ended_before_it_named_its_file_leaves_nothing_when_it_comes_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, engine = tmp_path / "files", start()
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path.parent == files:
            raise OSError(errno.EIO, "refused")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        with pytest.raises(StoreError):
            checkpoint(engine, files / "tag", 0)
    assert list(files.glob(".*"))
    checkpoint(start(), files / "tag", 0)
    assert {path.name for path in files.iterdir()} == {"tag", "latest"}


def ask(root: str, /, *, number: int, group: str) -> None:
    """Ask three times, in stores of which the second rank sees nothing."""
    killed_training.join_group(number, group, 2)
    asked: list[tuple[str, Any]] = [("fast", None), ("foreign", None), ("fast", 5)]
    for store, drain in asked:
        place = Path(root, "nothing") if number == 1 else Path(root)
        try:
            found = str(newest_tag(place / "files", place / store, drain=drain))
        except (StoreError, AttributeError, TypeError) as error:
            found = type(error).__name__
        with Path(root, f"found{number}").open("a") as file:
            file.write(f"{found}\n")
    killed_training.leave_group()


def ask_all(root: str) -> list[list[str]]:
    killed_training.end_ranks(ask, root, 2)
    return [Path(root, f"found{number}").read_text().split() for number in range(2)]


def test_all_ranks_come_to_the_tag_of_the_first(tmp_path: Path, start: Start) -> None:
    checkpoint(start(), tmp_path / "files" / "one", 1)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "something").touch()
    assert fresh.call(ask_all, str(tmp_path)) == [["one", "NotAStoreError", "BadOptionError"]] * 2


@pytest.mark.parametrize("pointer", [TORN, OF_NO_STEP])
def test_what_cannot_be_pruned_fails_no_save(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture, pointer: str
) -> None:
    files = tmp_path / "files"
    engine = start(keep_last=1)
    checkpoint(engine, files / "0", 0)
    damaged = files / "0" / MODEL
    kept = damaged.read_text()
    damaged.write_text(pointer.replace("{}", damaged.stem))
    checkpoint(engine, files / "1", 1)
    assert "is saved, but older checkpoints were not deleted; the next one" in caplog.text
    assert (files / "latest").read_text() == "1"
    assert engine.load(str(files / "1" / MODEL))["number"] == 1
    with pytest.raises((StoreError, ValueError)):
        engine.load(str(damaged))
    damaged.write_text(kept)
    checkpoint(engine, files / "2", 2)
    assert {path.name for path in files.iterdir()} == {"2", "latest"}


def test_a_file_of_another_rank_that_cannot_be_pruned_fails_no_save(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    folder, engine = tmp_path / "files" / "0", start(keep_last=1)
    folder.mkdir(parents=True)
    pointer = [TITLE, "/no run@0", "", f"{engine._session}.0", None]
    (folder / optimizer(1)).write_text(json.dumps(pointer))
    checkpoint(engine, folder, 0, ranks=2)
    assert "older checkpoints were not deleted" in caplog.text
    assert (tmp_path / "files" / "latest").read_text() == "0"
    assert engine.load(str(folder / MODEL))["number"] == 0


def test_nobody_waits_for_a_name_while_another_file_is_synced(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, held, fsync = start(), dict[str, bool](), os.fsync

    def watched(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_relative_to(tmp_path / "files"):
            with Path(engine._store.handle.objects.layout.names_lock).open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held[path.name] = True
                else:
                    held[path.name] = False
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    save(engine, tmp_path / "files" / "tag" / MODEL, 0, ranks=2)
    engine.wait(persist=True)
    assert len(held) == 2  # the pointer and its folder
    assert not any(held.values())


@pytest.mark.parametrize(("gib", "nbytes"), [(16, 16 << 30), (0.5, 512 << 20), (1, 1 << 30)])
def test_the_host_cache_of_datastates_is_the_pool(start: Start, gib: float, nbytes: int) -> None:
    """As DeepSpeed's tutorial for DataStates has it, beside the two keys of ours."""
    assert start(host_cache_size=gib)._options["pool_bytes"].capacity == nbytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_cache_size": 0}, "give a number of GiB above 0"),
        ({"host_cache_size": -1}, "give a number of GiB above 0"),
        ({"host_cache_size": "16"}, "give a number of GiB above 0"),
        ({"host_cache_size": True}, "give a number of GiB above 0"),
        ({"host_cache_size": float("nan")}, "give a number of GiB above 0"),
        ({"host_cache_size": float("inf")}, "give a number of GiB above 0"),
        ({"host_cache_size": 1, "pool_bytes": 1 << 30}, "give one of them"),
        ({"host_cache": 1}, "host_cache_size"),
    ],
)
def test_a_host_cache_of_no_size_is_refused(
    start: Start, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        start(**options)
