"""`tensor-dedup diff`: what changed from one checkpoint to another."""

from collections import defaultdict
from collections.abc import Iterator

import click
from rich.table import Table

from tensor_dedup.analyze.difference import CheckpointDiff, TensorChange, diff, prefixes_of
from tensor_dedup.analyze.picture import percent
from tensor_dedup.cli.store import follow_links_option, store_option
from tensor_dedup.cli.tables import Dotted, counted
from tensor_dedup.cli.terminal import ByteBar, console, json_option, say
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.text_table import human

# So many names that change their beginning alike are one line.
_ALIKE = 4


@click.command(name="diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--stat", is_flag=True, help="Only counts and sizes: no numbers are compared.")
@follow_links_option
@store_option
@json_option
def command(
    a: str, b: str, stat: bool, follow_links: bool, store: str | None, as_json: bool
) -> None:
    """Show which tensors were renamed, changed, added or removed from checkpoint A to B.

    Each is a file, a folder, a name in your Hugging Face cache, store://NAME, or a training step
    RUN@STEP of the store. For each changed tensor, the values that differ are counted. The exit
    status is 0 whether they differ or not.
    """
    with ByteBar("hashing") as progress:
        found = diff(
            a,
            b,
            count=not stat,
            hints=HintIndex(),
            store=store,
            progress=progress,
            follow_links=follow_links,
        )
    if as_json:
        say(found.to_dict(), as_json)
        return
    out = console()
    if not stat and (found.renamed or found.changed or found.added or found.removed):
        out.print(_tensors(found))
        out.print()
    out.print(_counts(found))
    if found.state_differs:
        out.print("The steps also differ in plain values or structure, which are no tensors.")


def _tensors(found: CheckpointDiff) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("tensor")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("differ", justify="right")
    for line in _renamed(found):
        table.add_row("renamed", Dotted(line), "", "")
    for each in found.changed:
        table.add_row("changed", Dotted(each.name), human(each.nbytes), _how_much(each))
    for kind, held in (("added", found.added), ("removed", found.removed)):
        for name, nbytes in held:
            table.add_row(kind, Dotted(name), human(nbytes), "")
    return table


def _renamed(found: CheckpointDiff) -> Iterator[str]:
    """Old and new names; many that begin alike are one line."""
    groups: defaultdict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for old, new in found.renamed:
        groups[prefixes_of(old, new)].append((old, new))
    for (old_prefix, new_prefix), pairs in groups.items():
        if len(pairs) >= _ALIKE:
            yield f"{old_prefix}* -> {new_prefix}* ({counted(len(pairs), 'tensor')})"
        else:
            yield from (f"{old} -> {new}" for old, new in pairs)


def _how_much(change: TensorChange) -> str:
    if change.differing is not None and change.numbers is not None:
        share = percent(change.differing, change.numbers)
        return f"{share} % of {change.numbers:,}"
    old, new = ("x".join(map(str, shape)) or "scalar" for shape in (change.old_shape, change.shape))
    if change.old_dtype != change.dtype:
        old, new = f"{change.old_dtype} {old}", f"{change.dtype} {new}"
    return f"{old} -> {new}" if old != new else ""


def _counts(found: CheckpointDiff) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for kind, count, nbytes in (
        ("unchanged", found.unchanged, found.unchanged_bytes),
        ("renamed", len(found.renamed), found.renamed_bytes),
        ("changed", len(found.changed), found.changed_bytes),
        ("added", len(found.added), sum(nbytes for _, nbytes in found.added)),
        ("removed", len(found.removed), sum(nbytes for _, nbytes in found.removed)),
    ):
        table.add_row(kind, counted(count, "tensor"), human(nbytes))
    return table
