"""The benchmark of remotes runs, and prints its figures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import remote
from bench.remote_speed import Speed, Watch
from project import package_source
from tensor_dedup.digest import digest

pytest.importorskip("obstore")


def test_the_benchmark_of_remotes_runs(tmp_path: Path) -> None:
    script = str(package_source.ROOT / "scripts" / "bench" / "remote.py")
    options = ["--only", "speed", "--mb", "2", "--pairs", "6", "--server", "folder"]
    options += ["--work", str(tmp_path)]
    target = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, script, *options, "--json", str(target)],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(target.read_text())
    for verb in ("push", "pull"):
        name = f"{verb} of 2 MB, folder"
        assert [len(side) for side in figures[name]] == [6, 6]
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} |")]
        assert len(re.findall(r"[0-9.]+ \[[0-9.]+, [0-9.]+\](?! \(all seen\))", line)) == 3
        assert re.search(r"x \| ≥ 0\.9 x \| (met|missed|not shown) \|$", line)
        is_slow = f"threads at work, {name}: " in done.stdout
        ratios = sorted(b / a for a, b in zip(*figures[name], strict=True))
        assert is_slow is (sum(ratios[2:4]) / 2 < 0.9)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_what_fine_tunes_cost_is_counted_beside_the_bounds(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    options = ["--only", "wire", "--quick", "--work", str(tmp_path), "--json", str(target)]
    done = CliRunner().invoke(remote.main, options)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if re.match(r"\| (0|100) \| pu", line)]
    assert len(lines) == 2 * 3 * 4
    assert all(line.endswith("| met |") for line in lines)
    figures = json.loads(target.read_text())
    assert len(figures) == 2 * 3 * 2 * 2
    for [[most], [counted]] in figures.values():
        assert 0 < counted <= most


def test_a_throughput_of_less_than_nine_tenths_is_missed() -> None:
    for seconds, said in ((1.0, "met"), (1.2, "missed")):
        row = Speed("push", 100, [[1.0] * 9, [seconds] * 9]).row()
        assert (row.plain, row.verdict) == ("100 [100, 100] MB/s", said)


def test_what_threads_are_at_is_seen() -> None:
    data = bytes(64 << 20)
    with Watch() as watch:
        for _ in range(8):
            digest(data)
    assert re.match(r"hash (8\d|9\d|100)%", watch.text())
