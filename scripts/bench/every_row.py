"""The rows that README.md and docs/results.md state, measured again: met, missed, or not shown.

`scripts/bench/all` runs this in an environment that has what it needs. Each part is a process of
its own, and one that fails says so in its rows while the others go on.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This folder on the path would hide the packages whose names its modules bear: cuda, store.
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import json
import math
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from bench import options
from bench.results import Figures
from bench.stated_rows import DEMO, ROWS, Part, StatedRow
from bench.stats import Estimate, estimate, exact, machine, verdict
from bench.turns import say
from demonstration import models
from tensor_dedup.cli import INTERRUPTED

PAIRS: Final = 9  # the fewest whose interval leaves out the extremes
LIMIT_SECONDS: Final = 600
FAILED: Final = "failed"
_HEAD: Final = "| row | without | with | compared | aim | |\n| --- | --- | --- | --- | --- | --- |"


@dataclass(frozen=True)
class Outcome:
    """What was found of a row: both sides, what is compared, and `met`, `missed`, or another."""

    row: StatedRow
    verdict: str
    sides: tuple[Estimate | None, Estimate | None] = (None, None)
    found: Estimate | None = None
    failure: str = ""

    def text(self) -> str:
        """As a line of a Markdown table."""
        sides = ["" if each is None else self.row.text(each, self.row.unit) for each in self.sides]
        found = self.failure if self.found is None else self.row.text(self.found, self.row.measure)
        return f"| {' | '.join((self.row.results, *sides, found, self.row.aim, self.verdict))} |"

    def document(self) -> dict[str, Any]:
        """As plain data, which JSON holds."""
        return {
            "row": self.row.name,
            "results": self.row.results,
            "readme": self.row.readme or None,
            "unit": self.row.unit,
            "without": _plain(self.sides[0]),
            "with": _plain(self.sides[1]),
            "compared": _plain(self.found),
            "measure": self.row.measure,
            "least": _finite(self.row.least),
            "most": self.row.most,
            "verdict": self.verdict,
            "failure": self.failure or None,
        }


def judged(row: StatedRow, figures: Figures, *, quick: bool = False) -> Outcome:
    """Return what the figures of its part show of a row; of too few pairs, nothing is shown."""
    sides = figures.get(row.figure, ((), ()))
    values = row.values(sides)
    if not values:
        return Outcome(row, FAILED, failure=f"no figure {row.figure!r}")
    of = exact if row.counted else estimate
    found = of(values)
    said = "not shown" if quick else verdict(found, least=row.least, most=row.most)
    plain, ours = (of([each / row.scale for each in side]) if side else None for side in sides)
    return Outcome(row, said, (plain, ours), found)


def measured(part: Part, pairs: int, work: Path, *, quick: bool) -> Figures:
    """Run a part to its end; its figures.

    Raises:
        click.ClickException: it failed, or took longer than `LIMIT_SECONDS`.
    """
    log = models.results(work) / f"{part.name.replace(' ', '-')}.log"
    with tempfile.TemporaryDirectory(prefix="tensor-dedup-all-") as folder:
        target = Path(folder) / "figures.json"
        with log.open("wb") as output:
            command = part.command(pairs, work, target, quick=quick)
            process = subprocess.Popen(command, stdout=output, stderr=output)
            try:
                status = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                raise click.ClickException(f"not done in {LIMIT_SECONDS} s; see {log}") from None
            finally:
                _end(process)
        if status:
            said = log.read_text(errors="replace").strip().splitlines()
            last = said[-1].strip() if said else "it said nothing"
            raise click.ClickException(f"status {status}, {last}; see {log}")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return of_the_demo(found) if part is DEMO else found


def of_the_demo(report: dict[str, Any]) -> Figures:
    """The figures in the report of `scripts/demo --json`."""
    return {"memory": ([report["plain"]["pss"]], [report["dedup"]["pss"]])}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process that still runs, so that it ends its own; kill it if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def outcomes(
    rows: Sequence[StatedRow], pairs: int, work: Path, *, quick: bool
) -> Iterator[Outcome]:
    """Measure rows, part by part."""
    parts = list(dict.fromkeys(row.part for row in rows))
    for number, part in enumerate(parts, 1):
        say(f"{part.name}: {number} of {len(parts)}")
        mine = [row for row in rows if row.part == part]
        try:
            figures = measured(part, pairs, work, quick=quick)
        except (OSError, ValueError, LookupError, click.ClickException) as error:
            reason = " ".join(str(error).split()).replace("|", "/")
            yield from (Outcome(row, FAILED, failure=reason) for row in mine)
        else:
            yield from (judged(row, figures, quick=quick) for row in mine)


def _plain(found: Estimate | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    return {
        "median": found.median,
        "low": _finite(found.low),
        "high": _finite(found.high),
        "count": found.count,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@click.command(name="all", context_settings=options.CONTEXT)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([row.name for row in ROWS]),
    metavar="ROW",
    help=f"Repeat for several: {', '.join(row.name for row in ROWS)}.",
)
@options.repeats("--pairs", PAIRS)
@options.work("what is measured, 10 GB")
@options.json_file("what was found")
def main(
    only: tuple[str, ...], pairs: int, quick: bool, work: Path | None, json_file: Path | None
) -> None:
    """Measure again what README.md and docs/results.md state.

    Prints a line for each row: both sides with 95 % intervals, how they compare, the aim, and
    whether it is met (the whole interval lies in it), missed (none of it does) or not shown. Where
    the documents state no aim, times are to be no longer than without, and memory and bytes at most
    3 % more than is stated.

    Ends with 0 if every row could be measured and none is missed, and with 1 otherwise.
    """
    folder = work or models.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if not only or row.name in only]
    lines, found = machine(), list[Outcome]()
    click.echo("\n".join([*lines, "", _HEAD]))
    try:
        for outcome in outcomes(rows, pairs, folder, quick=quick):
            found.append(outcome)
            click.echo(outcome.text())
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
    if json_file is not None:
        document = {"machine": lines, "rows": [outcome.document() for outcome in found]}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(outcome.verdict in ("missed", FAILED) for outcome in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="scripts/bench/all")
