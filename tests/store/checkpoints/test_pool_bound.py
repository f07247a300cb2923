"""What a save takes of memory, measured at the process: its pool, and little that does not grow.

A model of eight tensors is saved with a pool that has room for two of them.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
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


def in_the_pool(root: str, kind: str) -> tuple[int, int]:
    """The sizes of a model and of the pool while it is saved, once it may be changed again."""
    rows = torch.arange(COUNT * MIB, dtype=torch.float32).view(COUNT, 1024, 1024)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "transposed": lambda: {f"t{n}": each.T for n, each in enumerate(rows)},
        "channels_last": lambda: {
            f"c{n}": each.view(16, 64, 32, 32).contiguous(memory_format=torch.channels_last)
            for n, each in enumerate(rows)
        },
        "fortran": lambda: {
            f"f{n}": np.asfortranarray(each) for n, each in enumerate(rows.numpy())
        },
        "big_endian": lambda: {
            f"b{n}": each.astype(">f4").T for n, each in enumerate(rows.numpy())
        },
        "small": lambda: {f"s{n}": each for n, each in enumerate(rows.view(-1, 8 << 10))},
    }
    model = ways[kind]()
    expected = deepcopy(model)
    with CheckpointStore(root, "run", compress=None) as run:
        pending = run.save_async(model, 0)
        run.before_update()
        allocated = run._saves._pool.allocated
        for each in model.values():
            each[:] = 0
        pending.wait()
        found = run.load(0)
        for name, each in expected.items():
            assert np.array_equal(np.asarray(found[name]), np.asarray(each))
    return sum(each.nbytes for each in expected.values()), allocated


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "fortran", "small", "big_endian"])
def test_what_is_small_or_in_another_order_is_copied_into_the_pool(
    tmp_path: Path, kind: str
) -> None:
    size, allocated = in_the_pool(str(tmp_path / "s"), kind)
    assert size == COUNT * 4 * MIB
    if kind == "big_endian":  # it becomes a copy when it is turned
        return
    assert size <= allocated <= 1.1 * size


@pytest.mark.long
@pytest.mark.parametrize("compress", ["auto", "always"])
@pytest.mark.parametrize("way", ["save", "lazy", "eager"])
def test_encoding_takes_no_more_for_a_larger_model(tmp_path: Path, way: str, compress: str) -> None:
    count = 2 * COUNT
    found = fresh.call(growth, str(tmp_path / "s"), way, count, {"compress": compress})
    assert found <= POOL + SCRATCH + ENCODING < count * TENSOR
