"""`tensor-dedup analyze`: what checkpoints have in common, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensor_dedup.analyze import Analysis, analyze
from tensor_dedup.analyze.analysis import compare
from tensor_dedup.analyze.marker_checks import CheckedMarker, write_markers
from tensor_dedup.analyze.tensors import Measured
from tensor_dedup.analyze.variants import Variant, variants
from tensor_dedup.analyze.verdict import left_out
from tensor_dedup.cli import Failure, check_suffix, printable
from tensor_dedup.cli.analysis_page import write_page
from tensor_dedup.cli.analysis_tables import show_tables
from tensor_dedup.cli.analysis_text import show_summary
from tensor_dedup.cli.page import html_option
from tensor_dedup.cli.store import follow_links_option, part_lines, store_option
from tensor_dedup.cli.tables import counted
from tensor_dedup.cli.terminal import ByteBar, byte_size, console, json_option, say, say_lines
from tensor_dedup.digest import ALGORITHMS
from tensor_dedup.formats.hub_cache import name_parts
from tensor_dedup.formats.left_out import described
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.store.format.manifests import STATE_MARK
from tensor_dedup.text_table import human

_WRONG_SHOWN = 4


@click.command(name="analyze")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--min-tensor-bytes",
    type=byte_size(),
    default=0,
    show_default=True,
    metavar="SIZE",
    help="Leave tensors smaller than this out of every number; for example 1MiB. They are not "
    "compared, and may differ.",
)
@click.option(
    "--hash-algorithm",
    type=click.Choice(ALGORITHMS),
    default="blake3",
    show_default=True,
    help="How tensors are hashed; only blake3 can use the store and remembered digests.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="With --details and --json: the number of largest shared tensors to list.",
)
@click.option(
    "--details",
    is_flag=True,
    help="Also print tables of pairs, tensors, layers and what vLLM fuses.",
)
@html_option("the picture")
@click.option(
    "--write-markers",
    "markers",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write markers of what each PATH shares with the first one to the new folder OUT.",
)
@click.option(
    "--variants",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also estimate what N such models take: as they are, quantised, and shared.",
)
@follow_links_option
@store_option
@click.option(
    "--no-hints", is_flag=True, help="Hash every file, even those whose digests are remembered."
)
@json_option
def command(
    paths: Sequence[str],
    min_tensor_bytes: int,
    hash_algorithm: str,
    top: int,
    details: bool,
    page: Path | None,
    markers: Path | None,
    count: int | None,
    follow_links: bool,
    store: str | None,
    no_hints: bool,
    as_json: bool,
) -> None:
    """Show which tensors checkpoints share, and what sharing them saves.

    Each PATH is one checkpoint: a file (safetensors, GGUF, or torch.save, whose code is never run),
    a directory with its sub-folders, a name in your Hugging Face cache (ORG/NAME or
    ORG/NAME@REVISION), store://NAME, or a training step RUN@STEP of the store. A directory that
    holds several models stands for each of them: quantisations beside each other, or the store of
    Ollama or Docker Model Runner (~/.ollama/models, ~/.docker/models), or a Hugging Face cache,
    whose repositories it compares. A model of these that cannot be read is named, the others are
    compared, and the exit status is 1. Each file is read once. Files that were hashed before and
    have not changed, and checkpoints in the store, are not read at all.
    """
    check_suffix(page, ".html")
    with ByteBar("hashing") as progress:
        analysis = analyze(
            paths,
            min_tensor_bytes=min_tensor_bytes,
            hash_algorithm=hash_algorithm,
            hints=None if no_hints else HintIndex(),
            store=store,
            progress=progress,
            follow_links=follow_links,
            all_models=True,
        )
    if page is not None:
        drawn, _ = _of_tensors(analysis)
        write_page(page, drawn, _labels(drawn.checkpoints))
    written = None if markers is None else write_markers(analysis.checkpoints, markers)
    rows = [] if count is None else variants(_of_tensors(analysis)[0].checkpoints, count)
    for why in analysis.failed.values():
        click.echo(printable(why), err=True)
    if as_json:
        more = {} if count is None else {"variants": [row.to_dict() for row in rows]}
        say(analysis.to_dict(top) | more, as_json)
        _end(analysis)
        return
    show_analysis(analysis, console(), top, details=details)
    if rows:
        _show_variants(rows, len(analysis.checkpoints), console())
    if markers is not None:
        for folder in written or ():
            say_lines(f"written: {folder}")
        if not written:
            say_lines(f"no PATH has a tensor of the first one; {markers} is empty")
    if page is not None:
        say_lines(f"Wrote {page}.")
    _end(analysis)


def _end(analysis: Analysis) -> None:
    if failed := len(analysis.failed):
        total = failed + len(analysis.checkpoints)
        raise Failure(f"{failed} of {total} models could not be read")


def show_analysis(
    analysis: Analysis, console: Console, top: int = 10, *, details: bool = False
) -> None:
    """Print an analysis as text: one screen, and all tables if `details` is True.

    `top` limits the rows of a table.
    """
    analysis, other_entries = _of_tensors(analysis)
    labels = _labels(analysis.checkpoints)
    show_summary(analysis, labels, console, whole=details)
    if details:
        show_tables(analysis, labels, console, top)
        _say_reading(analysis, console)
    for checkpoint, label in zip(analysis.checkpoints, labels, strict=True):
        start = f"{printable(label)}: " if len(labels) > 1 else ""
        about = described(checkpoint.left_out, checkpoint.not_indexed)
        for line in (*about, *part_lines(Path(checkpoint.path))):
            console.print(Text(start + printable(line)), soft_wrap=True)
    small = left_out(analysis)
    for marker in analysis.markers:
        console.print(_marked(marker, whole=not small))
    for line in filter(None, (small, other_entries)):
        console.print(Text(line), soft_wrap=True)


def _show_variants(rows: Sequence[Variant], given: int, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("approach", "weights", "answers"):
        table.add_column(heading, justify="right" if heading == "weights" else "left")
    for row in rows:
        table.add_row(row.approach, ("" if row.measured else "~ ") + human(row.nbytes), row.answers)
    console.print()
    console.print(table)
    console.print("~ from shapes, or the assumption that a head is a tenth; not measured.")
    if given == 1:
        console.print("What variants share is not known: give the base first, then some of them.")


def _marked(marker: CheckedMarker, *, whole: bool) -> str:
    count, base = counted(marker.tensors, "tensor"), printable(marker.base)
    says = f"{printable(marker.path)} says that {count} of it are those of {base}"
    if marker.found is None and not whole:
        return f"{says}; that is checked without --min-tensor-bytes, which leaves some of it out."
    if marker.found is None:
        return f"{says}; give that one, too, to check it."
    if not marker.wrong:
        return f"{says}, and they are."
    some = ", ".join(map(printable, marker.wrong[:_WRONG_SHOWN]))
    more = f" and {len(marker.wrong) - _WRONG_SHOWN} more" if marker.wrong[_WRONG_SHOWN:] else ""
    return f"{says}, and {len(marker.wrong)} are not: {some}{more}."


def _of_tensors(analysis: Analysis) -> tuple[Analysis, str]:
    """Without what steps of a training have beside their tensors, and a line on that."""
    checkpoints, count, nbytes = [], 0, 0
    for each in analysis.checkpoints:
        tensors = [t for t in each.tensors if not t.name.startswith(STATE_MARK)]
        others = len(each.tensors) - len(tensors)
        checkpoints.append(replace(each, tensors=tensors, others=others))
        count += others
        nbytes += each.nbytes - checkpoints[-1].nbytes
    if not count:
        return analysis, ""
    line = (
        f"Left out: {count} entries of training steps that are no tensors (#structure and the "
        f"like), {human(nbytes)}; --json counts them."
    )
    again = compare(
        checkpoints, analysis.bytes_read, analysis.bytes_hashed, analysis.min_tensor_bytes
    )
    return again, line


def _labels(checkpoints: Sequence[Measured]) -> list[str]:
    """The names that other tools gave, or the shortest ends of the paths that tell them apart.

    A path that is given twice keeps its last part.
    """
    parts = [(each.name,) if each.name else name_parts(each.path) for each in checkpoints]
    different = set(parts)
    shown = []
    for own in parts:
        others = different - {own}
        count = 1
        while count < len(own) and any(other[-count:] == own[-count:] for other in others):
            count += 1
        shown.append("/".join(own[-count:]))
    return shown


def _say_reading(analysis: Analysis, console: Console) -> None:
    known = analysis.total_bytes > 0 and analysis.bytes_hashed == 0
    hashed = "nothing, all digests were known" if known else human(analysis.bytes_hashed)
    console.print(f"\nHashed: {hashed}.")
