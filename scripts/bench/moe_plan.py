"""What it costs to plan a mixture of 45,000 expert tensors, and to find all of it resident.

    python scripts/bench/moe_plan.py [--pairs N] [--only NAME] [--work DIR] [--profile] [--write]

As many layers and experts as large models have, of a few thousand numbers each: what counts here
is how many tensors there are. Both sides alternate. Prints a section of Markdown; `--write` puts it
into docs/benchmarks/tables.md instead of the one there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import cProfile
import os
import pstats
import tempfile
import time
from typing import TYPE_CHECKING

import click

from bench.stats import ENVIRONMENT, Section, estimate, verdict
from demonstration import models

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.results import Row

MOST_S = 5.0
NAMES = ("qwen3-moe", "deepseek-v3")
_NOTES = """\
- *Planning*: opening the file, hints, running the model's own `load_weights` over deferred tensors,
  recipes: all that comes before the first byte is read or shared. *Plain* there is that same
  `load_weights` of vLLM over tensors without data, with nobody watching. Processor time of the
  thread.
- *Same model again*: `load_model` of vLLM's loader with every weight resident, against plain
  vLLM's; the module tree is built and dropped in both. Processor time of all threads.
- Weights are small, so reading and processing them costs less here than in real models; planning
  does not depend on their size.
"""


def measured(name: str, work: Path, pairs: int) -> "list[Row]":
    """The rows of one mixture."""
    from bench import experts, recording
    from bench.loading import in_pairs, load, load_and_drop, make_known
    from bench.results import Row, ratio_row

    mixture = experts.MIXTURES[name]
    path = experts.made(mixture, work)
    make_known(path)
    plain, ours = in_pairs(
        pairs,
        f"{name}, planning",
        lambda: recording.seconds(path, recording.over_empty),
        lambda: recording.seconds(path, recording.whole),
    )
    found = estimate(ours)
    label = f"{name}, {mixture.expert_tensors} expert tensors"
    rows = [
        Row(
            f"{label}: planning",
            f"{estimate(plain).text(2)} s",
            f"{found.text(2)} s",
            f"{estimate([b - a for a, b in zip(plain, ours, strict=True)]).text(2)} s more",
            f"≤ {MOST_S:.0f} s",
            verdict(found, most=MOST_S),
        )
    ]
    resident, _ = load(path, dedup=True)
    both = in_pairs(
        pairs,
        f"{name}, again",
        lambda: _processor_seconds(lambda: load_and_drop(path, dedup=False)),
        lambda: _processor_seconds(lambda: load_and_drop(path, dedup=True)),
    )
    rows.append(ratio_row(f"{label}: same model again, whole load", both))
    del resident
    return rows


def _processor_seconds(work: "Callable[[], object]") -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _profile(name: str, work: Path) -> None:
    from bench import experts, recording
    from bench.loading import make_known

    path = experts.made(experts.MIXTURES[name], work)
    make_known(path)
    for step in (lambda: recording.seconds(path, recording.whole), lambda: _again(path)):
        with cProfile.Profile() as profile:
            step()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)


def _again(path: Path) -> None:
    from bench.loading import load, load_and_drop

    resident, _ = load(path, dedup=True)
    load_and_drop(path, dedup=True)
    del resident


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--pairs", default=6, show_default=True, type=click.IntRange(min=1))
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Repeat for several.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the checkpoints, 0.5 GB [default: in the user's cache directory].",
)
@click.option("--profile", is_flag=True, help="Profile instead, on the other stream.")
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(pairs: int, only: tuple[str, ...], work: Path | None, profile: bool, write: bool) -> None:
    """Measure planning of large mixtures of experts."""
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("moe_plan.py", "Planning large mixtures of experts")
    names = only or NAMES
    with tempfile.TemporaryDirectory(dir=folder, prefix=".hints-") as hints:
        os.environ.update(ENVIRONMENT, TENSOR_DEDUP_HINTS=str(Path(hints) / "hints.sqlite"))
        # They load vllm, which reads the environment then.
        from bench import experts
        from bench.loading import prepare_process
        from bench.results import HEAD

        prepare_process(experts.made(experts.SMALL, folder))
        if profile:
            for name in names:
                _profile(name, folder)
            return
        rows = [row for name in names for row in measured(name, folder, pairs)]
    body = [HEAD, *(row.text() for row in rows)]
    section.finish("moe_plan", f"{pairs} pairs", body, _NOTES, write=write)


if __name__ == "__main__":
    main()
