#!/usr/bin/env python3
"""This tree against another commit of it, in turns on one machine: is anything slower?

    scripts/bench/against.py COMMIT [--pairs N] [--only PART] [--work DIR] [--write]

*load*: vLLM loads a base, a fine-tune and the base again in one process (seconds of `load_model`).
*attach*: vLLM loads a model that another engine has put into a memory manager. *pipelines*:
Diffusers loads two pipelines (multiples of a plain load in that process); *calls*: the calls, of
Python and of C, that it makes for them. *checkpoints*: a run saves steps of which all, a tenth and
nothing changed, and loads one. *remote*: a base and a fine-tune are pushed to SeaweedFS (moto where
`weed` is not installed) at the loopback address, and pulled; its start is not timed. Each process
measures its part once, with modules compiled before. Both trees alternate (A B, B A, ...), and
ratios are of one pair. Prints a section of Markdown; `--write` puts it into
docs/benchmarks/tables.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
import subprocess
import tarfile
import tempfile
from io import BytesIO
from typing import Final

import click

from bench import journeys
from bench.stats import ENVIRONMENT, ROOT, estimate, machine, verdict, write_section

MOST: Final = 1.05


def unpack(commit: str, folder: Path) -> Path:
    """The tree of a commit, with its links, below `folder`."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    with tarfile.open(fileobj=BytesIO(subprocess.check_output(command))) as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def measured(part: str, tree: Path, inputs: Path) -> dict[str, float]:
    """What each step of a part takes in a process that imports `tree`: `journeys` names units."""
    with tempfile.TemporaryDirectory(dir=inputs, prefix=".run-") as scratch:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(tree / "src"),
            # Compiling modules would be most of a short load; both trees are left as they were.
            "PYTHONPYCACHEPREFIX": str(inputs / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "TENSOR_DEDUP_HINTS": str(Path(scratch) / "hints.sqlite"),
            "TENSOR_DEDUP_STORE": str(Path(scratch) / "store"),
        }
        command = [sys.executable, "-P", journeys.__file__, part, str(inputs), scratch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{part} in {tree}: {done.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


@click.command()
@click.argument("commit")
@click.option("--pairs", default=12, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(journeys.PARTS))
@click.option("--work", type=click.Path(path_type=Path), help="Where inputs are made.")
@click.option("--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md.")
def main(commit: str, pairs: int, only: tuple[str, ...], work: Path | None, write: bool) -> None:
    """Measure this tree against COMMIT."""
    rows = ["| | before | now | ratio | aim |", "| --- | --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory(dir=work, prefix="td-against-") as folder:
        before, inputs = unpack(commit, Path(folder) / "before"), Path(folder) / "inputs"
        inputs.mkdir()
        for part in only or journeys.PARTS:
            subprocess.run(
                [sys.executable, "-P", journeys.__file__, "make", part, str(inputs)], check=True
            )
            found: list[tuple[dict[str, float], dict[str, float]]] = []
            for number in range(pairs + 1):
                trees = [before, ROOT] if number % 2 else [ROOT, before]
                both = {tree: measured(part, tree, inputs) for tree in trees}
                if number:  # the first pair warms the page cache and compiles
                    found.append((both[before], both[ROOT]))
            for step in found[0][0]:
                old, new = ([pair[side][step] for pair in found] for side in (0, 1))
                ratio = estimate([b / a for a, b in zip(old, new, strict=True)])
                digits = 0 if part == "calls" else 3
                rows.append(
                    f"| {part}: {step} "
                    f"| {estimate(old).text(digits)} | {estimate(new).text(digits)} "
                    f"| {ratio.text(2)} | {MOST}: {verdict(ratio, most=MOST)} |"
                )
                click.echo(rows[-1])
    text = "\n".join(
        [f"## Against {commit}", "", *machine(), f"- {pairs} pairs, in turns.", "", *rows]
    )
    click.echo(text)
    if write:
        write_section("against", text)


if __name__ == "__main__":
    main()
