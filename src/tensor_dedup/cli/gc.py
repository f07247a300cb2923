"""`tensor-dedup gc`: give back the space of what no checkpoint uses."""

import click

from tensor_dedup.cli.store_verbs import ask, existing, json_option, say, store_option, yes_option
from tensor_dedup.loader.report_table import human
from tensor_dedup.store import GcPlan
from tensor_dedup.store.collecting import DEFAULT_GRACE_HOURS


@click.command(name="gc")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_HOURS,
    show_default=True,
    metavar="HOURS",
    help="How long the trash is kept.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@yes_option
@store_option
@json_option
def command(grace: float, dry_run: bool, yes: bool, store: str | None, as_json: bool) -> None:
    """Move what no checkpoint uses to the trash, and delete what was there for the grace."""
    opened = existing(store)
    plan = opened.gc(grace, dry_run=True)
    if not dry_run:
        if plan.trash or plan.delete or plan.unfinished:
            ask(f"{'. '.join(gc_lines(plan))}. Do it?", yes)
        plan = opened.gc(grace)
    files = [str(item.path) for item in (*plan.trash, *plan.delete, *plan.unfinished)]
    say(plan.to_dict(), as_json, *(files if dry_run else []), *gc_lines(plan))


def gc_lines(plan: GcPlan) -> list[str]:
    """What gc does, for people."""
    trash = sum(item.nbytes for item in plan.trash)
    return [
        f"To the trash: {len(plan.trash)} files, {human(trash)}",
        f"Deleted: {len(plan.delete) + len(plan.unfinished)} files, {human(plan.freed_bytes)}",
        f"Kept: {human(plan.kept_bytes)}",
    ]
