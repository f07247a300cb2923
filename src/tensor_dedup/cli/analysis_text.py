"""The summary of an analysis: one screen of text, with a row for each checkpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from tensor_dedup.analyze import Analysis
from tensor_dedup.analyze.picture import Cell, Section, draw, percent, sections
from tensor_dedup.analyze.verdict import Advice, advice, headline
from tensor_dedup.cli import given, printable
from tensor_dedup.cli.tables import wrapped
from tensor_dedup.text_table import human

# What is piped is neither wrapped nor cut.
_ENDLESS = 1000
# Of a terminal's 24, the last one is for the prompt after it.
_LINES = 23
_NAME = 16
_PICTURE = 12
_GAP = 2
_PART = re.compile(r"[^./_-]+[./_-]*|[./_-]+")


@dataclass(frozen=True, slots=True)
class _Symbols:
    shared: str
    partly: str
    own: str


_UNICODE, _ASCII = _Symbols("■", "▣", "□"), _Symbols("#", "+", ".")


@dataclass(frozen=True, slots=True)
class _Row:
    name: list[str]
    adds: str
    shared: str
    cells: Text
    note: str


def show_summary(
    analysis: Analysis, labels: Sequence[str], console: Console, *, whole: bool = False
) -> None:
    """Print what the checkpoints take together, what each adds and why, and what to do next.

    `labels` are the names of the checkpoints. The text fits the console's width. On a terminal,
    rows and notes that do not fit one screen are left out, unless `whole` is True.
    """
    endless = console.width >= _ENDLESS
    labels = [printable(label) for label in labels]
    symbols = _ASCII if console.options.ascii_only else _UNICODE
    adds = _adds(analysis)
    numbers = max(map(len, adds)) + _GAP + len("shared")
    columns, step = sections(analysis.checkpoints), 2
    longest = max(map(len, labels))
    width = longest
    if not endless:
        room = console.width - numbers - 2 * _GAP
        widest_part = max(len(part) for label in labels for part in _PART.findall(label))
        picture = min(_width(columns, 1), max(_PICTURE, room - longest))
        width = min(longest, max(_NAME, widest_part, room - picture))
        columns, step = _fitted(columns, max(_PICTURE, room - width))
    longest_adds = max(map(len, adds))
    rows = _rows(analysis, labels, adds, width, columns, step, symbols)
    head = [
        Text(headline(analysis), style="bold"),
        Text(_titles(columns, step, width, longest_adds), style="dim"),
    ]
    legend = _legend(symbols, columns, console.width) if len(labels) > 1 else []
    indent = width + numbers + 3 * _GAP + max(len(row.cells) for row in rows)
    drawn = [_drawn(row, width, indent, console.width) for row in rows]
    least = len(head) + len(legend) + sum(len(lines) for lines, _ in drawn)
    most = _ENDLESS if endless or whole else _LINES - least
    tail = legend + _advice(analysis, console.width, most)
    room = len(rows) * _LINES if endless or whole else _LINES - len(head) - len(tail)
    shown = _first(drawn, [each.adds_bytes for each in analysis.contributions], room)
    if len(shown) < len(rows):
        rest = sum(each.adds_bytes for each in analysis.contributions[len(shown) :])
        more = f"... {len(rows) - len(shown)} more add {human(rest)}; --details shows them"
        tail.insert(0, Text(more))
    for line in (*head, *(line for row in shown for line in row), *tail):
        console.print(line, soft_wrap=True)


def _adds(analysis: Analysis) -> list[str]:
    sizes = [human(each.adds_bytes) for each in analysis.contributions]
    longest = max(map(len, sizes))
    return [f"{'+' if n else ' '} {size:>{longest}}" for n, size in enumerate(sizes)]


def _width(columns: Sequence[Section], step: int) -> int:
    widths = [max(len(each.title), len(each.columns) * step - step + 1) for each in columns]
    return sum(widths) + _GAP * (len(widths) - 1)


def _fitted(columns: list[Section], room: int) -> tuple[list[Section], int]:
    """The sections as they fit: with gaps between cells, without, else neighbours as one cell."""
    if _width(columns, 2) <= room:
        return columns, 2
    joined = [Section("layers", tuple(c for section in columns for c in section.columns))]
    most = max(len(section.columns) for section in columns)
    for size in range(1, most + 1):
        grouped = [section.grouped(size) for section in columns]
        if _width(grouped, 1) <= room:
            return grouped, 1
        short = [Section(s.title.partition(" ")[0], s.columns) for s in grouped]
        if _width(short, 1) <= room:
            return short, 1
    size = -(-len(joined[0].columns) // room)
    return [joined[0].grouped(size)], 1


def _titles(columns: Sequence[Section], step: int, width: int, adds: int) -> str:
    left = f"{'':{width}}{'':{_GAP}}{'adds':>{adds}}{'':{_GAP}}shared{'':{_GAP}}"
    titles = [f"{each.title:{_width([each], step)}}" for each in columns]
    return (left + (" " * _GAP).join(titles)).rstrip()


def _rows(
    analysis: Analysis,
    labels: Sequence[str],
    adds: Sequence[str],
    width: int,
    columns: Sequence[Section],
    step: int,
    symbols: _Symbols,
) -> list[_Row]:
    cells = draw(analysis.checkpoints, columns).rows
    rows = []
    for number, label in enumerate(labels):
        checkpoint, added = analysis.checkpoints[number], analysis.contributions[number]
        shared = percent(checkpoint.nbytes - added.adds_bytes, checkpoint.nbytes)
        rows.append(
            _Row(
                _wrapped(label, width),
                adds[number],
                f"{shared} %" if number else "",
                _cells(cells[number], columns, step, symbols),
                printable("; ".join(analysis.reasons[number].changes)),
            )
        )
    return rows


def _wrapped(name: str, width: int) -> list[str]:
    """The name in lines that end after its separators."""
    lines = [""]
    for part in _PART.findall(name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _cells(
    row: Sequence[Sequence[Cell]], columns: Sequence[Section], step: int, symbols: _Symbols
) -> Text:
    text = Text()
    for cells, section in zip(row, columns, strict=True):
        start = len(text)
        for number, cell in enumerate(cells):
            symbol, style = _symbol(cell, symbols)
            text.append(symbol, style)
            if number < len(cells) - 1:
                text.append(" " * (step - 1))
        text.append(" " * (_width([section], step) - (len(text) - start) + _GAP))
    text.rstrip()
    return text


def _symbol(cell: Cell, symbols: _Symbols) -> tuple[str, str]:
    if not cell.tensors:
        return " ", ""
    if all(cell.shared):
        return symbols.shared, "green"
    # Of a layer that changed, a buffer of some bytes may still be the same.
    return (symbols.own, "dim") if cell.percent <= 1 else (symbols.partly, "yellow")


def _drawn(row: _Row, width: int, indent: int, room: int) -> tuple[list[Text], list[Text]]:
    """The lines of a row, and those of its note where that does not fit beside it."""
    line = Text(f"{row.name[0]:{width}}{'':{_GAP}}{row.adds}{'':{_GAP}}{row.shared:>6}{'':{_GAP}}")
    line.append_text(row.cells)
    beside = indent + len(row.note) <= room
    if row.note and beside:
        line.append(" " * (indent - len(line)) + row.note)
    below = [] if beside or not row.note else _broken(row.note, room, "dim", "  ")
    return [line, *map(Text, row.name[1:])], below


def _first(
    rows: Sequence[tuple[list[Text], list[Text]]], adds: Sequence[int], room: int
) -> list[list[Text]]:
    """The rows that have room, from the first one on, and the notes of those that add most."""
    taken = [len(lines) for lines, _ in rows]
    count = len(rows)
    while count > 1 and sum(taken[:count]) + (count < len(rows)) > room:
        count -= 1
    left = room - sum(taken[:count]) - (count < len(rows))
    shown = [list(lines) for lines, _ in rows[:count]]
    for number in sorted(range(count), key=lambda each: -adds[each]):
        note = rows[number][1]
        if len(note) <= left:
            left -= len(note)
            shown[number] += note
    return shown


def _legend(symbols: _Symbols, columns: Sequence[Section], width: int) -> list[Text]:
    blocks = [
        column
        for section in columns
        for column in section.columns
        if sum(name.rpartition(".")[2].isdecimal() for name in column) > 1
    ]
    grouped = f"; one cell: {max(map(len, blocks))} layers" if blocks else ""
    legend = (
        f"{symbols.shared} shared with an earlier one (first row: with a later one), "
        f"{symbols.partly} partly, {symbols.own} private{grouped}"
    )
    return _broken(legend, width, "dim")


def _advice(analysis: Analysis, width: int, room: int) -> list[Text]:
    """What to do next; of several commands at least one, and as many as `room` lines hold."""
    given_advice = advice(analysis, given("store"))
    shown = max(len(each.commands) for each in given_advice)
    lines = _advised(given_advice, width, shown)
    while shown > 1 and len(lines) > room:
        shown -= 1
        lines = _advised(given_advice, width, shown)
    return lines


def _advised(found: Sequence[Advice], width: int, shown: int) -> list[Text]:
    lines = []
    for each in found:
        lines += _broken(printable(each.sentence), width)
        for command in each.commands[:shown]:
            lines += [Text(line, style="bold") for line in _typed(printable(command), width)]
        if len(each.commands) > shown:
            more = f"  ... and {len(each.commands) - shown} more; --details shows them"
            lines.append(Text(more, style="dim"))
    return lines


def _typed(command: str, width: int) -> list[str]:
    """A command in lines as a shell takes it, which end before an option."""
    first, *options = f"  {command}".split(" --")
    lines = [first]
    for option in options:
        longer = f"{lines[-1]} --{option}"
        if len(longer) + len(" \\") > width:
            lines[-1] += " \\"
            longer = f"    --{option}"
            lines.append("")
        lines[-1] = longer
    return lines


def _broken(text: str, width: int, style: str = "", indent: str = "") -> list[Text]:
    lines = wrapped(indent + text, max(_NAME, width), len(indent))
    return [Text(line, style=style) for line in lines]
