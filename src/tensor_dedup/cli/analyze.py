"""`tensor-dedup analyze`: what checkpoints have in common, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from tensor_dedup.analyze import Analysis, analyze
from tensor_dedup.analyze.analysis import compare
from tensor_dedup.analyze.stored import SCHEME
from tensor_dedup.cli import WrongUse
from tensor_dedup.cli.analysis_page import write_page
from tensor_dedup.cli.analysis_tables import show_tables
from tensor_dedup.cli.analysis_text import show_summary
from tensor_dedup.cli.output import ByteBar, byte_size, console, json_option, say
from tensor_dedup.cli.store import follow_links_option, store_option
from tensor_dedup.digest import ALGORITHMS
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.text_table import human


@click.command(name="analyze")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--min-tensor-bytes",
    type=byte_size(),
    default=0,
    show_default=True,
    metavar="SIZE",
    help="Leave tensors smaller than this, for example 1MiB, out of every number.",
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
    help="With --details and --json: how many of the largest shared tensors to list.",
)
@click.option("--details", is_flag=True, help="Also print pairs, tensors, layers, what vLLM fuses.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also draw it as a page of its own, which needs nothing else.",
)
@follow_links_option
@store_option
@click.option("--no-hints", is_flag=True, help="Hash every file, also those remembered.")
@json_option
def command(
    paths: Sequence[str],
    min_tensor_bytes: int,
    hash_algorithm: str,
    top: int,
    details: bool,
    page: Path | None,
    follow_links: bool,
    store: str | None,
    no_hints: bool,
    as_json: bool,
) -> None:
    """Say which tensors checkpoints have in common, and what sharing them saves.

    Each PATH is one checkpoint: a file (safetensors, GGUF, or one of torch.save, of which nothing
    is run), a directory with its sub-folders, a name in your Hugging Face cache (ORG/NAME or
    ORG/NAME@REVISION), store://NAME, or a training step RUN@STEP of the store. Each file is read
    once; one that was hashed before and has not changed is not read at all, and neither is what a
    store holds.
    """
    if page is not None and page.suffix != ".html":
        raise WrongUse(f"{page} does not end in .html; name a file that does")
    with ByteBar("hashing") as progress:
        analysis = analyze(
            paths,
            min_tensor_bytes=min_tensor_bytes,
            hash_algorithm=hash_algorithm,
            hints=None if no_hints else HintIndex(),
            store=store,
            progress=progress,
            follow_links=follow_links,
        )
    if page is not None:
        drawn, _ = _of_tensors(analysis)
        write_page(page, drawn, _labels(paths))
    if as_json:
        say(analysis.to_dict(top), as_json)
    else:
        show_analysis(analysis, console(), top, details=details)


def show_analysis(
    analysis: Analysis, console: Console, top: int = 10, *, details: bool = False
) -> None:
    """Print an analysis for people: one screen, and with `details` all tables below it."""
    analysis, left_out = _of_tensors(analysis)
    labels = _labels([checkpoint.path for checkpoint in analysis.checkpoints])
    show_summary(analysis, labels, console, whole=details)
    if details:
        show_tables(analysis, labels, console, top)
        _say_reading(analysis, console)
    if left_out:
        console.print(left_out)


def _of_tensors(analysis: Analysis) -> tuple[Analysis, str]:
    """Without what steps of a training have beside their tensors, and a line on that."""
    checkpoints, count, nbytes = [], 0, 0
    for each in analysis.checkpoints:
        tensors = [t for t in each.tensors if not t.name.startswith(STATE_MARK)]
        checkpoints.append(replace(each, tensors=tensors))
        count += len(each.tensors) - len(tensors)
        nbytes += each.nbytes - checkpoints[-1].nbytes
    if not count:
        return analysis, ""
    left_out = (
        f"Left out: {count} entries of training steps that are no tensors (#structure and the "
        f"like), {human(nbytes)}; --json counts them."
    )
    return compare(checkpoints, analysis.bytes_read, analysis.bytes_hashed), left_out


def _labels(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths, as they were given, that tell them apart.

    A path that is given twice keeps its last part.
    """
    parts = [_parts(path) for path in paths]
    different = set(parts)
    shown = []
    for own in parts:
        others = different - {own}
        count = 1
        while count < len(own) and any(other[-count:] == own[-count:] for other in others):
            count += 1
        shown.append("/".join(own[-count:]))
    return shown


def _parts(path: str) -> tuple[str, ...]:
    return (path,) if path.startswith(SCHEME) else Path(path).parts or (path,)


def _say_reading(analysis: Analysis, console: Console) -> None:
    known = analysis.total_bytes > 0 and analysis.bytes_hashed == 0
    hashed = "nothing, all digests were known" if known else human(analysis.bytes_hashed)
    console.print(f"\nHashed: {hashed}.")
