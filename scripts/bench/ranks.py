#!/usr/bin/env python3
"""How much of an unknown checkpoint the ranks of one engine read and hash, all together.

    scripts/bench/ranks.py [--work DIR] [--json FILE]

Two tensor-parallel workers of one vLLM engine load a checkpoint that nobody has hashed before.
Bytes are counted, and are the same in every run.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os
from typing import Final

import click

from bench import options
from bench.fresh_start import own_hints
from bench.results import write_figures
from demonstration import models

RANKS: Final = 2
READ: Final = "unknown checkpoint, two ranks: bytes read"
HASHED: Final = "unknown checkpoint, two ranks: bytes hashed"


@click.command(context_settings=options.CONTEXT)
@options.work("the checkpoint")
@options.json_file("the bytes")
def main(work: Path | None, json_file: Path | None) -> None:
    """Count the bytes that two ranks read and hash of a checkpoint that they do not know."""
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with own_hints(folder):
        # A core for each rank.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(RANKS)))
        from bench import fine_tunes, loading
        from tensor_dedup import report

        base = fine_tunes.made(folder)[models.BASE]
        engine = loading.engine(base, dedup=True, tensor_parallel_size=RANKS)
        found = report().models
        del engine
        assert sorted(each.rank for each in found) == list(range(RANKS))
        size = found[0].checkpoint_bytes
        figures = {
            READ: [[size], [sum(each.bytes_read for each in found)]],
            HASHED: [[size], [sum(each.bytes_hashed for each in found)]],
        }
    for name, ((plain,), (ours,)) in figures.items():
        click.echo(f"{name}: {ours:,} of a checkpoint of {plain:,}, {ours / plain:.3f} x")
    if json_file is not None:
        write_figures(json_file, figures)


if __name__ == "__main__":
    main()
