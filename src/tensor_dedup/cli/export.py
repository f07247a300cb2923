"""`tensor-dedup export`: write a stored checkpoint's files, byte for byte."""

from pathlib import Path

import click

from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ByteBar, existing, json_option, say, store_option


@click.command(name="export")
@click.argument("name")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@store_option
@json_option
def command(name: str, directory: Path, store: str | None, as_json: bool) -> None:
    """Write the files of the checkpoint NAME to DIR, which must be empty or not there.

    Every byte is compared with its digest on the way.
    """
    with ByteBar("exporting") as progress:
        paths = existing(store).export(name, directory, progress=progress)
    document = {"name": name, "files": [str(path) for path in paths]}
    say(document, as_json, f"{name}: {counted(len(paths), 'file')} in {directory}")
