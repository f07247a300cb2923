#!/usr/bin/env python3
"""How long a step takes to load when the store holds 1, 100 and 1,000 of them.

    scripts/bench/checkpoints_load.py [--loads N] [--steps N...] [--work DIR] [--write]

Two runs in one store: a network of which one layer changes with every step, and an ensemble that
grows by two trees a step. The same number of tensors is loaded at every size of the store: of the
network the latest step, of the ensemble the first, which has a hundred trees from the beginning.
Each load is a new handle, as a new process would have; loads of all sizes take turns. Prints a
section of Markdown; `--write` puts it into docs/benchmarks/tables.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import random
import shutil
import tempfile
import time
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from bench.stats import Section, estimate
from tensor_dedup.training import CheckpointStore

Model = dict[str, NDArray[Any]]
_TREES = 100
_NOTES = """\
- *network*: 50 tensors, 10 MB, of which one changes with every step; the latest step is loaded.
  *forest*: 100 trees and two more a step; the first step is loaded. So each loads as many tensors
  whatever the store holds.
- Each load is by a new handle, as a new process would have; loads of all sizes take turns. Medians
  and 95 % intervals of the median.
"""


def network() -> Model:
    """Fifty tensors, 10 MB."""
    dice = np.random.default_rng(0)
    return {
        f"layer{number}": dice.standard_normal((100, 500)).astype(np.float32)
        for number in range(50)
    }


def forest(trees: int) -> Model:
    """Trees of 15 nodes."""
    return {
        f"tree{number:06}": np.random.default_rng(number).standard_normal((15, 6))
        for number in range(trees)
    }


def fill(folder: Path, steps: int) -> None:
    """A store with so many steps of both runs."""
    model, trees = network(), forest(_TREES + 2 * steps)
    with (
        CheckpointStore(folder, "network", compress=None) as net,
        CheckpointStore(folder, "forest", compress=None) as ensemble,
    ):
        for step in range(steps):
            model["layer49"] += np.float32(1e-3)
            net.save(model, step)
            names = list(trees)[: _TREES + 2 * step]
            ensemble.save({name: trees[name] for name in names}, step)


def load(folder: Path, run: str, step: int) -> float:
    """Milliseconds until a step is there."""
    began = time.perf_counter()
    CheckpointStore(folder, run).load(step)
    return (time.perf_counter() - began) * 1e3


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--loads", default=15, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=(1, 100, 1000), show_default=True, multiple=True, type=int)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Where stores go.")
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(loads: int, steps: tuple[int, ...], work: Path | None, write: bool) -> None:
    """Measure loads at several sizes of the store."""
    root = Path(tempfile.mkdtemp(prefix="checkpoints-load-", dir=work))
    section = Section("checkpoints_load.py", "Loading a step of many")
    try:
        table = measure(root, loads, steps)
    finally:
        shutil.rmtree(root)
    section.finish("checkpoints-load", f"{loads} loads of each", table, _NOTES, write=write)


def measure(root: Path, loads: int, steps: tuple[int, ...]) -> list[str]:
    """Fill the stores, load in turns; a table."""
    for count in steps:
        began = time.perf_counter()
        fill(root / str(count), count)
        click.echo(f"{count} steps made in {time.perf_counter() - began:.1f} s", err=True)
    cases = [(count, run) for count in steps for run in ("network", "forest")]
    found: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for _ in range(loads):
        random.shuffle(cases)
        for count, run in cases:
            step = count - 1 if run == "network" else 0
            found[count, run].append(load(root / str(count), run, step))
    lines = ["| steps in the store | run | load, ms |", "|---|---|---|"]
    for (count, run), values in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        lines.append(f"| {count} | {run} | {estimate(values).text(1)} |")
    return lines


if __name__ == "__main__":
    main()
