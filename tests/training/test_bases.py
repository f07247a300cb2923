"""The first step of a run near another checkpoint costs what differs from that."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from store_runs.stores import Model, assert_same
from tensor_dedup.store.errors import UnknownNameError
from tensor_dedup.store.format.tables import PLAIN
from tensor_dedup.training import CheckpointStore

# What a save encodes itself, and what it leaves for later.
SIZES = {"small": 300_000, "large": 1_500_000}


@pytest.fixture(params=SIZES)
def elements(request: pytest.FixtureRequest) -> int:
    return SIZES[request.param]


def model_of(elements: int, seed: int = 0) -> Model:
    dice = np.random.default_rng(seed)
    return {name: dice.standard_normal(elements).astype(np.float32) for name in ("one", "two")}


def near(model: Model, seed: int) -> Model:
    dice = np.random.default_rng(seed)
    return {
        name: array + dice.standard_normal(array.shape).astype(np.float32) * np.float32(1e-6)
        for name, array in model.items()
    }


def save(root: Path, run: str, model: Any, step: int = 0, **more: Any) -> int:
    """Save one step; how many bytes of containers the store has more then."""
    before = size(root)
    with CheckpointStore(root, run, **more) as opened:
        opened.save(model, step)
    return size(root) - before


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "containers").rglob("*.*"))


def bases(root: Path, name: str) -> set[str | None]:
    """What the tensors of a step are stored against."""
    with CheckpointStore(root, "any").store.checkpoint(name) as opened:
        return {opened.stored(each)[2] for each in opened if each.dtype == "F32"}


def test_the_first_step_of_a_run_near_another_one(tmp_path: Path, elements: int) -> None:
    model = model_of(elements)
    whole = save(tmp_path, "first", model)
    save(tmp_path, "first", near(model, 1), 1)
    save(tmp_path, "other", model_of(elements, seed=9))  # saved later, and not near
    tuned = near(model, 2)
    assert save(tmp_path, "second", tuned) < 0.6 * whole
    assert None not in bases(tmp_path, "second@0")
    run = CheckpointStore(tmp_path, "first")
    run.delete(0)
    run.delete(1)
    run.gc(0)
    second = CheckpointStore(tmp_path, "second")
    assert_same(second.load(0), tuned)
    assert second.store.verify(full=True).faults == []


def imported(root: Path, folder: Path, name: str, model: Model) -> None:
    folder.mkdir()
    save_file(model, folder / "model.safetensors")
    CheckpointStore(root, "any").store.import_(folder, name)


def test_the_first_step_near_an_import(tmp_path: Path, elements: int) -> None:
    root, model = tmp_path / "store", model_of(elements)
    imported(root, tmp_path / "base", "base", model)
    state = {"model": near(model, 1), "optimizer": model_of(elements, seed=7)}
    with CheckpointStore(root, "tuned", weights="model") as run:
        run.save(state, 0)
    with run.store.checkpoint("tuned@0") as opened:
        against = {each.name for each in opened if opened.stored(each)[2] is not None}
    assert against == {"model.one", "model.two"}
    found = run.load(0)
    assert_same(found["model"], state["model"])
    assert_same(found["optimizer"], state["optimizer"])


def test_the_base_that_was_named_is_used(tmp_path: Path, elements: int) -> None:
    root, model = tmp_path / "store", model_of(elements)
    imported(root, tmp_path / "one", "nearer", model)
    imported(root, tmp_path / "two", "named", near(model, 1))
    save(root, "tuned", near(model, 2), base="named")
    with CheckpointStore(root, "any").store.checkpoint("named") as opened:
        named = {each.digest for each in opened}
    assert bases(root, "tuned@0") <= named
    assert_same(CheckpointStore(root, "tuned").load(0), near(model, 2))


def test_what_is_not_near_is_not_used(tmp_path: Path, elements: int) -> None:
    root = tmp_path / "store"
    imported(root, tmp_path / "base", "base", model_of(elements, seed=5))
    save(root, "run", model_of(elements))
    assert bases(root, "run@0") == {None}


def test_a_step_is_not_near_itself(tmp_path: Path, elements: int) -> None:
    save(tmp_path, "run", model_of(elements))
    assert bases(tmp_path, "run@0") == {None}
    with CheckpointStore(tmp_path, "run").store.checkpoint("run@0") as opened:
        codecs = {opened.stored(each)[0] for each in opened if each.dtype == "F32"}
        assert PLAIN not in codecs  # but encoded


@pytest.mark.parametrize("base", ["base", "alone@0", None])
def test_a_base_whose_names_lack_the_first_part(
    tmp_path: Path, elements: int, base: str | None
) -> None:
    root, model = tmp_path / "store", model_of(elements)
    if base == "alone@0":
        save(root, "alone", model)
    else:
        imported(root, tmp_path / "base", "base", model)
    state = {"model": near(model, 1), "optimizer": model_of(elements, seed=7)}
    save(root, "tuned", state, base=base)
    with CheckpointStore(root, "tuned").store.checkpoint("tuned@0") as opened:
        against = {each.name for each in opened if opened.stored(each)[2] is not None}
    assert against == {"model.one", "model.two"}
    assert_same(CheckpointStore(root, "tuned").load(0)["model"], state["model"])


@pytest.mark.parametrize("drained", [False, True])
def test_a_run_with_steps_goes_on_without_its_base(tmp_path: Path, drained: bool) -> None:
    root, model = tmp_path / "fast", model_of(30_000)
    more: dict[str, Any] = {}
    if drained:
        more["drain"] = tmp_path / "second"
    imported(root, tmp_path / "base", "base", model)
    save(root, "tuned", near(model, 1), base="base", **more)
    if drained:
        shutil.rmtree(root)  # its machine is lost, and the base with it
    else:
        CheckpointStore(root, "any").store.delete("base")
    with CheckpointStore(root, "tuned", base="base", **more) as run:
        assert run.steps() == [0]
        run.save(near(model, 2), 1)
        assert_same(run.load(1), near(model, 2))


def test_a_base_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no checkpoint 'base'"):
        CheckpointStore(tmp_path, "run", base="base")
