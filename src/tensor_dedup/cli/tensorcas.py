"""The command `tensorcas`: the verbs and options of tensorcas, and `--json`, on a store."""

from pathlib import Path

import click

from tensor_dedup.api import Store
from tensor_dedup.cli import Program
from tensor_dedup.cli.runs import delete_steps, steps_of
from tensor_dedup.cli.store import existing, gc_lines, grace_option
from tensor_dedup.cli.terminal import ask, json_option, say, yes_option
from tensor_dedup.text_table import human


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("checkpoints"),
    show_default=True,
    help="The folder of the checkpoints: a store of tensor-dedup.",
)
@click.pass_context
def main(context: click.Context, root: Path) -> None:
    """Checkpoints of training runs, every tensor once."""
    context.obj = root


@main.command(name="list")
@click.option("--run", help="Only this run.")
@json_option
@click.pass_obj
def list_(root: Path, run: str | None, as_json: bool) -> None:
    """List runs and their steps: all runs, or that of --run."""
    store = _opened(root)
    names = store.runs() if run is None else [run]
    found = {name: [step.step for step in steps_of(store, name)] for name in names}
    document = {"runs": [{"run": name, "steps": steps} for name, steps in found.items()]}
    lines = [f"{name}: {', '.join(map(str, steps))}" for name, steps in found.items()]
    nothing = f"{store.path} holds no training runs; --root names another folder"
    say(document, as_json, *(lines or [nothing]))


@main.command()
@click.option("--run", help="Only this run.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For people, or one JSON document.",
)
@json_option
@click.pass_obj
def stats(root: Path, run: str | None, form: str, as_json: bool) -> None:
    """Chunk counts, unique chunks, dedup ratio, total bytes. A chunk is a tensor here."""
    store = _opened(root)
    if run is not None:
        steps_of(store, run)
    found = store.run_stats(run)
    say(
        found.to_dict(),
        as_json or form == "json",
        f"run           {found.run_id or 'all'}",
        f"checkpoints   {found.checkpoints}",
        # With those that hold an object's structure and its plain values: what a step refers to.
        f"chunks        {found.total_chunks}, {found.unique_chunks} of them unique",
        f"dedup ratio   {found.dedup_ratio:.4f} (unique / all: lower is more reuse)",
        f"total bytes   {human(found.total_bytes)}",
    )


@main.command()
@grace_option
@yes_option
@json_option
@click.pass_obj
def gc(root: Path, grace: float, yes: bool, as_json: bool) -> None:
    """Move files that no checkpoint uses to the trash; delete those that were there for --grace."""
    store = _opened(root)
    plan = store.gc(grace, dry_run=True)
    if plan.trash or plan.delete or plan.unfinished:
        ask(f"{'. '.join(gc_lines(plan, grace))}. Do it?", yes)
    plan = store.gc(grace)
    say(plan.to_dict(), as_json, *gc_lines(plan, grace))


@main.command()
@click.option("--run", required=True, help="The run.")
@click.option("--step", type=int, required=True, metavar="N", help="Its step.")
@yes_option
@json_option
@click.pass_obj
def delete(root: Path, run: str, step: int, yes: bool, as_json: bool) -> None:
    """Delete a single checkpoint; `gc` frees its space."""
    delete_steps(_opened(root), run, [step], yes)
    say({"run": run, "deleted": [step]}, as_json, f"step {step} of {run} is deleted")


def _opened(root: Path) -> Store:
    return existing(str(root))
