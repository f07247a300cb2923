"""The benchmark of vLLM on a GPU: the models that it makes, its verdicts, and that it runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import gpu_engines, gpu_models, gpu_processes
from bench.fine_tunes import contents, differing_bytes
from bench.gpu_place import Bench
from bench.results import Row
from project import package_source


def test_models_have_the_size_that_is_asked_for() -> None:
    of_3b = gpu_models.large(5.75)
    assert of_3b.num_hidden_layers == 36  # Qwen2.5-3B's own
    assert of_3b.nbytes == 6_171_877_376
    for gib in (2.0, 4.0, 14.0):
        one_layer = gpu_models.large(gib).changed_bytes
        assert abs(gpu_models.large(gib).nbytes - gib * 2**30) <= one_layer / 2
    assert gpu_models.large(0.1).num_hidden_layers == 2


def test_a_fine_tune_differs_in_one_layer(tmp_path: Path) -> None:
    base, tuned = gpu_models.made(tmp_path, gpu_models.TINY)
    assert sum(contents(base).values()) == gpu_models.TINY.nbytes
    assert differing_bytes(base, tuned) == gpu_models.TINY.changed_bytes
    assert gpu_models.made(tmp_path, gpu_models.TINY) == (base, tuned)  # and nothing is made anew


@pytest.mark.parametrize(("seconds", "said"), [(0.8, "met"), (1.0, "missed")])
def test_sleep_is_held_to_seconds_a_gigabyte(seconds: float, said: str) -> None:
    sides = [[9.0] * 9, [seconds] * 9]
    row = gpu_processes.per_gb("sleep", sides, 6 * 10**9, gpu_processes.SLEEP_MOST)
    assert row.verdict == said
    assert f"{seconds / 6:.3f}" in row.compared


@dataclass(frozen=True)
class Measured(gpu_engines.Run):
    """A run whose figures are there already."""

    def part(self, name: str) -> Iterator[Row]:
        yield Row(f"{name}: seconds", "2 s", "1 s", "0.5 x", "≤ 1 x", "met", ([2.0], [1.0]))
        if name == "sleep":
            raise OSError(28, "No space | left on device")
        yield Row(f"{name}: bytes", "", "0 MiB", "", "≤ 0 MiB", "met", ((), [0.0]))


@pytest.mark.parametrize(
    ("rehearsal", "said"), [(False, ["met", "met"]), (True, ["not shown: a rehearsal", "met"])]
)
def test_a_rehearsal_shows_what_is_counted_and_no_time(
    tmp_path: Path, rehearsal: bool, said: list[str]
) -> None:
    run = Measured(Bench(tmp_path, rehearsal, 1.0), gpu_models.TINY, 3)
    found = list(gpu_engines.rows(run, ("again",)))
    assert [row.name for row in found] == ["again: seconds", "again: bytes"]
    assert [row.verdict for row in found] == said


def test_a_part_that_fails_says_so_and_the_next_is_measured(tmp_path: Path) -> None:
    run = Measured(Bench(tmp_path, rehearsal=False, gib=1.0), gpu_models.TINY, 3)
    found = list(gpu_engines.rows(run, ("sleep", "memory")))
    names = ["sleep: seconds", "sleep", "memory: seconds", "memory: bytes"]
    assert [row.name for row in found] == names
    assert found[1].verdict == "failed"
    assert "OSError: [Errno 28] No space / left on device" in found[1].text()


@pytest.mark.long
@pytest.mark.vllm
def test_it_runs_over_the_fake_driver(tmp_path: Path) -> None:
    command = package_source.ROOT / "scripts" / "bench" / "gpu_engines.py"
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, command, "--rehearse", "--quick", "--work", tmp_path, "--json", figures],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["the same model again: bytes read"] == [[], [0.0] * 3]
    assert found["a known fine-tune: bytes read"] == [[], [gpu_models.TINY.changed_bytes] * 3]
    for part in ("first load, with a memory manager: weights", "memory of both engines"):
        assert part in found
    assert "| wake of the last engine awake" in done.stdout
    assert not list(tmp_path.glob(".gpu-*"))
