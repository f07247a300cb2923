#!/usr/bin/env python3
"""How long it takes to tell which weights a model has that is resident.

    scripts/bench/digests.py [--repeats N | --quick] [--work DIR] [--json FILE]

*Checkpoint*: its digest, of a known checkpoint. *Weights*: the digest of what the model has in
memory now, with shared weights that nothing has touched yet, and of one *in use*, when the kernel
looks at every page whether somebody wrote to it. Beside each is what hashing all weights takes.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import time
from collections.abc import Callable
from typing import Final

import click

from bench import options
from bench.fresh_start import own_hints
from bench.results import write_figures
from bench.stats import estimate
from demonstration import models

CHECKPOINT: Final = "digest of the checkpoint of a resident model"
UNTOUCHED: Final = "digest of the weights of a resident model"
TOUCHED: Final = "digest of the weights of a resident model, in use"
PLAIN: Final = {"cpu_weights": "plain"}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    assert work() is not None
    return time.perf_counter() - began


def _measured(path: Path, *, touched: bool) -> tuple[float, float, float]:
    """Load a model that is resident; return the seconds of hashing it, and of its two digests.

    With `touched`, it is hashed first, which maps every page of it.
    """
    from bench import loading
    from tensor_dedup.loader.residents.resident import digest_of

    model, load = loading.load(path, dedup=True, tensor_dedup=PLAIN)
    report = load.report
    assert report is not None
    assert report.private_bytes == 0

    def hash_all() -> list[str]:
        return [digest_of(parameter.data) for parameter in model.parameters()]

    hashing = _seconds(hash_all) if touched else 0.0
    checkpoint = _seconds(lambda: report.checkpoint_digest)
    weights = _seconds(lambda: report.weights_digest)
    return hashing if touched else _seconds(hash_all), checkpoint, weights


@click.command(context_settings=options.CONTEXT)
@options.repeats("--repeats", 15)
@options.work("the checkpoint")
@options.json_file("the seconds")
def main(repeats: int, quick: bool, work: Path | None, json_file: Path | None) -> None:
    """Measure how long the digests of a resident model take."""
    repeats = options.QUICK if quick else repeats
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with own_hints(folder):
        from bench import fine_tunes, loading

        base = fine_tunes.made(folder)[models.BASE]
        loading.prepare_process(base)
        loading.make_known(base, tensor_dedup=PLAIN)
        resident, _ = loading.load(base, dedup=True, tensor_dedup=PLAIN)
        fresh = [_measured(base, touched=False) for _ in range(repeats)]
        used = [_measured(base, touched=True) for _ in range(repeats)]
        sizes = [parameter.nbytes for parameter in resident.parameters()]
    figures = {
        CHECKPOINT: [[each[0] for each in fresh], [each[1] for each in fresh]],
        UNTOUCHED: [[each[0] for each in fresh], [each[2] for each in fresh]],
        TOUCHED: [[each[0] for each in used], [each[2] for each in used]],
    }
    click.echo(f"{len(sizes)} tensors of {sum(sizes) / 1e6:,.0f} MB")
    for name, sides in figures.items():
        hashed, found = (estimate([1e3 * value for value in side]) for side in sides)
        click.echo(f"{name}: {found.text()} ms; hashing all {hashed.text()} ms")
    if json_file is not None:
        write_figures(json_file, figures)


if __name__ == "__main__":
    main()
