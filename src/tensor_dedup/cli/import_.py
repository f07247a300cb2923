"""`tensor-dedup import`: take a checkpoint into the store."""

from pathlib import Path

import click

from tensor_dedup.cli.errors import WrongUse
from tensor_dedup.cli.store_verbs import ByteBar, json_option, say, store_option
from tensor_dedup.loader.hinting import StoreHints
from tensor_dedup.loader.report_table import human
from tensor_dedup.store import ImportResult, Store


@click.command(name="import")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--name", metavar="N", help="By default that of the folder, file or repository.")
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name.")
@click.option("--compress", metavar="auto", help="Not available in this version.")
@click.option("--base", metavar="N", help="Not available in this version.")
@click.option("--external", is_flag=True, help="Not available in this version.")
@click.option("--hub-cache", is_flag=True, help="Not available in this version.")
@store_option
@json_option
def command(
    path: Path | None,
    name: str | None,
    replace: bool,
    compress: str | None,
    base: str | None,
    external: bool,
    hub_cache: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Take a checkpoint into the store: what is new is stored, the rest only referred to.

    PATH is a safetensors file, an index, or a folder; a folder's other files (config, tokenizer)
    are kept too, so that an export works anywhere.
    """
    later = {
        "--compress": compress is not None,
        "--base": base is not None,
        "--external": external,
        "--hub-cache": hub_cache,
    }
    for option, given in later.items():
        if given:
            raise WrongUse(f"{option} is not available in this version; import without it")
    if path is None:
        raise WrongUse("Missing argument 'PATH': name a safetensors file or a folder")
    with ByteBar("importing") as progress:
        result = Store.open(store).import_(
            path, name, replace, progress=progress, hints=StoreHints()
        )
    say(result.to_dict(), as_json, *_lines(result))


def _lines(result: ImportResult) -> list[str]:
    lines = [
        f"{result.name}: {result.tensors} tensors in {result.files} files",
        f"new {human(result.new_bytes)} in {result.new_tensors} tensors, "
        f"known {human(result.known_bytes)}; {human(result.stored_bytes)} written",
    ]
    if result.skipped:
        lines.append(f"left out, weights in another form or copy: {', '.join(result.skipped)}")
    return lines
