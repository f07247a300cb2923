"""`tensor-dedup show`: what a stored checkpoint consists of."""

import click
from rich.table import Table

from tensor_dedup.cli.names import cell, console
from tensor_dedup.cli.store_verbs import existing, json_option, say, store_option
from tensor_dedup.loader.report_table import human
from tensor_dedup.store import StoredCheckpoint


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
            out.print(_tensors(checkpoint, whole=not out.is_terminal))


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


def _tensors(checkpoint: StoredCheckpoint, *, whole: bool) -> Table:
    """`whole`: digests in full. On a terminal their beginning tells tensors apart."""
    table = Table()
    table.add_column("tensor", overflow="fold")
    for name in ("dtype", "shape", "size", "stored", "codec", "digest"):
        table.add_column(name, no_wrap=True)
    for tensor in checkpoint:
        shape = "x".join(map(str, tensor.shape)) or "-"
        digest = tensor.digest if whole else tensor.digest[:8]
        codec, stored, _ = checkpoint.stored(tensor)
        sizes = human(tensor.nbytes), human(stored)
        table.add_row(cell(tensor.name), cell(tensor.dtype), shape, *sizes, codec, digest)
    return table
