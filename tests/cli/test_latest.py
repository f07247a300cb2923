"""RUN@latest where a verb takes the name of a checkpoint: it is printed as the step that it is."""

import json
from pathlib import Path

import numpy as np
import pytest

from processes import commands
from store_runs.stores import open_store
from tensor_dedup import Store
from tensor_dedup.training import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path / "store")
    with CheckpointStore(made, "policy", config={"config.json": "{}"}) as run:
        for step in (4, 10, 6):  # it went back
            run.save({"w": np.full(999, step)}, step=step)
    return made


def run(*arguments: str | Path, **environ: str) -> str:
    done = commands.run(*arguments, environ={"PATH": "/bin", **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


def failed(*arguments: str | Path, **environ: str) -> tuple[int, str]:
    done = commands.run(*arguments, environ={"PATH": "/bin", **environ})
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_verbs_that_read_a_checkpoint_take_the_latest_step(store: Store, tmp_path: Path) -> None:
    there: list[str | Path] = ["--store", store.path]
    assert run("show", "policy@latest", *there).startswith("policy@6\n")
    shown = json.loads(run("show", "store://policy@latest", "--json", *there))
    assert shown["name"] == "policy@6"
    assert "policy@6: " in run("export", "policy@latest", tmp_path / "out", *there)
    assert (tmp_path / "out/config.json").read_text() == "{}"
    assert json.loads(run("du", "policy@latest", "--json", *there))["name"] == "policy@6"
    tensor = json.loads(run("cat", "policy@latest", "w", "--json", *there))
    assert tensor["name"] == "policy@6"
    analysed = json.loads(run("analyze", "policy@latest", "policy@4", "--json", *there))
    assert [each["path"] for each in analysed["checkpoints"]] == ["store://policy@6", "policy@4"]
    compared = json.loads(run("diff", "policy@4", "store://policy@latest", "--json", *there))
    assert compared["changed"][0]["name"] == "w"
    # What removes or renames names a step.
    for verb in (["delete", "policy@latest", "--yes"], ["rename", "policy@latest", "other"]):
        status, said = failed(*verb, *there)
        assert (status, "no checkpoint 'policy@latest'" in said) == (2, True)
    for verb in (["show", "nobody@latest"], ["analyze", "store://nobody@latest"]):
        status, said = failed(*verb, *there)
        assert (status, "no step of a run 'nobody'" in said) == (2, True)
    assert failed("analyze", "nobody@latest", *there)[0] == 2


def test_push_and_pull_take_it_and_a_remote_counts_before_the_store(
    store: Store, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/remote"
    there: list[str | Path] = ["--store", store.path]
    assert run("push", "policy@latest", url, *there).startswith("policy@6: ")
    assert run("remote", "show", url, "policy@latest").startswith("policy@6: ")
    assert json.loads(run("remote", "show", url, "policy@latest", "--json"))["name"] == "policy@6"
    here = tmp_path / "here"
    assert run("pull", url, "policy@latest", "--store", here).startswith("policy@6: ")
    assert Store.open(here).names() == ["policy@6"]
    with CheckpointStore(store, "policy") as saved:
        saved.save({"w": np.full(999, 7)}, step=7)
    run("push", "policy@7", url, *there)
    # With the remote configured, what is here is not taken for the latest step.
    assert run("show", "policy@latest", "--store", here).startswith("policy@6")
    for verb in (["export", "policy@latest", tmp_path / "out"], ["analyze", "policy@latest"]):
        status, said = failed(*verb, "--store", here, TENSOR_DEDUP_REMOTE=url)
        assert status == 2
        assert "no checkpoint 'policy@7'" in said
        assert f"tensor-dedup pull {url} policy@" in said
    status, said = failed(
        *("export", "policy@latest", tmp_path / "out", "--store", here),
        TENSOR_DEDUP_REMOTE=f"file://{tmp_path}/nothing",
    )
    assert (status, "check the URL" in said) == (3, True)
    assert failed("pull", url, "nobody@latest", "--store", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


def test_advice_names_what_was_given(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nothing"
    status, said = failed("pull", url, "policy@latest", "--store", tmp_path / "here")
    assert status == 3
    assert "that the disk is mounted" in said
    assert f"`tensor-dedup push policy@latest {url}`" in said
    assert " NAME" not in said
