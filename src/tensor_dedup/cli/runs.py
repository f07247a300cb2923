"""`tensor-dedup runs`: the training checkpoints of a store."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
from rich.table import Table

from tensor_dedup.api import Store
from tensor_dedup.cli import Verbs, WrongUse, check_suffix, printable, remember
from tensor_dedup.cli.remote import interruptible, opened_remote, run_of_url
from tensor_dedup.cli.run_plot import PlottedRun, page
from tensor_dedup.cli.store import (
    Freed,
    damage_lines,
    empty,
    existing,
    existing_or_said,
    known,
    print_fitted,
    store_option,
)
from tensor_dedup.cli.tables import Dotted, counted, fitted
from tensor_dedup.cli.terminal import ask, console, json_option, say, say_lines, yes_option
from tensor_dedup.errors import StoreError, TensorDedupError
from tensor_dedup.formats.layers.layer_names import natural
from tensor_dedup.remote import RemoteStep
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, NotAStoreError
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.store.steps.errors import KeptStepError
from tensor_dedup.store.steps.notes import shown
from tensor_dedup.store.steps.retention import Mode, goal, ranked
from tensor_dedup.store.steps.retention import best as best_step
from tensor_dedup.store.steps.runs import Step, check_run, parse_step_name, step_name
from tensor_dedup.store.upkeep.run_sizes import RunCost, RunStats, TensorChanges
from tensor_dedup.suggestions import perhaps
from tensor_dedup.text_table import human
from tensor_dedup.training import CheckpointStore
from tensor_dedup.types import STORE_SCHEME, is_url

_SHOWN_NAMES = 20
_HEADINGS: Final = frozenset(
    {"step", "size", "stored", "direct", "anchor", "saved", "kept", "adapter"}
)
_NO_COST = RunCost(0, 0, 0, 0, 0)
_UNKNOWN_COST: Final[Mapping[str, int | None]] = dict.fromkeys(
    ("new_tensors", "new_bytes", "stored_bytes")
)


_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _run_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: the runs of the store whose names begin so."""
    with suppress(TensorDedupError, OSError):
        return [
            run
            for run in existing(context.params.get("store")).runs()
            if run.startswith(incomplete)
        ]
    return []


def _step_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: the steps in the store whose names begin so."""
    with suppress(TensorDedupError, OSError):
        names = existing(context.params.get("store")).names()
        found = ((name, parse_step_name(name)) for name in names if name.startswith(incomplete))
        return [name for name, step in found if step is not None and not step.kept]
    return []


def run_argument(verb: _Verb) -> _Verb:
    """Add the argument `RUN` to a verb, which gets it as `run`."""
    return click.argument("run", shell_complete=_run_names)(verb)


def runs_argument(verb: _Verb) -> _Verb:
    """Add the argument `RUN...` to a verb, which gets all of them as `runs`."""
    return click.argument(
        "runs", metavar="RUN...", nargs=-1, required=True, shell_complete=_run_names
    )(verb)


@click.group(name="runs", cls=Verbs, subcommand_metavar="VERB [OPTIONS]...")
def command() -> None:
    """Inspect, prune and plot training runs. Each step of a run is the checkpoint RUN@STEP."""


@command.command(name="list")
@store_option
@json_option
@click.pass_context
def list_(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """List the runs of the store and their steps. The exit status is 1 if one cannot be read."""
    opened = existing_or_said(store, as_json, {"store": store, "runs": [], "damaged": []})
    if opened is None:
        return
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
    last = {run: _latest(opened, run, steps) for run, steps in runs.items()}
    columns = {
        "steps": [str(len(steps)) for steps in runs.values()],
        "first": [str(steps[0].step) for steps in runs.values()],
        "latest": [str(step.step) for step in last.values()],
        "saved": [when(step.saved_at) for step in last.values()],
    }
    print_fitted(opened, "run", list(runs), columns, ["saved", "first"])


def steps_of(store: Store, run: str) -> list[Step]:
    """Return the steps of the run `run` in the store.

    Raises:
        WrongUse: The store has no run of this name.
    """
    found = store.steps(run)
    if not found:
        runs, there = store.runs(), f"--store {shlex.quote(str(store.path))}"
        step = parse_step_name(run.removeprefix(STORE_SCHEME))
        if step is not None and step.run in runs:
            shows = f"tensor-dedup show {shlex.quote(step_name(step.run, step.step))} {there}"
            what = f"{run!r} is a step; give its run, {step.run!r}; `{shows}` shows the step"
            raise WrongUse(f"{store.path}: {what}")
        near, look = perhaps(run, runs), f"tensor-dedup runs list {there}"
        raise WrongUse(f"{store.path}: no run {run!r}{near}; see `{look}`")
    return found


def _summary(run: str, steps: list[Step]) -> dict[str, object]:
    return {"run": run, "steps": [step.step for step in steps], "saved_at": steps[-1].saved_at}


def _latest(store: Store, run: str, steps: Sequence[Step]) -> Step:
    """The step of these that was saved last."""
    number = CheckpointStore(store, run).latest()
    return next((step for step in steps if step.step == number), steps[-1])


def when(seconds: int) -> str:
    """Return a Unix time in seconds as a date and time of day."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


