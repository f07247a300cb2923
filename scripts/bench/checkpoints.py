"""Training checkpoints: ours against TensorCAS's method, whole files, and DCP.

    python scripts/bench/checkpoints.py [--rounds N | --quick] [--only PART] [--stated] [--work DIR]
                                        [--json FILE] [--write]

One process, one run, the same models for all; in every round each method saves once, in an order
drawn anew. TensorCAS's method is a small implementation of what its article describes
(tensorcas_method.py), not their program. Prints a section of Markdown, and one of its own for
`--only gpt2`, a network of GPT-2's size, which takes minutes and 15 GB, and for `--only steps`, a
training that saves every step; `--json` writes the values, `--write` puts each section into
docs/benchmarks/tables.md instead of the one there. `--stated` measures only what docs/results.md
states.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from typing import Final

import click

from bench import checkpoint_latency, checkpoint_long, checkpoint_steps, options
from bench.checkpoint_storage import storage
from bench.results import Figures, write_figures
from bench.stats import Section
from demonstration import models

PARTS: Final = ("storage", "saves")
LONG: Final = "gpt2"
STEPS: Final = "steps"
_PACKAGES: Final = (
    *("torch", "scikit-learn", "xgboost-cpu", "xgboost", "safetensors"),
    *("blake3", "zstandard"),
)
_NOTES: Final = """\
- Models are made for this: ResNet-18 with the 122 tensors of torchvision's, trained a little on
  made images; trees and boosters of depth 3 on 1,000 made rows of 20 columns.
- *TensorCAS's method*: chunks of 1 MiB, BLAKE3, zstd, manifests in JSON, a registry in SQLite, as
  the article gives it. Trees that were saved once are not looked at again there, which its cache
  does for all arrays, and which is right for trees only. It does not sync what it writes; nor do
  `torch.save`, safetensors and pickle. DCP syncs its files. Ours is on the disk when `save`
  returns, and looks at every byte of every tensor in every save.
- Bytes are *apparent / allocated*, in MB (10^6), all files of a store and what folders take. Of
  plain files they are the sum of all that were written, and of *DVC* the sum of those that differ,
  for it keeps whole files by their MD5. *The article* has MB for
  `torch.save`, DVC, TensorCAS on weights and data of its own; its times are from another machine.
- Ratios and differences are taken round by round; an interval is of the median, 95 %, from order
  statistics.
"""


@click.command(context_settings=options.CONTEXT)
@options.repeats("--rounds", 15)
@options.only((*PARTS, LONG, STEPS))
@click.option("--stated", is_flag=True, help="Only what docs/results.md states.")
@options.work("3 GB, 15 with gpt2")
@options.json_file("bytes, and the seconds of all rounds")
@options.write
def main(
    rounds: int,
    quick: bool,
    only: tuple[str, ...],
    stated: bool,
    work: Path | None,
    json_file: Path | None,
    write: bool,
) -> None:
    """Measure saves and sizes of training checkpoints."""
    folder = (work or models.default_folder()) / "checkpoints-bench"
    folder.mkdir(parents=True, exist_ok=True)
    rounds = options.QUICK if quick else rounds
    parts, figures = only or PARTS, Figures()
    if set(parts) & set(PARTS):
        section = Section("checkpoints.py", "Training checkpoints", _PACKAGES)
        body: list[str] = []
        if "storage" in parts:
            lines = storage(folder, figures, quick=quick, stated=stated)
            body += ["### Bytes, MB", "", *lines, ""]
        if "saves" in parts:
            lines = checkpoint_latency.saves(folder, rounds, figures, quick=quick, stated=stated)
            body += ["### Saves into a store that has steps", "", *lines, ""]
        section.finish("checkpoints", f"{rounds} rounds", body, _NOTES, write=write)
    if LONG in parts:
        title = "Training checkpoints of a network of GPT-2's size"
        section = Section(f"checkpoints.py --only {LONG}", title, (*_PACKAGES, "transformers"))
        steps, body = checkpoint_long.gpt2(folder, figures, quick=quick, stated=stated)
        how = f"{steps} steps of each training"
        section.finish("checkpoints-long", how, body, checkpoint_long.NOTES, write=write)
    if STEPS in parts:
        section = Section(f"checkpoints.py --only {STEPS}", "Saving every step of a training")
        count, body = checkpoint_steps.steps(folder, rounds, figures, quick=quick, stated=stated)
        how = f"{rounds} rounds of {count} steps"
        section.finish("checkpoints-steps", how, body, checkpoint_steps.NOTES, write=write)
    if json_file is not None:
        write_figures(json_file, figures)


if __name__ == "__main__":
    main()
