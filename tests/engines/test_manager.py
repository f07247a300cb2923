"""Engines in separate processes, one copy of the weights in the memory manager."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from tensor_dedup.loader.report import REPORT_DIR_VARIABLE
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.patches.vllm import preload
from tensor_dedup.text_table import BETWEEN_PROCESSES
from vllm_runs import fleet

# Large enough that whole pages for small tensors do not matter, small enough to load in no time.
_SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}


# Plain vLLM with plain weights, as those are that leave a process.
UNPACKED: dict[str, Any] = {"worker_extension_cls": "vllm_runs.unpacked.Worker"}
LARGE = 256_000_000


def make(root: Path, sizes: dict[str, Any] = _SIZES) -> tuple[Path, Path]:
    """A checkpoint, and a fine-tune of it with one changed matrix."""
    torch.manual_seed(0)
    kind: Any = LlamaForCausalLM
    model = kind(LlamaConfig(**sizes)).bfloat16()
    model.save_pretrained(root / "base")
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.01)
    model.save_pretrained(root / "fine-tune")
    return root / "base", root / "fine-tune"


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[fleet.Fleet]:
    with fleet.fleet(tmp_path) as found:
        yield found


def test_engines_that_start_at_once_hold_one_copy(
    tmp_path: Path, checkpoints: tuple[Path, Path], engines: fleet.Fleet
) -> None:
    base, fine_tune = checkpoints
    alone = {path: engines.start(path, None, **UNPACKED) for path in checkpoints}
    expected = {path: engine.loaded for path, engine in alone.items()}
    for engine in alone.values():
        engine.end()
    assert expected[base]["outputs"] != expected[fine_tune]["outputs"]

    with fleet.manager(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        paths = [base, base, fine_tune]
        three = [engines.start(path, config) for path in paths]
        total = three[0].report["total_bytes"]
        check_one_copy(manager, dict(zip(three, paths, strict=True)), expected, 512 * 1408 * 2)
        with Admin(manager.socket) as admin:
            leases = admin.totals().leases
        manager.kill()
        assert three[2].outputs() == expected[fine_tune]["outputs"]

    with fleet.manager(tmp_path) as manager:
        # Another manager at the same socket is given what engines still hold.
        manager.wait_for_leases(leases)
        newcomer = engines.start(base, config)
        report = newcomer.report
        assert (report["shared_bytes"], report["bytes_read"]) == (total, 0)
        assert newcomer.loaded["outputs"] == expected[base]["outputs"]
        assert manager.built() == []


def check_one_copy(
    manager: fleet.Manager,
    engines: dict[fleet.Engine, Path],
    plain: dict[Path, dict[str, Any]],
    differ: int,
) -> None:
    """What these engines of a base and of a fine-tune hold, built, answer, and keep for themselves.

    `plain`: what plain vLLM said of each checkpoint; `differ`: bytes of the fine-tune's own.
    """
    reports = [engine.report for engine in engines]
    total = reports[0]["total_bytes"]
    unique = total + differ
    # Whatever the order in which they came: every byte was made by one of them.
    assert sum(report["private_bytes"] for report in reports) == unique
    assert sum(report["shared_bytes"] for report in reports) == len(reports) * total - unique
    assert len(manager.built()) == len(set(manager.built())) > 0
    check_memory(manager, list(engines), unique)
    for engine, path in engines.items():
        assert engine.loaded["outputs"] == plain[path]["outputs"]
        assert engine.loaded["anonymous"] <= plain[path]["anonymous"] - 0.5 * total


@pytest.mark.long
def test_four_engines_of_a_larger_model_that_start_at_once_hold_one_copy(
    tmp_path: Path, engines: fleet.Fleet
) -> None:
    sizes = {**_SIZES, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    base, fine_tune = make(tmp_path, sizes)
    expected = {}
    for path in (base, fine_tune):
        alone = engines.start(path, None, kv_cache_memory_bytes=64 << 20, **UNPACKED)
        expected[path] = alone.loaded
        alone.end()
    with fleet.manager(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        paths = [base, fine_tune, base, fine_tune]
        four = {engines.start(path, config, kv_cache_memory_bytes=64 << 20): path for path in paths}
        assert next(iter(four)).report["total_bytes"] >= LARGE
        check_one_copy(manager, four, expected, 1024 * 2816 * 2)


def check_memory(manager: fleet.Manager, engines: list[fleet.Engine], unique: int) -> None:
    """All of them hold leases, and together one copy."""
    most = 1.03 if unique >= LARGE else 1.06
    with Admin(manager.socket) as admin:
        overview = admin.overview()
    assert {row.pid for row in overview.clients} == {engine.pid for engine in engines}
    assert all(row.leases for row in overview.clients)
    # The norms of a model nobody trained are equal, and one.
    assert 0.99 * unique <= overview.totals.charged <= most * unique
    mapped = [fleet.slab_pss(pid) for pid in (manager.process.pid, *(e.pid for e in engines))]
    # Pages of an embedding that nobody has looked at are in no process's share.
    assert 0.5 * unique <= sum(mapped) <= most * unique


def test_what_was_preloaded_is_there_for_the_first_engine(
    tmp_path: Path,
    checkpoints: tuple[Path, Path],
    engines: fleet.Fleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user has it, with an engine below the process that preloads: nothing is read later.

    And with somebody who collects the reports of all.
    """
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("TENSOR_DEDUP_HINTS", str(engines.hints))  # one, as of one user
    base, _ = checkpoints
    settings = json.dumps({"skip_tokenizer_init": True, "max_model_len": 256})
    options = ("--preload", str(base), "--engine-args", settings)
    reports = tmp_path / "reports"
    reports.mkdir()
    with fleet.manager(tmp_path, *options, environ={REPORT_DIR_VARIABLE: str(reports)}) as manager:
        manager.wait_for(" preloaded ")
        assert len(list(reports.rglob("*.json"))) == 1
        with Admin(manager.socket) as admin:
            totals = admin.totals()
        assert (totals.clients, totals.leases) == (1, 0)
        assert totals.pinned_bytes == totals.resident_bytes > 0
        built = manager.built()

        here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # saves a process that imports vLLM
        engine = engines.start(base, {"memory_manager": str(manager.socket)}, here)
        report = engine.report
        assert report["shared_bytes"] == report["total_bytes"]
        assert report["bytes_read"] == 0
        assert manager.built() == built
        plain = engines.start(base, None, here, **UNPACKED)
        assert engine.loaded["outputs"] == plain.loaded["outputs"]


