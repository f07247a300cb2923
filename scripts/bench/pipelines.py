"""A first and a second image pipeline, with and without sharing: seconds and memory.

    python scripts/bench/pipelines.py [--pairs N | --quick] [--stored] [--work DIR]
                                      [--json FILE] [--write]

One process, one run; both sides alternate (A B, B A, ...) after the same preparation. Two pipelines
with the text encoder and VAE of Stable Diffusion 1.5 in true size and different tiny UNets, in
float16, of random weights, each in files of its own; with `--stored`, tensor-dedup loads them from
a store (`store://NAME`), and plain Diffusers from these files. Prints a section of Markdown;
`--write` puts it into docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import os

import click

from bench import options
from bench.fresh_start import own_hints
from bench.results import table, write_figures
from bench.stats import Section
from demonstration import models, pictures
from tensor_dedup import Store
from tensor_dedup.settings import CACHE_ENVIRONMENT as CACHE

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "blake3")
_NOTES = """\
- *Seconds to load* are of `DiffusionPipeline.from_pretrained`. Plain loading maps files and reads
  next to nothing until a weight is used; *until all was read* adds one byte of every page of every
  parameter, in turn, and is what compares with a load that hashes.
- *Cold*: the pages of all files were dropped from this machine's page cache just before the first
  of the two loads, and `mincore` found none left; a host under a virtual machine may still have
  them. *Cached*: all were read once just before. *Unknown*: no hints. *Known*: both files' digests
  are remembered. A first load hashes in either case: nothing is resident to be used instead.
- *Added memory* is PSS with every page read, less PSS before that load; garbage was collected and
  the allocator trimmed before each reading. Plain loading's are clean pages of mapped files: the
  kernel can take them back, and loads of one same file would share them.
- *Bytes read* are of the report: what was fetched of tensors, hashing included.
- *What differs* are the bytes of parameters that are not equal in both pipelines.
- An aim is *met* where the whole interval lies inside it, *missed* where none of it does, otherwise
  *not shown*. Intervals are of medians, 95 %, from order statistics; ratios are taken by pairs.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--pairs", 12)
@click.option("--stored", is_flag=True, help="Load from a store, which takes as much disk again.")
@click.option("--tiny", is_flag=True, help="Tiny models: for tests, no measurement.")
@options.work("the pipelines, 0.9 GB")
@options.json_file("the values of all pairs")
@options.write
def main(
    pairs: int,
    quick: bool,
    stored: bool,
    tiny: bool,
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Measure two pipelines that have most of their weights in common."""
    pairs = options.QUICK if quick else pairs
    folder = (work or models.default_folder()) / ("tiny-halves" if tiny else "halves")
    folder.mkdir(parents=True, exist_ok=True)
    title = "Two image pipelines, from a store" if stored else "Two image pipelines"
    section = Section("pipelines.py", title, PACKAGES)
    with own_hints(folder) as scratch:
        os.environ[CACHE] = str(scratch / "cache")
        from bench import pipeline_runs  # it loads the libraries, which read the environment then

        for name in pictures.missing(folder):
            pictures.make(name, folder, tiny=tiny, dtype="float16")
        paths = [folder / name for name in pictures.NAMES]
        store = scratch / "store" if stored else None
        if store is not None:
            with Store.open(store) as made:
                for path in paths:
                    made.import_(path, path.name)
        rows = pipeline_runs.run(paths, pairs, store)
    if json_file is not None:
        write_figures(json_file, {row.name: row.sides for row in rows})
    name = "pipelines-stored" if stored else "pipelines"
    section.finish(name, f"{pairs} pairs", table(rows, "plain"), _NOTES, write=write)


if __name__ == "__main__":
    main()
