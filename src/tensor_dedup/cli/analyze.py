"""`tensor-dedup analyze`: what checkpoints have in common, before anything is loaded."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from tensor_dedup.analyze import Analysis, analyze
from tensor_dedup.analyze.stored import is_stored
from tensor_dedup.cli.names import cell
from tensor_dedup.cli.store_verbs import store_option
from tensor_dedup.digest import ALGORITHMS
from tensor_dedup.loader.hints import HintIndex
from tensor_dedup.loader.report_table import human

# A matrix wider than this is unreadable in a terminal; the best pairs are listed instead.
_MATRIX = 8


@click.command(name="analyze")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--min-tensor-bytes",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave tensors smaller than N bytes out of every number.",
)
@click.option(
    "--hash-algorithm", type=click.Choice(ALGORITHMS), default="blake3", show_default=True
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many of the largest shared tensors, and layers, to list.",
)
@store_option
@click.option("--no-hints", is_flag=True, help="Hash every file, also those remembered.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
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
    progress = _Progress()
    with progress.bar:
        analysis = analyze(
            paths,
            min_tensor_bytes=min_tensor_bytes,
            hash_algorithm=hash_algorithm,
            hints=None if no_hints else HintIndex(),
            store=store,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(analysis.to_dict(top), indent=2))
    else:
        show(analysis, Console(), top)


class _Progress:
    """A bar on stderr with bytes, rate and time left; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("hashing"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self.bar.add_task("hashing", total=None)

    def start(self, total_bytes: int) -> None:
        self.bar.update(self._task, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        self.bar.advance(self._task, nbytes)


def show(analysis: Analysis, console: Console, top: int = 10) -> None:
    """Print an analysis for people."""
    labels = _labels([checkpoint.path for checkpoint in analysis.checkpoints])
    console.print(_checkpoint_table(analysis, labels))
    if len(labels) > 1:
        wide = len(labels) > _MATRIX
        console.print(_pair_list(analysis, top) if wide else _pair_matrix(analysis, labels))
    if analysis.shared_tensors and top:
        console.print(_largest_table(analysis, top))
    if analysis.shared_layers:
        console.print(_layer_table(analysis, top))
    if analysis.vllm.groups and len(labels) > 1:
        console.print(_fusing_table(analysis))
    _say_saving(analysis, console)


def _labels(paths: Sequence[str]) -> list[str]:
    """Numbered, the shortest ends of the paths that tell them apart.

    A path that is given twice keeps its last part, and its number alone tells it from the other.
    """
    parts = [_parts(path) for path in paths]
    different = set(parts)
    shown = []
    for number, own in enumerate(parts, 1):
        others = different - {own}
        count = 1
        while count < len(own) and any(other[-count:] == own[-count:] for other in others):
            count += 1
        shown.append(f"{number} {'/'.join(own[-count:])}")
    return shown


def _parts(path: str) -> tuple[str, ...]:
    if is_stored(path):
        return (path,)
    return Path(path).resolve().parts or (path,)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _checkpoint_table(analysis: Analysis, labels: Sequence[str]) -> Table:
    table = _table("Checkpoints", "checkpoint", "tensors", "size")
    for label, checkpoint in zip(labels, analysis.checkpoints, strict=True):
        table.add_row(cell(label), str(len(checkpoint.tensors)), human(checkpoint.nbytes))
    tensors = sum(len(checkpoint.tensors) for checkpoint in analysis.checkpoints)
    table.add_section()
    table.add_row("total", str(tensors), human(analysis.total_bytes))
    table.add_row("unique", "", human(analysis.unique_bytes))
    return table


def _pair_matrix(analysis: Analysis, labels: Sequence[str]) -> Table:
    numbers = [label.partition(" ")[0] for label in labels]
    table = _table("Shared by two (bytes, tensors)", "", *numbers)
    pairs = iter(analysis.pairs)
    rows = [["" for _ in labels] for _ in labels]
    for a in range(len(labels)):
        for b in range(a + 1, len(labels)):
            pair = next(pairs)
            rows[a][b] = rows[b][a] = f"{human(pair.shared_bytes)}\n{pair.shared_tensors}"
    for label, row in zip(labels, rows, strict=True):
        table.add_row(cell(label), *row)
    return table


def _pair_list(analysis: Analysis, top: int) -> Table:
    table = _table("Pairs that share most", "a", "b", "tensors", "size")
    for pair in sorted(analysis.pairs, key=lambda pair: -pair.shared_bytes)[:top]:
        table.add_row(
            cell(pair.a), cell(pair.b), str(pair.shared_tensors), human(pair.shared_bytes)
        )
    return table


def _largest_table(analysis: Analysis, top: int) -> Table:
    table = _table("Largest shared tensors", "name", "dtype", "shape", "size", "copies")
    for tensor in analysis.shared_tensors[:top]:
        kind = tensor.fingerprint
        shape = "x".join(map(str, kind.shape)) or "-"
        copies = str(len(tensor.places))
        table.add_row(cell(tensor.places[0][1]), kind.dtype, shape, human(tensor.nbytes), copies)
    return table


def _layer_table(analysis: Analysis, top: int) -> Table:
    layers = analysis.shared_layers
    shown = layers[:top]
    title = f"Layers shared whole: {len(layers)}"
    table = _table(title, "layer", "tensors", "size", "checkpoints")
    for layer in shown:
        holders = str(len({path for path, _ in layer.places}))
        table.add_row(cell(layer.places[0][1]), str(layer.tensors), human(layer.nbytes), holders)
    if len(layers) > len(shown):
        rest = sum(layer.nbytes for layer in layers[len(shown) :])
        table.add_row(f"... {len(layers) - len(shown)} more", "", human(rest), "")
    return table


def _fusing_table(analysis: Analysis) -> Table:
    # The first checkpoint finds nothing in memory: only what comes after it can be shared.
    columns = ("parameter", "in the first", "in later ones", "of those shared", "broken", "lost")
    table = _table("Fused by vLLM, loaded in this order", *columns)
    for group in analysis.vllm.groups:
        row = (group.fused - group.followers, group.followers, group.shared, group.broken)
        table.add_row(group.suffix, *map(str, row), human(group.lost_bytes))
    return table


def _say_saving(analysis: Analysis, console: Console) -> None:
    console.print(
        f"Sharing saves [bold]{human(analysis.shared_bytes)}[/] of "
        f"{human(analysis.total_bytes)} ([bold]{analysis.saving:.2%}[/])."
    )
    if len(analysis.checkpoints) > 1:
        lost = analysis.vllm.lost_bytes
        console.print(
            f"In vLLM {human(analysis.vllm.shared_bytes)} of it survive fusing"
            f"{f', {human(lost)} are lost to it' if lost else ''}."
        )
    known = analysis.total_bytes > 0 and analysis.bytes_hashed == 0
    hashed = "nothing, all digests were remembered" if known else human(analysis.bytes_hashed)
    console.print(f"Hashed: {hashed}.")