@command.command()
@click.argument("run", metavar="RUN_OR_URL", shell_complete=_run_names)
@click.option(
    "--run", "name", metavar="RUN", help="The run at URL; by default the last component of URL."
)
@store_option
@json_option
@click.pass_context
def show(ctx: click.Context, run: str, name: str | None, store: str | None, as_json: bool) -> None:
    """Show the steps of RUN with their time, size and metrics, and what each one cost.

    `stored` is the space that a step takes beside those before it.

    For a run that is published to a remote, give the URL: s3://BUCKET/RUN, gs://, az:// or
    file:///FOLDER. `direct` is then what a program that follows the run pulls of a step. `anchor`
    is the step that it is stored against: itself, if it is whole, or "deleted". The exit status is
    1 if a step cannot be read.
    """
    if _is_of_remote(run):
        if store is not None:
            raise WrongUse("a URL names a remote, and --store a store: give one of them")
        _show_remote(ctx, run, name, as_json)
        return
    if name is not None:
        raise WrongUse("--run names the run at a URL; give a URL in place of RUN")
    opened = existing(store)
    steps = steps_of(opened, run)
    costs = _step_costs(opened, run)
    if as_json:
        found = [{**step.to_dict(), **costs.get(step.step, _UNKNOWN_COST)} for step in steps]
        say({"run": run, "steps": found}, as_json)
        return
    stored = [known(costs.get(step.step, _UNKNOWN_COST)["stored_bytes"]) for step in steps]
    _print_steps(steps, {"stored": stored})


def _is_of_remote(run: str) -> bool:
    return is_url(run) and not run.startswith(STORE_SCHEME)


def _show_remote(ctx: click.Context, url: str, run: str | None, as_json: bool) -> None:
    """Show the steps of a run on a remote."""
    with interruptible():
        remote = opened_remote(url)
        remember(ctx, "url", url)  # now: it holds no secret
        found = remote.step_costs(check_run(run_of_url(url) if run is None else run))
    if as_json:
        damaged = [{"name": name, "damage": what} for name, what in found.damaged.items()]
        document = {"url": remote.url, "run": found.run, "damaged": damaged}
        say({**document, "steps": [each.to_dict() for each in found.steps]}, as_json)
    else:
        stored = [None if s.growth is None else s.growth.stored_bytes for s in found.steps]
        more = {
            "stored": [known(each) for each in stored],
            "direct": [
                "" if s.direct_bytes is None else human(s.direct_bytes) for s in found.steps
            ],
            "anchor": [_anchor(each) for each in found.steps],
        }
        if found.steps:
            _print_steps([each.step for each in found.steps], more)
        say_lines(*(f"{name} cannot be read: {what}" for name, what in found.damaged.items()))
    if found.damaged:
        ctx.exit(1)


def _anchor(each: RemoteStep) -> str:
    if each.kind is None:
        return "-"
    anchor = None if each.anchor is None else parse_step_name(each.anchor)
    return "itself" if each.kind == "whole" else "deleted" if anchor is None else str(anchor.step)


