"""Names that two things may want: of steps, imports and marks, and of the files of an export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from store_runs.stores import (
    assert_same,
    content,
    handle,
    network,
    safetensors,
    shares,
    stored,
    u8,
    write,
)
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import BadNameError, DamagedFileError, NameTakenError
from tensor_dedup.store.format.manifests import STATE, WEIGHTS, free_path
from tensor_dedup.store.steps.errors import (
    BadOptionError,
    KeptStepError,
    NotATrainingError,
    TakenStepError,
)
from tensor_dedup.store.writing import import_ as import_module
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.errors import NamedTwiceError
from tensor_dedup.training.snapshot import StepSnapshot


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A checkpoint to import: a file of weights, and a small one."""
    weights = safetensors(u8(tensor=bytes(range(200))))
    return write(tmp_path / "imported", {"model.safetensors": weights, "config.json": b"{}"})


@pytest.fixture
def run(tmp_path: Path) -> CheckpointStore:
    return handle(tmp_path / "store")


# --- runs


@pytest.mark.parametrize("name", ["my run", "", "run/", "-run", "a/../b", 7, "x" * 177, "x" * 300])
def test_a_bad_name_of_a_run_is_the_one_that_was_given(tmp_path: Path, name: Any) -> None:
    with pytest.raises(BadNameError) as caught:
        CheckpointStore(tmp_path, name)
    told = str(caught.value)
    assert "@" not in told.partition("; ")[0]
    assert caught.value.__context__ is None
    assert caught.value.facts["name"] == name
    if len(str(name)) > 176:
        assert f"it has {len(name)} characters, and a run's name 176 at most" in told
    else:
        assert told.startswith(f"{name!r}: this cannot be the name of a run; use at most 200")
    assert CheckpointStore(tmp_path, "x" * 176).steps() == []


def test_no_run_begins_under_the_name_of_a_step(run: CheckpointStore) -> None:
    run.save(network(1), 4)
    for name in ("run@4", "run@5"):
        with pytest.raises(BadOptionError, match=f"run '{name}': that is the name of the step"):
            CheckpointStore(run.store, name)
    assert CheckpointStore(run.store, "run@x").steps() == []


# --- steps and imports


Save = Callable[[CheckpointStore, Any], object]
SAVES: dict[str, Save] = {
    "save": lambda run, model: run.save(model, 5),
    "save_async": lambda run, model: run.save_async(model, 5).wait(),
    "commit": lambda run, model: run.commit(run.snapshot(model, 5)),
    "with retention": lambda run, model: handle(run.store.path, keep_last=1).save(model, 5),
}


@pytest.mark.parametrize("save", SAVES)
def test_no_save_replaces_what_was_imported(
    run: CheckpointStore, imported: Path, save: str
) -> None:
    run.save(network(1), 4)
    run.store.import_(imported, "run@5")
    with pytest.raises(NotATrainingError, match="'run@5', which was imported") as caught:
        SAVES[save](run, network(1))
    facts = {key: caught.value.facts[key] for key in ("run", "step", "name")}
    assert facts == {"run": "run", "step": 5, "name": "run@5"}
    assert stored(run.store, "run@5") == content(imported)
    assert (run.steps(), run.latest()) == ([4], 4)
    assert run.append(network(1)).step == 6
    assert handle(run.store.path, keep_last=1).save(network(1), 7).step == 7
    assert run.store.handle.objects.names() == ["run@5", "run@7"]
    for act in (run.delete, run.keep, run.load):
        with pytest.raises(NotATrainingError):
            act(5)
    assert stored(run.store, "run@5") == content(imported)
    assert run.store.verify(full=True).fine


