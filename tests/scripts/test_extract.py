"""Checkpoints come out of a store by scripts/extract.py alone, or what is damaged is named."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from files import gguf_files
from project import package_source
from store_runs.parted_runs import LEAVES, in_parts, save_parted_run
from store_runs.stores import (
    KIB,
    Content,
    content,
    handle,
    memory_folder,
    noise,
    open_store,
    safetensors,
    three,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice
from tensor_dedup.store.writing import encoder
from tensor_dedup.training import CheckpointStore

SCRIPT = package_source.ROOT / "scripts" / "extract.py"
# Runs the script for each list of arguments, in one process.
MANY = """
import contextlib, io, json, runpy, sys
main, found = runpy.run_path(sys.argv[1])["main"], []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Ended]
Many = Callable[[list[list[str]]], list[Ended]]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, str]]:
    """An environment with the packages that the script may import, and no other."""
    with memory_folder() as folder:
        for name in ("blake3", "zstandard", "numpy"):
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            package = Path(spec.origin).parent
            (folder / name).symlink_to(package)
            if (libraries := package.with_name(f"{name}.libs")).exists():
                (folder / libraries.name).symlink_to(libraries)
        yield {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}


def _python(env: dict[str, str], *arguments: str, given: str = "") -> Ended:
    command = [sys.executable, "-S", "-P", *arguments]
    done = subprocess.run(
        command, env=env, input=given, capture_output=True, text=True, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(alone: dict[str, str]) -> Run:
    return lambda *arguments: _python(alone, str(SCRIPT), *map(str, arguments))


@pytest.fixture
def many(alone: dict[str, str]) -> Many:
    def run(calls: list[list[str]]) -> list[Ended]:
        ended = _python(alone, "-c", MANY, str(SCRIPT), given=json.dumps(calls))
        assert ended.status == 0, ended.err
        return [Ended(*each) for each in json.loads(ended.out)]

    return run


def exported(store: Store, name: str, folder: Path) -> Content:
    store.export(name, folder)
    found = content(folder)
    assert found
    shutil.rmtree(folder)
    return found


def extracted(many: Many, root: Path, names: list[str], folder: Path) -> dict[str, Content]:
    """All files of these checkpoints, which come out without a word."""
    calls = [[str(root), name, str(folder / name)] for name in names]
    assert many(calls) == [(0, "", "")] * len(names)
    return {name: content(folder / name) for name in names}


def assert_as_exported(many: Many, store: Store, tmp_path: Path) -> None:
    names = [listed.name for listed in store.list()]
    assert many([[str(store.path)]]) == [(0, "".join(f"{name}\n" for name in sorted(names)), "")]
    expected = {name: exported(store, name, tmp_path / "exported") for name in names}
    assert extracted(many, store.path, names, tmp_path / "extracted") == expected


def codec_of(store: Store, name: str, tensor: str) -> str:
    with store.checkpoint(name) as checkpoint:
        return checkpoint.stored(checkpoint[tensor])[0]


def test_the_package_is_not_there(alone: dict[str, str]) -> None:
    ended = _python(alone, "-c", "import numpy, blake3, zstandard, tensor_dedup")
    assert ended.status == 1
    assert "No module named 'tensor_dedup'" in ended.err


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 300


def test_the_command(run: Run, many: Many, tmp_path: Path) -> None:
    store, folders = open_store(tmp_path / "store"), three(tmp_path)
    store.import_(folders["base"], "team/base")
    root, out = str(store.path), str(tmp_path / "new" / "out")
    assert run(root) == (0, "team/base\n", "")
    assert run(root, "team/base", out) == (0, "", "")
    assert content(Path(out)) == content(folders["base"])
    calls = [[root, "team/base", out], [root, "base", f"{out}2"], ["--help"], [root, "base"], []]
    full, unknown, helped, short, none = many(calls)
    assert full == (2, "", f"error: {out} is not empty\n")
    assert unknown == (2, "", f"error: no base in {root}\n")
    assert (helped.status, short.status, none.status) == (0, 2, 2)
    assert "Exit status" in helped.out
    (ended,) = many([[str(tmp_path)]])
    assert ended.status == 1
    assert str(tmp_path / "FORMAT") in ended.err


FAMILIES = {"planes": "1248", "xor": "1248", "diff": "1248", "sparse": "1248", "step": "12"}
FAMILIES |= {"nibble": "12"}


def test_every_codec(many: Many, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes behind the last word; for words of four bytes, two leaves."""
    assert CODECS.keys() == {f"{name}{width}" for name in FAMILIES for width in FAMILIES[name]}
    store, expected = open_store(tmp_path / "store"), {}
    large = weights(1, LEAF_BYTES + 100 * KIB) + b"0123456"
    bases = {False: large[-100 * KIB - 7 :], True: large}
    for held, base in bases.items():
        folder = write(tmp_path / str(held), {"m.safetensors": safetensors(u8(a=base))})
        store.import_(folder, str(held))
    for number, name in enumerate(CODECS):
        base = bases[name.endswith("4")]
        data = bytearray(tuned(base[:-7], number, 0.2) + b"6543210")
        data[9_000:9_040] = noise(number, 40)
        data[-90_000:-89_990] = noise(number, 10)
        folder = write(tmp_path / name, {"m.safetensors": safetensors(u8(a=bytes(data)))})
        choice = CodecChoice(CODECS[name], "entropy", 0.1)
        monkeypatch.setattr(encoder, "choose", lambda *_, choice=choice: choice)
        store.import_(folder, name, compress="auto", base=str(name.endswith("4")))
        assert codec_of(store, name, "a") == name
        expected[name] = content(folder)
    assert extracted(many, store.path, list(expected), tmp_path / "out") == expected


def test_an_encoded_anchor(many: Many, tmp_path: Path) -> None:
    store, data = open_store(tmp_path / "store"), weights(1, 300 * KIB)
    for name, held in {"base": data, "tune": tuned(data, 2)}.items():
        write(tmp_path / name, {"m.safetensors": safetensors({"a": ("BF16", (150 * KIB,), held)})})
        store.import_(tmp_path / name, name, compress="auto")
    assert codec_of(store, "base", "a").startswith("planes")
    with store.checkpoint("tune") as checkpoint:
        assert checkpoint.stored(checkpoint["a"])[2] == digest(data)
    assert_as_exported(many, store, tmp_path)


def test_common_leaves(many: Many, tmp_path: Path) -> None:
    """As they are, encoded, and of a tensor that has grown."""
    store = open_store(tmp_path / "store")
    first = noise(1, 2 * LEAF_BYTES) + weights(2, LEAF_BYTES)
    moved = noise(3, LEAF_BYTES) + first[LEAF_BYTES:-LEAF_BYTES] + tuned(first[-LEAF_BYTES:], 4)
    for name, data in {"base": first, "moved": moved, "grown": moved + noise(5, 70 * KIB)}.items():
        write(tmp_path / name, {"m.safetensors": safetensors(u8(a=data))})
        store.import_(
            tmp_path / name, name, compress="auto", base=None if name == "base" else "base"
        )
    assert codec_of(store, "moved", "a") == codec_of(store, "grown", "a") == "leaves"
    assert_as_exported(many, store, tmp_path)


def test_parts(many: Many, tmp_path: Path) -> None:
    save_parted_run(tmp_path / "store", "auto")
    store = open_store(tmp_path / "store")
    assert len(in_parts(store)) == LEAVES - 1
    assert_as_exported(many, store, tmp_path)


def test_files_of_every_kind(many: Many, tmp_path: Path) -> None:
    shards = {
        "a-00001-of-00002.safetensors": u8(x=noise(1, 90 * KIB), none=b"", same=noise(2, 5 * KIB)),
        "a-00002-of-00002.safetensors": u8(y=noise(3, 90 * KIB), again=noise(2, 5 * KIB)),
    }
    sharded = {name: safetensors(tensors) for name, tensors in shards.items()}
    index = {key: name for name, tensors in shards.items() for key in tensors}
    more = {"a.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": index}).encode()}
    more |= {"config.json": b"{}", "empty.txt": b"", "optimizer.bin": noise(4, 80 * KIB)}
    write(tmp_path / "all", {**sharded, **more, "deep/er/x.json": b"{}"})
    write(tmp_path / "renamed", {"b.safetensors": sharded["a-00001-of-00002.safetensors"]})
    tensor = gguf_files.file_of(tensors=[gguf_files.info("t", (8,))], data=noise(5, 32))
    write(tmp_path / "gguf", {"m.gguf": tensor})
    tied = torch.randn(200, 300)
    (tmp_path / "torch").mkdir()
    torch.save({"a": tied, "b": tied, "c": torch.ones(3)}, tmp_path / "torch" / "pytorch_model.bin")
    store = open_store(tmp_path / "store")
    store.import_(tmp_path / "all", all_files=True)
    for name in ("renamed", "gguf", "torch"):
        store.import_(tmp_path / name)
    kinds = {path.name.partition(".")[2] for path in store.path.glob("containers/*/*")}
    assert {"slab", "pack"} <= kinds
    assert_as_exported(many, store, tmp_path)
    for name in ("all", "renamed", "gguf", "torch"):
        assert content(tmp_path / "extracted" / name) == content(tmp_path / name)


def test_files_outside_the_store(many: Many, run: Run, tmp_path: Path) -> None:
    store, folder = open_store(tmp_path / "store"), three(tmp_path)["base"]
    store.import_(folder, "base", external=True)
    assert "external" in store.stats().containers
    assert_as_exported(many, store, tmp_path)
    os.utime(folder / "model.safetensors")
    ended = run(store.path, "base", tmp_path / "out")
    assert ended.status == 1
    assert f"{folder / 'model.safetensors'}: the file has changed" in ended.err
    assert list(content(tmp_path / "out")) == ["config.json"]


def test_steps_as_they_are_exported(many: Many, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 40)).sum().backward()
    optimizer.step()
    store = open_store(tmp_path / "store")
    state = {
        "model": model,
        "optimizer": optimizer,
        "modelled": np.ones(2),
        "none": np.ones((0, 3)),
    }
    state |= {"wide": np.ones(3, "c16"), 'Zahl ö\n"': np.arange(5, dtype=">i2"), "flags": [True]}
    state |= {
        "transposed": np.arange(12.0).reshape(3, 4).T,
        "f8": torch.ones(3).to(torch.float8_e5m2),
    }
    odd = {"model.__metadata__": np.ones(3), "model.": np.ones(2), "model.#a": np.ones(1)}
    with Store.open(store.path) as again:
        with CheckpointStore(again, "runs/one", weights="model") as saves:
            saves.save(state, 1, {"loss": 0.5}, files={"config.json": b"{}"})
            saves.save(
                {**state, "loss": 3}, 2, files={"training": b"x", "model.safetensors/a": b""}
            )
            saves.keep(1)
        with CheckpointStore(again, "whole") as saves:
            saves.save(state, 0)
    with handle(store.path, "odd", weights="model") as saves:
        files = {".part": b"p", "training_": b"", "training/state.safetensors/b": b"y"}
        saves.save(odd, 7, files=files)
    assert list(store.path.glob("refs/*@keep"))
    with store.checkpoint("runs/one@1") as checkpoint:
        assert {"I16", "C128", "F8_E5M2", "I64"} <= {tensor.dtype for tensor in checkpoint}
    assert_as_exported(many, store, tmp_path)
    found = content(tmp_path / "extracted")
    assert "runs/one@2/model_.safetensors" in found
    assert "odd@7/training_" in found


def test_a_copy_of_a_remote(many: Many, tmp_path: Path) -> None:
    store, remote = open_store(tmp_path / "store"), tmp_path / "remote"
    for name, folder in three(tmp_path).items():
        store.import_(folder, name, compress="auto")
    store.push(remote.as_uri(), "base")
    store.push(remote.as_uri(), "tune")
    assert list(remote.glob("containers/*/*.mixed"))
    expected = {name: exported(store, name, tmp_path / "e") for name in ("base", "tune")}
    assert extracted(many, remote, ["base", "tune"], tmp_path / "out") == expected


def _damaged(root: Path, rng: random.Random) -> Iterator[tuple[Path, int]]:
    """Bytes of all that readers go by: the first, the last, some between, of each file."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and parts[0] in ("FORMAT", "refs", "manifests", "containers"):
            size = path.stat().st_size
            end = rng.randrange(max(size - 300, 0), size)
            yield from ((path, at) for at in {0, size - 1, end, rng.randrange(size)})


def test_a_damaged_byte_is_found_anywhere(many: Many, tmp_path: Path) -> None:
    store, folders = open_store(tmp_path / "store"), three(tmp_path)
    for name, folder in folders.items():
        store.import_(folder, name, compress="auto", base="base" if name == "tune" else None)
    kinds = {path.name.partition(".")[2] for path in store.path.glob("containers/*/*")}
    assert {"pack", "delta"} < kinds
    expected = {name: content(folder) for name, folder in folders.items()}
    places = list(_damaged(store.path, random.Random(3)))
    calls, roots = [], []
    for number, (path, at) in enumerate(places):
        root = tmp_path / "damaged" / str(number)
        shutil.copytree(store.path, root, copy_function=os.link)
        damaged = root / path.relative_to(store.path)
        data = bytearray(damaged.read_bytes())
        data[at] ^= 1 << number % 8
        damaged.unlink()
        damaged.write_bytes(data)
        roots.append(root)
        calls += [[str(root), name, str(root / "out" / name)] for name in expected]
    ended = many(calls)
    for number, ((path, at), root) in enumerate(zip(places, roots, strict=True)):
        where = (path.relative_to(store.path), at)
        three_ended = ended[3 * number : 3 * number + 3]
        said = "".join(each.err for each in three_ended)
        assert path.name in said or (path.parent.name == "refs" and "damaged" in said), (
            where,
            said,
        )
        for (name, files), each in zip(expected.items(), three_ended, strict=True):
            found = content(root / "out" / name) if (root / "out" / name).exists() else {}
            assert found.items() <= files.items(), where
            assert (each.status == 0) == (found == files), (where, each)
            assert each.status == 0 or "error: " in each.err


def test_what_is_missing_is_named(many: Many, tmp_path: Path) -> None:
    store, folders = open_store(tmp_path / "store"), three(tmp_path)
    for name, folder in folders.items():
        store.import_(folder, name)
    data = min(store.path.glob("containers/*/*.raw"))
    (slab,) = store.path.glob("containers/*/*.slab")
    slab.unlink()
    root = str(store.path)
    base, tune, tiny = many([[root, name, str(tmp_path / "out" / name)] for name in folders])
    assert (base.status, tune.status, tiny.status) == (0, 1, 0)
    lost = digest(tuned(weights(2, 400 * KIB), 4))
    assert f"model.safetensors is left out: b: no container has the piece {lost}" in tune.err
    assert list(content(tmp_path / "out" / "tune")) == ["config.json"]
    data.rename(tmp_path / data.name)
    (ended,) = many([[root, "base", str(tmp_path / "other")]])
    assert ended.status == 1
    assert str(data) in ended.err
    with store.checkpoint("tiny") as checkpoint:
        manifest = store.path / "manifests" / checkpoint.manifest[:2] / checkpoint.manifest
    manifest.unlink()
    (ended,) = many([[root, "tiny", str(tmp_path / "again")]])
    assert ended.status == 1
    assert str(manifest) in ended.err


def test_another_copy_is_read(many: Many, tmp_path: Path) -> None:
    store, folder = open_store(tmp_path / "store"), three(tmp_path)["base"]
    store.import_(folder, "indexed", external=True)
    store.import_(folder, "copied")
    (folder / "model.safetensors").rename(tmp_path / "moved")
    ended = many([[str(store.path), name, str(tmp_path / name)] for name in ("indexed", "copied")])
    for name, each in zip(("indexed", "copied"), ended, strict=True):
        assert each.status == 0
        assert content(tmp_path / name)["model.safetensors"] == (tmp_path / "moved").read_bytes()


def test_a_later_version_is_refused(many: Many, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (store.path / "FORMAT").write_text("tensor-dedup store\nversion 2\n")
    (ended,) = many([[str(store.path)]])
    assert ended.status == 1
    assert "FORMAT is damaged, or of a later version" in ended.err
