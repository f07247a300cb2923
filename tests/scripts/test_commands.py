"""The shell commands refuse what they cannot do, and touch nothing that is not theirs."""

import os
import subprocess
from pathlib import Path

import pytest

from project import package_source


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(package_source.ROOT / "scripts" / script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", ["setup", "test"])
def test_an_unknown_option_is_wrong_use(script: str) -> None:
    done = run(script, "--nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: scripts/{script} ")


def test_setup_never_clears_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    treasure = tmp_path / "photos" / "cat.jpg"
    treasure.parent.mkdir()
    treasure.touch()
    done = run("setup", TENSOR_DEDUP_VENV=str(treasure.parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a virtual environment" in done.stderr
    assert list(treasure.parent.iterdir()) == [treasure]


def test_setup_says_which_interpreter_it_wants(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    done = run("setup", TENSOR_DEDUP_PYTHON=missing, TENSOR_DEDUP_VENV=str(tmp_path / "venv"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Python 3.11" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_continuous_run_is_the_test_command() -> None:
    script = package_source.ROOT / ".ci" / "run"
    done = subprocess.run([str(script), "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "scripts/test" in done.stderr
