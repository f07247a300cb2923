"""The command `tensor-dedup analyze` as a user runs it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import jsonschema
import numpy
import pytest
import torch
from rich.console import Console
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from models import gallery
from models import tiny_checkpoints as checkpoints
from processes import commands
from tensor_dedup import Store
from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.verdict import vllm_server
from tensor_dedup.cli.analyze import show_analysis
from tensor_dedup.training import CheckpointStore

COMMAND = Path(sys.executable).with_name("tensor-dedup")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("analyze", *arguments)


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
    assert found["pairs"][0].keys() == {"a", "b", "shared_tensors", "shared_bytes"}
    assert found["vllm"].keys() >= {"final_shared_bytes", "lost_to_fusing_bytes", "groups_broken"}
    held = checkpoints.tensors(pair.base)
    changed = sum(held[name].numel() * 2 for name in pair.changed)
    size = checkpoints.nbytes(pair.base)
    first, second = found["checkpoints"]
    assert (first["path"], first["tensors"], first["bytes"]) == (str(pair.base), len(held), size)
    assert (first["adds_bytes"], second["adds_bytes"]) == (size, changed)
    assert sum(layer["bytes"] for layer in second["layers"]) == size
    assert sum(layer["shared_bytes"] for layer in second["layers"]) == size - changed
    assert found["total_bytes"] == 2 * size
    assert found["pairs"][0]["shared_tensors"] == len(held) - len(pair.changed)
    assert found["pairs"][0]["shared_bytes"] == size - changed


SCHEMA = Path(__file__).parents[2] / "docs" / "analyze.schema.json"


def test_json_is_what_the_published_schema_says(
    pair: checkpoints.Pair, models: list[Path], tmp_path: Path
) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for paths in (models, [pair.base, pair.fine_tune], models[:1], links(tmp_path, models[0], 12)):
        found = document(*paths)
        validator.validate(found)
        for checkpoint in found["checkpoints"]:
            shared = sum(layer["shared_bytes"] for layer in checkpoint["layers"])
            assert checkpoint["bytes"] - shared == checkpoint["adds_bytes"]
        assert sum(c["adds_bytes"] for c in found["checkpoints"]) == found["unique_bytes"]
        # Enough to draw it: all tensors have their places.
        places = [(place, t["bytes"]) for t in found["tensors"] for place in t["places"]]
        for number, checkpoint in enumerate(found["checkpoints"]):
            own = [size for place, size in places if place["checkpoint"] == number]
            assert (len(own), sum(own)) == (checkpoint["tensors"], checkpoint["bytes"])
    with_variants = document(pair.base, pair.fine_tune, "--variants", "3")
    validator.validate(with_variants)
    assert len(with_variants["variants"]) == 5
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(found | {"schema": 1})


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


def test_details_are_tables_below_the_saving(pair: checkpoints.Pair) -> None:
    short, result = run(pair.base, pair.fine_tune), run(pair.base, pair.fine_tune, "--details")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(short.stdout)
    assert re.match(r".* instead of .*: \d+ % saved\n", short.stdout)
    for title in ("Checkpoints", "Shared by two", "Largest shared", "Layers shared", "Fused by"):
        assert title in result.stdout.removeprefix(short.stdout)
        assert title not in short.stdout


def said(*paths: Path, width: int = 200) -> str:
    """The text form with all its tables, in this process."""
    out = StringIO()
    show_analysis(analyze(paths), Console(file=out, width=width), details=True)
    return out.getvalue()


def blocks(
    path: Path,
    changed: tuple[int, ...] = (),
    more: Mapping[str, int] | None = None,
    layers: int = 12,
) -> Path:
    """A checkpoint of some layers, an embedding, and what else has that many bytes."""
    sizes = {"model.embed_tokens.weight": 64, **(more or {})}
    tensors = {name: numpy.full(size, size % 90, numpy.uint8) for name, size in sizes.items()}
    for layer in range(layers):
        value = 100 + layer - 100 * (layer in changed)
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


def test_a_narrow_terminal_breaks_names_after_their_dots_and_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "language_model.transformer.encoder.embed_tokens_of_the_model.weight"
    paths = [blocks(tmp_path / f"{n}.safetensors", more={name: 99}) for n in range(8)]
    monkeypatch.chdir(tmp_path)
    paths = [Path(path.name) for path in paths]
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
    result = run(*paths, "--details")
    assert result.returncode == 0
    assert "Pairs that share most" in result.stdout


def test_options_reach_the_numbers(pair: checkpoints.Pair) -> None:
    found = document(pair.base, "--min-tensor-bytes", "64KiB", "--hash-algorithm", "xxh3_128")
    large = [t for t in checkpoints.tensors(pair.base).values() if t.numel() * 2 >= 65536]
    assert found["checkpoints"][0]["tensors"] == len(large)
    assert document(pair.base, pair.base, "--top", "1")["largest_shared"][0]["digest"]
    again = document(pair.base, pair.base, "--top", "1", "--hash-algorithm", "blake2b")
    assert again["largest_shared"][0]["digest"].startswith("blake2b:")


def test_what_the_minimum_leaves_out_is_said_and_not_called_equal(
    pair: checkpoints.Pair, tmp_path: Path
) -> None:
    held = checkpoints.tensors(pair.base)
    save_torch(held, tmp_path / "base.safetensors")
    smallest = min(held, key=lambda name: held[name].nbytes)
    save_torch(held | {smallest: held[smallest] + 1}, tmp_path / "tune.safetensors")
    paths = [tmp_path / "base.safetensors", tmp_path / "tune.safetensors"]
    assert document(*paths)["checkpoints"][1]["adds_bytes"] == held[smallest].nbytes
    limit = held[smallest].nbytes + 1
    compared = sum(tensor.nbytes >= limit for tensor in held.values())
    page = tmp_path / "page.html"
    short = ("--min-tensor-bytes", str(limit))
    texts = [
        run(*paths, *short, "--details", "--html", page).stdout,
        page.read_text().replace("&nbsp;", " "),
    ]
    for text in texts:
        assert (
            f"no difference from base.safetensors in the {compared} tensors that were compared"
            in text
        )
        assert f"Not compared: tensors smaller than {limit} B, " in text
        assert "equals base.safetensors" not in text
        assert "shared whole" not in text
    found = document(*paths, *short)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert found["min_tensor_bytes"] == limit
    assert found["checkpoints"][1]["small_tensors"] == len(held) - compared
    assert "equals" not in json.dumps(found["checkpoints"][1]["changes"])


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
    assert "no such file or folder; give the path" in run(*nothing).stderr
    # What may be a name of the Hub was looked for in its cache, too.
    for name in ("Qwen/Qwen2-0.5B", "Qwen/Qwen2-0.5B@main"):
        told = run(name).stderr
        assert f"{name}: no such file or folder, and no model of that name in " in told
        assert "huggingface" in told or "hub" in told
    (tmp_path / "config.json").write_text("{}")
    result = run(tmp_path / "config.json")
    assert (result.returncode, result.stdout) == (1, "")
    assert "holds no weights; give its folder" in result.stderr


def test_labels_are_as_long_as_it_takes(tmp_path: Path) -> None:
    for part in ("one/deep/model", "two/deep/model", "two/other"):
        (tmp_path / part).mkdir(parents=True)
        save_file({"weight": numpy.arange(4)}, tmp_path / part / "model.safetensors")
    paths = [tmp_path / "one/deep/model", tmp_path / "two/deep/model", tmp_path / "two/other"]
    result = run(*paths, paths[0], "--details")
    for label in ("1 one/deep/model", "2 two/deep/model", "3 other", "4 one/deep/model"):
        assert f" {label} " in result.stdout


def test_of_two_equal_models_all_that_comes_second_is_shared(pair: checkpoints.Pair) -> None:
    groups = document(pair.base, pair.base)["vllm"]["groups"]
    assert [group["shared"] for group in groups] == [group["followers"] for group in groups]
    assert [group["fused"] for group in groups] == [2 * group["shared"] for group in groups]
    table = run(pair.base, pair.base, "--details").stdout.partition("Fused by vLLM: ")[2]
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
    shown = run("store://base", "store://tune", *where, "--details").stdout
    assert shown.endswith("\nHashed: nothing, all digests were known.\n")
    for key in ("total_bytes", "unique_bytes", "shared_bytes", "saving", "vllm"):
        assert found[key] == wanted[key], key
    mixed = document(
        "store://base", pair.base, "store://base", *where, "--min-tensor-bytes", "65536"
    )
    assert mixed["unique_bytes"] * 3 == mixed["total_bytes"]
    assert "\nstore://base " in run("store://base", pair.base, *where).stdout


def test_a_store_that_does_not_help(pair: checkpoints.Pair, tmp_path: Path) -> None:
    Store.open(tmp_path / "store")
    where = ("--store", tmp_path / "store")
    assert run("store://nothing", *where).returncode == 2
    assert run("store://nothing", "--store", tmp_path / "no store").returncode == 2
    assert run("store://", *where).returncode == 2
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


def in_cache(root: Path, checkpoint: Path, *revisions: str) -> None:
    """A repository `Qwen/tiny` in a hub cache whose snapshots are copies of a checkpoint."""
    for revision in revisions:
        snapshot = root / "models--Qwen--tiny" / "snapshots" / revision
        shutil.copytree(checkpoint, snapshot)


def test_names_in_the_hub_cache_and_steps_are_checkpoints(
    pair: checkpoints.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    in_cache(tmp_path / "hub", pair.base, "abc111")
    in_cache(tmp_path / "hub", pair.fine_tune, "def222")
    where = ("--store", tmp_path / "store")
    state = {"weight": numpy.arange(64)}
    with CheckpointStore(tmp_path / "store", "run") as handle:
        handle.save(state, 4)
    names = ["Qwen/tiny@abc111", "Qwen/tiny@def", "store://run@4", "run@4"]
    found = document(*names, *where)
    assert [c["path"] for c in found["checkpoints"]] == names
    assert found["pairs"][0]["shared_bytes"] == checkpoints.nbytes(pair.base) - sum(
        checkpoints.tensors(pair.base)[name].numel() * 2 for name in pair.changed
    )
    assert [c["adds_bytes"] > 0 for c in found["checkpoints"]] == [True, True, True, False]
    text = run(*names, *where).stdout
    assert "\ntiny@abc111 " in text
    # vLLM does not know revisions in names.
    assert f"{tmp_path}/hub/models--Qwen--tiny/snapshots/abc111 --port" in text
    # Nor does it know the folder of a repository.
    repository = tmp_path / "hub" / "models--Qwen--tiny"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def222")
    text = run(repository, pair.base, *where).stdout
    assert f"{repository}/snapshots/def222 --port" in text
    (repository / "refs" / "main").unlink()
    unclear = run("Qwen/tiny", *where)
    assert (unclear.returncode, unclear.stdout) == (2, "")
    assert "name one of Qwen/tiny@abc111, Qwen/tiny@def222" in unclear.stderr
    missing = run("run@5", *where)
    assert (missing.returncode, missing.stdout) == (2, "")
    imported = subprocess.run(
        [COMMAND, "import", "Qwen/tiny@d", *where, "--json"], capture_output=True, check=False
    )
    assert json.loads(imported.stdout)["name"] == "Qwen/tiny@def222"
    assert document("store://Qwen/tiny@def222", pair.fine_tune, *where)["saving"] == 0.5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


def links(root: Path, target: Path, count: int) -> list[Path]:
    made = [root / f"customer-{number:02}" for number in range(1, count + 1)]
    for link in made:
        link.symlink_to(target)
    return made


def screen(paths: Sequence[Path], width: int = 80, encoding: str = "utf-8") -> list[str]:
    """What a terminal of this width shows, without colours."""
    raw = BytesIO()
    out = TextIOWrapper(raw, encoding=encoding)
    show_analysis(analyze(paths), Console(file=out, width=width))
    out.flush()
    return raw.getvalue().decode(encoding).splitlines()


def row_of(lines: Sequence[str], name: str) -> str:
    (found,) = [line for line in lines if re.match(rf"{name} +[+ ] +\d", line)]
    return found


def test_a_row_says_what_a_checkpoint_adds_and_why(models: list[Path]) -> None:
    lines = screen(models, width=140)
    saved = analyze(models)
    assert saved.saving > 0.5  # the premise: there is something to say
    assert lines[0].endswith(": 51 % saved")
    drawn = {path.name: row_of(lines, path.name).split("%")[-1].strip() for path in models[1:]}
    assert drawn == {
        "Qwen2-tiny-Instruct": "■      ■ ■ ■ □ ■ ■  ■  changed: layer 3",
        "Qwen2-tiny-sql-lora-merged": "■      ▣ ▣ ▣ ▣ ▣ ▣  ■  "
        "changed: q_proj, v_proj; k_proj lost to vLLM's fused qkv",
        "Qwen2-tiny-de-extended-vocab": "□      ■ ■ ■ ■ ■ ■  □  vocabulary 400 -> 426 rows",
        "Qwen2-tiny-full-ft": "□      □ □ □ □ □ □  □  "
        "every tensor changed: fine-tuned in full, or unrelated",
    }
    adds = [row_of(lines, path.name)[30:42] for path in models]
    assert adds == ["  224.4 KiB ", "+  29.1 KiB ", "+  15.0 KiB ", "+  53.2 KiB ", "+ 224.4 KiB "]
    assert [each.adds_bytes for each in saved.contributions] == [
        229_824, 29_760, 15_360, 54_528, 229_824,
    ]  # fmt: skip
    text = "\n".join(lines).replace(" \\\n    --", " --")  # where the folder's name is long
    for number, model in enumerate(models[:-1]):
        port = f"--port 800{number} --kv-cache-memory-bytes 1G --"
        assert f"  {vllm_server()} {model} {port}" in text
    assert f"  tensor-dedup import {models[-1]} --compress auto" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_screen_holds_it_and_no_name_is_broken_inside_a_word(
    models: list[Path], tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models[0].parent)
    named = [Path(path.name) for path in models]
    twelve = links(tmp_path, models[0], 12)
    monkeypatch.chdir(tmp_path)
    for folder, paths in ((models[0].parent, named), (tmp_path, [Path(p.name) for p in twelve])):
        monkeypatch.chdir(folder)
        lines = screen(paths, width)
        assert len(lines) < 24
        assert max(map(len, lines)) <= width
        words = {word for path in paths for word in path.name.split("-")}
        # Every word of every name stands somewhere as it is.
        assert words <= {word for line in lines for word in re.split(r"[\s-]", line)}
        sizes = [m for line in lines if (m := re.search(r"[ +] +\d[\d.]* (KiB|B)  ", line))]
        assert len(sizes) == len(paths)
        assert len({size.end() for size in sizes}) == 1, lines


def test_links_keep_their_names(models: list[Path], tmp_path: Path) -> None:
    twelve = links(tmp_path, models[0], 12)
    lines = screen(twelve)
    for link in twelve[1:]:
        assert row_of(lines, link.name).endswith("equals customer-01")
    assert lines[0].endswith(": 92 % saved")
    assert "Qwen2-tiny " not in "\n".join(lines)


def test_an_ascii_terminal_has_other_cells(models: list[Path]) -> None:
    lines = screen(models, encoding="ascii")
    assert "#      # # # . # #  #" in row_of(lines, "Qwen2-tiny-Instruct")
    assert "#      + + + + + +  #" in row_of(lines, "Qwen2-tiny-sql-lora-merged")
    assert any("# shared" in line and "+ partly" in line for line in lines)


def test_no_colour_is_no_escape(models: list[Path]) -> None:
    def colours(environment: dict[str, str]) -> bool:
        out = StringIO()
        terminal = Console(file=out, width=80, force_terminal=True, _environ=environment)
        show_analysis(analyze(models), terminal)
        return "\x1b[32m" in out.getvalue()

    assert colours({"TERM": "xterm"})
    assert not colours({"TERM": "xterm", "NO_COLOR": "1"})


def test_many_layers_and_many_checkpoints_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deep = [Path("deep.safetensors"), Path("tuned.safetensors")]
    blocks(deep[0], layers=80)
    blocks(deep[1], changed=(0, 79), layers=80)
    lines = screen(deep, 60)
    assert max(map(len, lines)) <= 60
    cells = re.search(r"[■▣□]+$", lines[3].replace(" ", ""))
    assert cells is not None
    assert cells[0].count("▣") == 2
    assert any(re.search(r"one cell: [2-9] layers", line) for line in lines)
    assert any("changed: layers 0, 79" in line for line in lines)
    hundred = links(Path(), deep[0], 100)
    lines = screen(hundred)
    assert len(lines) < 24
    assert re.search(r"^\.\.\. \d\d more add 0 B; --details shows them$", "\n".join(lines), re.M)
    piped = run(*hundred).stdout.splitlines()
    assert sum(line.startswith("customer-") for line in piped) == 100


def test_one_checkpoint_is_told_that_it_is_alone(models: list[Path]) -> None:
    text = "\n".join(screen(models[:1]))
    assert "one checkpoint, nothing to compare it with" in text
    assert f"  tensor-dedup analyze {models[0]} OTHER" in text
