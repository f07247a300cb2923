"""`tensorcas`: the verbs and flags of tensorcas, on a store of ours."""

from pathlib import Path

import click

from tensor_dedup.cli import Program
from tensor_dedup.cli.output import ask, say, yes_option
from tensor_dedup.cli.runs import delete_steps, measured, stats_lines, steps_of
from tensor_dedup.cli.store import existing, gc_lines, grace_option
from tensor_dedup.store import Store


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
@click.pass_obj
def list_(root: Path, run: str | None) -> None:
    """List all runs and their steps."""
    store = _opened(root)
    found = store.runs() if run is None else [run]
    if not found:
        say({}, False, f"{store.path} holds no training runs; --root names another folder")
    for name in found:
        steps = ", ".join(str(step.step) for step in steps_of(store, name))
        say({}, False, f"{name}: {steps}")


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
@click.pass_obj
def stats(root: Path, run: str | None, form: str) -> None:
    """Chunk counts, unique chunks, dedup ratio, total bytes. A chunk is a tensor here."""
    found = measured(_opened(root), run)
    say(found.to_dict(), form == "json", *stats_lines(found))


@main.command()
@grace_option
@yes_option
@click.pass_obj
def gc(root: Path, grace: float, yes: bool) -> None:
    """Move what no checkpoint uses to the trash, and delete what was there for the grace."""
    store = _opened(root)
    plan = store.gc(grace, dry_run=True)
    if plan.trash or plan.delete or plan.unfinished:
        ask(f"{'. '.join(gc_lines(plan, grace))}. Do it?", yes)
    say({}, False, *gc_lines(store.gc(grace), grace))


@main.command()
@click.option("--run", required=True, help="The run.")
@click.option("--step", type=int, required=True, metavar="N", help="Its step.")
@yes_option
@click.pass_obj
def delete(root: Path, run: str, step: int, yes: bool) -> None:
    """Delete a single checkpoint; its space comes back with the next gc."""
    delete_steps(_opened(root), run, [step], yes)
    say({}, False, f"step {step} of {run} is deleted")


def _opened(root: Path) -> Store:
    return existing(str(root))
