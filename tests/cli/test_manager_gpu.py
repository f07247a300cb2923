"""The verbs of the memory manager, against one of a fake GPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import gpus
from tensor_dedup.cli import main
from tensor_dedup.memory_manager.cuda.fake import fake_uuid

GPU = ("--device", fake_uuid(0))


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gpus.GpuManager]:
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path) as running:
        monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(tmp_path / "m.sock"))
        yield running


def test_a_gpus_manager_is_asked_by_its_uuid(manager: gpus.GpuManager, tmp_path: Path) -> None:
    totals = json.loads(run("status", *GPU, "--json"))["totals"]
    assert (totals["pid"], totals["name"]) == (manager.pid, str(manager.socket))
    given = run("status", "--socket", str(tmp_path / "m.sock"), *GPU, "--json")
    assert json.loads(given)["totals"]["pid"] == manager.pid
    assert json.loads(run("pin", "base", *GPU, "--json"))["pinned"]
    assert "serve" in run("status", status=1), "the one of the machine's memory is not there"
    run("stop", *GPU)
    assert manager.wait() == 0


def test_what_is_no_uuid_is_wrong_use() -> None:
    assert "nvidia-smi -L" in run("status", "--device", "0", status=2)


def test_a_gpu_is_not_preloaded() -> None:
    assert "--device" in run("serve", "--device", "0", "--preload", "model", status=2)
