#!/usr/bin/env python3
"""What sharing by leaf costs where it is made, mapped and read.

    scripts/bench/leaves.py [--repeats N]

*make*: a tensor of which one leaf in eight differs from a resident, against copying it whole.
*miss*: a tensor that nobody has a leaf of, beside 300 residents with such rows, or beside none.
*map*: 300 residents of one extent, and one of 1,000 extents. *product*: `F.linear` with such a
weight, against one of a whole slab. All in turns and in one thread; prints medians, least and
greatest of the processor's time, which other work on the machine changes less than the clock's.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import torch

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.loader.residents.leaves import build_from_leaves
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import Resident, pack
from tensor_dedup.loader.residents.slab import SlabExtent, SlabWriter

ROW = 1024
ROWS_OF_A_LEAF = LEAF_BYTES // (4 * ROW)


def timed(repeats: int, sides: dict[str, Callable[[], object]]) -> None:
    """Print the processor's milliseconds of each side, run in turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            began = time.process_time()
            kept = side()
            found[name].append((time.process_time() - began) * 1e3)
            del kept
    for name, values in found.items():
        click.echo(f"{name:44} {median(values):9.3f} [{min(values):.3f}, {max(values):.3f}] ms")


def matrix(leaves: int) -> torch.Tensor:
    """Return a random matrix of so many leaves."""
    return torch.rand(leaves * ROWS_OF_A_LEAF, ROW)


def whole(tensor: torch.Tensor) -> Resident:
    """Return a resident in a slab of its own, as it is made without sharing by leaf."""
    return pack([(tensor, "whole")])[0]


def in_pieces(count: int) -> Resident:
    """Return a resident of so many extents of one leaf, in turns of two slabs."""
    slabs = []
    for _ in range(2):
        writer = SlabWriter(count // 2 * LEAF_BYTES)
        writer.take(count // 2 * LEAF_BYTES)
        slabs.append(writer.seal())
    extents = [SlabExtent(slabs[n % 2], n // 2 * LEAF_BYTES, LEAF_BYTES) for n in range(count)]
    key = whole(torch.empty(0)).key
    shape = (count * LEAF_BYTES // 4,)
    return Resident(type(key)("F32", shape, (1,), "pieces"), extents)


@click.command()
@click.option("--repeats", default=9)
def main(repeats: int) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    for leaves in (2, 4, 8, 32, 128):
        base = matrix(leaves)
        held = registry.register(pack([(base, f"base {leaves}")])[0])
        tune = base.clone()
        tune[:: 8 * ROWS_OF_A_LEAF] += 1
        timed(
            repeats,
            {
                f"make {leaves * 2} MiB whole": partial(mapped_whole, tune),
                f"make {leaves * 2} MiB by leaf": partial(mapped, tune),
            },
        )
        del held
    new = matrix(32)
    timed(repeats, {"miss of 64 MiB, nothing alike": lambda: build_from_leaves(new, "new")})
    crowd = [registry.register(pack([(torch.rand(2100, ROW), str(n))])[0]) for n in range(300)]
    timed(repeats, {"miss of 64 MiB, 300 alike": lambda: build_from_leaves(new, "new")})
    pieces = in_pieces(1000)
    timed(
        repeats,
        {
            "map 300 residents of one extent": lambda: [each.map() for each in crowd],
            "map one resident of 1,000 extents": pieces.map,
        },
    )
    weight = matrix(32)
    held = registry.register(pack([(weight, "weight")])[0])
    tune = weight.clone()
    tune[:: 2 * ROWS_OF_A_LEAF] += 1  # the most extents that there can be
    one, other = whole(tune).map(), mapped(tune)
    rows = torch.rand(1, ROW)
    timed(
        20 * repeats,
        {
            "product with a whole slab": lambda: torch.nn.functional.linear(rows, one),
            "product with 32 extents": lambda: torch.nn.functional.linear(rows, other),
        },
    )
    del held


def mapped_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a slab of its own."""
    return whole(tensor).map()


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor made from leaves, or as ever where it is too small."""
    found = build_from_leaves(tensor, "tune")
    return whole(tensor).map() if found is None else found.map()


if __name__ == "__main__":
    main()
