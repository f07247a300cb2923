"""The benchmark of the store runs, and says what it leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project import package_source


@pytest.mark.long
def test_the_benchmark_of_the_store_runs(tmp_path: Path) -> None:
    script = str(package_source.ROOT / "scripts" / "bench" / "store.py")
    options = ["--pairs", "1", "--gb", "0.02", "--only", "warm", "--only", "imports"]
    done = subprocess.run(
        [sys.executable, script, *options, "--work", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("tensor-dedup", "tensor-dedup, mapped", "safetensors load_file", "torch.load"):
        assert f"\n| {name} | " in done.stdout
    for name in ("tensorfs", "fastsafetensors", "Run:ai streamer", "tensorizer"):
        assert f"\n| {name} | " in done.stdout or f"\n- left out: {name}, " in done.stdout
    assert "\n| known, warm | " in done.stdout
