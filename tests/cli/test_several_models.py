"""Folders of other tools on the command line: several models, other tools' stores, parts of one."""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from files.gguf_files import entry, file_of, info
from files.model_store_files import (
    digest,
    docker_model,
    gguf_bytes,
    ollama_model,
    safetensors_bytes,
    write,
)
from processes.commands import document, run
from store_runs.stores import content
from tensor_dedup import Store, load_tensors
from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.planning.substitution.substitute import substitute

ALPHA = gguf_bytes({"blk.0.a": 1.0, "blk.1.a": 2.0})
BETA = gguf_bytes({"blk.0.a": 1.0, "blk.1.a": 3.0})


def quantisations(root: Path) -> Path:
    files = {"m.Q4_K_M.gguf": ALPHA, "m.Q8_0.gguf": BETA, "mmproj.gguf": gguf_bytes({"v": 4.0})}
    for name, data in files.items():
        write(root / name, data)
    return root


def ollama(root: Path) -> Path:
    for name, data in (("alpha", ALPHA), ("beta", BETA), ("gamma", ALPHA)):
        layers = [("model", data), ("template", b"T")]
        ollama_model(root, f"registry.ollama.ai/library/{name}/latest", layers)
    return root


def docker(root: Path) -> Path:
    for name, data in (("alpha", ALPHA), ("beta", BETA)):
        docker_model(root, f"index.docker.io/ai/{name}:latest", [("gguf.v3", data)])
    return root


def slices(root: Path) -> Path:
    for rank in (0, 1):
        info = json.dumps({"w": {"saved_offsets": [2 * rank]}})
        data = safetensors_bytes({"w": float(rank)}, DCP_SHARDING_INFO=info)
        write(root / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", data)
    return root


def distributed(root: Path) -> Path:
    for name in (".metadata", "__0_0.distcp"):
        write(root / name, b"x")
    return root


def deepspeed(root: Path) -> Path:
    (root / "global_step10").mkdir(parents=True)
    for rank in (0, 1):
        file = root / "global_step10" / f"mp_rank_0{rank}_model_states.pt"
        torch.save({"module": {"w": torch.full((4,), float(rank))}}, file)
    return root


Made = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("make", "status", "says"),
    [
        (quantisations, 2, "2 models and 1 projector in this folder"),
        (ollama, 2, "the store of another tool, with 3 models"),
        (slices, 1, "consolidate_safetensors_files"),
        (distributed, 1, "dcp_to_torch"),
        (deepspeed, 1, "zero_to_fp32.py"),
    ],
)
def test_every_verb_and_the_library_say_the_same(
    tmp_path: Path, make: Made, status: int, says: str
) -> None:
    root, other = make(tmp_path / "given"), tmp_path / "other.safetensors"
    write(other, safetensors_bytes({"w": 1.0}))
    where = ("--store", tmp_path / "store")
    verbs: list[tuple[str | Path, ...]] = [
        ("import", root, *where),
        ("diff", other, root),
        ("du", root, *where),
        ("substitute", other, root, "--layers", "0", "--output", tmp_path / "out"),
    ]
    if status == 1:
        verbs.append(("analyze", root))
    with pytest.raises(TensorDedupError) as caught:
        Store.open(tmp_path / "library").import_(root)
    assert says in str(caught.value)
    for verb in [*verbs, (*verbs[0], "--json")]:
        result = run(*verb)
        assert (result.returncode, result.stdout) == (status, ""), verb
        assert says in result.stderr
        assert "keep one" not in result.stderr
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (quantisations, ["given/m.Q4_K_M", "given/m.Q8_0", "given/mmproj"]),
        (ollama, ["alpha/latest", "beta/latest", "gamma/latest"]),
        (docker, ["ai/alpha/latest", "ai/beta/latest"]),
    ],
)
def test_one_is_imported_or_all_under_their_names(
    tmp_path: Path, make: Made, names: list[str]
) -> None:
    root, where = make(tmp_path / "given"), ("--store", tmp_path / "store")
    listed = run("import", root, *where).stderr
    compared = document("analyze", root)["checkpoints"]
    for each in compared:
        assert each["path"] in listed
    one = min(compared, key=lambda each: each["name"] or each["path"])
    alone = document("import", one["path"], "--name", names[0], *where)
    assert alone["name"] == names[0]
    done = document("import", root, "--all-models", *where)
    assert sorted(each["name"] for each in done["imported"]) == names
    assert done["failed"] == {}
    assert [each["name"] for each in done["imported"] if each["unchanged"]] == [names[0]]
    assert [each["name"] for each in document("list", *where)["checkpoints"]] == names
    # What is in the store is what was compared.
    both = document("analyze", one["path"], f"store://{names[0]}", *where)
    assert both["checkpoints"][1]["adds_bytes"] == 0
    assert both["pairs"][0]["shared_tensors"] == one["tensors"]


