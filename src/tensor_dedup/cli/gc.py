"""`tensor-dedup gc`: give back the space of what no checkpoint uses."""

import click

from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ask, existing, json_option, say, store_option, yes_option
from tensor_dedup.errors import StoreError
from tensor_dedup.store import GcPlan, Store
from tensor_dedup.store.upkeep.gc import DEFAULT_GRACE_HOURS
from tensor_dedup.text_table import human


@click.command(name="gc")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_HOURS,
    show_default=True,
    metavar="HOURS",
    help="How long the trash is kept; 0 deletes at once.",
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
            ask(f"{'. '.join(gc_lines(plan, grace))}. Do it?", yes)
        plan = opened.gc(grace)
    files = [str(item.path) for item in (*plan.trash, *plan.delete, *plan.unfinished)]
    say(plan.to_dict(), as_json, *(files if dry_run else []), *gc_lines(plan, grace))


def gc_lines(plan: GcPlan, grace: float) -> list[str]:
    """What gc does or did with a grace of so many hours, for people."""
    trash = f"To the trash: {counted(len(plan.trash), 'file')}, {human(_trashed(plan))}"
    if plan.trash:
        trash += f", which a gc {_later(grace)} deletes" if grace else ", and deleted at once"
    gone = len(plan.delete) + len(plan.unfinished)
    deleted = f"{counted(gone, 'file')}, {human(plan.freed_bytes)}"
    return [
        trash,
        f"{'Deleted' if plan.done else 'To delete'}: {deleted}",
        f"Kept: {human(plan.kept_bytes)}",
    ]


def _trashed(plan: GcPlan) -> int:
    return sum(item.nbytes for item in plan.trash)


def _later(grace: float) -> str:
    return f"{grace:g} hours later" if grace != 1 else "an hour later"


def space_after(store: Store) -> tuple[dict[str, object], str]:
    """What gc could give back now that something was deleted: for JSON, and for people."""
    try:
        plan = store.gc(dry_run=True, wait_s=0.0)
    except StoreError as error:
        return {"reclaimable_bytes": None}, f"how much `gc` can give back is not known: {error}"
    nbytes = _trashed(plan)
    known: dict[str, object] = {
        "reclaimable_bytes": nbytes,
        "grace_hours": DEFAULT_GRACE_HOURS,
        "dead_bytes": plan.dead_bytes,
    }
    if nbytes:
        later = _later(DEFAULT_GRACE_HOURS)
        text = (
            f"`tensor-dedup gc` can give back {human(nbytes)} in all: it puts them into the "
            f"trash, and when it runs {later} it deletes them (`gc --grace 0`: at once)"
        )
    else:
        text = "other checkpoints need all that it lies in: there is no space to give back"
    if 100 * plan.dead_bytes > nbytes:  # less is not worth a word
        text += f"; in all, {human(plan.dead_bytes)} that nobody uses lie in what others need"
    return known, text