def test_a_preload_of_what_is_not_there_ends_with_the_reason(tmp_path: Path) -> None:
    """As the manager's helper; what it does about one that fails is in test_state_dicts."""
    nothing = str(tmp_path / "nothing")
    done = CliRunner().invoke(preload.main, ["--socket", str(tmp_path / "m.sock"), nothing])
    assert done.exit_code == 1
    assert f"{nothing}: not preloaded: " in str(done.exception)


@pytest.mark.long
def test_a_preload_that_fails_is_said_and_the_manager_serves(tmp_path: Path) -> None:
    with fleet.manager(tmp_path, "--preload", str(tmp_path / "nothing")) as manager:
        manager.wait_for("preload failed")
        with Admin(manager.socket) as admin:
            assert admin.totals().residents == 0


def test_where_nobody_answers_a_model_loads_by_itself(
    tmp_path: Path, checkpoints: tuple[Path, Path], engines: fleet.Fleet
) -> None:
    home = tmp_path / "socket"
    home.mkdir(mode=0o700)
    nobody = home / "nobody.sock"
    engine = engines.start(checkpoints[0], {"memory_manager": str(nobody)})
    plain = engines.start(checkpoints[0], None)
    assert engine.loaded["outputs"] == plain.loaded["outputs"]
    assert engine.report["shared_bytes"] == 0
    [[name, why]] = engine.report["skipped"]
    assert name == BETWEEN_PROCESSES
    assert str(nobody) in why


def test_a_manager_is_started_where_none_answers(
    tmp_path: Path, checkpoints: tuple[Path, Path], engines: fleet.Fleet
) -> None:
    """Nothing is set up. Servers, with engines in processes below them, do so in test_serve.py."""
    home = Path(tempfile.mkdtemp(prefix="td-"))  # the path of a socket is short
    environ = {"XDG_RUNTIME_DIR": str(home)}
    both = [engines.start(checkpoints[0], {"memory_manager": "auto"}, environ) for _ in range(2)]
    try:
        first, second = both
        total = first.report["total_bytes"]
        assert first.report["shared_bytes"] + second.report["shared_bytes"] == total
        assert first.loaded["outputs"] == second.loaded["outputs"]
        with Admin(home / "tensor-dedup" / "manager.sock") as admin:
            clients = {row.pid for row in admin.overview().clients}
            assert clients == {engine.pid for engine in both}
    finally:
        with Admin(home / "tensor-dedup" / "manager.sock") as admin:
            admin.stop()
        shutil.rmtree(home)


@pytest.mark.long
def test_ranks_of_engines_with_tensor_parallelism_share_their_slices(
    tmp_path: Path, checkpoints: tuple[Path, Path], engines: fleet.Fleet
) -> None:
    """Four workers and the four halves of two equal models: each half is there once."""
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    options = {"tensor_parallel_size": 2}
    plain = engines.start(checkpoints[0], None, environ, **options, **UNPACKED)
    expected = plain.loaded["outputs"]
    plain.end()
    with fleet.manager(tmp_path) as manager:
        config = {"memory_manager": str(manager.socket)}
        both = [engines.start(checkpoints[0], config, environ, **options) for _ in range(2)]
        reports = [report for engine in both for report in engine.loaded["reports"]]
        assert sorted(report["rank"] for report in reports) == [0, 0, 1, 1]
        total = sum(report["total_bytes"] for report in reports)
        # Norms and such are whole in both ranks, and one among all four.
        assert sum(report["shared_bytes"] for report in reports) >= total / 2
        assert len(manager.built()) == len(set(manager.built())) > 0
        with Admin(manager.socket) as admin:
            assert admin.totals().clients == 5
            assert admin.totals().charged <= 1.06 * total / 2
        for engine in both:
            assert engine.loaded["outputs"] == expected
