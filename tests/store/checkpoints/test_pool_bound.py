"""What a save takes of memory, measured at the process: its pool, and little that does not grow.

A model of eight tensors is saved with a pool that has room for two of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
from tensor_dedup.store.checkpoints import CheckpointStore

MIB = 1 << 20
TENSOR, COUNT = 16 * MIB, 8
POOL = 2 * TENSOR
# Blocks of some MiB that threads hash, write and drain, and what the allocator keeps.
SCRATCH = 48 * MIB
# Decoded leaves of anchors, 64 MiB at most, and the leaves that are being encoded.
ENCODING = 96 * MIB


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def growth(root: str, way: str, count: int, options: dict[str, Any]) -> int:
    """By how many bytes the process grew, at most, while two steps were saved after the first."""
    torch.set_num_threads(1)
    model = {f"weight{n}": torch.randn(TENSOR // 4) for n in range(count)}
    with CheckpointStore(root, "run", pool_bytes=POOL, **options) as run:
        for step in range(3):
            if step == 1:
                base = _status("VmRSS") - run._saves._pool.allocated
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if way == "save":
                run.save(model, step)
            else:
                run.save_async(model, step, lazy=way == "lazy")
                run.before_update()
                assert way == "eager" or 0 < run._saves._pool.allocated <= POOL
            for weight in model.values():
                weight.mul_(1.0001)
    assert run.steps() == [0, 1, 2]
    assert run.store.stats().unique_bytes > 0
    return _status("VmHWM") - base


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("save", {}),
        ("lazy", {}),
        ("eager", {"in_flight": 2}),
        ("lazy", {"in_flight": 2, "drain": True}),
    ],
)
def test_a_save_takes_its_pool_and_no_copy_beside_it(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    if "drain" in options:
        options = {**options, "drain": str(tmp_path / "second")}
    found = fresh.call(growth, str(tmp_path / "s"), way, COUNT, {**options, "compress": None})
    assert found <= POOL + SCRATCH < COUNT * TENSOR


@pytest.mark.long
@pytest.mark.parametrize("compress", ["auto", "always"])
@pytest.mark.parametrize("way", ["save", "lazy", "eager"])
def test_encoding_takes_no_more_for_a_larger_model(tmp_path: Path, way: str, compress: str) -> None:
    count = 2 * COUNT
    found = fresh.call(growth, str(tmp_path / "s"), way, count, {"compress": compress})
    assert found <= POOL + SCRATCH + ENCODING < count * TENSOR
