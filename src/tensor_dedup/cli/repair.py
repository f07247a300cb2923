"""`tensor-dedup repair`: restore what is damaged or lost."""

from collections.abc import Sequence
from pathlib import Path

import click

from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ByteBar, json_option, say, store_option
from tensor_dedup.store import Store
from tensor_dedup.text_table import human


@click.command(name="repair")
@click.option(
    "--from",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A checkpoint that holds what is lost; can be given several times.",
)
@click.argument("more", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path))
@store_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    paths: Sequence[Path],
    more: Sequence[Path],
    store: str | None,
    as_json: bool,
) -> None:
    """Restore what `verify` found damaged, from the trash and from checkpoints that hold it.

    Bytes come back only under the digest they have. Exit status 1 while anything is missing.
    """
    opened = Store.open(store, create=False, mend=True)
    with ByteBar("repairing") as progress:
        result = opened.repair([*paths, *more], progress=progress)
    say(
        result.to_dict(),
        as_json,
        f"restored: {counted(result.pieces, 'piece')} ({human(result.bytes)}), "
        f"{result.manifests} of manifests and pages, {counted(result.references, 'reference')}, "
        f"{counted(result.from_trash, 'container')} from the trash",
        *(f"missing: {what}" for what in result.missing),
    )
    if not result.whole:
        ctx.exit(1)
