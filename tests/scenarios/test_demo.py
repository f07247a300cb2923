"""The demonstration on small checkpoints, as a user runs it, and its parts."""

import dataclasses
import json
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from demonstration import __main__ as demo
from demonstration import gallery, models, pictures, process, resident, run, show
from models import tiny_checkpoints as checkpoints
from processes import fresh
from project import package_source
from tensor_dedup.analyze import analyze
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.report import ModelReport

TINY = {
    **models.CONFIG,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def do(kind: str, models: list[str], config: Any, options: Any) -> dict[str, Any]:
    """What a process of the demonstration does: its last event."""
    job: process.Job = {
        "kind": kind,
        "models": models,
        "config": config,
        "options": options,
        "events": -1,
    }
    events: list[dict[str, Any]] = []
    process.run(job, process._library(kind), lambda **event: events.append(event))
    return events[-1]


def follow_forked(
    kind: str, paths: Sequence[Path], config: Any, options: Any, _env: Any, log: Path, _step: Any
) -> Any:
    """As `run.follow`, in a process that has imported what it needs."""
    log.touch()
    paths_of_models = [str(path) for path in paths]
    return fresh.call_forked(do, kind, paths_of_models, config and dict(config), dict(options))


@pytest.fixture(params=["forked", pytest.param("new", marks=pytest.mark.long)])
def demonstrate(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs the demonstration, whose processes are forked or new ones; what it prints."""

    def with_new_processes(*arguments: str | Path) -> str:
        script = package_source.ROOT / "scripts" / "demonstration"
        command = [sys.executable, script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def with_forked_processes(*arguments: str | Path) -> str:
        done = CliRunner().invoke(demo.main, [str(each) for each in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    if request.param == "new":
        return with_new_processes
    for module in (run, gallery):
        monkeypatch.setattr(module, "follow", follow_forked)
    return with_forked_processes


@pytest.mark.vllm
def test_own_checkpoints_answer_as_plain_vllm_and_share(
    tmp_path: Path, demonstrate: Callable[..., str]
) -> None:
    pair = checkpoints.make("qwen2", tmp_path)
    report = tmp_path / "report.json"
    options = ["--work", str(tmp_path), "--json", str(report)]
    said = demonstrate(*options, pair.base, pair.fine_tune)
    assert "tokens equal plain vLLM's" in said
    found = json.loads(report.read_text())
    assert [model["tokens_equal_plain"] for model in found["models"]] == [True, True]
    assert found["models"][1]["shared_bytes"] > found["models"][1]["private_bytes"] > 0
    assert found["resident_bytes"] > 0
    for side in ("plain", "dedup"):
        assert found[side]["together"]
        assert len(found[side]["models"]) == 2
        assert found[side]["pss"] > 0
        for model in found[side]["models"]:
            # All of it is cleared when it is made; vLLM rounds down to whole blocks.
            assert 500 << 20 < model["kv_cache"] <= 512 << 20
            assert model["added_pss"] > model["kv_cache"]


def growth_by_reading(file: str) -> int:
    """How much this process grows when the pages of a file that it maps are read."""
    flat = torch.from_file(file, shared=True, size=Path(file).stat().st_size // 4)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(flat, requires_grad=False)
    before = process.memory()["pss"]
    resident.read_pages(module)
    return process.memory()["pss"] - before


def test_pages_that_were_written_through_a_descriptor_count_once_they_are_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))
    # In a process of its own: what this one has forked changes its share of what they share.
    assert fresh.call_forked(growth_by_reading, str(file)) >= 7 << 20


def side(*tokens: int) -> run.Side:
    memory = {"rss": 3, "pss": 2, "anonymous": 1}
    return run.Side(
        loads=[{"model": str(n), "seconds": 1.0, "memory": memory} for n, _ in enumerate(tokens)],
        answers=[{"seconds": 1.0, "tokens": [[t]], "logprobs": []} for t in tokens],
        before=memory,
        peak_rss=5,
        together=True,
        report={"models": [ModelReport(name=str(n)).to_dict() for n, _ in enumerate(tokens)]},
    )


def test_one_other_token_is_said_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = checkpoints.make("qwen2", tmp_path)
    work, logs = tmp_path / "work", list[Path]()

    def plain(models: Sequence[Path], log: Path, *_: object) -> run.Side:
        log.touch()
        logs.append(log)
        return side(7, 8)

    monkeypatch.setattr(run, "run_plain", plain)
    arguments = ["--work", str(work), "--json", str(tmp_path / "r.json")]
    arguments += [str(pair.base), str(pair.fine_tune)]
    for answers, status in (((7, 8), 0), ((7, 9), 1)):
        monkeypatch.setattr(run, "run_shared", lambda *_, answers=answers: side(*answers))
        assert CliRunner().invoke(demo.main, arguments).exit_code == status
    report = json.loads((tmp_path / "r.json").read_text())
    assert [model["tokens_equal_plain"] for model in report["models"]] == [True, False]
    assert report["tokens_equal_plain"] is False
    # What a shell takes `work/*` for is checkpoints, as `analyze` needs them.
    assert all(log.is_file() and log.is_relative_to(work) for log in logs)
    assert [path for path in work.iterdir() if not path.name.startswith(".")] == []


def test_what_each_load_added_and_its_sum() -> None:
    def at(size: int) -> dict[str, Any]:
        return {"model": "m", "seconds": 2.0, "memory": {"pss": size}}

    def of(together: bool) -> run.Side:
        return run.Side([at(30), at(45)], [], {"pss": 10}, 0, together, None)

    assert of(together=True).added() == [{"pss": 20}, {"pss": 15}]
    assert of(together=True).total() == {"pss": 45}
    # Loaded in a process each, both levels are above the empty process's.
    assert of(together=False).added() == [{"pss": 20}, {"pss": 35}]
    assert of(together=False).total() == {"pss": 65}


def test_a_models_memory_is_told_apart_from_its_kv_cache() -> None:
    def of(*added: tuple[int, int]) -> run.Side:
        level, loads = 10 << 20, list[dict[str, Any]]()
        for size, cache in added:
            level += size << 20
            memory = {"rss": level, "pss": level}
            loads.append({"seconds": 1.0, "memory": memory, "kv_cache": cache << 20})
        before = {"rss": 10 << 20, "pss": 10 << 20}
        answers = [{"seconds": 1.0, "tokens": [[1]], "logprobs": []} for _ in added]
        return run.Side(loads, answers, before, level, True, None)

    plain, shared = of((165, 64), (164, 64)), of((166, 64), (67, 64))
    assert (plain.kept(), shared.kept()) == ([101 << 20, 100 << 20], [102 << 20, 3 << 20])
    text = shown(["base", "tuned"], plain, shared)
    assert re.search(r"│ tuned +│ +100\.0 MiB │ +3\.0 MiB │", text)
    assert re.search(r"│ of it KV caches +│ +128\.0 MiB │ +128\.0 MiB │ +1\.00 │", text)


def shown(names: Sequence[str], plain: run.Side, shared: run.Side, width: int = 200) -> str:
    """The tables as text."""
    out = StringIO()
    show.show(Console(file=out, width=width), names, plain, shared)
    return out.getvalue()


def test_the_tables_are_whole_and_every_heading_says_all_of_it() -> None:
    names = ["base", "a-fine-tune-with.a-long-name"]
    tables = {
        width: {line.rstrip() for line in shown(names, side(1, 2), side(1, 2), width).splitlines()}
        for width in (80, 100, 120, 10_000)
    }
    for width, lines in tables.items():
        text = "\n".join(lines)
        assert "…" not in text
        assert max(map(len, lines)) <= width
        assert all(f"{word}," in text for word in ("memory", "seconds"))
    assert tables[100] == tables[120] == tables[10_000]


# With another library, for it is quickly imported.
PROCESS = f"""
import sys
sys.path.insert(0, {str(package_source.ROOT / "scripts")!r})
from demonstration import process

class Library:
    prepare = staticmethod(lambda: None)
    load = staticmethod(lambda path, config, options: path)
    facts = staticmethod(lambda model: {{"kv_cache": 3}})
    answer = staticmethod(lambda model, path, number, options: {{"seconds": 1.0, **options}})

process._library = {{"engine": Library}}.__getitem__
process.main()
"""


def test_a_process_is_followed_event_by_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, steps = tmp_path / "process.py", list[tuple[str, str]]()
    script.write_text(PROCESS)
    monkeypatch.setattr(run, "process", SimpleNamespace(__file__=str(script)))
    models, options = [Path("to/base"), Path("to/tuned")], {"number": 7}
    log = tmp_path / "log"
    result = run.follow("engine", models, None, options, {}, log, lambda *s: steps.append(s))
    assert [(load["model"], load["kv_cache"]) for load in result["loads"]] == [
        ("to/base", 3),
        ("to/tuned", 3),
    ]
    assert result["answers"] == [{"seconds": 1.0, "number": 7}] * 2
    assert result["report"] is None
    assert steps[0] == ("starting", "")
    assert steps[1:] == [
        *((event, name) for name in ("base", "tuned") for event in ("loading", "loaded")),
        *((event, name) for name in ("base", "tuned") for event in ("answering", "answered")),
    ]


def test_an_engine_that_fails_says_where_it_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "sys", SimpleNamespace(executable="false"))
    with pytest.raises(run.EngineFailedError, match=r"plain\.log"):
        run.run_plain([tmp_path / "nothing"], tmp_path / "plain.log", print, 1 << 20, True)


def test_the_checkpoints_differ_from_the_base_where_they_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "CONFIG", TINY)
    assert models.missing(tmp_path) == list(models.MAKERS)
    for name in models.missing(tmp_path):
        models.make(name, tmp_path)
    assert models.missing(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(models.MAKERS)
    base, layer, lora, grown = models.paths(tmp_path)
    changed = {path.name: checkpoints.different(base, path) for path in (layer, lora, grown)}
    assert len(changed["one-layer"]) == 12
    assert all(f".layers.{models.CHANGED_LAYER}." in name for name in changed["one-layer"])
    assert len(changed["merged-lora"]) == 24
    assert all("q_proj" in name or "v_proj" in name for name in changed["merged-lora"])
    assert changed["grown-vocabulary"] == ("model.embed_tokens.weight",)
    found = analyze([base, lora])
    assert found.vllm.broken == 12
    # k of twelve layers is equal, and lost to the fused qkv; the biases are fused apart.
    assert found.vllm.lost_bytes == 12 * 64 * 128 * 2
    assert found.vllm.shared_bytes == found.pairs[0].shared_bytes - found.vllm.lost_bytes


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(free=10**9))
    models.check_space(tmp_path, [])
    with pytest.raises(UnsupportedError, match="--work"):
        models.check_space(tmp_path, ["base"])
    result = CliRunner().invoke(demo.main, ["--work", str(tmp_path)])
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert result.stderr.startswith("demo: on two idle cores this takes two minutes and 7.2 GiB of")


def test_what_stays_on_the_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_bytes(bytes(1 << 20))
    (tmp_path / "of-somebody").write_bytes(bytes(1 << 20))
    for equal in (True, False):
        monkeypatch.setattr(demo, "_language_models", lambda *_, equal=equal, **__: equal)
        result = CliRunner().invoke(demo.main, ["--work", str(tmp_path)])
        assert result.exit_code == (not equal)
        assert f"1.0 MiB of checkpoints stay in {tmp_path} for the next run" in result.stderr


def test_its_help_is_that_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    script = package_source.ROOT / "scripts" / "demonstration"
    subprocess.run([sys.executable, str(script), "--help"], check=True)
    assert capfd.readouterr().out.startswith("Usage: scripts/demo [OPTIONS] [PATHS]...\n")


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(demo.main, ["--work", str(tmp_path), str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    absent = ["--diffusers", "--work", str(tmp_path), str(tmp_path / "nothing")]
    result = CliRunner().invoke(demo.main, absent)
    assert (result.exit_code, "nothing" in result.stderr) == (2, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "diffusers" or None)
    result = CliRunner().invoke(demo.main, ["--diffusers", "--work", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install '.[diffusers]'" in result.stderr


def test_pipelines_draw_as_without_sharing(tmp_path: Path, demonstrate: Callable[..., str]) -> None:
    for name in pictures.NAMES:
        pictures.make(name, tmp_path, tiny=True)
    report = tmp_path / "report.json"
    options = ["--diffusers", "--work", str(tmp_path / "work"), "--json", str(report)]
    demonstrate(*options, *(tmp_path / name for name in pictures.NAMES))
    found = json.loads(report.read_text())
    assert found["pictures_equal"] == [True, True]
    one, two = found["models"]
    assert one["shared_bytes"] == 0
    assert {each["name"]: each["private_bytes"] == 0 for each in two["components"]} == {
        "vae": True,
        "text_encoder": True,
        "unet": False,
    }
    with Image.open(found["pictures"]) as sheet:
        assert sheet.size == (2 * 32 + 8, 2 * 32 + 8)


def drawn(folder: Path, *values: float) -> run.Side:
    folder.mkdir(parents=True)
    files = [folder / f"{number}.npy" for number, _ in enumerate(values)]
    for file, value in zip(files, values, strict=True):
        np.save(file, np.full((4, 4, 3), value))
    made = side(*(0 for _ in values))
    answers = [{"seconds": 1.0, "picture": str(file)} for file in files]
    return dataclasses.replace(made, answers=answers)


@pytest.mark.parametrize(("values", "status"), [((0.1, 0.2), 0), ((0.1, 0.2001), 1)])
def test_one_other_pixel_is_said_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[float, float], status: int
) -> None:
    sides = {"plain": drawn(tmp_path / "a", 0.1, 0.2), "shared": drawn(tmp_path / "b", *values)}
    monkeypatch.setattr(gallery, "run_side", lambda _, folder, *__: sides[folder.name])
    (tmp_path / "work" / "pipelines").mkdir(parents=True)
    paths = [str(tmp_path / "base"), str(tmp_path / "base")]
    checkpoint = tmp_path / "base" / "model.safetensors"
    checkpoint.parent.mkdir()
    save_file({"weight": torch.ones(4)}, checkpoint)
    arguments = ["--diffusers", "--work", str(tmp_path / "work"), *paths]
    result = CliRunner().invoke(demo.main, arguments)
    assert result.exit_code == status, result.output
    assert ("differs" in result.stdout) == bool(status)
