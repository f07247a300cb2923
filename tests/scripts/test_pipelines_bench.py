"""The benchmark of image pipelines runs, on pipelines that are too small to measure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project import package_source


@pytest.mark.long
def test_the_benchmark_of_pipelines_runs(tmp_path: Path) -> None:
    script = str(package_source.ROOT / "scripts" / "bench" / "pipelines.py")
    done = subprocess.run(
        [sys.executable, script, "--pairs", "1", "--tiny", "--work", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for state in ("cold, unknown", "cold, known", "cached, unknown", "cached, known"):
        for what in ("seconds to load", "until all was read"):
            assert f"\n| first pipeline, {state}: {what} | " in done.stdout
            assert f"\n| second pipeline, {state}: {what} | " in done.stdout
        assert f"\n| second pipeline, {state}: added memory | " in done.stdout


@pytest.mark.long
def test_it_loads_them_from_a_store(tmp_path: Path) -> None:
    script = str(package_source.ROOT / "scripts" / "bench" / "pipelines.py")
    done = subprocess.run(
        [sys.executable, script, "--pairs", "1", "--tiny", "--stored", "--work", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for state in ("cold, from a store", "cached, from a store"):
        (row,) = (r for r in done.stdout.splitlines() if f"pipeline, {state}: bytes read" in r)
        assert "| 0.00 [0.00, 0.00] (all seen) MiB beyond the 1.90 MiB that differ |" in row
