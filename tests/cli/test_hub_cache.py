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


def test_the_folder_of_a_repository_means_its_main_snapshot(cache: Path, tmp_path: Path) -> None:
    base, tune = (cache / f"models--org--{name}" for name in ("base", "tune"))
    assert len(list((tune / "snapshots").iterdir())) == 2
    analysis = document("analyze", base, tune)
    named = document("analyze", "org/base", "org/tune")
    for key in ("total_bytes", "unique_bytes", "tensors"):
        assert analysis[key] == named[key]
    text = run("analyze", base, tune).stdout
    assert "\nbase " in text
    assert "\ntune " in text
    assert document("diff", base, tune) | {"a": 0, "b": 0} == document(
        "diff", "org/base", "org/tune"
    ) | {"a": 0, "b": 0}
    assert document("du", base)["nbytes"] == document("du", "org/base")["nbytes"] == 160 * KIB
    run("substitute", base, tune, "--layers", "3", "--output", tmp_path / "out")
    assert document("analyze", base, tmp_path / "out")["checkpoints"][1]["adds_bytes"] == 0
    assert document("import", base)["name"] == "org/base"
    store = Store.open(tmp_path / "store")
    assert store.import_(tune).name == "org/tune"
    assert document("import", "org/tune")["unchanged"]
    assert document("import", tune / "snapshots")["unchanged"]
    assert_clean(store, {"org/base": model(1), "org/tune": model(2)})


def test_a_repository_with_several_snapshots_and_no_main_lists_them(cache: Path) -> None:
    folder = cache / "models--org--tune"
    (folder / "refs" / "main").unlink()
    for verb in ("import", "analyze", "du"):
        said = run(verb, folder, status=2).output
        for revision in (COMMIT, OTHER):
            assert str(folder / "snapshots" / revision) in said
    assert not Path(os.environ["TENSOR_DEDUP_STORE"]).exists()


@pytest.mark.parametrize("below", [".", ".."])
def test_a_whole_cache_is_no_checkpoint(
    cache: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "elsewhere")
    root = (cache / below).resolve()
    verbs: list[list[str | Path]] = [["import"], ["import", "--all-files"], ["du"], ["diff", root]]
    for verb in verbs:
        said = run(*verb, root, status=2).output
        command = f"HF_HUB_CACHE={cache} tensor-dedup import"
        assert f"`{command} org/base`" in said
        assert f"`{command} --hub-cache`" in said
    assert not Path(os.environ["TENSOR_DEDUP_STORE"]).exists()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    named = document("analyze", "org/base", "org/tune")
    assert named["shared_bytes"] == 120 * KIB
    whole = document("analyze", root)
    assert [each["path"] for each in whole["checkpoints"]] == [
        str(cache / f"models--org--{name}") for name in ("base", "tune")
    ]
    for key in ("tensors", "shared_bytes"):
        assert whole[key] == named[key]


def test_of_a_cache_the_repositories_that_can_be_read_are_compared(
    cache: Path, tmp_path: Path
) -> None:
    gguf = {"m.Q4.gguf": gguf_bytes({"w": 1.0}), "m.Q8.gguf": gguf_bytes({"w": 2.0})}
    folder = snapshot(cache, "org/quantised", gguf)
    # A link to a blob of another repository, which is in the cache, and not shared.
    other = write(cache / "models--org--private" / "blobs", {"1234": safetensors(u8(w=BIG))})
    evil = write(cache / "models--evil--one" / "snapshots" / COMMIT, {"config.json": b"{}"})
    (evil / "model.safetensors").symlink_to(other / "1234")
    found = document("analyze", cache, status=1)
    assert [each["path"] for each in found["checkpoints"]] == [
        str(cache / "models--org--base"),
        *(str(folder / name) for name in gguf),
        str(cache / "models--org--tune"),
    ]
    assert list(found["failed"]) == [str(cache / "models--evil--one")]
    assert "which is outside" in next(iter(found["failed"].values()))


def test_a_snapshot_that_is_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", model(7))
    folder = cache / "models--evil--one"
    write(folder / "refs", {"main": COMMIT.encode()})
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / COMMIT).symlink_to(secret)
    assert (folder / "snapshots" / COMMIT / "model.safetensors").is_file()
    assert "no snapshot" in run("import", folder, status=2).output
    (folder / "snapshots" / COMMIT).unlink()
    (folder / "snapshots").rmdir()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / COMMIT).symlink_to(secret)
    (folder / "snapshots").symlink_to(tmp_path / "all")
    assert "which is outside" in run("import", folder, status=1).output
    assert not Path(os.environ["TENSOR_DEDUP_STORE"]).exists()


def test_a_revision_does_not_take_the_name_of_main(cache: Path, tmp_path: Path) -> None:
    for given, name in (
        ("org/tune@refs/pr/1", "org/tune@refs/pr/1"),
        ("org/tune@v1.0", "org/tune@v1.0"),
        (f"org/tune@{OTHER[:4]}", f"org/tune@{OTHER}"),
        (f"org/tune@{OTHER}", f"org/tune@{OTHER}"),
        ("org/tune", "org/tune"),
    ):
        text = run("import", given).output
        assert text.startswith(f"{name}: ")
        assert "cannot be the name" not in text
    found = document("import", "--hub-cache")
    assert f"org/tune@{OTHER}" in found["left_out"]
    expected = dict.fromkeys(("org/tune@refs/pr/1", "org/tune@v1.0"), model(3))
    expected |= {"org/tune": model(2), f"org/tune@{OTHER}": model(3)}
    expected |= {f"org/tune@{COMMIT}": model(2), f"org/base@{COMMIT}": model(1)}
    assert set(Store.open(tmp_path / "store").names()) == set(expected)
    for name, files in list(expected.items())[:4]:
        run("export", name, tmp_path / "out" / name)
        assert content(tmp_path / "out" / name) == files


def test_each_model_of_a_revision_has_the_revision_in_its_name(cache: Path) -> None:
    gguf = {"m.Q4.gguf": gguf_bytes({"w": 1.0}), "m.Q8.gguf": gguf_bytes({"w": 2.0})}
    snapshot(cache, "org/quantised", gguf)
    refs = {"refs/pr/1": COMMIT.encode()}
    write(cache / "models--org--quantised" / "refs", refs)
    found = document("import", "org/quantised@refs/pr/1", "--all-models")
    names = [f"org/quantised@refs/pr/1/m.{kind}" for kind in ("Q4", "Q8")]
    assert [each["name"] for each in found["imported"]] == names