def test_equal_blobs_are_read_and_stored_once(tmp_path: Path) -> None:
    root = ollama(tmp_path / "given")
    found = document("analyze", root, "--no-hints")
    assert [each["name"] for each in found["checkpoints"]] == [
        f"{name}/latest" for name in ("alpha", "beta", "gamma")
    ]
    assert (found["total_bytes"], found["unique_bytes"]) == (3 * 64, 3 * 32)
    assert found["bytes_read"] == 2 * 64
    tags = root / "manifests" / "registry.ollama.ai"
    assert document("analyze", tags)["checkpoints"] == found["checkpoints"]
    assert "equals alpha/latest" in run("analyze", tags).stdout
    done = document("import", root, "--all-models", "--store", tmp_path / "store")["imported"]
    assert [each["new_tensors"] for each in done] == [2, 1, 0]


def test_an_export_holds_the_files_under_plain_names(tmp_path: Path) -> None:
    root, store = ollama(tmp_path / "given"), tmp_path / "store"
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "alpha" / "latest"
    for name, options in (("copied", ()), ("in-place", ("--external",))):
        run("import", manifest, "--name", name, *options, "--store", store)
        assert document("export", name, tmp_path / name, "--store", store)["name"] == name
        assert content(tmp_path / name) == {
            "model.gguf": ALPHA,
            "template.txt": b"T",
            "manifest-config.json": b"{}",
            "manifest.json": manifest.read_bytes(),
        }
    with Store.open(store).checkpoint("copied") as opened:
        tensors = load_tensors(opened)
    said = run("import", manifest, "--store", store).stdout
    assert said.startswith("alpha/latest: 2 tensors")
    assert "cannot be the name" not in said
    assert tensors["blk.1.a"].view(torch.float32).tolist() == [2.0] * 8


def test_an_export_of_several_models_repairs_the_store(tmp_path: Path) -> None:
    layers = [("model", ALPHA), ("draft", BETA)]
    manifest = ollama_model(tmp_path / "o", "registry.ollama.ai/library/m/latest", layers)
    where = ("--store", tmp_path / "store")
    document("import", manifest, *where)
    document("export", "m/latest", tmp_path / "out", *where)
    assert "2 models in this folder" in run("import", tmp_path / "out", *where).stderr
    for path in (tmp_path / "store" / "containers").glob("*/*"):
        path.unlink()
    assert run("verify", *where).returncode == 1
    # The small files are in no model of the folder.
    assert run("repair", "--from", tmp_path / "out", "--from", manifest, *where).returncode == 0
    document("export", "m/latest", tmp_path / "again", *where)
    assert content(tmp_path / "again") == content(tmp_path / "out")


def test_text_and_page_call_models_by_the_names_of_their_tool(tmp_path: Path) -> None:
    root = docker(tmp_path / "given")
    page = tmp_path / "page.html"
    result = run("analyze", root, "--html", page)
    assert result.returncode == 0
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert [row for row in rows if row.startswith("ai/")] == ["ai/alpha/latest", "ai/beta/latest"]
    assert "ai/beta/latest" in page.read_text()


