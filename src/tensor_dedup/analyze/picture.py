"""A chart of an analysis: rows for checkpoints, cells for layers, from private to shared."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.formats.layers.layer_names import natural, split, unwrapped

_BLOCK = re.compile(r"(?:(?P<prefix>.*)\.)?(?P<number>\d+)")
_EMBEDDING = re.compile(r"embed|wte|wpe")
_HEAD = re.compile(r"head|output|score|classif|logits")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the chart: one or more layers of a checkpoint, and which tensors are shared.

    `shared` has a value for each of `tensors`: True if an earlier checkpoint has the tensor. In the
    first checkpoint, True means that a later checkpoint has it.
    """

    tensors: tuple[AnalyzedTensor, ...]
    shared: tuple[bool, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def shared_bytes(self) -> int:
        both = zip(self.tensors, self.shared, strict=True)
        return sum(tensor.nbytes for tensor, shared in both if shared)

    @property
    def percent(self) -> int:
        """How much is shared, in percent; 0 only if nothing is, 100 only if everything is."""
        return percent(self.shared_bytes, self.nbytes)


@dataclass(frozen=True, slots=True)
class Section:
    """Neighbouring columns of the chart under one title; each column is a tuple of layer names."""

    title: str
    columns: tuple[tuple[str, ...], ...]

    def grouped(self, size: int) -> "Section":
        """Return the section with each `size` neighbouring columns joined into one."""
        flat = range(0, len(self.columns), size)
        joined = (sum(self.columns[start : start + size], ()) for start in flat)
        return replace(self, columns=tuple(joined))


@dataclass(frozen=True, slots=True)
class Picture:
    """The chart: its sections from left to right, and its cells.

    `rows[checkpoint][section][column]` is a cell.
    """

    sections: tuple[Section, ...]
    rows: tuple[tuple[tuple[Cell, ...], ...], ...]


def percent(part: int, whole: int) -> int:
    """Return `part` in percent of `whole`: 0 only if `part` is 0, 100 only if they are equal."""
    if not whole or part == whole:
        return 100 if part else 0
    return min(99, max(1, round(100 * part / whole))) if part else 0


def sections(checkpoints: Sequence[Measured]) -> list[Section]:
    """Return the columns of the chart for these checkpoints, grouped into titled sections.

    Each numbered layer has a column of its own. All embeddings share a column, and so do all other
    layers. In a pipeline, each component is a section.
    """
    names = dict.fromkeys(_column(t.name) for c in checkpoints for t in c.tensors)
    components = dict.fromkeys(name.rpartition("/")[0] for name in names)
    if len(components) > 1:  # of a pipeline
        return [
            Section(
                component or "other",
                _in_order(n for n in names if n.rpartition("/")[0] == component),
            )
            for component in sorted(components)
        ]
    blocks: dict[str, list[str]] = {}
    embeddings, others = [], []
    for name in sorted(names, key=natural):
        if block := _BLOCK.fullmatch(name):
            blocks.setdefault(block["prefix"] or "", []).append(name)
        elif _EMBEDDING.search(name):
            embeddings.append(name)
        else:
            others.append(name)
    found = [Section("embed", (tuple(embeddings),))] if embeddings else []
    found += [Section(_title(prefix, of), tuple((n,) for n in of)) for prefix, of in blocks.items()]
    if others:
        head = any(map(_HEAD.search, others))
        one = others[0].rpartition(".")[2] if len(others) == 1 else "other"
        found.append(Section("head" if head else one, (tuple(others),)))
    return found


def draw(checkpoints: Sequence[Measured], columns: Sequence[Section]) -> Picture:
    """Return a chart with a row for each of `checkpoints`.

    Its columns, from left to right, are those of each section in `columns`.
    """
    later = {t.fingerprint.digest for c in checkpoints[1:] for t in c.tensors}
    before: set[str] = set()
    rows = []
    for number, checkpoint in enumerate(checkpoints):
        layers: dict[str, list[AnalyzedTensor]] = {}
        for tensor in checkpoint.tensors:
            layers.setdefault(_column(tensor.name), []).append(tensor)
        rows.append(
            tuple(
                tuple(_cell(layers, names, before if number else later) for names in each.columns)
                for each in columns
            )
        )
        before |= {tensor.fingerprint.digest for tensor in checkpoint.tensors}
    return Picture(tuple(columns), tuple(rows))


def _cell(layers: dict[str, list[AnalyzedTensor]], names: Iterable[str], held: set[str]) -> Cell:
    tensors = tuple(tensor for name in names for tensor in layers.get(name, ()))
    return Cell(tensors, tuple(tensor.fingerprint.digest in held for tensor in tensors))


def _column(name: str) -> str:
    return split(unwrapped(name))[0]


def _title(prefix: str, names: Sequence[str]) -> str:
    numbers = [name.rpartition(".")[2] for name in names]
    ends = numbers[0] if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"
    return f"{prefix or 'layers'} {ends}"


def _in_order(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """A component's layers: embeddings first, then blocks, and what else there is as one."""
    ranked = Counter[str]()
    for name in names:
        block = _BLOCK.fullmatch(name)
        ranked[name] = 1 if block else 0 if _EMBEDDING.search(name) else 2
    ordered = sorted(ranked, key=lambda name: (ranked[name], natural(name)))
    first, last = ([n for n in ordered if ranked[n] == rank] for rank in (0, 2))
    blocks = [(name,) for name in ordered if ranked[name] == 1]
    return (*([tuple(first)] if first else []), *blocks, *([tuple(last)] if last else []))