def _print_steps(steps: Sequence[Step], costs: Mapping[str, Sequence[str]]) -> None:
    """Print a row for each step, with the columns `costs`, a text for each step."""
    names = sorted({name for step in steps for name in step.metrics}, key=natural)
    headings = {name: _heading(name) for name in names}
    columns = {
        "size": [human(step.nbytes) for step in steps],
        **{title: [*texts] for title, texts in costs.items()},
        **{headings[name]: [_number(step.metrics.get(name)) for step in steps] for name in names},
        "saved": [when(step.saved_at) for step in steps],
        "kept": ["yes" if step.kept else "" for step in steps],
        "adapter": [printable(step.adapter) for step in steps],
    }
    least = ["adapter", "saved", "kept", *reversed(headings.values()), *reversed([*costs]), "size"]
    widest = max(len(str(text)) for text in ("step", *(step.step for step in steps)))
    out = console()
    table, left_out = fitted(out, "step", [f"{s.step:>{widest}}" for s in steps], columns, least)
    out.print(table)
    say_lines(*[left_out] * bool(left_out))


def _step_costs(store: Store, run: str) -> dict[int, dict[str, int | None]]:
    """What each step of a run added to those before; nothing where that is not known."""
    with suppress(StoreError):
        return {
            each.step: {
                "new_tensors": each.new_tensors,
                "new_bytes": each.new_bytes,
                "stored_bytes": each.stored_bytes,
            }
            for each in store.run_growth(run)
        }
    return {}


def _heading(metric: str) -> str:
    shown_name = printable(metric)
    taken = shown_name in _HEADINGS
    return f"{shown_name} (metric)" if taken else shown_name


@command.command(name="stats")
@click.argument("run", required=False, shell_complete=_run_names)
@click.option("--tensors", is_flag=True, help="Also say how often each tensor of RUN changed.")
@store_option
@json_option
@click.pass_context
def stats_(
    ctx: click.Context, run: str | None, tensors: bool, store: str | None, as_json: bool
) -> None:
    """Show the size of RUN, or of all runs, and the space it takes in the store.

    The exit status is 1 if something in the store is damaged, so that the space is not known.
    """
    if tensors and run is None:
        raise WrongUse("say which run's tensors: runs stats RUN --tensors")
    nothing = RunStats(None, 0, 0, 0, 1.0, 0).to_dict() | {"logical_bytes": 0} | _NO_COST.to_dict()
    opened = existing_or_said(store, as_json, nothing) if run is None else existing(store)
    if opened is None:
        return
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
        table, _ = _changes_table(changes, overall)
        console().print(table)
    if cost["disk_bytes"] is None:
        ctx.exit(1)


def _cost(
    store: Store, run: str | None, sizes: Sequence[int]
) -> tuple[dict[str, object], list[str]]:
    """What steps of these sizes cost beside the rest of a store: for JSON, and for people."""
    saved = f"checkpoints   {_total(sizes)}"
    try:
        cost = store.run_cost(run)
    except StoreError as error:
        unknown = dict.fromkeys(_NO_COST.to_dict())
        return unknown, [saved, f"on disk       not known: {error}"]
    logical, kept = sum(sizes), cost.disk_bytes
    if kept <= logical:
        share = f"{(logical - kept) / logical if logical else 0:.0%}".replace("%", " %")
        saved += f" kept in {human(kept)} ({share} saved)"
    else:
        saved += f" kept in {human(kept)}, with what differences are from"
    whose = "this run" if run is not None else "runs"
    dead = f"; {human(cost.dead_bytes)} more stay unused" if cost.dead_bytes else ""
    return cost.to_dict(), [
        saved,
        f"alone         {human(cost.unique_bytes)} that only {whose} need{'s' * (run is not None)}",
        f"shared        {human(cost.shared_bytes)} that others need too",
        f"if deleted    gc gives back {human(cost.reclaimable_bytes)}{dead}",
        f"store         {human(cost.store_bytes)} on disk, with all else that is in it",
    ]


def _total(sizes: Sequence[int]) -> str:
    """The sizes of steps and their sum, for people: `4 x 3.6 MiB = 14.4 MiB`."""
    if not sizes:
        return "none"
    least, most = human(min(sizes)), human(max(sizes))
    each = most if least == most else f"({least} to {most})"
    return f"{len(sizes)} x {each} = {human(sum(sizes))}"


