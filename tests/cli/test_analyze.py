"""The command `tensor-dedup analyze` as a user runs it."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.console import Console
from safetensors.numpy import save_file

import tiny_checkpoints as checkpoints
from tensor_dedup.analyze import analyze
from tensor_dedup.cli.analyze import show_analysis
from tensor_dedup.store import Store

COMMAND = Path(sys.executable).with_name("tensor-dedup")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "analyze", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def document(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Pair:
    return checkpoints.make("qwen2", tmp_path_factory.mktemp("models"))


def test_json_is_one_document_with_the_promised_keys(pair: checkpoints.Pair) -> None:
    found = document(pair.base, pair.fine_tune)
    assert {"checkpoints", "total_bytes", "unique_bytes", "shared_bytes", "pairs"} <= found.keys()
    assert {"shared_layers", "largest_shared", "vllm"} <= found.keys()
    assert found["checkpoints"][0].keys() == {"path", "tensors", "bytes"}
    assert found["pairs"][0].keys() == {"a", "b", "shared_tensors", "shared_bytes"}
    assert found["vllm"].keys() >= {"final_shared_bytes", "lost_to_fusing_bytes", "groups_broken"}
    held = checkpoints.tensors(pair.base)
    changed = sum(held[name].numel() * 2 for name in pair.changed)
    size = checkpoints.nbytes(pair.base)
    assert found["checkpoints"][0] == {
        "path": str(pair.base),
        "tensors": len(held),
        "bytes": size,
    }
    assert found["total_bytes"] == 2 * size
    assert found["pairs"][0]["shared_tensors"] == len(held) - len(pair.changed)
    assert found["pairs"][0]["shared_bytes"] == size - changed


def test_variants_share_what_is_equal(pair: checkpoints.Pair, tmp_path: Path) -> None:
    held = checkpoints.tensors(pair.base)
    equal = {
        "same": len(held),
        "resharded": len(held),
        "grown_vocabulary": len(held) - 2,
        "frozen_embedding": 2,
        "as_fp32": 0,
        "same_header": 0,
    }
    made = [checkpoints.VARIANTS[name](pair.base, tmp_path / name) for name in equal]
    pairs = document(pair.base, *made)["pairs"]
    shared = {Path(p["b"]).name: p["shared_tensors"] for p in pairs if p["a"] == str(pair.base)}
    assert shared == equal


def test_people_read_tables_with_the_saving_at_the_end(pair: checkpoints.Pair) -> None:
    result = run(pair.base, pair.fine_tune)
    assert (result.returncode, result.stderr) == (0, "")
    for title in ("Checkpoints", "Shared by two", "Largest shared", "Layers shared", "Fused by"):
        assert title in result.stdout
    assert "Sharing saves" in result.stdout


def said(*paths: Path, width: int = 200) -> str:
    """The text form, in this process."""
    out = StringIO()
    show_analysis(analyze(paths), Console(file=out, width=width))
    return out.getvalue()


def blocks(
    path: Path, changed: tuple[int, ...] = (), more: Mapping[str, int] | None = None
) -> Path:
    """A checkpoint of twelve layers, an embedding, and what else has that many bytes."""
    sizes = {"model.embed_tokens.weight": 64, **(more or {})}
    tensors = {name: numpy.full(size, size % 90, numpy.uint8) for name, size in sizes.items()}
    for layer in range(12):
        value = 100 + layer + 100 * (layer in changed)
        tensors[f"model.layers.{layer}.mlp.weight"] = numpy.full(32, value, numpy.uint8)
    save_file(tensors, path)
    return path


def test_layers_stand_in_their_order_and_modules_are_none(tmp_path: Path) -> None:
    base, tuned = blocks(tmp_path / "a.safetensors"), blocks(tmp_path / "b.safetensors", (3, 11))
    for second, ranges in ((tuned, ["0-2", "4-10"]), (base, ["0-11"])):
        text = said(base, second)
        shown = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
        layers = [name for name in shown if re.fullmatch(r"model\.layers\.[\d-]+", name)]
        assert layers == [f"model.layers.{each}" for each in ranges]
        assert "other modules: 1" in text
        # Embeddings, of which there is one, are no layer; both checkpoints have it.
        assert re.search(r"model\.embed_tokens +│ +- │ +1 │ +64 B │ +2 │", text)
    assert "Layers shared whole: 10," in said(base, tuned)
    largest = re.findall(r"model\.layers\.(\d+)\.mlp", said(base, base))
    assert largest == [str(number) for number in range(9)]  # with the embedding, the first ten


def test_what_describes_a_training_is_no_tensor(tmp_path: Path) -> None:
    step = blocks(tmp_path / "a.safetensors", more={"#structure": 2048, "#values": 128})
    text = said(step, step)
    assert "Left out: 4 entries" in text
    assert "4.2 KiB; --json" in text
    assert re.search(r"│ 1 a\.safetensors │ +13 │", text)
    assert text.count("#structure") == 1
    assert analyze([step]).to_dict()["checkpoints"][0]["tensors"] == 15


def test_a_narrow_terminal_breaks_names_after_their_dots_and_cuts_nothing(tmp_path: Path) -> None:
    name = "language_model.transformer.encoder.embed_tokens_of_the_model.weight"
    paths = [blocks(tmp_path / f"{n}.safetensors", more={name: 99}) for n in range(8)]
    for width in (60, 80, 100):
        text = said(*paths, width=width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        cells = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
        assert name in "".join(cells)
        broken = [c for c in cells if c and name.startswith(c) and c != name]
        assert all(cell.endswith(".") for cell in broken), broken
    # Eight columns of numbers have room in the widest only.
    assert ["Shared by two" in said(*paths, width=width) for width in (60, 120)] == [False, True]


def test_many_checkpoints_are_listed_by_pairs(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(9)]
    for path in paths:
        save_file({"weight": numpy.arange(4)}, path)
    result = run(*paths)
    assert result.returncode == 0
    assert "Pairs that share most" in result.stdout


def test_options_reach_the_numbers(pair: checkpoints.Pair) -> None:
    found = document(pair.base, "--min-tensor-bytes", "65536", "--hash-algorithm", "xxh3_128")
    large = [t for t in checkpoints.tensors(pair.base).values() if t.numel() * 2 >= 65536]
    assert found["checkpoints"][0]["tensors"] == len(large)
    assert document(pair.base, pair.base, "--top", "1")["largest_shared"][0]["digest"]
    again = document(pair.base, pair.base, "--top", "1", "--hash-algorithm", "blake2b")
    assert again["largest_shared"][0]["digest"].startswith("blake2b:")


def test_wrong_data_ends_with_1_and_wrong_use_with_2(tmp_path: Path) -> None:
    (tmp_path / "liar.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "empty").mkdir()
    for arguments in ([tmp_path / "liar.safetensors"], [tmp_path], [tmp_path / "empty"]):
        result = run(*arguments, "--json")
        assert (result.returncode, result.stdout) == (1, ""), arguments
        assert result.stderr.startswith("Error: ")
    nothing = [tmp_path / "nothing"]
    for wrong in ([], ["--min-tensor-bytes", "-1", "x"], ["--hash-algorithm", "md5", "x"], nothing):
        result = run(*wrong, "--json")
        assert (result.returncode, result.stdout) == (2, ""), wrong
    assert "no such file or folder" in run(*nothing).stderr


def test_labels_are_as_long_as_it_takes(tmp_path: Path) -> None:
    for part in ("one/deep/model", "two/deep/model", "two/other"):
        (tmp_path / part).mkdir(parents=True)
        save_file({"weight": numpy.arange(4)}, tmp_path / part / "model.safetensors")
    paths = [tmp_path / "one/deep/model", tmp_path / "two/deep/model", tmp_path / "two/other"]
    result = run(*paths, paths[0])
    for label in ("1 one/deep/model", "2 two/deep/model", "3 other", "4 one/deep/model"):
        assert f" {label} " in result.stdout


def test_of_two_equal_models_all_that_comes_second_is_shared(pair: checkpoints.Pair) -> None:
    groups = document(pair.base, pair.base)["vllm"]["groups"]
    assert [group["shared"] for group in groups] == [group["followers"] for group in groups]
    assert [group["fused"] for group in groups] == [2 * group["shared"] for group in groups]
    table = run(pair.base, pair.base).stdout.partition("Fused by vLLM, loaded in this order")[2]
    rows = [line.split("│")[1:-1] for line in table.splitlines() if "_proj" in line]
    assert len(rows) == len(groups)
    for row in rows:
        first, later, shared, broken, _ = map(str.strip, row[1:])
        assert (first, later, broken) == (shared, shared, "0")


def test_a_stored_checkpoint_is_known(pair: checkpoints.Pair, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.import_(pair.base, "base")
    store.import_(pair.fine_tune, "tune")
    where = ("--store", tmp_path / "store")
    wanted = document(pair.base, pair.fine_tune, "--no-hints")
    found = document("store://base", "store://tune", *where, "--no-hints")
    assert (found["bytes_read"], found["bytes_hashed"]) == (0, 0)
    assert [c["path"] for c in found["checkpoints"]] == ["store://base", "store://tune"]
    for key in ("total_bytes", "unique_bytes", "shared_bytes", "saving", "vllm"):
        assert found[key] == wanted[key], key
    mixed = document(
        "store://base", pair.base, "store://base", *where, "--min-tensor-bytes", "65536"
    )
    assert mixed["unique_bytes"] * 3 == mixed["total_bytes"]
    assert "1 store://base" in run("store://base", pair.base, *where).stdout


def test_a_store_that_does_not_help(pair: checkpoints.Pair, tmp_path: Path) -> None:
    Store.open(tmp_path / "store")
    where = ("--store", tmp_path / "store")
    assert run("store://nothing", *where).returncode == 1
    assert run("store://nothing", "--store", tmp_path / "no store").returncode == 1
    assert run("store://", *where).returncode == 1
    refused = run("store://nothing", *where, "--hash-algorithm", "blake2b")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "blake3" in refused.stderr


def test_other_formats_count_alike(pair: checkpoints.Pair, tmp_path: Path) -> None:
    held = checkpoints.tensors(pair.base)
    torch.save({"model": held}, tmp_path / "model.pt")
    found = document(pair.base, tmp_path / "model.pt")
    assert found["pairs"][0]["shared_tensors"] == len(held)
    assert found["shared_bytes"] == checkpoints.nbytes(pair.base)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    refused = run(tmp_path / "module.pt", "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "torch.nn.modules.linear.Linear" in refused.stderr
