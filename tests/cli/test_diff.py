"""The command `tensor-dedup diff` as a user runs it."""

import json
import subprocess
from pathlib import Path

import jsonschema
import numpy
import pytest
from safetensors.numpy import save_file

from models import gallery
from processes import commands
from tensor_dedup.training import CheckpointStore

SCHEMA = Path(__file__).parents[2] / "docs" / "diff.schema.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("diff", *arguments)


def test_people_see_what_changed_and_how_much(models: list[Path]) -> None:
    base, one_layer, _, grown, _ = models
    done = run(base, one_layer)
    assert (done.returncode, done.stderr) == (0, "")
    changed = [line.split()[1] for line in done.stdout.splitlines() if " model.layers.3." in line]
    assert len(changed) == 8
    assert "100 % of 1,024" in done.stdout
    counts = done.stdout.splitlines()[-5:]
    assert [line.split()[:2] for line in counts] == [
        ["unchanged", "43"],
        ["renamed", "0"],
        ["changed", "8"],
        ["added", "0"],
        ["removed", "0"],
    ]
    assert "400x32 -> 426x32" in run(base, grown).stdout
    stat = run(base, one_layer, "--stat")
    assert stat.stdout.splitlines() == counts
    assert run(base, base).stdout.splitlines()[0].startswith("unchanged  51 tensors")


def test_json_is_what_its_schema_says(models: list[Path]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for other, more in ((models[1], []), (models[3], []), (models[1], ["--stat"])):
        done = run(models[0], other, "--json", *more)
        assert (done.returncode, done.stderr) == (0, "")
        validator.validate(json.loads(done.stdout))


def test_steps_differ_in_numbers_and_in_state(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "store", "run") as handle:
        handle.save({"model": {"w": numpy.arange(64), "b": numpy.zeros(8)}, "epoch": 1}, 1)
        handle.save({"model": {"w": numpy.arange(64) + 1, "b": numpy.zeros(8)}, "epoch": 2}, 2)
    where = ("--store", tmp_path / "store")
    found = json.loads(run("run@1", "store://run@2", *where, "--json").stdout)
    (changed,) = found["changed"]
    assert (changed["numbers"], changed["differing"]) == (64, 64)
    assert found["unchanged"]["tensors"] == 1
    assert found["state_differs"]
    assert "plain values or structure" in run("run@1", "run@2", *where).stdout
    save_file({"model.w": numpy.arange(64)}, tmp_path / "w.safetensors")
    exported = run(tmp_path / "w.safetensors", "run@1", *where).stdout  # of which one is a step
    assert "added  model.b" in exported
    assert "plain values or structure" not in exported


def test_many_names_that_change_alike_are_one_line(tmp_path: Path, models: list[Path]) -> None:
    arrays = {f"h.{n}.w": numpy.full(4, n) for n in range(12)}
    save_file(arrays, tmp_path / "a.safetensors")
    wrapped = {f"model.{name}": array for name, array in arrays.items()}
    save_file(wrapped, tmp_path / "b.safetensors")
    text = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    assert "* -> model.* (12 tensors)" in text


def test_wrong_use_is_status_2(tmp_path: Path, models: list[Path]) -> None:
    for arguments in ((models[0],), (models[0], tmp_path / "nothing"), (models[0], "store://no")):
        done = run(*arguments, "--store", tmp_path / "store")
        assert (done.returncode, done.stdout) == (2, ""), arguments
