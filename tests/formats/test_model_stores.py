"""The stores of Ollama and Docker Model Runner: models by manifest, and manifests that lie."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from files.gguf_files import entry, file_of, info
from files.model_store_files import (
    MANIFEST_LIST,
    OLLAMA,
    digest,
    docker_model,
    gguf_bytes,
    manifest_of,
    ollama_model,
    safetensors_bytes,
    write,
)
from files.refusals import refused
from tensor_dedup.errors import CheckpointNotFoundError, SeveralModelsError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.formats.errors import CheckpointFault, JsonFault
from tensor_dedup.formats.model_stores import MAX_MANIFEST_BYTES, is_manifest, open_model

LIBRARY = "registry.ollama.ai/library"
BASE = gguf_bytes({"a": 1.0, "b": 2.0})
TUNE = gguf_bytes({"a": 1.0, "b": 3.0})
PROJECTOR = gguf_bytes({"v": 4.0})


def names(path: Path) -> list[str]:
    return [name for name, _, _ in open_checkpoint(path).tensors()]


def listed(folder: Path) -> dict[str, str]:
    """What an error lists: the name of each model by the path that stands for it."""
    with pytest.raises(SeveralModelsError) as caught:
        open_checkpoint(folder)
    found = {}
    for path in caught.value.models:
        found[path] = open_checkpoint(path).name
        assert f"{path} ({found[path]})" in str(caught.value)
    count = f"with {len(found)} models: " if len(found) > 1 else "with 1 model: "
    assert count in str(caught.value)
    return found


def exported(path: Path) -> Mapping[str, bytes]:
    model = open_model(path)
    return {each.name: each.path.read_bytes() for each in (*model.weights, *model.others)}


def test_ollama(tmp_path: Path) -> None:
    root = tmp_path / ".ollama" / "models"
    layers = [("model", BASE), ("projector", PROJECTOR), ("template", b"T"), ("params", b"{}")]
    one = ollama_model(root, f"{LIBRARY}/llama3.2/latest", layers)
    two = ollama_model(root, "hf.co/me/tune/Q8_0", [("model", TUNE), ("license", b"L")])
    assert names(one) == ["a", "b", "v"]
    for folder in (root, root.parent):
        assert set(listed(folder).values()) == {"llama3.2/latest", "hf.co/me/tune/Q8_0"}
    assert listed(one.parent) == {str(one): "llama3.2/latest"}
    assert exported(one) == {
        "model.gguf": BASE,
        "projector.gguf": PROJECTOR,
        "template.txt": b"T",
        "params.json": b"{}",
        "manifest-config.json": b"{}",
        "manifest.json": one.read_bytes(),
    }
    assert exported(two)["license.txt"] == b"L"


def test_docker(tmp_path: Path) -> None:
    root = tmp_path / "models"
    one = docker_model(
        root, "index.docker.io/ai/smollm2:Q4", [("gguf.v3", BASE), ("mmproj", PROJECTOR)]
    )
    shards = [safetensors_bytes({name: 1.0}) for name in "xy"]
    layers = [*(("safetensors", each) for each in shards), ("model.file", b"{}")]
    two = docker_model(root, "me/st:1", layers, ["sub/x.safetensors", None, "config.json"])
    assert listed(root) == {str(one): "ai/smollm2/Q4", str(two): "me/st/1"}
    assert names(one) == ["a", "b", "v"]
    assert names(two) == ["sub/x", "y"]
    assert exported(two)["config.json"] == b"{}"


def test_a_model_of_many_layers_is_numbered(tmp_path: Path) -> None:
    tensors = [("tensor", safetensors_bytes({f"layers.{n}.w": float(n)})) for n in range(3)]
    path = ollama_model(tmp_path, f"{LIBRARY}/mlx/latest", tensors)
    assert names(path) == [f"layers.{n}.w" for n in range(3)]
    assert list(exported(path))[:3] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def split(parts: Mapping[int, str], count: int) -> list[tuple[str, bytes]]:
    """Layers that are parts of a split model, each with one tensor."""
    layers = []
    for number, name in parts.items():
        entries = [
            entry(key, 2, struct.pack("<H", value))
            for key, value in (("split.no", number - 1), ("split.count", count))
        ]
        layers.append(("gguf.v3", file_of(entries, [info(name, (8,))], b"\0" * 32)))
    return layers


def test_a_split_model_has_all_its_parts(tmp_path: Path) -> None:
    path = docker_model(tmp_path, "ai/m:latest", split({1: "a", 2: "b"}, 2))
    assert names(path) == ["a", "b"]
    assert [name for name in exported(path) if name.endswith(".gguf")] == [
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
    ]


@pytest.mark.parametrize("parts", [{1: "a"}, {1: "a", 3: "c"}, {2: "b", 1: "a", 3: "c"}])
def test_a_split_model_without_a_part_or_in_another_order_is_refused(
    tmp_path: Path, parts: Mapping[int, str]
) -> None:
    path = docker_model(tmp_path, "ai/m:latest", split(parts, 3))
    with refused(CheckpointFault.PART, match=r"model.*gguf"):
        open_checkpoint(path)


def test_equal_layers_are_one_file(tmp_path: Path) -> None:
    path = ollama_model(tmp_path, f"{LIBRARY}/m/t", [("model", BASE), ("model", BASE)])
    assert [each.name for each in open_model(path).weights] == ["model.gguf"]


def test_the_newer_place_of_manifests(tmp_path: Path) -> None:
    ollama_model(tmp_path, f"{LIBRARY}/m/t", [("model", TUNE)])
    new = ollama_model(tmp_path, f"{LIBRARY}/m/t", [("model", BASE)], "manifests-v2")
    blob = write(tmp_path / "blobs" / digest(new.read_bytes()).replace(":", "-"), new.read_bytes())
    new.unlink()
    new.symlink_to(os.path.relpath(blob, new.parent))  # as Ollama does
    assert listed(tmp_path) == {str(new): "m/t"}
    assert exported(new)["model.gguf"] == BASE


@pytest.mark.parametrize("inline", [True, False])
def test_of_a_list_of_manifests_one_counts(tmp_path: Path, inline: bool) -> None:
    for data in (BASE, TUNE, b"{}"):
        write(tmp_path / "blobs" / digest(data).replace(":", "-"), data)
    children: list[dict[str, Any]] = []
    for runner, data in (("mlx", TUNE), ("ollama", BASE)):
        child = manifest_of([("model", data)]) | {"runner": runner}
        if not inline:
            raw = json.dumps(child).encode()
            write(tmp_path / "blobs" / digest(raw).replace(":", "-"), raw)
            child = {"digest": digest(raw), "runner": runner}
        children.append(child)
    changes = {"mediaType": MANIFEST_LIST, "manifests": children, "layers": None}
    path = ollama_model(tmp_path, f"{LIBRARY}/m/t", [], changes=changes)
    assert exported(path)["model.gguf"] == BASE


def test_a_model_that_runs_elsewhere_is_no_choice(tmp_path: Path) -> None:
    here = ollama_model(tmp_path, f"{LIBRARY}/m/t", [("model", BASE)])
    cloud = ollama_model(tmp_path, f"{LIBRARY}/m/cloud", [("license", b"L")])
    assert list(listed(tmp_path)) == [str(here)]
    with pytest.raises(CheckpointNotFoundError, match="no weights here"):
        open_checkpoint(cloud)


def layer(**changes: object) -> list[dict[str, object]]:
    return [{"mediaType": OLLAMA + "model", "digest": digest(BASE), "size": len(BASE), **changes}]


@pytest.mark.parametrize(
    "given",
    [
        "sha256:../../../secret",
        "sha256:" + "../" * 21 + "a",
        digest(BASE).upper(),
        digest(BASE) + "\n",
        digest(BASE).replace("256", "512"),
        digest(BASE)[:-1],
        None,
    ],
)
def test_a_digest_that_is_none_leads_nowhere(tmp_path: Path, given: object) -> None:
    for path in (
        ollama_model(tmp_path / "a", f"{LIBRARY}/m/t", [("model", BASE)]),
        docker_model(tmp_path / "b", "m:t", [("gguf.v3", BASE)]),
    ):
        write(tmp_path / "secret", BASE)  # which is what `../../../secret` is to Docker's blobs
        manifest = json.loads(path.read_text())
        manifest["layers"][0]["digest"] = given
        path.write_text(json.dumps(manifest))
        with refused(CheckpointFault.MANIFEST, match="is no SHA-256"):
            open_checkpoint(path, follow_links=True)


@pytest.mark.parametrize(
    "layers",
    [
        layer(digest=digest(b"nowhere")),
        layer(size=len(BASE) + 1),
        layer(size=-1),
        layer(size=str(len(BASE))),
        layer(size=float(len(BASE))),
        layer(size=None),
        ["text"],
        {},
        None,
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, layers: object) -> None:
    path = ollama_model(tmp_path, f"{LIBRARY}/m/t", [("model", BASE)], changes={"layers": layers})
    with refused(CheckpointFault.MANIFEST, match="pull the model again"):
        open_checkpoint(path)


def test_a_manifest_that_is_no_json_is_listed_and_fails(tmp_path: Path) -> None:
    ollama_model(tmp_path, f"{LIBRARY}/m/good", [("model", BASE)])
    path = write(tmp_path / "manifests" / LIBRARY / "m" / "bad", b"\xff")
    with pytest.raises(SeveralModelsError, match="m/bad"):
        open_checkpoint(tmp_path)
    with refused(JsonFault.ENCODING):
        open_checkpoint(path)
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with refused(CheckpointFault.MANIFEST, match="larger than"):
        open_checkpoint(path)


def test_a_link_out_of_the_store_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    path = ollama_model(root, f"{LIBRARY}/m/t", [("model", BASE), ("license", b"secret")])
    for data in (BASE, b"secret"):
        blob = root / "blobs" / digest(data).replace(":", "-")
        outside = write(tmp_path / "outside" / blob.name, data)
        blob.unlink()
        blob.symlink_to(outside)
        with refused(CheckpointFault.LINK_OUTSIDE):
            open_checkpoint(path)
        assert open_checkpoint(path, follow_links=True).tensor_count == 2
        blob.unlink()
        write(blob, data)


@pytest.mark.parametrize(
    "given",
    [
        "../x.gguf",
        "/etc/x.gguf",
        "a/../../x.gguf",
        ".ssh/x.gguf",
        "a//b.gguf",
        "",
        "x\0.gguf",
        "x\n.gguf",
        "x" * 300 + ".gguf",
    ],
)
def test_a_name_that_leads_elsewhere_is_not_taken(tmp_path: Path, given: str) -> None:
    path = docker_model(tmp_path, "m:t", [("gguf.v3", BASE)], [given])
    assert [each.name for each in open_model(path).weights] == ["model.gguf"]


@pytest.mark.parametrize(
    "given",
    [
        ["a", "a/b.json"],
        ["a/b.json", "a"],
        ["manifest.json", "manifest-config.json"],
        ["model.gguf", "x"],
    ],
)
def test_no_file_stands_where_another_file_or_a_folder_is(
    tmp_path: Path, given: Sequence[str]
) -> None:
    layers = [("gguf.v3", BASE), ("model.file", b"1"), ("model.file", b"2")]
    files = exported(docker_model(tmp_path / "store", "m:t", layers, [None, *given]))
    for name, data in files.items():
        write(tmp_path / "out" / name, data)
    assert {data: (tmp_path / "out" / name).read_bytes() for name, data in files.items()} == {
        data: data for data in files.values()
    }
    assert len(files) == 5


def test_folders_that_look_alike_are_no_stores(tmp_path: Path) -> None:
    write(tmp_path / "manifests" / "a" / "model.safetensors", safetensors_bytes({"w": 1.0}))
    assert names(tmp_path) == ["manifests/a/w"]
    (tmp_path / "blobs").mkdir()
    assert names(tmp_path) == ["manifests/a/w"]
    assert not is_manifest(tmp_path / "manifests" / "a" / "model.safetensors")
