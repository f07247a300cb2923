"""The detailed tables of an analysis, which `analyze --details` prints below the summary."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from tensor_dedup.analyze import Analysis
from tensor_dedup.analyze.layers import SharedLayer
from tensor_dedup.cli.tables import Dotted, cell
from tensor_dedup.formats.layers.layer_names import natural
from tensor_dedup.text_table import human

# A matrix wider than this is unreadable in a terminal; the best pairs are listed instead.
_MATRIX = 8
_NAME = 16
_BLOCK = re.compile(r"(.*\.)?(\d+)")


def show_tables(analysis: Analysis, labels: Sequence[str], console: Console, top: int) -> None:
    """Print tables of checkpoints, pairs, tensors and layers, with the names `labels`.

    The tables of tensors and layers have at most `top` rows.
    """
    labels = [f"{number} {label}" for number, label in enumerate(labels, 1)]
    tables = [_checkpoint_table(analysis, labels)]
    if len(labels) > 1:
        tables.append(_pairs(analysis, labels, top, console))
    if analysis.shared_tensors and top:
        tables.append(_largest_table(analysis, top))
    if analysis.shared_layers:
        tables.append(_layer_table(analysis, top))
    if analysis.vllm.groups and len(labels) > 1:
        tables.append(_fusing_table(analysis))
    for table in tables:
        console.print()
        console.print(table)


def _table(title: str, *columns: str, names: int = 1) -> Table:
    """A table whose first columns are names, which may take several lines, and others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        name = number < names
        side: Literal["left", "right"] = "left" if name else "right"
        least = max(map(len, column.split()), default=None) if name else None
        table.add_column(column, justify=side, no_wrap=not name, overflow="fold", min_width=least)
    return table


def _checkpoint_table(analysis: Analysis, labels: Sequence[str]) -> Table:
    table = _table("Checkpoints", "checkpoint", "tensors", "size")
    for label, checkpoint in zip(labels, analysis.checkpoints, strict=True):
        table.add_row(Dotted(label), str(len(checkpoint.tensors)), human(checkpoint.nbytes))
    tensors = sum(len(checkpoint.tensors) for checkpoint in analysis.checkpoints)
    table.add_section()
    table.add_row("total", str(tensors), human(analysis.total_bytes))
    table.add_row("unique", "", human(analysis.unique_bytes))
    return table


def _pairs(analysis: Analysis, labels: Sequence[str], top: int, console: Console) -> Table:
    """A matrix where it can be read, else the best pairs."""
    if len(labels) <= _MATRIX:
        # Names can take several lines, numbers cannot.
        short = _pair_matrix(analysis, [label[:_NAME] for label in labels])
        unbounded = console.options.update(max_width=10_000)
        if Measurement.get(console, unbounded, short).maximum <= console.width:
            return _pair_matrix(analysis, labels)
    return _pair_list(analysis, labels, top)


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
        table.add_row(Dotted(label), *row)
    return table


def _pair_list(analysis: Analysis, labels: Sequence[str], top: int) -> Table:
    table = _table("Pairs that share most", "a", "b", "tensors", "size", names=2)
    both = zip(combinations(labels, 2), analysis.pairs, strict=True)
    for (a, b), pair in sorted(both, key=lambda each: -each[1].shared_bytes)[:top]:
        table.add_row(Dotted(a), Dotted(b), str(pair.shared_tensors), human(pair.shared_bytes))
    return table


