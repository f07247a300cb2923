"""`tensor-dedup list`: the checkpoints of the store."""

from datetime import UTC, datetime

import click
from rich.table import Table

from tensor_dedup.cli.names import Dotted, listing
from tensor_dedup.cli.store_verbs import (
    empty,
    existing,
    json_option,
    print_table,
    say,
    store_option,
)
from tensor_dedup.store import Listed
from tensor_dedup.text_table import human


@click.command(name="list")
@store_option
@json_option
def command(store: str | None, as_json: bool) -> None:
    """List the checkpoints of the store."""
    opened = existing(store)
    found = opened.list()
    if as_json:
        document = {"store": str(opened.path), "checkpoints": [each.to_dict() for each in found]}
        say(document, as_json)
    elif found:
        print_table(opened, _table(found))
    else:
        say({}, as_json, empty(opened, "no checkpoints"))


def _table(found: list[Listed]) -> Table:
    table = listing("name", "files", "size", "imported")
    for each in found:
        when = datetime.fromtimestamp(each.imported_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        table.add_row(Dotted(each.name), str(each.files or "-"), human(each.nbytes), when)
    return table
