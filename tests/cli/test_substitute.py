"""The command `tensor-dedup substitute` as a user runs it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from models import gallery
from processes import commands
from tensor_dedup.analyze import analyze


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("substitute", *arguments)


def test_people_see_what_was_taken_and_what_it_saves(models: list[Path], tmp_path: Path) -> None:
    base, _, lora, *_ = models
    done = run(base, lora, "--layers", "0-3", "--output", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.layers.3" in done.stdout
    assert "32 tensors taken from BASE" in done.stdout
    assert "--samples measures by how much" in done.stdout
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    shared = analyze([base, tmp_path / "out"]).contributions[1].adds_bytes
    assert 0 < shared < analyze([base, lora]).contributions[1].adds_bytes


def test_files_that_are_not_copied_are_named_with_the_reason(
    models: list[Path], tmp_path: Path
) -> None:
    base, _, lora, *_ = models
    tune = tmp_path / "tune"
    shutil.copytree(lora, tune)
    for name in ("optimizer.pt", "tf_model.h5"):
        (tune / name).write_bytes(b"x")
    said = run(base, tune, "--layers", "0", "--output", tmp_path / "out").stdout
    assert "Not copied, state of a training: optimizer.pt." in said
    assert "Not copied, because they hold TUNE's weights in other forms: tf_model.h5." in said


@pytest.mark.parametrize("options", [("--layers", "0-2"), ("--budget", "1GiB")])
def test_where_nothing_changes_that_is_said(
    models: list[Path], tmp_path: Path, options: tuple[str, str]
) -> None:
    base, instruct, *_ = models  # which changed layer 3
    done = run(base, instruct, *options, "--output", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nothing changed" in done.stdout
    assert "differ" not in done.stdout
    assert analyze([instruct, tmp_path / "out"]).contributions[1].adds_bytes == 0


def test_the_document_has_the_bytes_that_analyze_counts(models: list[Path], tmp_path: Path) -> None:
    base, *_, full = models
    alone = analyze([base, full]).contributions[1].adds_bytes
    budget = alone // 2
    done = run(base, full, "--budget", str(budget), "--output", tmp_path / "out", "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["tune_adds_bytes"] == alone
    found = analyze([base, tmp_path / "out"]).contributions[1].adds_bytes
    assert document["adds_bytes"] == found <= budget
    assert document["outputs"] is None
    assert sum(layer["bytes"] for layer in document["layers"]) >= alone - budget


def test_a_file_of_samples_without_a_text_is_wrong_use(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("\n  \n")
    options = ("--layers", "0", "--samples", tmp_path / "texts", "--output", tmp_path / "out")
    done = run(models[0], models[2], *options)
    assert done.returncode == 2
    assert "there is no text in it" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_grown_vocabulary_is_refused_in_one_line(models: list[Path], tmp_path: Path) -> None:
    base, grown = models[0], models[3]
    done = run(base, grown, "--layers", "*embed*", "--output", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "[400, 32] in the base and BF16 [426, 32] in the fine-tune" in done.stderr
    assert not (tmp_path / "out").exists()
