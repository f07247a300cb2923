"""`tensor-dedup show`: what a stored checkpoint consists of."""

from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli.errors import printable
from tensor_dedup.cli.names import Dotted, cell, console, listing
from tensor_dedup.cli.store_verbs import existing, json_option, say, store_option
from tensor_dedup.store import StoredCheckpoint
from tensor_dedup.text_table import human

# What goes first where a terminal is narrow, so that names keep this width.
_LEAST: Final = ("codec", "stored", "digest", "dtype")
_NAME: Final = 32
_BORDER: Final = 4


@click.command(name="show")
@click.argument("name")
@store_option
@json_option
def command(name: str, store: str | None, as_json: bool) -> None:
    """Show the files and tensors of the checkpoint NAME; digests are those `analyze` shows."""
    with existing(store).checkpoint(name) as checkpoint:
        if as_json:
            say(_document(checkpoint), as_json)
        else:
            out = console()
            out.print(_files(checkpoint))
            table, left_out = _tensors(checkpoint, out)
            out.print(table)
            if left_out:
                out.print(f"No room for: {', '.join(left_out)}; a pipe and --json have all.")


def _document(checkpoint: StoredCheckpoint) -> dict[str, object]:
    return {
        "name": checkpoint.name,
        "stored_bytes": sum(stored for _, stored, _ in map(checkpoint.stored, checkpoint)),
        "manifest": checkpoint.manifest,
        "bytes": checkpoint.nbytes,
        "files": [{"path": file.path, "bytes": file.nbytes} for file in checkpoint.files],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "digest": tensor.digest,
                "alias_of": tensor.alias_of,
                "codec": codec,
                "stored_bytes": stored,
                "base": base,
            }
            for tensor in checkpoint
            for codec, stored, base in [checkpoint.stored(tensor)]
        ],
    }


def _files(checkpoint: StoredCheckpoint) -> Table:
    table = Table("file", "size", title=checkpoint.name, title_justify="left")
    for file in checkpoint.files:
        table.add_row(cell(file.path), human(file.nbytes))
    return table


def _tensors(checkpoint: StoredCheckpoint, out: Console) -> tuple[Table, list[str]]:
    """All tensors, and the columns that had to go to leave room for their names.

    For other programs digests in full; on a terminal their beginning tells tensors apart.
    """
    digits = 8 if out.is_terminal else None
    names, rows = [], []
    for tensor in checkpoint:
        codec, stored, _ = checkpoint.stored(tensor)
        shape = "x".join(map(str, tensor.shape)) or "-"
        sizes = human(tensor.nbytes), human(stored)
        names.append(tensor.name)
        rows.append((printable(tensor.dtype), shape, *sizes, codec, tensor.digest[:digits]))
    columns = ["dtype", "shape", "size", "stored", "codec", "digest"]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    room = out.width - _BORDER - min(_NAME, max(map(len, ["tensor", *names])))
    left_out: list[str] = []
    while sum(widths[columns.index(c)] + _BORDER for c in columns if c not in left_out) > room:
        if len(left_out) == len(_LEAST):
            break
        left_out.append(_LEAST[len(left_out)])
    table = listing("tensor", *(column for column in columns if column not in left_out))
    for name, row in zip(names, rows, strict=True):
        shown = [cell for column, cell in zip(columns, row, strict=True) if column not in left_out]
        table.add_row(Dotted(name), *map(Text, shown))
    return table, left_out