def test_no_save_replaces_what_is_imported_meanwhile(
    run: CheckpointStore, imported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other, late = StepSnapshot.whole, handle(run.store.path), [5]

    def meanwhile(self: StepSnapshot) -> StepSnapshot:
        if late:
            run.store.import_(imported, f"run@{late.pop()}")
        return whole(self)

    monkeypatch.setattr(StepSnapshot, "whole", meanwhile)
    with pytest.raises(NotATrainingError, match="run@5"):
        other.save(network(1), 5)
    assert stored(run.store, "run@5") == content(imported)
    late.append(6)
    assert other.append(network(1)).step == 7
    assert stored(run.store, "run@6") == content(imported)
    assert run.steps() == [7]


def test_no_import_replaces_a_step(run: CheckpointStore, imported: Path) -> None:
    for step in (4, 5):
        run.save(network(1), step)
    run.keep(4)
    assert shares(run)
    for name in ("run@4", "run@5", "run@4@keep", "run@9@keep"):
        for replace in (False, True):
            with pytest.raises(TakenStepError, match=name) as caught:
                run.store.import_(imported, name, replace)
            assert isinstance(caught.value, NameTakenError)
            assert (caught.value.facts["run"], caught.value.facts["name"]) == ("run", name)
    assert (run.steps(), run.kept()) == ([4, 5], {4})
    for step in (4, 5):
        assert_same(run.load(step), network(1))
    run.store.import_(imported, "run@6")
    run.store.import_(imported, "run@6", replace=True)  # one import in place of another
    assert run.steps() == [4, 5]


def test_no_import_replaces_a_step_that_is_saved_meanwhile(
    run: CheckpointStore, imported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, late = import_module.Import.add, [5]

    def meanwhile(self: import_module.Import, file: Any) -> None:
        add(self, file)
        if late:
            run.save(network(1), late.pop())

    monkeypatch.setattr(import_module.Import, "add", meanwhile)
    with pytest.raises(TakenStepError, match="run@5"):
        run.store.import_(imported, "run@5", replace=True)
    assert_same(run.load(5), network(1))
    assert list((run.store.path / "tmp").iterdir()) == []


def point(store: LocalStore, name: str, at: str) -> None:
    """Let a name be another one of what is there, as another program may have done."""
    objects = store.handle.objects
    objects.set_ref(name, objects.ref(at), replace=True)


def test_an_import_under_the_name_of_a_mark_is_kept(run: CheckpointStore, imported: Path) -> None:
    """No verb gives it that name; another program may have."""
    run.save(network(1), 5)
    run.store.import_(imported, "other")
    point(run.store, "run@5@keep", "other")
    for act in (run.keep, run.unkeep):
        with pytest.raises(NotATrainingError, match="run@5@keep"):
            act(5)
    with pytest.raises(KeptStepError):
        run.delete(5)
    objects = run.store.handle.objects
    assert objects.ref("run@5@keep") == objects.ref("other")


def test_a_step_of_another_run_is_none_of_this_one(run: CheckpointStore) -> None:
    other = handle(run.store.path, "other")
    other.save(network(2), 3)
    for step in (1, 2):
        run.save(network(1), step)
    point(run.store, "run@7", "other@3")
    point(run.store, "run@8", "run@1")
    assert (run.steps(), run.latest()) == ([1, 2], 2)
    for step in (7, 8):
        for act in (run.delete, lambda step: run.save(network(1), step)):
            with pytest.raises(NotATrainingError):
                act(step)
    handle(run.store.path, keep_last=1).save(network(1), 9)
    assert run.store.handle.objects.names() == ["other@3", "run@7", "run@8", "run@9"]


def test_a_damaged_step_may_be_saved_again(run: CheckpointStore) -> None:
    manifest = run.save(network(1), 5).manifest
    run.store.handle.objects.layout.manifest(manifest).write_bytes(b"damaged")
    with pytest.raises(DamagedFileError):
        run.load(5)
    handle(run.store.path).save(network(2), 5)
    assert_same(run.load(5), network(2))


# --- the files of an export


SMALL = ["training", "training_", "training/state.safetensors/more", "training/notes.txt"]
SMALL += ["model.safetensors/more"]


@pytest.mark.parametrize("path", SMALL)
def test_every_small_file_is_exported_beside_the_tensors(tmp_path: Path, path: str) -> None:
    model = {**network(1), "#state": np.arange(7)}
    files = {path: b"small", "training/more": b"s"} if path == "training/notes.txt" else {}
    files = files or {path: b"small"}
    run = handle(tmp_path / "store", config=files)
    for step in (0, 1):
        run.save(model, step)
    assert shares(run)
    run.store.export("run@1", tmp_path / "out")
    found = content(tmp_path / "out")
    assert found == stored(run.store, "run@1")
    assert {name: found.pop(name) for name in files} == files
    weights, state = sorted(found)
    assert weights == free_path(WEIGHTS, files)
    assert state == free_path(STATE, files)
    assert_same(load_file(tmp_path / "out" / weights), network(1))
    assert load_file(tmp_path / "out" / state).keys() == {"#state"}
    assert ((weights, state) == (WEIGHTS, STATE)) == (path in ("training/notes.txt", "training_"))
    run.store.import_(tmp_path / "out", "again")
    assert run.store.verify(full=True).fine


@pytest.mark.parametrize(
    ("taken", "path"),
    [
        ([], "training/state.safetensors"),
        (["training/notes.txt", "trainings"], "training/state.safetensors"),
        (["training"], "training_/state.safetensors"),
        (["training", "training_/state.safetensors"], "training__/state.safetensors"),
        (["training/state.safetensors"], "training_/state.safetensors"),
        (["training/state.safetensors/x"], "training_/state.safetensors"),
    ],
)
def test_a_free_path(taken: list[str], path: str) -> None:
    assert free_path(STATE, taken) == path


@pytest.mark.parametrize("path", [WEIGHTS, STATE])
def test_the_very_path_of_the_tensors_is_refused(run: CheckpointStore, path: str) -> None:
    with pytest.raises(NamedTwiceError, match="exported"):
        run.save(network(1), 0, files={path: b"x"})


def test_no_tensor_takes_the_place_of_what_describes_a_file(tmp_path: Path) -> None:
    run = handle(tmp_path / "store", weights="model")
    with pytest.raises(NamedTwiceError, match="__metadata__"):
        run.save({"__metadata__": np.ones(3)}, 0)
    state = {"model.__metadata__": np.ones(3), "model.a": np.zeros(2)}
    run.save(state, 1)
    run.store.export("run@1", tmp_path / "out")
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == {"a"}
    assert load_file(tmp_path / "out" / STATE).keys() == {"model.__metadata__"}
    assert_same(run.load(1), state)
