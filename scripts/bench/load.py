"""Loading, memory and decoding against plain vLLM, on checkpoints of Qwen2-0.5B shapes.

    python scripts/bench/load.py [--pairs N | --quick] [--only NAME] [--work DIR] [--json FILE]
                                 [--write]

One process, one run. Both sides alternate (A B, B A, A B, ...) after the same preparation. Prints
a section of Markdown; `--json` writes the values of all pairs, `--write` puts the section into
docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import click

from bench import options
from bench.fresh_start import own_hints
from bench.results import table, write_figures
from bench.stats import Section
from demonstration import models

PARTS = ("unknown", "again", "planning", "known", "residency", "decode")
_NOTES = """\
- *Seconds* are of `load_model` of vLLM's model loader for one model, with the engine's process
  groups there already. Plain vLLM calls `gc.collect` twice in a load, whatever is loaded (0.4 s
  a call in this process when it was last looked at); we do not. Unknown loads are compared without
  those calls, and then with them. *Weight phase*: from the moment the module tree is
  built, without them. *Whole load*: with them.
- *Unknown*: no hints; every byte is read and hashed once. *Known*: the digests are remembered.
  *Cold*: the file's pages were dropped from this machine's page cache just before and `mincore`
  found none left; a host under a virtual machine may still have them. *Cached*: the file was read
  once just before. Everything but the two lines on unknown checkpoints is with cached files.
- *Planning*: opening the file, hints, the model's own `load_weights` over deferred tensors and
  recipes, or following a load plan: all that comes before the first byte is read or shared. In
  processor time of its thread.
- Both sides allocate in one process that gives freed memory back before each load, so each pays
  for fresh pages.
- The allowance for an unknown cached checkpoint is its bytes at 4 GB/s a core.
- *Weights given memory* is what the report says; *allocator's growth* is that of `mallinfo2`
  (in use, all arenas, and what was mapped for large requests) and of the slabs' files as the kernel
  counts them; of it, and of PSS, the growth of loading the resident base again is subtracted.
  Every page of every parameter is read before PSS is.
- *Unique bytes* are those of the different source tensors of the checkpoints that are resident.
- *Decode*: every pair has three new engines (base and fine-tune sharing, fine-tune plain, which of
  the two ways first alternates) and compares the fine-tune's two. Engines loaded the same way
  differ by 5 to 10 % here, by where in memory they come to lie, so pairs on one set of engines
  would give a narrow interval around an accident.
- An aim is *met* where the whole interval lies inside it, *missed* where none of it does, and
  otherwise *not shown*. Intervals are of medians, 95 %, from order statistics; ratios and
  differences are taken pair by pair.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--pairs", 20)
@options.only(PARTS)
@options.work("the checkpoints, 4 GB")
@options.json_file("the values of all pairs")
@options.write
def main(
    pairs: int,
    quick: bool,
    only: tuple[str, ...],
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Measure loads against plain vLLM."""
    pairs = options.QUICK if quick else pairs
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("load.py", "Loading against plain vLLM")
    with own_hints(folder):
        from bench import suite  # it loads vllm, which reads the environment then

        rows, more = suite.run(folder, pairs, only or PARTS)
    if json_file is not None:
        write_figures(json_file, {row.name: row.sides for row in rows})
    how = f"{pairs} pairs. Checkpoints of Qwen2-0.5B shapes, random weights, bfloat16, 988 MB each"
    section.finish("load", how, [*table(rows), *more], _NOTES, write=write)


if __name__ == "__main__":
    main()
