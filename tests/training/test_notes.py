"""What a step's manifest says of it: metrics, as JSON that every reader takes, and the time."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

from store_runs.clocks import ClockedFiles, SetClock
from store_runs.stores import handle, network, shares
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.store.format.manifests import encode_manifest
from tensor_dedup.store.steps.errors import BadMetricError
from tensor_dedup.store.steps.notes import Notes, checked, content_name
from tensor_dedup.training import CheckpointStore


def refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def test_numbers_that_json_lacks_are_texts() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5}
    texts = Notes("run", 1, "numpy", metrics).to_texts()
    held = json.loads(texts["metrics"], parse_constant=refuse)
    assert held == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}
    back = Notes.from_texts(texts)
    assert back is not None
    assert math.isnan(back.metrics["a"])
    assert (back.metrics["b"], back.metrics["c"], back.metrics["d"]) == (math.inf, -math.inf, 0.5)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1' + "0" * 400 + "}", '{"a": "1.5"}', '{"a": "nan"}', '{"a": []}', "[" * 100_000, "1"],
    ids=["too large", "a text", "another text", "a list", "deep", "no object"],
)
def test_what_no_run_wrote_is_no_step(text: str) -> None:
    assert Notes.from_texts(Notes("run", 1, "numpy").to_texts() | {"metrics": text}) is None


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, -(10**400), "low", None, torch.ones(2)],
    ids=["large", "larger", "less", "a text", "None", "a tensor"],
)
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(BadMetricError, match="the metric 'l' is"):
        checked({"l": value})


@pytest.mark.parametrize("value", [1, [1], "loss"])
def test_metrics_without_names(tmp_path: Path, value: Any) -> None:
    run = handle(tmp_path)
    with pytest.raises(BadMetricError, match="give numbers by name"):
        run.save(network(1), 0, value)
    assert run.steps() == []


def test_a_run_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run, model = handle(tmp_path), network(1)
    run.save(model, 0, {"loss": math.inf, "acc": 1})
    run.save(model, 1, {"loss": math.nan, "acc": torch.tensor(0.5)})
    with pytest.raises(BadMetricError):
        run.save(model, 2, {"loss": 10**400})
    assert shares(run)
    assert run.steps() == [0, 1]
    assert run.metrics()[0] == {"acc": 1.0, "loss": math.inf}
    assert run.best("loss") == 0


# --- when a step was saved


def times(store: Store) -> dict[int, int]:
    return {step.step: step.saved_at for step in store.steps("run")}


def test_the_time_of_saving_goes_with_a_step(tmp_path: Path) -> None:
    """However its reference came to be, and whatever a file system says of that."""
    ago = SetClock(hours=-1000)
    with handle(tmp_path / "store", files=ClockedFiles(ago)) as run:
        for step in (0, 1):
            run.save(network(step), step)
        run.keep(1)
    store, second = Store.open(tmp_path / "store"), tmp_path / "second"
    said = times(store)
    assert [abs(at - (time.time() - 3_600_000)) < 600 for at in said.values()] == [True, True]
    for file in (store.path / "refs").iterdir():
        os.utime(file, (3000, 3000))
    with CheckpointStore(store, "run", drain=str(second), keep_fast=None) as tiers:
        tiers.drain()
    url, other = f"file://{tmp_path}/remote", Store.open(tmp_path / "other")
    store.push(url, "run")
    other.pull(url, "run")
    shutil.copytree(store.path, tmp_path / "copy", copy_function=shutil.copyfile)
    for each in (store, Store.open(second), other, Store.open(tmp_path / "copy")):
        assert times(each) == said
        assert {one.name: one.imported_at for one in each.list()} == {
            f"run@{step}": at for step, at in said.items()
        }
        [usage] = each.usage().checkpoints
        assert usage.imported_at == max(said.values())


def test_what_is_saved_again_is_equal_whenever_it_was(tmp_path: Path) -> None:
    model, names = network(1), []
    for hours in (0, 7):
        run = handle(tmp_path, files=ClockedFiles(SetClock(hours=hours)))
        run.save(model, 4)
        objects = run.store.handle.objects
        content = objects.manifest(objects.ref("run@4"))
        assert content.notes["saved"].isdecimal()
        names.append((objects.ref("run@4"), content_name(content)))
    (one, same), (two, as_well) = names
    assert one != two
    assert same == as_well


@pytest.mark.parametrize("text", [None, "", "soon", "-5", "1e9", "9" * 400, "999999999999"])
def test_a_step_whose_time_is_not_known_is_a_step(tmp_path: Path, text: str | None) -> None:
    """It is shown with the time of its reference, as one without the note is."""
    run = handle(tmp_path)
    run.save(network(1), 4)
    objects = run.store.handle.objects
    content = objects.manifest(objects.ref("run@4"))
    notes = {**content.notes, "saved": text} if text is not None else {**content.notes}
    if text is None:
        del notes["saved"]
    name, blob = encode_manifest(structs.replace(content, notes=notes))
    objects.publish(blob, objects.layout.manifest(name))
    objects.set_ref("run@4", name, replace=True)
    os.utime(tmp_path / "refs" / "run@4", (3000, 3000))
    [step] = run.store.steps("run")
    assert (step.step, step.saved_at) == (4, 3000)
    result = CliRunner().invoke(main, ["runs", "show", "run", "--store", str(tmp_path)])
    assert "1970-01-01 00:50 UTC" in result.stdout
