"""`tensor-dedup runs`: the training checkpoints of a store."""

import html
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import click
from rich.table import Table
from rich.text import Text

from tensor_dedup.analyze.natural import natural
from tensor_dedup.cli import Verbs, WrongUse
from tensor_dedup.cli.output import (
    Dotted,
    ask,
    cell,
    console,
    counted,
    json_option,
    listing,
    say,
    yes_option,
)
from tensor_dedup.cli.store import (
    damage_lines,
    empty,
    existing,
    print_table,
    space_after,
    store_option,
)
from tensor_dedup.errors import StoreError
from tensor_dedup.store import Store
from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import PinnedStepError
from tensor_dedup.store.checkpoints.notes import shown
from tensor_dedup.store.checkpoints.retention import Mode, goal
from tensor_dedup.store.checkpoints.retention import best as best_step
from tensor_dedup.store.checkpoints.runs import Step, parse_step_name
from tensor_dedup.store.checkpoints.sizes import Growth, TensorChanges
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, NotAStoreError
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.suggestions import perhaps
from tensor_dedup.text_table import human

_SHOWN_NAMES = 20
_WIDTH, _HEIGHT, _MARGIN = 720, 180, 60
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em}}h2{{font-size:1em;margin-bottom:0}}
svg text{{font-size:11px}}polyline{{fill:none;stroke:#1f6fb2;stroke-width:1.5}}
circle{{fill:#1f6fb2}}.axis{{stroke:#999}}</style></head>
<body><h1>{title}</h1>
{charts}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Values at steps; what is no finite number is left out."""

    title: str
    steps: Sequence[int]
    values: Sequence[float]

    @property
    def points(self) -> list[tuple[int, float]]:
        """The steps that have a value."""
        both = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in both if math.isfinite(value)]


@click.group(name="runs", cls=Verbs, subcommand_metavar="VERB [OPTIONS]...")
def command() -> None:
    """Training checkpoints: each step of a run is the checkpoint RUN@STEP of the store."""


@command.command(name="list")
@store_option
@json_option
@click.pass_context
def list_(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """List the runs of the store and their steps. Exit status 1 when a step cannot be read."""
    opened = existing(store)
    runs = {run: steps_of(opened, run) for run in opened.runs()}
    # An import may have a step's name. That one cannot be told from a step then is as bad.
    damaged = [
        each for each in opened.list() if each.damage is not None and parse_step_name(each.name)
    ]
    if as_json:
        found = [_summary(run, steps) for run, steps in runs.items()]
        broken = [each.to_dict() for each in damaged]
        say({"store": str(opened.path), "runs": found, "damaged": broken}, as_json)
    elif not runs and not damaged:
        say({}, as_json, empty(opened, "no training runs"))
    else:
        _print_runs(opened, runs)
        say({}, as_json, *damage_lines(damaged))
    if damaged:
        ctx.exit(1)


def _print_runs(opened: Store, runs: Mapping[str, Sequence[Step]]) -> None:
    table = listing("run")
    for heading in ("steps", "first", "latest", "saved"):
        table.add_column(heading, justify="left" if heading == "saved" else "right", no_wrap=True)
    for run, steps in runs.items():
        last = _latest(opened, run, steps)
        table.add_row(
            Dotted(run), str(len(steps)), str(steps[0].step), str(last.step), when(last.saved_at)
        )
    print_table(opened, table)


def steps_of(store: Store, run: str) -> list[Step]:
    """The steps of a run. WrongUse: there is no such run."""
    found = store.steps(run)
    if not found:
        near = perhaps(run, store.runs())
        look = f"tensor-dedup runs list --store {shlex.quote(str(store.path))}"
        raise WrongUse(f"{store.path}: no run {run!r}{near}; see `{look}`")
    return found


def _summary(run: str, steps: list[Step]) -> dict[str, object]:
    return {"run": run, "steps": [step.step for step in steps], "saved_at": steps[-1].saved_at}


def _latest(store: Store, run: str, steps: Sequence[Step]) -> Step:
    """The step of these that was saved last."""
    number = CheckpointStore(store, run).latest()
    return next((step for step in steps if step.step == number), steps[-1])


def when(seconds: int) -> str:
    """A moment, for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


@command.command()
@click.argument("run")
@store_option
@json_option
def show(run: str, store: str | None, as_json: bool) -> None:
    """Show the steps of RUN: when they were saved, their size and their metrics."""
    opened = existing(store)
    steps = steps_of(opened, run)
    if as_json:
        say({"run": run, "steps": [step.to_dict() for step in steps]}, as_json)
        return
    table = Table()
    for heading in ("step", "saved", "size", "metrics", "kept", "adapter"):
        number = heading in ("step", "size")
        side: Literal["left", "right"] = "right" if number else "left"
        table.add_column(heading, justify=side, no_wrap=number, overflow="fold")
    for step in steps:
        # One a line: a table breaks lines where it likes.
        metrics = Text("\n").join(cell(f"{n} {value:g}") for n, value in step.metrics.items())
        kept = "yes" if step.pinned else ""
        size = human(step.nbytes)
        table.add_row(str(step.step), when(step.saved_at), size, metrics, kept, cell(step.adapter))
    console().print(table)


@command.command(name="stats")
@click.argument("run", required=False)
@click.option("--tensors", is_flag=True, help="Also say how often each tensor of RUN changed.")
@store_option
@json_option
def stats_(run: str | None, tensors: bool, store: str | None, as_json: bool) -> None:
    """Say what RUN, or all runs together, hold, and what they cost beside the rest of the store."""
    if tensors and run is None:
        raise WrongUse("say which run's tensors: runs stats RUN --tensors")
    opened = existing(store)
    names = opened.runs() if run is None else [run]
    steps = [step for name in names for step in steps_of(opened, name)]
    found = opened.run_stats(run)
    logical = sum(step.nbytes for step in steps)
    cost, lines = _cost(opened, run, [step.nbytes for step in steps])
    document = {**found.to_dict(), "logical_bytes": logical, **cost}
    changes = opened.tensor_changes(run) if tensors and run is not None else None
    if changes is not None:
        overall = TensorChanges(
            "", sum(each.identical for each in changes), sum(each.changed for each in changes)
        )
        document["tensors"] = [each.to_dict() for each in changes]
        document["identical_percent"] = overall.percent
    say(document, as_json, f"run           {run or 'all'}", *lines)
    if changes is not None and not as_json:
        console().print(_changes_table(changes, overall))


def _cost(
    store: Store, run: str | None, sizes: Sequence[int]
) -> tuple[dict[str, object], list[str]]:
    """What steps of these sizes cost beside the rest of a store: for JSON, and for people."""
    saved = f"checkpoints   {_total(sizes)}"
    try:
        cost = store.run_cost(run)
    except StoreError as error:
        return {"reclaimable_bytes": None}, [saved, f"on disk       not known: {error}"]
    logical, kept = sum(sizes), cost.disk_bytes
    if kept <= logical:
        share = f"{(logical - kept) / logical if logical else 0:.0%}".replace("%", " %")
        saved += f" kept in {human(kept)} ({share} saved)"
    else:
        saved += f" kept in {human(kept)}, with what differences are from"
    whose = "this run" if run is not None else "runs"
    gone = "it is" if run is not None else "all runs are"
    dead = f"; {human(cost.dead_bytes)} more stay unused" if cost.dead_bytes else ""
    return cost.to_dict(), [
        saved,
        f"alone         {human(cost.unique_bytes)} that only {whose} need{'s' * (run is not None)}",
        f"shared        {human(cost.shared_bytes)} that others need too",
        f"if deleted    gc gives back {human(cost.reclaimable_bytes)} when {gone} deleted{dead}",
        f"store         {human(cost.store_bytes)} on disk, with all else that is in it",
    ]


def _total(sizes: Sequence[int]) -> str:
    """The sizes of steps and their sum, for people: `4 x 3.6 MiB = 14.4 MiB`."""
    if not sizes:
        return "none"
    least, most = human(min(sizes)), human(max(sizes))
    each = most if least == most else f"({least} to {most})"
    return f"{len(sizes)} x {each} = {human(sum(sizes))}"


def _changes_table(changes: Sequence[TensorChanges], overall: TensorChanges) -> Table:
    """How often tensors changed between a step and the one before; last, all of them together."""
    table = listing("tensor")
    for heading in ("identical", "changed", "identical %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in (*changes, overall):
        if each is overall:
            table.add_section()
        share = "-" if each.percent is None else f"{each.percent:.1f}"
        name = Dotted(each.name) if each is not overall else "all tensors, all steps"
        table.add_row(name, str(each.identical), str(each.changed), share)
    return table


@command.command()
@click.argument("run")
@click.argument("metric")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Which value is best; by default as keep_best of the run says, or the metric's name.",
)
@store_option
@json_option
def best(run: str, metric: str, mode: Mode | None, store: str | None, as_json: bool) -> None:
    """Say which step of RUN has the best METRIC: the least loss, the greatest accuracy."""
    opened = existing(store)
    steps = {step.step: step for step in steps_of(opened, run)}
    chosen = mode or goal(metric, [step.goals for step in reversed(steps.values())])
    found = steps[best_step({n: step.metrics for n, step in steps.items()}, metric, chosen, run)]
    document = {"run": run, "step": found.step, "metric": metric, "mode": chosen}
    value = shown(found.metrics)[metric]
    which = "least" if chosen == "min" else "greatest"
    line = f"{found.name}: {metric} {found.metrics[metric]:g}, the {which}"
    say({**document, "value": value}, as_json, line)


@command.command()
@click.argument("run")
@click.argument("folder", type=click.Path(file_okay=False))
@store_option
@json_option
def drain(run: str, folder: str, store: str | None, as_json: bool) -> None:
    """Copy the steps of RUN that the store in FOLDER lacks, as they are; nothing is deleted.

    FOLDER is a store, or a folder that is empty or not there, which becomes one.
    """
    opened = existing(store)
    steps_of(opened, run)
    try:
        with CheckpointStore(opened, run, drain=folder, keep_fast=None) as handle:
            handle.drain()
    except NotAStoreError as error:
        what = "it holds other files, and no store; name a folder that is new or empty, or a store"
        raise WrongUse(f"{folder}: {what}") from error
    there = [step.step for step in Store.open(folder, create=False).steps(run)]
    document = {"run": run, "folder": folder, "steps": there}
    say(document, as_json, f"{folder}: {counted(len(there), 'step')} of {run}")


@command.command()
@click.argument("one", metavar="RUN@STEP")
@click.argument("two", metavar="RUN@STEP")
@store_option
@json_option
def diff(one: str, two: str, store: str | None, as_json: bool) -> None:
    """Say in which tensors and metrics the second step differs from the first."""
    opened = existing(store)
    found = opened.step_difference(_step(one), _step(two))
    # Here too what describes an object counts, which the lists below leave out.
    unchanged = counted(found.unchanged, "piece")
    lines = [f"unchanged     {unchanged} (tensors, structure, plain values)"]
    for title, names, size in (
        ("renamed", found.renamed, ""),
        ("changed", found.changed, f", {human(found.changed_bytes)}"),
        ("added", found.added, ""),
        ("removed", found.removed, ""),
    ):
        # What describes an object, and its plain values, are no tensors but among the bytes.
        held = sorted((n for n in names if not n.startswith(STATE_MARK)), key=natural)
        if title == "renamed" and not held:
            continue
        lines.append(f"{title:<14}{counted(len(held), 'tensor')}{size}")
        for name in held[:_SHOWN_NAMES]:
            now = f" -> {found.renamed[name]}" if title == "renamed" else ""
            lines.append(f"  {name}{now}")
        lines += [f"  ... {len(held) - _SHOWN_NAMES} more"] if len(held) > _SHOWN_NAMES else []
    if any(name.startswith(STATE_MARK) for name in (*found.changed, *found.added)):
        lines.append("other         plain values or the structure")
    for name, (old, new) in found.metrics.items():
        lines.append(f"{name:<14}{_number(old)} -> {_number(new)}")
    say(found.to_dict(), as_json, *lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _step(name: str) -> tuple[str, int]:
    found = parse_step_name(name.removeprefix("store://"))
    if found is None or found.kept:
        raise WrongUse(f"{name!r} is not a training step; name one as RUN@STEP")
    return found.run, found.step


@command.command()
@click.argument("run")
@click.option(
    "--step", "steps", type=int, multiple=True, metavar="N", help="This step; can be repeated."
)
@click.option("--all", "every", is_flag=True, help="All steps that are not kept (`runs keep`).")
@yes_option
@store_option
@json_option
def delete(
    run: str, steps: tuple[int, ...], every: bool, yes: bool, store: str | None, as_json: bool
) -> None:
    """Forget steps of RUN. Their space comes back when `gc` finds that nobody else needs it."""
    opened = existing(store)
    if every == bool(steps):
        raise WrongUse("say which steps: --step N, or --all")
    known = steps_of(opened, run)
    chosen = [step.step for step in known if not step.pinned] if every else sorted({*steps})
    delete_steps(opened, run, chosen, yes)
    reclaimable, space = space_after(opened)
    deleted = f"{counted(len(chosen), 'step')} {'is' if len(chosen) == 1 else 'are'}"
    document = {"run": run, "deleted": chosen, **reclaimable}
    say(document, as_json, f"{run}: {deleted} deleted; {space}")


def delete_steps(store: Store, run: str, steps: list[int], yes: bool) -> None:
    """Ask, and delete; nothing is asked or deleted unless all of them can be."""
    steps_of(store, run)
    handle = CheckpointStore(store, run)
    kept = handle.pinned()
    for step in steps:
        with suppress(DamagedFileError, MissingObjectError):  # that may be why it is to go
            handle.manifest(step)
        if step in kept:
            what = f"the step {step} of {run!r} is kept"
            raise PinnedStepError.at(store.path, what, run=run, step=step)
    if not steps:
        return
    ask(f"Delete {_steps_text(steps)} of {run} from {store.path}?", yes)
    for step in steps:
        handle.delete(step)


def _steps_text(steps: Sequence[int]) -> str:
    """How many steps, and which: `3 steps (4, 5, 6)`."""
    which = ", ".join(map(str, steps[:_SHOWN_NAMES])) + ", ..." * (len(steps) > _SHOWN_NAMES)
    return f"{counted(len(steps), 'step')} ({which})"


@command.command()
@click.argument("run")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file that ends in .html; by default RUN.html.",
)
@store_option
@json_option
def plot(run: str, output: Path | None, store: str | None, as_json: bool) -> None:
    """Draw bytes per step, dedup ratio and metrics of RUN."""
    opened = existing(store)
    steps = steps_of(opened, run)
    found = opened.run_growth(run)
    target = output or Path(f"{run.replace('/', '-')}.html")
    plot_to(target, run, series_of(found, steps))
    document = {
        "run": run,
        "output": str(target),
        "steps": [each.to_dict() for each in found],
        "metrics": [{"step": step.step, **shown(step.metrics)} for step in steps],
    }
    say(document, as_json, f"{target}: {counted(len(steps), 'step')} of {run}")


def series_of(found: list[Growth], steps: list[Step]) -> list[PlotSeries]:
    """Return the lines that are drawn."""
    at = [each.step for each in found]
    drawn = [
        PlotSeries(
            "bytes a step adds to the disk", at, [float(each.stored_bytes) for each in found]
        ),
        PlotSeries("bytes of a step", at, [float(each.nbytes) for each in found]),
        PlotSeries("dedup ratio", at, [each.dedup_ratio for each in found]),
    ]
    for name in sorted({name for step in steps for name in step.metrics}):
        having = [step for step in steps if name in step.metrics]
        values = [step.metrics[name] for step in having]
        drawn.append(PlotSeries(name, [step.step for step in having], values))
    return drawn


def plot_to(path: Path, title: str, series: Sequence[PlotSeries]) -> None:
    """Write lines over steps as a page of HTML that needs nothing else.

    Raises:
        WrongUse: The name of the file does not end in .html.
    """
    if path.suffix == ".html":
        charts = "\n".join(_chart(each) for each in series)
        path.write_text(_PAGE.format(title=html.escape(title), charts=charts), encoding="utf-8")
    else:
        raise WrongUse(f"{path} does not end in .html; name a file that does")


def _chart(series: PlotSeries) -> str:
    points = series.points
    if not points:
        return f"<h2>{html.escape(series.title)}</h2><p>no values</p>"
    low, high = min(0.0, *(v for _, v in points)), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]

    def x(step: int) -> float:
        return _MARGIN + (step - first) / max(1, last - first) * (_WIDTH - 2 * _MARGIN)

    def y(value: float) -> float:
        return _HEIGHT - 25 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - 40)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    dots = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5">'
        f"<title>step {step}: {value:g}</title></circle>"
        for step, value in points
    )
    bottom = y(low)
    return (
        f"<h2>{html.escape(series.title)}</h2>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f'<line class="axis" x1="{_MARGIN}" y1="{bottom}" x2="{_WIDTH - _MARGIN}" y2="{bottom}"/>'
        f'<line class="axis" x1="{_MARGIN}" y1="15" x2="{_MARGIN}" y2="{bottom}"/>'
        f'<text x="{_MARGIN - 5}" y="20" text-anchor="end">{high:.4g}</text>'
        f'<text x="{_MARGIN - 5}" y="{bottom}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 8}">{first}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 8}" text-anchor="end">{last}</text>'
        f'<polyline points="{line}"/>{dots}</svg>'
    )
