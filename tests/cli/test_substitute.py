"""The command `tensor-dedup substitute` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gallery
from tensor_dedup.analyze import analyze

COMMAND = Path(sys.executable).with_name("tensor-dedup")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(each) for each in (COMMAND, "substitute", *arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


def test_nothing_is_said_to_differ_where_nothing_does(models: list[Path], tmp_path: Path) -> None:
    base, tuned = models[:2]  # of which one block has changed
    assert analyze([base, tuned]).contributions[1].adds_bytes > 0
    for number, choice in enumerate((("--layers", "0"), ("--layers", ""), ("--budget", "1GiB"))):
        done = run(base, tuned, *choice, "--output", tmp_path / str(number))
        assert (done.returncode, done.stderr) == (0, "")
        assert "its outputs are TUNE's" in done.stdout
        assert "differ from" not in done.stdout
    changed = run(base, tuned, "--layers", "3", "--output", tmp_path / "3")
    assert "Its outputs differ from TUNE's" in changed.stdout


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