def _changes_table(changes: Sequence[TensorChanges], overall: TensorChanges) -> tuple[Table, str]:
    """How often tensors changed between a step and the one before; last, all of them together."""
    rows = [*changes, overall]
    names = [each.name for each in changes] + ["all tensors, all steps"]
    columns = {
        "identical": [str(each.identical) for each in rows],
        "changed": [str(each.changed) for each in rows],
        "identical %": ["-" if each.percent is None else f"{each.percent:.1f}" for each in rows],
    }
    return fitted(console(), "tensor", names, columns, [])


@command.command()
@run_argument
@click.argument("metric")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Which value is best; by default as keep_best of the run says, or the metric's name.",
)
@store_option
@json_option
def best(run: str, metric: str, mode: Mode | None, store: str | None, as_json: bool) -> None:
    """Show the step of RUN with the best METRIC, such as the least loss or greatest accuracy."""
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
@run_argument
@click.argument("folder", metavar="FOLDER_OR_URL", type=click.Path(file_okay=False))
@store_option
@json_option
def drain(run: str, folder: str, store: str | None, as_json: bool) -> None:
    """Copy the steps of RUN that a second store or a remote lacks. Nothing is deleted.

    A folder is a store, or becomes one where it is empty or missing; a URL is a remote's. The store
    that is copied from becomes the run's writer there: a training elsewhere that copies its steps
    to the same place ends with an error.
    """
    opened = existing(store)
    steps_of(opened, run)
    try:
        with CheckpointStore(opened, run, drain=folder, keep_fast=None) as handle:
            handle.drain()
            stranded = cast("list[int]", handle.stats()["stranded"])
            # A stranded step is on the second tier, too, if that has another version of it.
            near = CheckpointStore(opened, run)
            only_here = [s for s in stranded if handle.manifest(s) == near.manifest(s)]
            there = [step for step in handle.steps() if step not in only_here]
    except NotAStoreError as error:
        what = "it holds other files, and no store; name a folder that is new or empty, or a store"
        raise WrongUse(f"{folder}: {what}") from error
    document = {"run": run, "folder": folder, "steps": there, "stranded": stranded}
    lines = [f"{folder}: {counted(len(there), 'step')} of {run}"]
    if stranded:
        numbers, many = ", ".join(map(str, stranded)), counted(len(stranded), "step")
        lines += [f"left here, as {folder} has gone on without: {many} ({numbers})"]
    say(document, as_json, *lines)


