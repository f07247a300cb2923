"""Training checkpoints: ours against TensorCAS's method, whole files, DVC, and DCP.

    python scripts/bench/checkpoints.py [--rounds N | --quick] [--only PART] [--dvc PROGRAM]
                                        [--long] [--work DIR] [--write]

One process, one run, the same models for all; in every round each method saves once, in an order
drawn anew. TensorCAS's method is a small implementation of what its article describes
(tensorcas_method.py), not their program. DVC runs when `--dvc` names its program, from an
environment of its own. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md.
What `--long` adds is a section of its own: `--only gpt2 --write` leaves the other as it is.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from collections.abc import Callable
from typing import Final

import click

from bench import checkpoint_changes, checkpoint_latency, checkpoint_long
from bench.checkpoint_storage import storage
from bench.stats import Section
from demonstration import models

PARTS: Final = ("storage", "changes", "deltas", "saves", "readme", "history")
LONG: Final = "gpt2"
QUICK_ROUNDS: Final = 3
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
  `torch.save`, safetensors, pickle and DVC. DCP syncs its files. Ours is on the disk when `save`
  returns, and looks at every byte of every tensor in every save.
- Bytes are *apparent / allocated*, in MB (10^6), all files of a store and what folders take. Of
  plain files and DVC they are the sum of all the files that were written. *The article* has MB for
  `torch.save`, DVC, TensorCAS on weights and data of its own; its times are from another machine.
- Ratios and differences are taken round by round; an interval is of the median, 95 %, from order
  statistics.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="Few rounds, short experiments: shows that it runs.")
@click.option("--only", multiple=True, type=click.Choice((*PARTS, LONG)), help="Repeatable.")
@click.option(
    "--dvc",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
    help="DVC's program, such as ENVIRONMENT/bin/dvc.",
)
@click.option("--long", "is_long", is_flag=True, help="Also fine-tune a network of GPT-2's size.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for 3 GB, 15 with --long [default: in the user's cache directory].",
)
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(
    rounds: int,
    quick: bool,
    only: tuple[str, ...],
    dvc: Path | None,
    is_long: bool,
    work: Path | None,
    write: bool,
) -> None:
    """Measure saves, loads and sizes of training checkpoints."""
    folder = (work or models.default_folder()) / "checkpoints-bench"
    folder.mkdir(parents=True, exist_ok=True)
    rounds = QUICK_ROUNDS if quick else rounds
    if parts := _parts(folder, rounds, quick, dvc, only or PARTS):
        section = Section("checkpoints.py", "Training checkpoints", _PACKAGES)
        body: list[str] = []
        for title, part in parts.items():
            body += [f"### {title}", "", *part(), ""]
        section.finish("checkpoints", f"{rounds} rounds", body, _NOTES, write=write)
    if is_long or LONG in only:
        title = "Training checkpoints of a network of GPT-2's size"
        section = Section("checkpoints.py --long", title, (*_PACKAGES, "transformers"))
        steps, body = checkpoint_long.gpt2(folder, quick, _say)
        how = f"{steps} steps of each training"
        section.finish("checkpoints-long", how, body, checkpoint_long.NOTES, write=write)


def _parts(
    work: Path, rounds: int, quick: bool, dvc: Path | None, only: tuple[str, ...]
) -> dict[str, Callable[[], list[str]]]:
    parts: dict[str, tuple[str, Callable[[], list[str]]]] = {
        "storage": ("Bytes, MB", lambda: storage(work, quick, dvc, _say)),
        "changes": ("What stays the same", lambda: checkpoint_changes.unchanged(quick)),
        "deltas": ("Differences", lambda: checkpoint_changes.deltas(work, quick)),
        "saves": (
            "Saves into a store that has steps",
            lambda: checkpoint_latency.saves(work, rounds, quick, dvc, _say),
        ),
        "readme": (
            "Save, load, and save again",
            lambda: checkpoint_latency.readme(work, rounds, _say),
        ),
        "history": (
            "With more and more steps in the store",
            lambda: checkpoint_latency.history(work, rounds, quick, _say),
        ),
    }
    return dict(parts[name] for name in PARTS if name in only)


def _say(text: str) -> None:
    """Progress, beside the result on stdout."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