def test_of_models_that_fail_the_others_are_compared(tmp_path: Path) -> None:
    root = ollama(tmp_path / "given")
    manifests = root / "manifests" / "registry.ollama.ai" / "library"
    good = document("analyze", root)
    assert good["failed"] == {}
    ollama_model(root, "registry.ollama.ai/library/broken/latest", [("model", b"GGUFx")])
    ollama_model(root, "registry.ollama.ai/library/lost/latest", [("model", lost := BETA + b"x")])
    (root / "blobs" / digest(lost).replace(":", "-")).unlink()
    broken, gone = (manifests / name / "latest" for name in ("broken", "lost"))
    for as_json in ([], ["--json"]):
        result = run("analyze", root, *as_json)
        assert result.returncode == 1
        assert f"{root}/blobs/sha256-" in result.stderr
        assert "2 of 5 models could not be read" in result.stderr
        assert "Traceback" not in result.stderr
    found = json.loads(result.stdout)
    assert list(found["failed"]) == [str(broken), str(gone)]
    for why in found["failed"].values():
        assert why in result.stderr
    assert "that it names is not there" in found["failed"][str(gone)]
    for key in ("checkpoints", "pairs", "unique_bytes"):
        assert found[key] == good[key]
    assert "equals alpha/latest" in run("analyze", root).stdout
    for name in ("alpha", "beta", "gamma"):
        (manifests / name / "latest").unlink()
    none = run("analyze", root, "--json")
    assert (none.returncode, none.stdout) == (1, "")
    assert f"{root}/blobs/sha256-" in none.stderr


def test_of_models_that_fail_the_others_are_imported(tmp_path: Path) -> None:
    root, where = ollama(tmp_path / "given"), ("--store", tmp_path / "store")
    bad = root / "manifests" / "registry.ollama.ai" / "library" / "beta" / "latest"
    bad.write_text(bad.read_text().replace("sha256:", "sha256:../"))
    result = run("import", root, "--all-models", "--json", *where)
    assert result.returncode == 1
    assert "1 of 3 models could not be imported" in result.stderr
    done = json.loads(result.stdout)
    assert [each["name"] for each in done["imported"]] == ["alpha/latest", "gamma/latest"]
    (said,) = done["failed"].values()
    assert str(bad) in said


