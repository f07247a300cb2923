"""A run under another name: all of it or nothing, whenever the process dies that renames it."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from store_runs.disk_faults import CHANGES, NEEDS_SPACE, WRITES, Crash, Faults, FaultyFiles, Loss
from store_runs.stores import (
    Model,
    assert_same,
    content,
    handle,
    network,
    open_store,
    safetensors,
    shares,
    stored,
    train,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.store import locks
from tensor_dedup.store.errors import (
    BadNameError,
    DamagedFileError,
    NameTakenError,
    NoSpaceError,
    StoreBusyError,
    UnknownNameError,
)
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.steps.errors import BadOptionError, DrainedRunError, RenamedRunError
from tensor_dedup.training import CheckpointStore

LOSSES: list[Loss] = ["everything", "bytes", "nothing"]
STEPS = (2, 0, 10)  # in the order of saving


def model_of(step: int) -> Model:
    model = network(1, layers=2)
    train(model, step, "layer0.bias", "layer1.weight")
    return model


def saved(root: Path, run: str = "org/old") -> CheckpointStore:
    """A run of three steps, of which one is kept, beside an import that is named like a step."""
    found = handle(root, run, config={"config.json": "{}"})
    for step in STEPS:
        found.save(model_of(step), step, {"loss": 1.0 / (step + 1)})
    found.keep(0)
    assert shares(found)
    source = write(root.parent / "source", {"m.safetensors": safetensors(u8(a=b"1234"))})
    found.store.import_(source, f"{run}@7")
    return found


def check(store: Store, run: str) -> None:
    """All of it has this name, and it can go on."""
    described = store.steps(run)
    assert [step.step for step in described] == sorted(STEPS)
    assert [step.metrics["loss"] for step in described] == [1.0 / (n + 1) for n in sorted(STEPS)]
    with handle(store.path, run, config={"config.json": "{}"}) as found:
        assert (found.kept(), found.latest()) == ({0}, STEPS[-1])
        for step in STEPS:
            assert_same(found.load(step), model_of(step))
    assert store.verify(full=True).faults == []


# --- what goes with the name


def test_a_run_is_renamed_with_all_that_it_has(tmp_path: Path) -> None:
    run = saved(tmp_path / "store")
    run.close()
    store = Store.open(tmp_path / "store")
    before, times = content(store.path / "containers"), [s.saved_at for s in store.steps("org/old")]
    imported = stored(store, "org/old@7")
    command = ["rename", "org/old", "new", "--json", "--store", str(store.path)]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"renamed": "org/old", "name": "new", "steps": 3}
    assert store.names() == ["new@0", "new@10", "new@2", "org/old@7"]
    assert (store.runs(), stored(store, "org/old@7")) == (["new"], imported)
    assert [step.saved_at for step in store.steps("new")] == times
    assert content(store.path / "containers") == before
    check(store, "new")
    assert len(store.gc(0).trash) == 3  # the manifests of the old name
    check(store, "new")
    with CheckpointStore(store, "new") as going_on:
        assert going_on.save({"layer0.bias": model_of(10)["layer0.bias"]}, 11).new_bytes < 1000
    url, other = f"file://{tmp_path}/remote", Store.open(tmp_path / "other")
    store.push(url, "new")
    other.pull(url, "new")
    assert CheckpointStore(other, "new").kept() == {0}


def test_a_checkpoint_comes_before_a_run_of_its_name(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", "both").store
    store.import_(tmp_path / "source", "both")
    store.rename("both", "other")
    assert (store.runs(), "other" in store.names()) == (["both"], True)
    store.rename("both", "third")
    assert store.runs() == ["third"]


@pytest.mark.parametrize(
    ("new", "error"),
    [
        ("taken", NameTakenError),
        ("named", NameTakenError),
        ("org/old", NameTakenError),
        ("a b", BadNameError),
        ("n" * 180, BadNameError),
        ("other@5", BadOptionError),
    ],
)
def test_a_name_that_cannot_be_the_run_s(tmp_path: Path, new: str, error: type[Exception]) -> None:
    store = saved(tmp_path / "store").store
    handle(store.path, "taken").save(network(1), 1)
    store.import_(tmp_path / "source", "named@4")
    before = content(store.path / "refs")
    with pytest.raises(error):
        store.rename("org/old", new)
    assert content(store.path / "refs") == before
    check(Store.open(store.path), "org/old")


def test_no_run_and_no_checkpoint_of_a_name(tmp_path: Path) -> None:
    store = saved(tmp_path / "store").store
    with pytest.raises(UnknownNameError, match="no checkpoint 'org'"):
        store.rename("org", "new")


def test_a_run_of_two_tiers_keeps_its_name(tmp_path: Path) -> None:
    """On the second tier its steps would have the old one."""
    store = saved(tmp_path / "store").store
    with CheckpointStore(store, "org/old", drain=str(tmp_path / "second")) as run:
        run.drain()
    before = content(store.path / "refs")
    with pytest.raises(DrainedRunError, match="second tier"):
        store.rename("org/old", "new")
    assert content(store.path / "refs") == before


def test_a_run_with_a_damaged_step_keeps_its_name(tmp_path: Path) -> None:
    store = saved(tmp_path / "store").store
    name = store.handle.objects.ref("org/old@2")
    store.handle.objects.layout.manifest(name).write_bytes(b"?")
    before = content(store.path / "refs")
    with pytest.raises(DamagedFileError, match=name):
        store.rename("org/old", "new")
    assert content(store.path / "refs") == before


# --- a training that has it open

SAVES: dict[str, Callable[[CheckpointStore, Any], object]] = {
    "save": lambda run, model: run.save(model, 11),
    "append": lambda run, model: run.append(model),
    "save_async": lambda run, model: run.save_async(model, 11).wait(),
    "commit": lambda run, model: run.commit(run.snapshot(model, 11)),
    "replacing": lambda run, model: run.save(model, 10),
}


@pytest.mark.parametrize("save", SAVES)
def test_the_next_save_of_a_training_says_that_its_run_was_renamed(
    tmp_path: Path, save: str
) -> None:
    run = saved(tmp_path / "store")
    store = Store.open(tmp_path / "store")
    store.rename("org/old", "new")
    for _ in range(2):
        with pytest.raises(RenamedRunError, match="'org/old' was renamed to 'new'") as caught:
            SAVES[save](run, model_of(11))
        assert (caught.value.facts["run"], caught.value.facts["new_run"]) == ("org/old", "new")
    assert store.runs() == ["new"]
    check(store, "new")
    for name in ("new", "org/old"):  # the old one is another run from now on, for who opens it
        with handle(store.path, name) as other:
            other.save(model_of(11), 11)
    assert [step.step for step in store.steps("org/old")] == [11]
    assert store.runs() == ["new", "org/old"]
    store.delete("new@11")
    check(store, "new")


def test_a_run_that_was_renamed_again_is_another_one(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", "one").store
    store.rename("one", "two")
    run = handle(store.path, "one")
    run.save(model_of(1), 1)
    store.rename("two", "three")
    run.save(model_of(2), 2)
    store.rename("one", "two")
    with pytest.raises(RenamedRunError, match="'one' was renamed to 'two'"):
        run.save(model_of(3), 3)


# --- deaths


class Stage:
    """Copies of a store, in which a run is renamed on a disk with faults."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        saved(folder / "template" / "store").close()

    def rename(self, faults: Faults, loss: Loss | None = None) -> tuple[Path, FaultyFiles]:
        self._number += 1
        folder = self._folder / str(self._number)
        (folder / "limbo").mkdir(parents=True)
        shutil.copytree(self._folder / "template" / "store", folder / "store")
        files = FaultyFiles(folder / "limbo", faults)
        if loss is None:
            open_store(folder / "store", files).rename("org/old", "new")
            return folder / "store", files
        with pytest.raises(Crash):
            open_store(folder / "store", files).rename("org/old", "new")
        files.lose(loss)
        return folder / "store", files

    def operations(self) -> list[str]:
        return self.rename(Faults())[1].log


