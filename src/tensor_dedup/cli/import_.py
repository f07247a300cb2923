"""`tensor-dedup import`: take a checkpoint into the store."""

from pathlib import Path
from typing import Literal

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
@click.option("--compress", type=click.Choice(["auto"]), help="Encode what gets a tenth smaller.")
@click.option("--base", metavar="N", help="With --compress: what to store differences from.")
@click.option("--external", is_flag=True, help="Not available in this version.")
@click.option("--hub-cache", is_flag=True, help="Not available in this version.")
@store_option
@json_option
def command(
    path: Path | None,
    name: str | None,
    replace: bool,
    compress: Literal["auto"] | None,
    base: str | None,
    external: bool,
    hub_cache: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Take a checkpoint into the store: what is new is stored, the rest only referred to.

    PATH is a safetensors file, an index, or a folder; a folder's other files (config, tokenizer)
    are kept too, so that an export works anywhere.

    With --compress auto, new tensors are stored encoded where samples of them say that it saves a
    tenth: by themselves, or as differences from a tensor of the stored checkpoint --base, by
    default the most similar one. Exports are byte for byte the same; reading takes longer.
    """
    later = {
        "--external": external,
        "--hub-cache": hub_cache,
    }
    for option, given in later.items():
        if given:
            raise WrongUse(f"{option} is not available in this version; import without it")
    if base is not None and compress is None:
        raise WrongUse("--base says what --compress auto compares with; give both")
    if path is None:
        raise WrongUse("Missing argument 'PATH': name a safetensors file or a folder")
    with ByteBar("importing") as progress:
        result = Store.open(store).import_(
            path,
            name,
            replace,
            progress=progress,
            hints=StoreHints(),
            compress=compress,
            base=base,
        )
    say(result.to_dict(), as_json, *_lines(result))


def _lines(result: ImportResult) -> list[str]:
    lines = [
        f"{result.name}: {result.tensors} tensors in {result.files} files",
        f"new {human(result.new_bytes)} in {result.new_tensors} tensors, "
        f"known {human(result.known_bytes)}; {human(result.stored_bytes)} written",
    ]
    if result.encoded_tensors:
        against = f", against {result.base}" if result.base is not None else ""
        lines.append(
            f"saved {human(result.saved_bytes)} by encoding {result.encoded_tensors} tensors"
            f"{against}"
        )
    if result.skipped:
        lines.append(f"left out, weights in another form or copy: {', '.join(result.skipped)}")
    return lines