def test_names_that_several_would_have_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--repo-GGUF" / "snapshots" / ("0" * 40)
    quantisations(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    where = ("--store", tmp_path / "store")
    done = document("import", "org/repo-GGUF", "--all-models", *where)["imported"]
    assert [each["name"] for each in done] == [
        f"org/repo-GGUF/{name}" for name in ("m.Q4_K_M", "m.Q8_0", "mmproj")
    ]


@pytest.mark.parametrize("cached", [False, True])
def test_no_model_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    files = {"m (Q4).gguf": ALPHA, "m [Q4].gguf": BETA, "n.gguf": ALPHA}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    root = tmp_path / "hub" / "models--org--repo" / "snapshots" / "1" if cached else tmp_path / "r"
    for name, data in files.items():
        write(root / name, data)
    store, given = tmp_path / "store", ("--hub-cache",) if cached else (root, "--all-models")
    done = document("import", *given, "--replace", "--store", store)["imported"]
    names = [each["name"] for each in document("list", "--store", store)["checkpoints"]]
    assert len(names) == len(done) == len(files)
    marked = [name for name in names if re.search(r"gguf-[0-9a-f]{8}$", name)]
    assert [Path(name).name[:-9] for name in marked] == ["m-Q4-.gguf", "m-Q4-.gguf"]
    held: list[tuple[str, bytes]] = []
    for name in names:
        run("export", name, tmp_path / "out" / name, "--store", store)
        held += content(tmp_path / "out" / name).items()
    assert sorted(held) == sorted(files.items())


def test_each_model_of_a_cached_repository_is_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = "0" * 40
    quantisations(tmp_path / "hub" / "models--org--repo-GGUF" / "snapshots" / revision)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for key in ("imported", "left_out"):
        done = document("import", "--hub-cache", "--store", tmp_path / "store")
        names = {each["name"] for each in done["imported"]} | {*done["left_out"]}
        assert names == {f"org/repo-GGUF@{revision}/{n}" for n in ("m.Q4_K_M", "m.Q8_0", "mmproj")}
        assert len(done[key]) == 3


def test_a_split_model_is_called_without_the_number_of_its_part(tmp_path: Path) -> None:
    root = quantisations(tmp_path / "given")
    for number, name in ((1, "a"), (2, "b")):
        entries = [
            entry("split.no", 2, struct.pack("<H", number - 1)),
            entry("split.count", 2, struct.pack("<H", 2)),
        ]
        data = file_of(entries, [info(f"blk.{number - 1}.{name}")], b"\0" * 8)
        write(root / f"m.BF16-0000{number}-of-00002.gguf", data)
    (root / "m.Q8_0.gguf").write_bytes(gguf_bytes({"blk.0.a": 1.0}))
    done = document("import", root, "--all-models", "--store", tmp_path / "store")["imported"]
    assert [(each["name"], each["tensors"]) for each in done] == [
        ("given/m.BF16", 2),
        ("given/m.Q4_K_M", 2),
        ("given/m.Q8_0", 1),
        ("given/mmproj", 1),
    ]


def test_all_models_is_not_said_of_a_cache(tmp_path: Path) -> None:
    result = run("import", "--all-models", "--hub-cache", "--store", tmp_path / "store")
    assert result.returncode == 2
    assert "--all-models" in result.stderr


def test_all_files_of_a_folder_belong_to_none_of_several_models(tmp_path: Path) -> None:
    root, store = two_of_a_training(tmp_path / "a b"), tmp_path / "store"
    result = run("import", root, "--all-models", "--all-files", "--store", store)
    assert result.returncode == 2
    assert f"type `tensor-dedup import '{root}' --all-models`, and keep" in result.stderr
    assert not store.exists()


def test_a_single_model_is_imported_with_the_option_too(tmp_path: Path) -> None:
    path = write(tmp_path / "one" / "model.safetensors", safetensors_bytes({"w": 1.0}))
    write(path.parent / "optimizer.bin", b"state")
    given, where = (path.parent, "--all-models"), ("--store", tmp_path / "store")
    done = document("import", *given, *where)["imported"]
    done += document("import", *given, "--all-files", "--name", "two", *where)["imported"]
    assert [(each["name"], each["files"]) for each in done] == [("one", 1), ("two", 2)]


def two_of_a_training(root: Path) -> Path:
    for number, name in enumerate(("model", "model_1")):
        write(root / f"{name}.safetensors", safetensors_bytes({"w": float(number)}))
    for name in ("optimizer.bin", "random_states_0.pkl", "README.md", "sub/config.json"):
        write(root / name, b"x")
    return root


@pytest.mark.parametrize("make", [quantisations, two_of_a_training, ollama])
def test_models_of_two_folders_do_not_take_each_others_names(tmp_path: Path, make: Made) -> None:
    """Two trainings name their files alike; the advice keeps what is there."""
    first, second = tmp_path / "1" / "run", tmp_path / "2" / "run"
    for root in (first, second):
        make(root)
    store = ("--store", tmp_path / "store")
    before = [
        each["name"] for each in document("import", first, "--all-models", *store)["imported"]
    ]
    changed = sorted(second.rglob("blobs/*") if make is ollama else second.glob("m*"))[0]
    changed.write_bytes(changed.read_bytes()[:-1] + b"\1")
    again = run("import", second, "--all-models", *store)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert "--name N" in again.stderr.splitlines()[-1]
    named = document("import", second, "--all-models", "--name", "my/r2", *store)["imported"]
    below = [name.removeprefix("run/") for name in before]
    assert [each["name"] for each in named] == [f"my/r2/{name}" for name in below]
    held = {each["name"] for each in document("list", *store)["checkpoints"]}
    assert held == {*before, *(f"my/r2/{name}" for name in below)}


def test_folders_with_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    store = ("--store", tmp_path / "store")
    for folder in ("one", "two"):
        write(
            two_of_a_training(tmp_path / folder) / f"{folder}.safetensors",
            safetensors_bytes({"w": 2.0}),
        )
        document("import", tmp_path / folder, "--all-models", *store)
    names = [each["name"] for each in document("list", *store)["checkpoints"]]
    # The model that is called as its folder is does not repeat it.
    assert names == ["one", "one/model", "one/model_1", "two", "two/model", "two/model_1"]


def test_a_name_for_several_models_has_to_be_a_name(tmp_path: Path) -> None:
    given = (quantisations(tmp_path / "given"), "--all-models", "--name", "a b")
    result = run("import", *given, "--store", tmp_path / "store")
    assert result.returncode == 2
    assert "'a b'" in result.stderr


def test_what_is_in_none_of_several_models_is_said(tmp_path: Path) -> None:
    root, store = two_of_a_training(tmp_path / "gan"), ("--store", tmp_path / "store")
    state = "left out, state of a training: optimizer.bin, random_states_0.pkl; keep the folder"
    for dry in (("--dry-run",), ()):
        result = run("import", root, "--all-models", *dry, *store)
        assert (result.returncode, result.stderr) == (0, "")
        assert "left out: README.md, sub/config.json\n" in result.stdout
        assert f"{state} to resume\n" in result.stdout
    left_out = document("import", root, "--all-models", *store)["left_out"]
    beside, training = "beside several models, and part of none", "state of a training"
    assert left_out == [
        {"path": "README.md", "reason": beside},
        {"path": "optimizer.bin", "reason": training},
        {"path": "random_states_0.pkl", "reason": training},
        {"path": "sub/config.json", "reason": beside},
    ]
    for given in ((), ("--all-files",)):
        said = run("import", root, *given, *store).stderr
        assert f"{state} to resume" in said
        assert "README" not in said
    assert f"\nmodel.safetensors: {state} to resume\n" in run("analyze", root).stdout
    for each in document("analyze", root)["checkpoints"]:
        assert each["left_out"] == left_out[1:3]


def test_a_projector_is_called_that_and_is_not_the_example(tmp_path: Path) -> None:
    root, store = quantisations(tmp_path / "given"), ("--store", tmp_path / "store")
    write(root / "a-mmproj-f16.gguf", gguf_bytes({"v": 4.0}))
    said = run("import", root, *store).stderr
    assert "2 models and 2 projectors in this folder" in said
    assert f"name one of them, as in `tensor-dedup import {root}/m.Q4_K_M.gguf " in said
    for name in ("a-mmproj-f16", "mmproj"):
        assert f"{root}/{name}.gguf (projector, used beside one of these)" in said
    lines = run("import", root, "--all-models", *store).stdout.splitlines()
    assert [line.split()[0] for line in lines if "is a projector" in line] == [
        "given/a-mmproj-f16",
        "given/mmproj",
    ]


def test_a_model_of_another_tools_store_is_no_tune_to_substitute(tmp_path: Path) -> None:
    tensors: Mapping[str, float] = {"model.layers.0.w": 1.0}
    data = safetensors_bytes(tensors)
    root = tmp_path / "given"
    manifest = ollama_model(root, "registry.ollama.ai/library/m/latest", [("tensor", data)])
    base = write(tmp_path / "base.safetensors", safetensors_bytes({"model.layers.0.w": 2.0}))
    with pytest.raises(UnsupportedError, match="import it"):
        substitute(base, manifest, tmp_path / "out", layers="0")
    assert not (tmp_path / "out").exists()
    store = Store.open(tmp_path / "store")
    store.import_(manifest, "m")
    done = substitute(base, "store://m", tmp_path / "out", layers="0", store=store.path)
    assert [layer.name for layer in done.layers] == ["model.layers.0"]
