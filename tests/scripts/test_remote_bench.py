"""The benchmark of remotes runs, and prints its figures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from project import package_source

pytest.importorskip("obstore")


def test_the_benchmark_of_remotes_runs(tmp_path: Path) -> None:
    script = str(package_source.ROOT / "scripts" / "bench" / "remote.py")
    options = ["--mb", "2", "--tensors", "20", "--pairs", "6"]
    done = subprocess.run(
        [sys.executable, script, *options],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "20 tensors, 2 MB, medians of 6 pairs" in done.stdout
    for what in (
        *("pull into an empty store", "plain copy by obstore", "throughput of the pull"),
        *("push to an empty folder", "plain upload by obstore", "throughput of the push"),
    ):
        [line] = [line for line in done.stdout.splitlines() if line.startswith(what)]
        assert re.search(r"[0-9.]+ \[[0-9.]+, [0-9.]+\](?! \(all seen\))", line)
