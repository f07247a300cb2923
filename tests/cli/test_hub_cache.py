"""Verbs on a Hugging Face cache as its library leaves it: blobs that the whole cache shares."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files.hub_caches import COMMIT, snapshot
from files.model_store_files import gguf_bytes
from store_runs.stores import KIB, MIB, assert_clean, content, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.text_table import human

OTHER = "2f" * 20
BIG = noise(9, 2 * MIB)
LAYER = "model.layers.{}.mlp.up_proj.weight"


def model(number: int) -> dict[str, bytes]:
    """A checkpoint whose last layer is its own; all have the others."""
    tensors = {LAYER.format(layer): noise(layer, 40 * KIB) for layer in range(3)}
    tensors[LAYER.format(3)] = noise(100 + number, 40 * KIB)
    return {"model.safetensors": safetensors(u8(**tensors)), "config.json": b"{}"}


def run(*arguments: str | Path, status: int = 0) -> Result:
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done


def document(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run(*arguments, "--json", status=status).stdout)
    return loaded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two repositories, and a second revision of one that has a branch, a tag and a request."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    snapshot(cache, "org/base", model(1))
    snapshot(cache, "org/tune", model(3), OTHER)
    folder = snapshot(cache, "org/tune", model(2))
    refs = dict.fromkeys(("refs/pr/1", "feature/x", "v1.0"), OTHER.encode())
    write(cache / "models--org--tune" / "refs", refs)
    assert (folder / "model.safetensors").resolve().parent.parent == cache / "blobs"
    return cache


def test_every_verb_reads_shared_blobs(cache: Path, tmp_path: Path) -> None:
    analysis = document("analyze", "org/base", "org/tune")
    assert analysis["pairs"][0]["shared_bytes"] == 120 * KIB
    changed = document("diff", "org/base", "org/tune")["changed"]
    assert [each["name"] for each in changed] == [LAYER.format(3)]
    assert document("du", "org/base")["unique_bytes"] == 160 * KIB
    run("substitute", "org/base", "org/tune", "--layers", "3", "--output", tmp_path / "out")
    made = document("analyze", "org/base", tmp_path / "out")
    assert made["checkpoints"][1]["adds_bytes"] == 0
    assert document("import", "org/base")["name"] == "org/base"
    assert document("import", "org/tune")["new_bytes"] < 41 * KIB
    found = document("find", analysis["largest_shared"][0]["digest"])["tensors"]
    assert [each["checkpoint"] for each in found] == ["org/base", "org/tune"]
    assert_clean(Store.open(tmp_path / "store"), {"org/base": model(1), "org/tune": model(2)})


def test_the_whole_cache_is_indexed(cache: Path, tmp_path: Path) -> None:
    expected = {f"org/base@{COMMIT}": model(1), f"org/tune@{COMMIT}": model(2)}
    expected[f"org/tune@{OTHER}"] = model(3)
    before = blobs(cache)
    found = document("import", "--hub-cache")
    assert [each["name"] for each in found["imported"]] == sorted(expected)
    assert (found["left_out"], found["failed"]) == ({}, {})
    store = Store.open(tmp_path / "store")
    for name, files in expected.items():
        store.export(name, tmp_path / name)
        assert content(tmp_path / name) == files
    assert blobs(cache) == before


def blobs(cache: Path) -> Mapping[Path, tuple[int, ...]]:
    """The identity and times of every file in the store of a cache."""
    found = {path: path.lstat() for path in (cache / "blobs").rglob("*")}
    return {
        path: (each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for path, each in found.items()
    }


def test_what_is_twice_on_the_disk_is_said(cache: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", large := {"model.safetensors": safetensors(u8(w=BIG))})
    run("import", folder)
    snapshot(cache, "org/large", large)
    before = blobs(cache)
    small = len(model(1)["config.json"])  # which all have, and an index in place has copied
    found = document("import", "--hub-cache")
    twice = len(large["model.safetensors"]) + small
    assert found["twice_bytes"] == twice
    assert (found["deduped_files"], found["deduped_bytes"], found["not_deduped"]) == (0, 0, {})
    text = run("import", "--hub-cache").stdout
    assert f"\ntwice on disk  {human(twice)}, in the cache and in the store\n" in text

    found = document("import", "--hub-cache", "--dedup-cache")
    assert sum(found["not_deduped"].values()) == found["twice_bytes"]
    assert found["deduped_bytes"] + found["twice_bytes"] == twice
    text = run("import", "--hub-cache", "--dedup-cache").stdout
    assert "\none copy now   0 B in 0 files\ntwice on disk  " in text  # nothing is left to do
    for why, nbytes in found["not_deduped"].items():
        assert f"\nof that        {human(nbytes)}: {why}\n" in text
    assert blobs(cache) == before
    assert document("verify", "--full")["faults"] == []


def test_each_of_several_models_in_a_repository_is_counted(cache: Path) -> None:
    files = {
        "m.Q4.gguf": gguf_bytes({"w": 1.0, "q4": 2.0}),
        "m.Q8.gguf": gguf_bytes({"w": 3.0, "q8": 4.0}),
    }
    folder = snapshot(cache, "org/quantised", files)
    assert all((folder / name).resolve().parent.parent == cache / "blobs" for name in files)
    before = document("import", "--hub-cache")
    names = [f"org/quantised@{COMMIT}/m.{kind}" for kind in ("Q4", "Q8")]
    assert {*names} < {each["name"] for each in before["imported"]}
    for number, name in enumerate(files, 1):
        run("import", folder / name, "--name", f"copy{number}")
    after = document("import", "--hub-cache")
    assert after["twice_bytes"] - before["twice_bytes"] == sum(map(len, files.values()))


def test_one_copy_is_made_of_the_cache_only(cache: Path) -> None:
    for arguments in (["org/base"], ["org/base", "--external"]):
        done = run("import", *arguments, "--dedup-cache", status=2)
        assert "give --hub-cache, too" in done.output
    assert not Path(os.environ["TENSOR_DEDUP_STORE"]).exists()


@pytest.mark.parametrize("revision", ["refs/pr/1", "feature/x", "v1.0", OTHER[:4], OTHER])
def test_a_revision_is_called_by_its_repository(cache: Path, revision: str) -> None:
    name = f"org/tune@{revision}"
    found = document("analyze", "org/base", name)
    assert [each["path"] for each in found["checkpoints"]] == ["org/base", name]
    assert found["pairs"][0] | {"b": name} == found["pairs"][0]
    shown = name if "/" in revision else f"tune@{revision}"
    text = run("analyze", "org/base", name, name, "--details").stdout
    lines = text.splitlines()
    assert [line for line in lines if line.startswith(f"{shown} ")]
    assert f"equals {shown}" in text
    assert f"│ 2 {shown} " in text


def test_the_path_of_a_snapshot_is_shown_as_a_name(cache: Path) -> None:
    folders = [cache / f"models--org--{name}" / "snapshots" / COMMIT for name in ("base", "tune")]
    text = run("analyze", *folders).stdout
    assert f"\nbase@{COMMIT[:12]} " in text
    assert f"\ntune@{COMMIT[:12]} " in text
    document_ = document("analyze", *folders)
    assert [each["path"] for each in document_["checkpoints"]] == list(map(str, folders))


def test_a_folder_of_that_name_is_a_path(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write(tmp_path / "org" / "runs@old" / name, model(1))
    text = run("analyze", "org/runs@old/first", "org/runs@old/second").stdout
    assert "\nfirst " in text