@command.command()
@click.argument("one", metavar="RUN@STEP", shell_complete=_step_names)
@click.argument("two", metavar="RUN@STEP", shell_complete=_step_names)
@store_option
@json_option
def diff(one: str, two: str, store: str | None, as_json: bool) -> None:
    """Show the tensors and metrics in which the second step differs from the first."""
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
        lines.append(f"{name:<12}  {_number(old)} -> {_number(new)}")
    say(found.to_dict(), as_json, *lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _step(name: str) -> tuple[str, int]:
    found = parse_step_name(name.removeprefix(STORE_SCHEME))
    if found is None or found.kept:
        raise WrongUse(f"{name!r} is not a training step; name one as RUN@STEP")
    return found.run, found.step


@command.command()
@run_argument
@click.option(
    "--step", "steps", type=int, multiple=True, metavar="N", help="This step; can be repeated."
)
@click.option(
    "--all", "every", is_flag=True, help="All steps that are not protected by `runs keep`."
)
@yes_option
@store_option
@json_option
def delete(
    run: str, steps: tuple[int, ...], every: bool, yes: bool, store: str | None, as_json: bool
) -> None:
    """Delete steps of RUN. `gc` frees the space that no other checkpoint uses."""
    opened = existing(store)
    if every == bool(steps):
        raise WrongUse("say which steps: --step N, or --all")
    known = steps_of(opened, run)
    chosen = [step.step for step in known if not step.kept] if every else sorted({*steps})
    freed = Freed(opened)
    delete_steps(opened, run, chosen, yes)
    reclaimable, space = freed.said()
    deleted = f"{counted(len(chosen), 'step')} {'is' if len(chosen) == 1 else 'are'}"
    document = {"run": run, "deleted": chosen, **reclaimable}
    say(document, as_json, f"{run}: {deleted} deleted; {space}")


def delete_steps(store: Store, run: str, steps: list[int], yes: bool) -> None:
    """Delete `steps` of a run, after asking for confirmation unless `yes` is True.

    Raises:
        KeptStepError: A step is protected by `runs keep`; no step was deleted.
        Declined: The user does not agree.
        WrongUse: The store has no run of this name, or there is no terminal to ask on.
    """
    steps_of(store, run)
    handle = CheckpointStore(store, run)
    kept = handle.kept()
    for step in steps:
        with suppress(DamagedFileError, MissingObjectError):  # that may be why it is to go
            handle.manifest(step)
        if step in kept:
            what = f"the step {step} of {run!r} is kept"
            raise KeptStepError.at(store.path, what, run=run, step=step)
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
@run_argument
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N steps saved last."
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the steps whose number is a multiple of N.",
)
@click.option(
    "--keep-best",
    metavar="METRIC[:min|max][:N]",
    help="Keep the N best by a metric; by default one, with min or max chosen as in `runs best`.",
)
@click.option("--dry-run", is_flag=True, help="Only show which steps would be deleted.")
@yes_option
@store_option
@json_option
def prune(
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    dry_run: bool,
    yes: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Delete the steps of RUN that no rule keeps, as CheckpointStore does after each save.

    The step that was saved last always stays, and so do the steps that `runs keep` marks. `gc`
    frees the space that no other checkpoint uses.
    """
    opened = existing(store)
    known = steps_of(opened, run)
    if keep_last is None and keep_every is None and keep_best is None:
        raise WrongUse("say what stays: --keep-last N, --keep-every N or --keep-best METRIC")
    best_rule = None if keep_best is None else _best_rule(keep_best, run, known)
    handle = CheckpointStore(
        opened, run, keep_last=keep_last, keep_every=keep_every, keep_best=best_rule
    )
    chosen = handle.prune(dry_run=True)
    if chosen and not dry_run:
        ask(f"Delete {_steps_text(chosen)} of {run} from {opened.path}?", yes)
        freed = Freed(opened)
        chosen = handle.prune(among=chosen)  # and nothing that was not asked about
    staying = [step.step for step in known if step.step not in chosen]
    document: dict[str, object] = {
        "run": run,
        "done": not dry_run,
        "deleted": chosen,
        "kept": staying,
    }
    word = "would be deleted" if dry_run else "deleted"
    lines = [f"{run}: {_steps_text(chosen)} {word}", f"kept: {_steps_text(staying)}"]
    if not chosen:
        lines[0] = f"{run}: the rules keep every step"
    elif not dry_run:
        reclaimable, space = freed.said()
        document, lines = {**document, **reclaimable}, [*lines, space]
    say(document, as_json, *lines)


def _best_rule(text: str, run: str, steps: Sequence[Step]) -> tuple[str, int, Mode]:
    """Parse METRIC[:min|max][:N]; the name of a metric may have colons itself."""
    metric, count = text, 1
    mode: Mode | None = None
    if (found := re.fullmatch(r"(.+):([0-9]+)", metric)) is not None:
        metric, count = found[1], int(found[2])
    if (found := re.fullmatch(r"(.+):(min|max)", metric)) is not None:
        metric, mode = found[1], "min" if found[2] == "min" else "max"
    mode = mode or goal(metric, [step.goals for step in reversed(steps)])
    best_step({step.step: step.metrics for step in steps}, metric, mode or "min", run)
    if mode is None:
        what = f"nothing says whether the least or the greatest {metric!r} is best"
        raise WrongUse(f"{what}; say --keep-best {metric}:min or {metric}:max")
    if count < 1:
        raise WrongUse(f"--keep-best {text}: keep one step or more")
    return metric, count, mode


@command.command()
@run_argument
@click.argument("step", type=int)
@click.option("--remove", is_flag=True, help="Remove the protection.")
@store_option
@json_option
def keep(run: str, step: int, remove: bool, store: str | None, as_json: bool) -> None:
    """Protect a STEP of RUN from being deleted or replaced, whatever the rules say."""
    opened = existing(store)
    handle = CheckpointStore(opened, run)
    if not remove or step not in handle.kept():  # a mark may be all that there is of a step
        steps_of(opened, run)
        handle.manifest(step)  # raises if there is no such step
    if remove:
        handle.unkeep(step)
    else:
        handle.keep(step)
    line = f"{run}@{step} is no longer kept" if remove else f"{run}@{step} is kept"
    say({"run": run, "step": step, "kept": not remove}, as_json, line)


@command.command()
@runs_argument
@store_option
@json_option
def compare(runs: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Compare runs: metrics at their best and latest steps, and the space each takes.

    `alone` is the space that only this run needs.
    """
    opened = existing(store)
    found = [_compared(opened, run) for run in dict.fromkeys(runs)]
    if as_json:
        say({"store": str(opened.path), "runs": found}, as_json)
        return
    columns = {
        "steps": [str(each["steps"]) for each in found],
        "latest": [str(each["latest"]) for each in found],
        "a step": [human(each["nbytes"]) for each in found],
        "on disk": [known(each["disk_bytes"]) for each in found],
        "alone": [known(each["unique_bytes"]) for each in found],
    }
    print_fitted(opened, "run", [each["run"] for each in found], columns, ["latest", "steps"])
    names = sorted({name for each in found for name in each["metrics"]}, key=natural)
    if names:
        console().print(_metrics_table(names, found))


def _metrics_table(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> Table:
    metrics = Table("metric", "run")
    for heading in ("best", "at step", "latest"):
        metrics.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        for each in found:
            values = each["metrics"].get(name, {"best": None, "step": None, "latest": None})
            step = "-" if values["step"] is None else str(values["step"])
            shown_values = _number(values["best"]), step, _number(values["latest"])
            metrics.add_row(Dotted(name), Dotted(each["run"]), *shown_values)
        metrics.add_section()
    return metrics


def _compared(store: Store, run: str) -> dict[str, Any]:
    """What `compare` says of a run, as JSON has it."""
    steps = {step.step: step for step in steps_of(store, run)}
    latest = _latest(store, run, [*steps.values()])
    by_step = {number: step.metrics for number, step in steps.items()}
    metrics = {}
    for name in sorted({name for step in steps.values() for name in step.metrics}):
        mode = goal(name, [step.goals for step in reversed(steps.values())])
        ordered = ranked(by_step, name, mode) if mode is not None else []
        best = steps[ordered[0]] if ordered else None
        metrics[name] = {
            "mode": mode,
            "best": shown(best.metrics)[name] if best is not None else None,
            "step": best.step if best is not None else None,
            "latest": shown(latest.metrics).get(name),
        }
    try:
        cost: dict[str, object] = store.run_cost(run).to_dict()
    except StoreError:
        cost = dict.fromkeys(("disk_bytes", "unique_bytes", "reclaimable_bytes"))
    return {
        "run": run,
        "steps": len(steps),
        "latest": latest.step,
        "nbytes": latest.nbytes,
        "logical_bytes": sum(step.nbytes for step in steps.values()),
        **{key: cost[key] for key in ("disk_bytes", "unique_bytes", "reclaimable_bytes")},
        "metrics": metrics,
    }


@command.command()
@runs_argument
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file that ends in .html; by default RUN.html, or runs.html for several runs.",
)
@store_option
@json_option
def plot(runs: tuple[str, ...], output: Path | None, store: str | None, as_json: bool) -> None:
    """Plot the space that the steps of RUN take, and their metrics, as an HTML page.

    The page is self-contained: no network, no script. Several runs share the charts of metrics.
    """
    opened = existing(store)
    drawn = [_plotted(opened, run) for run in dict.fromkeys(runs)]
    named = drawn[0].run.replace("/", "-") if len(drawn) == 1 else "runs"
    target = output or Path(f"{named}.html")
    check_suffix(target, ".html")
    target.write_text(page(drawn), encoding="utf-8")
    found = [
        {
            "run": each.run,
            "steps": [one.to_dict() for one in each.growth],
            "metrics": [{"step": step.step, **shown(step.metrics)} for step in each.steps],
        }
        for each in drawn
    ]
    document = {"output": str(target), "runs": found}
    lines = [f"{target}: {counted(len(each.steps), 'step')} of {each.run}" for each in drawn]
    say(document, as_json, *lines)


def _plotted(store: Store, run: str) -> PlottedRun:
    steps = steps_of(store, run)
    growth = {each.step: each for each in store.run_growth(run)}
    there = [step for step in steps if step.step in growth]
    latest = _latest(store, run, there)
    return PlottedRun(run, there, [growth[step.step] for step in there], latest.step)
