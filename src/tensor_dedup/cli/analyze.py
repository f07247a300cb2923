"""`tensor-dedup analyze`: what checkpoints have in common, before anything is loaded."""

from collections.abc import Sequence

import click

from tensor_dedup.analyze import analyze
from tensor_dedup.cli.analysis_tables import show
from tensor_dedup.cli.names import console
from tensor_dedup.cli.store_verbs import ByteBar, json_option, say, store_option
from tensor_dedup.digest import ALGORITHMS
from tensor_dedup.loader.checkpoint_io.hints import HintIndex


@click.command(name="analyze")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--min-tensor-bytes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Leave tensors smaller than N bytes out of every number.",
)
@click.option(
    "--hash-algorithm",
    type=click.Choice(ALGORITHMS),
    default="blake3",
    show_default=True,
    help="What names bytes here; store://NAME and remembered digests of blake3 need no hashing.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="How many of the largest shared tensors, and layers, to list.",
)
@store_option
@click.option("--no-hints", is_flag=True, help="Hash every file, also those remembered.")
@json_option
def command(
    paths: Sequence[str],
    min_tensor_bytes: int,
    hash_algorithm: str,
    top: int,
    store: str | None,
    no_hints: bool,
    as_json: bool,
) -> None:
    """Say which tensors checkpoints have in common, and what sharing them saves.

    Each PATH is one checkpoint: a file (safetensors, GGUF, or one of torch.save, of which nothing
    is run), a directory with its sub-folders, or store://NAME. Each file is read once; one that was
    hashed before and has not changed is not read at all, and neither is what a store holds.
    """
    with ByteBar("hashing") as progress:
        analysis = analyze(
            paths,
            min_tensor_bytes=min_tensor_bytes,
            hash_algorithm=hash_algorithm,
            hints=None if no_hints else HintIndex(),
            store=store,
            progress=progress,
        )
    if as_json:
        say(analysis.to_dict(top), as_json)
    else:
        show(analysis, console(), top)
