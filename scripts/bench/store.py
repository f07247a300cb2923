"""Loads from a store to CPU tensors against other loaders, and the rate of imports.

    python scripts/bench/store.py [--pairs N | --quick] [--only PART] [--gb N] [--work DIR]
                                  [--write]

One process, one run; in every round each method loads once, in an order drawn anew. Peers that are
not installed are left out with the reason: pip install tensorfs fastsafetensors
runai-model-streamer tensorizer. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import click

from bench import options
from bench.results import table
from bench.stats import Section
from bench.store_methods import PACKAGES, Method, usable
from bench.store_runs import Seconds, comparisons, imports, make_source, rates, rounds
from bench.turns import say
from demonstration import models

PARTS = ("cold", "warm", "imports")
_NOTES = """\
- *Seconds* are from a path (or a name in a store) to all tensors by name, with one byte of every
  page of every tensor read: a load that maps files has read nothing before.
- *Cold*: just before, the pages of every file the method reads were dropped from this machine's
  page cache, and `mincore` found none left; a host under a virtual machine may still have them.
  *Warm*: every file was read once just before.
- Before each load the memory of the one before was given back to the kernel. *Memory used again* is
  for a process that replaces a model by another: the tensors come into the memory of the last ones.
- Ours compares every byte with its digest unless it says *not verified*; of the others, none does.
- Every method's tensors were once compared with the checkpoint before anything was timed.
- *Raw reads* make no tensors: four threads, requests of 8 MiB, memory that was touched before. *The
  best* is the one with the least median of all in its state, raw reads included.
- Imports are durable when they end. *Known*: all tensors are in the store already; the files are
  read and hashed again.
- An interval is of the median, 95 %, from order statistics; ratios are taken round by round.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--pairs", 12)
@options.only(PARTS)
@click.option("--gb", default=1.0, show_default=True, help="Size of the checkpoint.")
@options.work("six times the checkpoint")
@options.write
def main(
    pairs: int, quick: bool, only: tuple[str, ...], gb: float, work: Path | None, write: bool
) -> None:
    """Measure loads from a store, and imports."""
    pairs = options.QUICK if quick else pairs
    folder = (work or models.default_folder()) / "store-bench"
    section = Section("store.py", "Loading from a store", PACKAGES)
    source = make_source(folder, gb)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    body = _measure(folder / f"{gb:g}", source, nbytes, pairs, only or PARTS)
    how = f"{pairs} rounds. A checkpoint of {nbytes / 1e9:.2f} GB: bfloat16, two safetensors files"
    section.finish("store", how, body, _NOTES, write=write)


def _measure(
    work: Path, source: Path, nbytes: int, pairs: int, parts: tuple[str, ...]
) -> list[str]:
    work.mkdir(parents=True, exist_ok=True)
    body: list[str] = []
    states = [part for part in ("cold", "warm") if part in parts]
    if states:
        methods, skipped = _methods(work, source)
        found: dict[str, Seconds] = {state: rounds(methods, state, pairs) for state in states}
        rows = comparisons(found, "method")
        body += [rates(found, nbytes), "", *table(rows, "other"), ""]
        body += [f"- left out: {name}, {reason}" for name, reason in skipped]
    if "imports" in parts:
        body += ["", *imports(work, source, nbytes, pairs)]
    return body


def _methods(work: Path, source: Path) -> tuple[list[Method], list[tuple[str, str]]]:
    methods, skipped = [], []
    for found in usable(work, source):
        if isinstance(found, Method):
            methods.append(found)
        else:
            skipped.append(found)
            say(f"left out: {found[0]}, {found[1]}")
    return methods, skipped


if __name__ == "__main__":
    main()
