"""`save_dict` against safetensors and `torch.save`, each made durable by fsync.

    python scripts/bench/interchange.py [--rounds N | --quick] [--mb N] [--work DIR] [--write]

One process, one run; in every round each way saves the same state dict once, in an order drawn
anew, into a folder that was empty and synced. The aims: 0.9 of the speed of the better of the
others without verification, 0.6 with. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Final

import click
import numpy as np
import safetensors.torch
import torch

from bench.checkpoint_methods import sync
from bench.stats import Section, estimate, verdict
from demonstration import models
from tensor_dedup.store.interchange import save_dict

QUICK_ROUNDS: Final = 3
VERIFIED: Final = "save_dict"
UNVERIFIED: Final = "save_dict, verification=False"
SAFETENSORS: Final = "safetensors save_file + fsync"
TORCH: Final = "torch.save + fsync"
AIMS: Final[Mapping[str, float]] = {UNVERIFIED: 0.9, VERIFIED: 0.6}
PACKAGES: Final = ("torch", "safetensors", "xxhash")
_NOTES = """\
- *Speed* is bytes of tensors by seconds until all is durable, for which the others' file and its
  folder are synced.
- *Of the better* is the ratio of the seconds of that one of the two others whose median is less to
  ours, round by round; an interval is of the median, 95 %, from order statistics.
- With verification, all bytes are hashed by SHA-256 (a tree) and twice by xxHash64 (two chains), as
  tensorcast's format has them; nobody else here hashes anything.
"""


def _state(megabytes: int) -> dict[str, torch.Tensor]:
    """Blocks of matrices of 16 MiB, a vector beside each."""
    count = max(1, megabytes * 1_000_000 // (16 << 20))
    draw = torch.Generator().manual_seed(0)
    found = {}
    for number in range(count):
        found[f"blocks.{number}.weight"] = torch.randn(2048, 2048, generator=draw)
        found[f"blocks.{number}.bias"] = torch.randn(2048, generator=draw)
    return found


def _ways(state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Callable[[], object]]:
    def safe() -> None:
        safetensors.torch.save_file(dict(state), folder / "a.safetensors")
        sync(folder / "a.safetensors")
        sync(folder)

    def plain() -> None:
        torch.save(dict(state), folder / "a.pt")
        sync(folder / "a.pt")
        sync(folder)

    return {
        SAFETENSORS: safe,
        TORCH: plain,
        VERIFIED: lambda: save_dict(state, folder / "ours"),
        UNVERIFIED: lambda: save_dict(state, folder / "ours", verification=False),
    }


def _measure(
    state: Mapping[str, torch.Tensor], folder: Path, rounds: int
) -> dict[str, list[float]]:
    ways = _ways(state, folder)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in np.random.default_rng(number).permutation([*ways]):
            began = time.perf_counter()
            ways[str(name)]()
            seconds[str(name)].append(time.perf_counter() - began)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()  # what a way left to the kernel is not the next one's
    return {name: each[1:] for name, each in seconds.items()}  # the first round is warm-up


def _table(seconds: Mapping[str, Sequence[float]], nbytes: int) -> list[str]:
    better = min((SAFETENSORS, TORCH), key=lambda name: statistics.median(seconds[name]))
    lines = ["| | GB/s | of the better | aim | |", "| --- | --- | --- | --- | --- |"]
    for name, each in seconds.items():
        speed = estimate([nbytes / 1e9 / took for took in each]).text()
        if name not in AIMS:
            lines.append(f"| {name} | {speed} | {'(the better)' if name == better else ''} | | |")
            continue
        ratio = estimate([other / own for other, own in zip(seconds[better], each, strict=True)])
        aim = AIMS[name]
        lines.append(
            f"| {name} | {speed} | {ratio.text()} | ≥ {aim} | {verdict(ratio, least=aim)} |"
        )
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(min=1), help="Rounds.")
@click.option("--quick", is_flag=True, help=f"{QUICK_ROUNDS} rounds: shows that it runs.")
@click.option("--mb", default=400, show_default=True, type=click.IntRange(min=1), help="Size, MB.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder on the disk to measure [default: in the user's cache directory].",
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(rounds: int, quick: bool, mb: int, work: Path | None, write: bool) -> None:
    """Measure how fast a state dict becomes a durable folder."""
    rounds = QUICK_ROUNDS if quick else rounds
    section = Section("interchange.py", "Writing a folder of tensorcast's format", PACKAGES)
    state = _state(mb)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    root = work or models.default_folder()
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root) as folder:
        body = _table(_measure(state, Path(folder), rounds), nbytes)
    how = f"{rounds} rounds. {len(state)} tensors, {nbytes / 1e6:.0f} MB"
    section.finish("interchange", how, body, _NOTES, write=write)


if __name__ == "__main__":
    main()