def references(store: Path) -> set[str]:
    return {file.name.replace("%2F", "/") for file in (store / "refs").iterdir()}


@pytest.fixture(params=["some losses", pytest.param("all losses", marks=pytest.mark.long)])
def every(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "all losses"


def test_a_death_leaves_one_name_or_the_other(tmp_path: Path, every: bool) -> None:
    stage, seen, torn, turn = Stage(tmp_path), set[str](), 0, itertools.count()
    for number, operation in enumerate(stage.operations()):
        if operation not in CHANGES:
            continue
        for loss in LOSSES if every else LOSSES[next(turn) % 3 :][:1]:
            folder, _ = stage.rename(Faults(stop_at=number, torn=operation in WRITES), loss)
            torn += (folder / "renaming").exists() and len(references(folder)) > 5
            store = Store.open(folder)
            if number % 2 == 0:  # whatever comes first: a gc, or a reader
                store.gc(0)
            [run] = store.runs()
            seen.add(run)
            assert references(folder) == {
                *(f"{run}@{step}" for step in STEPS),
                *(f"{run}@0@keep", "org/old@7"),
            }
            assert not (folder / "renaming").exists()
            check(store, run)
            shutil.rmtree(folder.parent)
    assert seen == {"org/old", "new"}
    assert torn > 3  # some deaths were in the middle, with steps under both names


def test_what_has_returned_survives_a_power_cut(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for loss in LOSSES:
        folder, files = stage.rename(Faults())
        files.lose(loss)
        assert Store.open(folder).runs() == ["new"]
        check(Store.open(folder), "new")


def test_a_full_disk_leaves_one_name_or_the_other(tmp_path: Path) -> None:
    stage, seen = Stage(tmp_path), set[str]()
    for number, operation in enumerate(stage.operations()):
        if operation in NEEDS_SPACE:
            with pytest.raises(NoSpaceError):
                stage.rename(Faults(full_from=number))
            folder = tmp_path / str(stage._number) / "store"
            [run] = Store.open(folder).runs()
            seen.add(run)
            check(Store.open(folder), run)
            shutil.rmtree(folder.parent)
    assert seen == {"org/old", "new"}


def test_no_reader_sees_a_part_of_it(tmp_path: Path) -> None:
    stage, seen, busy = Stage(tmp_path), list[frozenset[str]](), list[int]()
    count = len(stage.operations())
    folder = tmp_path / "2" / "store"
    layout = Store.open(tmp_path / "template" / "store").handle.objects.layout

    def look(number: int) -> None:
        try:
            with locks.session(RealFiles(), type(layout)(folder), wait_s=0):
                seen.append(frozenset(name.partition("@")[0] for name in references(folder)))
        except StoreBusyError:
            busy.append(number)

    at = {number: lambda number=number: look(number) for number in range(3, count)}
    stage.rename(Faults(at=at))
    assert {*seen} <= {frozenset({"org/old"}), frozenset({"new", "org/old"})}
    assert frozenset({"org/old"}) in seen
    assert len(busy) > 20


def test_a_list_that_comes_back_changes_nothing_that_came_after(tmp_path: Path) -> None:
    """As after a power cut: the list was removed, and the removal was not durable."""
    store = saved(tmp_path / "store").store
    listed = list[bytes]()
    files = RealFiles()
    unlink = files.unlink

    def remembering(path: Path) -> None:
        if path.name == "renaming":
            listed.append(path.read_bytes())
        unlink(path)

    files.unlink = remembering  # type: ignore[method-assign]
    Store.open(store.path, files=files).rename("org/old", "new")
    with handle(store.path, "new") as run, handle(store.path, "org/old") as other:
        run.save(model_of(5), 10)
        run.delete(2)
        other.save(model_of(6), 10)
        (store.path / "renaming").write_bytes(listed[0])
        assert {*Store.open(store.path).names()} == {"new@0", "new@10", "org/old@10", "org/old@7"}
        assert_same(run.load(10), model_of(5))
        assert_same(other.load(10), model_of(6))
        other.save(model_of(7), 11)  # nothing was renamed, and so it is not told
    assert not (store.path / "renaming").exists()


def test_a_damaged_list_is_set_aside(tmp_path: Path) -> None:
    store = saved(tmp_path / "store").store
    (store.path / "renaming").write_bytes(b"?")
    again = Store.open(store.path)
    check(again, "org/old")
    assert not (store.path / "renaming").exists()
    assert [file.name.partition(".")[2] for file in (store.path / "quarantine").iterdir()] == [
        "renaming"
    ]
