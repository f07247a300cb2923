"""The verbs of the memory manager, against one of a fake GPU."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_runs import gpus
from gpu_runs.fake_driver import FakeDriver, fake_uuid
from tensor_dedup.cli import main
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.errors import ManagerGoneError

GPU = ("--device", fake_uuid(0))
GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """NVML of one GPU, which this process and one that does not say how much it has are using."""

    NVMLError = NVMLError

    def __init__(self, *, refuse: str = "") -> None:
        self.refuse = refuse
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.refuse:
                raise NVMLError("Driver Not Loaded")
            return getattr(self, f"_{name}")(*arguments)

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return call

    def _nvmlInit(self) -> None:
        self.begun += 1

    def _nvmlShutdown(self) -> None:
        self.begun -= 1

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == fake_uuid(0)
        return "handle"

    def _nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"A fake GPU"

    def _nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=80 * GIB, used=12 * GIB, free=68 * GIB)

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB)
        return [SimpleNamespace(pid=1, usedGpuMemory=None), mine]


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
    assert json.loads(run("pin", "base", "--ahead", *GPU, "--json"))["pinned"]
    assert "`tensor-dedup serve`" in run("status", status=3), "that of host memory is not there"
    run("stop", *GPU)
    assert manager.wait() == 0


@pytest.mark.parametrize(
    "verb", [("status",), ("top",), ("pin", "base"), ("unpin", "base"), ("evict", "base")]
)
def test_where_none_answers_the_command_starts_one_of_that_gpu(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(tmp_path / "m.sock"))
    said = run(*verb, "--device", "GPU-01234567", status=3)
    assert "start one with `tensor-dedup serve --device GPU-01234567`" in " ".join(said.split())
    with pytest.raises(ManagerGoneError, match="`tensor-dedup serve --device GPU-01234567`"):
        connect(tmp_path / "m.sock", device="GPU-01234567")


@pytest.mark.parametrize("verb", ["status", "top", "stop", "serve"])
def test_what_is_no_uuid_is_wrong_use(verb: str) -> None:
    given = "foo" if verb == "serve" else "0"
    assert "nvidia-smi -L" in run(verb, "--device", given, status=2)
    assert "write GPU- for MIG-: GPU-01234567" in run(verb, "--device", "MIG-01234567", status=2)


def test_a_gpus_manager_takes_80_percent_of_it_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "with --device 80 % of the GPU's" in " ".join(run("serve", "--help").split())
    driver = FakeDriver()
    driver.init()
    total = driver.devices()[0].nbytes
    (tmp_path / "configured.toml").write_text('budget = "32GiB"')
    monkeypatch.setenv("TENSOR_DEDUP_CONFIG", str(tmp_path / "configured.toml"))
    tmp_path.chmod(0o700)
    with gpus.running(tmp_path, "--budget", "0") as manager:  # none given
        shown = run("status", "--socket", str(manager.socket), "--json")
    assert json.loads(shown)["totals"]["budget"] == int(total * 0.8)


def test_a_gpu_is_not_preloaded() -> None:
    assert "--device" in run("serve", "--device", "0", "--preload", "model", status=2)


def test_handles_have_the_sizes_that_cuda_has() -> None:
    assert "64 MiB" in run("serve", "--device", "0", "--handle", "3M", status=2)
    assert "--device" in run("serve", "--handle", "4M", status=2)
    assert "vmm" in run("serve", "--device", "0", "--backend", "ipc", "--handle", "4M", status=2)


def test_status_and_top_show_what_nvml_counts(
    manager: gpus.GpuManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    client = connect(tmp_path / "m.sock", name="an engine", device=fake_uuid(0))
    shown = " ".join(run("status", *GPU).split())
    assert "A fake GPU: 12.0 GiB of 80.0 GiB in use" in shown
    assert "2 processes on it, 1 no clients" in shown
    assert "3.0 GiB" in shown.split("an engine")[1]
    for verb in ("status", "top"):
        device = json.loads(run(verb, *GPU, "--json"))["device"]
        assert (device["uuid"], device["used"]) == (fake_uuid(0), 12 * GIB)
        assert device["processes"] == [
            {"pid": 1, "nbytes": None},
            {"pid": os.getpid(), "nbytes": 3 * GIB},
        ]
    assert nvml.begun == 0
    client.close()


@pytest.mark.parametrize("refuse", ["import", "nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_where_nvml_cannot_be_asked_the_reason_is_shown(
    refuse: str, manager: gpus.GpuManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if refuse == "import" else FakeNvml(refuse=refuse)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    reason = json.loads(run("status", *GPU, "--json"))["device"]["not_available"]
    assert ("nvidia-ml-py" if refuse == "import" else "Driver Not Loaded") in reason
    assert "not available" in run("status", *GPU)
    assert found is None or found.begun == 0