def _largest_table(analysis: Analysis, top: int) -> Table:
    table = _table("Largest shared tensors", "name", "dtype", "shape", "size", "copies")
    for tensor in analysis.shared_tensors[:top]:
        kind = tensor.fingerprint
        shape = "x".join(map(str, kind.shape)) or "-"
        copies = str(len(tensor.places))
        name = Dotted(tensor.places[0][1])
        table.add_row(name, cell(kind.dtype), shape, human(tensor.nbytes), copies)
    rest = analysis.shared_tensors[top:]
    if rest:
        table.add_row(f"... {len(rest)} more", "", "", human(sum(t.nbytes for t in rest)), "")
    return table


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers that follow one another and are alike, or a module outside of the layers.

    `numbers` are those of the first and the last; None outside. Sizes are of all of them together.
    """

    prefix: str
    numbers: tuple[int, int] | None
    count: int
    tensors: int
    nbytes: int
    holders: frozenset[str]

    @property
    def name(self) -> str:
        if self.numbers is None:
            return self.prefix
        first, last = self.numbers
        return f"{self.prefix}{first}" + (f"-{last}" if last > first else "")

    def followed_by(self, other: "_Layers") -> bool:
        """Is the other one the next of these?"""
        return (
            self.numbers is not None
            and other.numbers is not None
            and (self.prefix, self.holders) == (other.prefix, other.holders)
            and self.numbers[1] + 1 == other.numbers[0]
        )

    def joined(self, other: "_Layers") -> "_Layers":
        """With the next of these."""
        assert self.numbers is not None
        assert other.numbers is not None
        return replace(
            self,
            numbers=(self.numbers[0], other.numbers[1]),
            count=self.count + other.count,
            tensors=self.tensors + other.tensors,
            nbytes=self.nbytes + other.nbytes,
        )


def _layers(shared: Sequence[SharedLayer]) -> Iterator[_Layers]:
    """One by one, as the first checkpoint that has it calls each."""
    for layer in shared:
        holders = frozenset(path for path, _ in layer.places)
        first = layer.places[0][0]
        for name in dict.fromkeys(name for path, name in layer.places if path == first):
            block = _BLOCK.fullmatch(name)
            prefix, number = (block[1] or "", int(block[2])) if block else (name, None)
            numbers = None if number is None else (number, number)
            yield _Layers(prefix, numbers, 1, layer.tensors, layer.nbytes, holders)


def _runs(layers: Sequence[_Layers]) -> list[_Layers]:
    """In their models' order, with those that follow one another as one."""
    runs: list[_Layers] = []
    for each in sorted(layers, key=lambda one: natural(one.name)):
        if runs and runs[-1].followed_by(each):
            last = runs.pop()
            each = last.joined(each)
        runs.append(each)
    return runs


def _layer_table(analysis: Analysis, top: int) -> Table:
    """Numbered blocks are layers; embeddings, heads and norms outside of them are not."""
    found = list(_layers(analysis.shared_layers))
    blocks = _runs([each for each in found if each.numbers is not None])
    others = sorted(
        (each for each in found if each.numbers is None),
        key=lambda each: (-each.nbytes, natural(each.name)),
    )
    count = sum(each.count for each in blocks)
    whole = all(each.is_whole for each in analysis.checkpoints)
    title = f"Layers shared {'whole' if whole else 'as far as compared'}: {count}"
    title += f", other modules: {len(others)}" if others else ""
    table = _table(title, "layer or module", "layers", "tensors", "size", "checkpoints")
    for part in (blocks, others):
        for each in part[:top]:
            layers = str(each.count) if each.numbers is not None else "-"
            holders = sum(one.path in each.holders for one in analysis.checkpoints)
            sizes = str(each.tensors), human(each.nbytes), str(holders)
            table.add_row(Dotted(each.name), layers, *sizes)
        if rest := part[top:]:
            nbytes = human(sum(each.nbytes for each in rest))
            table.add_row(f"... {len(rest)} more", "", "", nbytes, "")
        table.add_section()
    return table


def _fusing_table(analysis: Analysis) -> Table:
    # The first checkpoint finds nothing in memory: only what comes after it can be shared.
    columns = ("parameter", "first", "later", "shared", "broken", "lost")
    title = "Fused by vLLM: in the first one, in later ones, and of those shared"
    table = _table(title, *columns)
    for group in analysis.vllm.groups:
        row = (group.fused - group.followers, group.followers, group.shared, group.broken)
        table.add_row(Dotted(group.suffix), *map(str, row), human(group.lost_bytes))
    return table
