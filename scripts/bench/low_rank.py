"""Whether a low-rank difference stores a merged LoRA in fewer bytes than a delta does.

    python scripts/bench/low_rank.py

A merged LoRA is `base + scale * B @ A`, rounded to the dtype of the weights. From base and merged
weights alone, the factors come back by a truncated singular value decomposition, and what they
predict is exact after a residual: the merged bytes against the predicted ones, by the codec that
makes them smallest. Beside it is the same codec against the base itself, as a run stores it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
import torch

from tensor_dedup.store.codecs.choice import CODECS, Sample, choose

SIZE = 1024
RANKS = (4, 16, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def data_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def encoded_bytes(data: memoryview, base: memoryview, width: int) -> int:
    """Return the size of the smallest encoding of bytes against others."""
    choice = choose([Sample(data, base)], width)
    if choice is None:
        return data.nbytes
    codec = CODECS[choice.codec.name]
    return len(codec.encode(data, base if codec.against_base else None, choice.effort))


def predicted(base: torch.Tensor, merged: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """Return what a truncated decomposition predicts, and the bytes of its factors."""
    difference = merged.double() - base.double()
    left, values, right = torch.linalg.svd(difference, full_matrices=False)
    first = (left[:, :rank] * values[:rank]).float()
    second = right[:rank].float()
    again = (base.double() + first.double() @ second.double()).to(base.dtype)
    return again, data_of(first).nbytes + data_of(second).nbytes


def main() -> None:
    """Print a table."""
    torch.manual_seed(0)
    click.echo(
        "dtype     rank  plain KB  delta KB  factors KB  residual KB  low rank KB  exact at once"
    )
    for name, dtype in DTYPES.items():
        for rank in RANKS:
            base = (torch.randn(SIZE, SIZE) * 0.02).to(dtype)
            update = torch.randn(SIZE, rank) @ torch.randn(rank, SIZE) * (1e-3 / np.sqrt(rank))
            merged = (base.float() + update).to(dtype)
            again, factors = predicted(base, merged, rank)
            delta = encoded_bytes(data_of(merged), data_of(base), dtype.itemsize)
            residual = encoded_bytes(data_of(merged), data_of(again), dtype.itemsize)
            same = (merged == again).float().mean().item()
            sizes = (data_of(merged).nbytes, delta, factors, residual, factors + residual)
            shown = "".join(f"{size / 1e3:>14.1f}" for size in sizes)
            click.echo(f"{name:<10}{rank:>4}{shown}{same:>15.4%}")


if __name__ == "__main__":
    main()
