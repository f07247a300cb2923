"""The benchmark of DataStates' evaluation: it runs, and what it compares with is what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fresh
import package_source

SCRIPTS = package_source.ROOT / "scripts"
OURS = "ours, save_async, lazy"


def ideals(folder: str) -> list[bool]:
    """Whether each way to write as fast as the disk can leaves the bytes it was given."""
    sys.path.append(str(SCRIPTS))
    from bench.datastates_write import ideal
    from tensor_dedup.store.buffers import allocate

    size = (16 << 20) + 4096
    source = allocate(size)
    source[:] = os.urandom(size)
    found = []
    for threads, direct in ((1, False), (2, False), (3, True)):
        path = Path(folder, f"{threads}")
        ideal(path, source, threads, direct=direct)
        found.append(path.read_bytes() == source)
    return found


def test_the_ideal_writes_all_of_it(tmp_path: Path) -> None:
    assert fresh.call(ideals, str(tmp_path)) == [True] * 3


def trainings(folder: str) -> tuple[list[int], list[bool]]:
    """The bytes of steps by size, and whether every tensor of one changes with a step."""
    sys.path.append(str(SCRIPTS))
    from torch import distributed

    from bench.datastates_engines import Training, tensors

    # Each rank's part alone: its collectives have nobody to meet.
    group = f"file://{folder}/group"
    distributed.init_process_group("gloo", init_method=group, rank=0, world_size=1)
    small = 45_000_000
    sizes = [sum(Training(small, rank, n).nbytes for rank in range(n)) for n in (1, 2, 4)]
    training = Training(small, 0, 4)
    before = {name: each.clone() for name, each in tensors(training.state).items()}
    training.step(lambda: None)
    after = tensors(training.state)
    return sizes, [bool((after[name] != each).any()) for name, each in before.items()]


def test_a_step_has_its_bytes_over_all_ranks_and_all_of_it_changes(tmp_path: Path) -> None:
    sizes, changed = fresh.call(trainings, str(tmp_path))
    assert [abs(size / 45e6 - 1) < 0.01 for size in sizes] == [True] * 3
    assert len(changed) > 20
    assert all(changed)


@pytest.mark.long
def test_the_benchmark_runs_and_every_engine_restores_its_steps(tmp_path: Path) -> None:
    script, out = str(SCRIPTS / "bench" / "datastates.py"), tmp_path / "raw.json"
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, script, "--quick", "--work", str(tmp_path / "work"), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(package_source.SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    raw: dict[str, Any] = json.loads(out.read_text())
    assert [each["setup"]["ranks"] for each in raw["setups"]] == [1, 1, 2]
    for found in raw["setups"]:
        assert {"no saves", "torch.save", "DCP async_save", OURS} <= found["turns"].keys()
        assert found["restored"].keys() == found["turns"].keys() - {"no saves"}
        assert all(found["restored"].values())
        assert len(found["rank_bytes"]) == found["setup"]["ranks"]
        for turns in found["turns"].values():
            assert [(each["steps"], each["saves"]) for each in turns] == [
                (2, 2 // found["setup"]["every"])
            ]
    assert {OURS, "DCP async_save"} <= raw["setups"][0]["parts"].keys()
    assert len(raw["writes"]) == 3
    assert len(raw["timeline"]["tensors"]) == 5
    for title in ("by size: 2 MB", "every 2", "2 ranks", "What a save consists of"):
        assert f"\n**{title}" in done.stdout
    assert not any((tmp_path / "work").iterdir())
