"""The charts of the site's page of benchmarks, drawn from the tables that the benchmarks write.

A chart is one table, or some rows of one: a bar a row, with its interval, and the losing rows too.
"""

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLES: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "tables.md"
_NUMBER: Final = r"(\d[\d,]*(?:\.\d+)?)"
_INTERVAL: Final = re.compile(rf"{_NUMBER}(?: \[{_NUMBER}, {_NUMBER}\])?")
_RANGE: Final = re.compile(rf"{_NUMBER}-{_NUMBER} %")
_OURS: Final = re.compile(r"ours|.*tensor-dedup|attach")
# A label stands above its bar, so that a telephone shows both.
_WIDTH, _ROW, _VALUE = 480, 38, 90
_ROOM: Final = 66  # letters of a label


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows of a table: in which section, which table of it, and which columns label and measure.

    The column that measures is named by its head. Rows are those that `rows` matches. With
    `compared` the value is a multiple of the other side, whose line is drawn at 1; a bar beyond it
    loses.
    """

    section: str
    table: int
    unit: str
    value: str
    label: tuple[int, ...] = (0,)
    rows: str = ""
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A row as it is drawn: its median, and what its interval reaches from and to."""

    label: str
    median: float
    low: float
    high: float
    said: str


CHARTS: Final = {
    "savings": Chart("savings", 0, "% saved", "source tensors"),
    "load": Chart(
        "load", 0, "x the time of plain vLLM", "compared", rows=r"\] s \| [^|]* x \|", compared=True
    ),
    "pipelines": Chart(
        "pipelines", 0, "x the time of plain Diffusers", "compared", rows=r" x \|", compared=True
    ),
    "attach": Chart("attach", 0, "ms to the first page of every tensor", "first page, ms"),
    "store-cold": Chart("store", 0, "s, file cold", "cold, s"),
    "store-warm": Chart("store", 0, "s, file cached", "warm, s"),
    "codecs": Chart("codecs", 0, "% of the size", "size"),
    "training-bytes": Chart(
        "checkpoints", 0, "of the bytes of TensorCAS's method", "ours / TensorCAS", compared=True
    ),
    "training-saves": Chart(
        "checkpoints", 1, "ms a save", "ms", (1,), rows=r"ResNet-18, all changes \|"
    ),
    "training-frozen": Chart(
        "checkpoints", 1, "ms a save", "ms", (1,), rows=r"ResNet-18, frozen \|"
    ),
    "large": Chart("checkpoints-long", 0, "MB", "MB, apparent", (0, 2)),
    "background": Chart(
        "checkpoints-async", 0, "ms a step, training included", "blocking, ms a step"
    ),
    "datastates": Chart("datastates", 0, "ms blocked a save, 420 MB", "blocked, ms a save"),
}


def bars(chart: Chart, text: str) -> list[Bar]:
    """Return the bars of a chart, at least two, from the text of all tables.

    Raises:
        LookupError: the section, the table or the column is not there, or too few rows have a
            value.
    """
    drawn, before = list[Bar](), ""
    header, _, *lines = _lines(chart.section, chart.table, text)
    if chart.value not in _cells(header):
        raise LookupError(f"{TABLES}: no column {chart.value!r} in {chart.section!r}")
    column = _cells(header).index(chart.value)
    for line in lines:
        cells = _cells(line)
        if cells[0].startswith("the same"):
            cells[0] = cells[0].replace("the same", before)
        else:
            before = cells[0]
        if not re.search(chart.rows, line):
            continue
        label = ", ".join(cells[at] for at in chart.label).replace("`", "")
        said = cells[column]
        if pair := _RANGE.match(said):
            low, high = map(_float, pair.groups())
            drawn.append(Bar(label, high, low, high, said))
        elif value := _INTERVAL.match(said):
            median, low, high = (_float(each or value[1]) for each in value.groups())
            drawn.append(Bar(label, median, low, high, said))
    if len(drawn) < 2:
        raise LookupError(f"{TABLES}: no rows for a chart of {chart.section!r}")
    return drawn


def table(section: str, number: int, text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of a section, from the text of all tables.

    Raises:
        LookupError: the section or the table is not there.
    """
    header, _, *rows = map(_cells, _lines(section, number, text))
    return header, rows


def _lines(section: str, number: int, text: str) -> list[str]:
    _, found, rest = text.partition(f"<!-- {section}: begin -->\n")
    tables = re.findall(r"(?:^\|.*\n)+", rest.split("<!-- ")[0], re.MULTILINE)
    if not found or len(tables) <= number:
        raise LookupError(f"{TABLES}: no table {number} in {section!r}")
    return [*tables[number].splitlines()]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def svg(name: str) -> str:
    """Return the drawing of a chart as HTML in one line, as Markdown takes it."""
    chart = CHARTS[name]
    drawn = bars(chart, TABLES.read_text(encoding="utf-8"))
    # An interval that is much wider than all medians would leave no room for those.
    most = max(max(bar.median for bar in drawn) * 1.6, 1.2 * chart.compared)
    most = min(most, max(max(bar.high for bar in drawn), 1.2 * chart.compared))
    room = _WIDTH - _VALUE
    scale = room / most
    height = _ROW * len(drawn) + 22
    parts = [_bar(bar, at, scale, room, chart) for at, bar in enumerate(drawn)]
    if chart.compared:
        parts.append(
            f'<line class="one" x1="{scale:.1f}" y1="0" x2="{scale:.1f}" y2="{height - 20}"/>'
        )
    parts.append(f'<text class="unit" x="0" y="{height - 4}">{html.escape(chart.unit)}</text>')
    told = "; ".join(f"{bar.label}: {bar.said}" for bar in drawn)
    return (
        '<figure class="bars">'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(f"{chart.unit}. {told}")}">{"".join(parts)}</svg></figure>'
    )


def _bar(bar: Bar, row: int, scale: float, room: float, chart: Chart) -> str:
    top = row * _ROW + 18
    middle, width = top + 8, min(room, bar.median * scale)
    ours = chart.compared or _OURS.match(bar.label) is not None or chart.section == "savings"
    kind = "lost" if chart.compared and bar.median > 1 else "ours" if ours else "other"
    low, high = (min(room, each * scale) for each in (bar.low, bar.high))
    value = bar.said.split(" [")[0].split(" x")[0]
    return (
        f"<g><title>{html.escape(f'{bar.label}: {bar.said}')}</title>"
        f'<text x="0" y="{top - 4}">{html.escape(_cut(bar.label))}</text>'
        f'<rect class="{kind}" x="0" y="{top}" width="{width:.1f}" height="16"/>'
        f'<line class="interval" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>'
        f'<text x="{max(high, width) + 6:.1f}" y="{middle + 4}">{html.escape(value)}</text></g>'
    )


def _cut(label: str) -> str:
    """What of a label there is room for; its bar's title and the table have all of it."""
    return label if len(label) <= _ROOM else label[: _ROOM - 1].rstrip() + "…"
