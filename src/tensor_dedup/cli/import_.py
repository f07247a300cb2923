"""`tensor-dedup import`: take a checkpoint into the store."""

from pathlib import Path
from typing import Literal

import click

from tensor_dedup.cli.errors import WrongUse
from tensor_dedup.cli.import_cache import import_cache
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import ByteBar, json_option, say, store_option
from tensor_dedup.loader.checkpoint_io.hints import StoreHints
from tensor_dedup.store import ImportResult, Store
from tensor_dedup.text_table import human


@click.command(name="import")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="N", help="What to call it; by default as its folder, file or repository."
)
@click.option("--replace", is_flag=True, help="Replace the checkpoint that has this name.")
@click.option("--compress", type=click.Choice(["auto"]), help="Encode what gets a tenth smaller.")
@click.option("--base", metavar="N", help="With --compress: what to store differences from.")
@click.option("--external", is_flag=True, help="Index the weights where they are; copy none.")
@click.option("--hub-cache", is_flag=True, help="All of your Hugging Face cache, in place.")
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

    PATH is a file (safetensors, GGUF, torch.save), an index, or a folder; a folder's other files
    (config, tokenizer) are kept too, so that an export works anywhere.

    With --compress auto, new tensors are stored encoded where samples of them say that it saves a
    tenth: by themselves, or as differences from a tensor of the stored checkpoint --base, by
    default the most similar one. Exports are byte for byte the same; reading takes longer.

    With --external the weights are indexed where they are: no second copy is made, they are never
    changed or deleted, and a file that somebody else changes is missed and named. --hub-cache does
    so with every snapshot in HF_HUB_CACHE (or HF_HOME), under names like ORG/NAME@REVISION.
    """
    if (external or hub_cache) and compress is not None:
        raise WrongUse("--compress stores weights, --external and --hub-cache leave them in place")
    if base is not None and compress is None:
        raise WrongUse("--base says what --compress auto compares with; give both")
    if hub_cache:
        if path is not None or name is not None:
            raise WrongUse("--hub-cache names every snapshot itself: no PATH, no --name")
        import_cache(store, replace, as_json)
        return
    if path is None:
        raise WrongUse("Missing argument 'PATH': name a file of weights or a folder")
    with ByteBar("importing") as progress:
        result = Store.open(store).import_(
            path,
            name,
            replace,
            progress=progress,
            hints=StoreHints(),
            compress=compress,
            base=base,
            external=external,
        )
    say(result.to_dict(), as_json, *_lines(result))


def _lines(result: ImportResult) -> list[str]:
    lines = [
        f"{result.name}: {counted(result.tensors, 'tensor')} in {counted(result.files, 'file')}",
        f"new {human(result.new_bytes)} in {counted(result.new_tensors, 'tensor')}, "
        f"known {human(result.known_bytes)}; {human(result.stored_bytes)} written",
    ]
    if result.encoded_tensors:
        against = f", against {result.base}" if result.base is not None else ""
        encoded = counted(result.encoded_tensors, "tensor")
        lines.append(f"saved {human(result.saved_bytes)} by encoding {encoded}{against}")
    if result.external_bytes:
        lines.append(f"indexed in place {human(result.external_bytes)}")
    if result.skipped:
        lines.append(f"left out, weights in another form or copy: {', '.join(result.skipped)}")
    return lines
