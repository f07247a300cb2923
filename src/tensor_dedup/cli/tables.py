"""Text and tables that fit the width of a terminal, by wrapping, shortening or leaving out.

Names come from untrusted files and may contain terminal commands, so they are escaped before they
are printed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli import printable

_TOKEN: Final = re.compile(r"[^ ]+ *| +")
_PART: Final = re.compile(r"[^./]+[./]*|[./]+")
_WORD: Final = re.compile(r"[^./_@+=: -]+[./_@+=: -]*|[./_@+=: -]+")
# Columns of words; all others are numbers, which stand to the right.
_WORDS: Final = frozenset(
    {
        *("kind", "status", "dtype", "codec", "digest", "shape", "imported", "pinned", "saved"),
        *("state", "kept", "adapter"),
    }
)
# What a table adds to each of its columns, and once.
_BORDER: Final = 3
# Of a name this much stays on a line, if it is that long, and a revision that is shortened does.
_NAME: Final = 32
_DIGITS: Final = 12
_DIGEST: Final = re.compile(rf"\b([0-9a-f]{{{_DIGITS}}})(?:[0-9a-f]{{28}}|[0-9a-f]{{52}})\b")
# What no line breaks if it can be helped: a command, a number and its unit, a symbol
# and what it means, a word.
_UNBROKEN: Final = re.compile(
    r"[■▣□#+.] \S+|`[^`]+`\S*|\S+?(?: (?:%|B|[KMG]iB)(?![\w%])\S*|(?=\s|$))"
)
_LABEL: Final = re.compile(r" *(?:\S+ )*?\S+ {2,}| *")


def cell(name: str) -> Text:
    """Return a table cell that shows `name` literally, without rich's markup."""
    return Text(printable(name))


class Dotted:
    """A table cell for a name. Lines are broken only after dots and slashes."""

    def __init__(self, name: str) -> None:
        self._name = printable(name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(map(len, _WORD.findall(self._name)), default=0)
        limit = options.max_width
        return Measurement(min(widest, limit), min(len(self._name), limit))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, lines = "", list[str]()
        for part in self._parts(options.max_width):
            if line and len(line) + len(part) > options.max_width:
                lines.append(line)
                line = ""
            line += part
        yield Text("\n".join([*lines, line]), overflow="fold")

    def _parts(self, width: int) -> list[str]:
        return _divided([self._name], width)


def _divided(parts: list[str], width: int) -> list[str]:
    """What no line breaks: between spaces, then dots, then words where one is too long."""
    for finer in (_TOKEN, _PART, _WORD):
        parts = [
            each
            for part in parts
            for each in ([part] if len(part) <= width else finer.findall(part))
        ]
    return parts


def wrapped(text: str, width: int, indent: int | None = None) -> list[str]:
    """Split a text into lines of at most `width` characters.

    Lines after the first begin with `indent` spaces. The default depends on the text:

    * If it begins with a label and two spaces, as in "path  /data", the lines are aligned with
      what follows the label.
    * Otherwise, the lines are indented like the first line.

    Words that are longer than a line are split after a dot or slash. A number and its unit stay
    together, and a command stays on one line if it fits.
    """
    if len(text) <= width:
        return [text]
    if indent is None:
        label = _LABEL.match(text)
        indent = label.end() if label is not None and label.end() <= _NAME else 0
    head, room = text[:indent], max(_DIGITS, width - indent)
    words = [word for found in _UNBROKEN.findall(text[indent:]) for word in _pieces(found, room)]
    lines = [head]
    for word, follows in words:
        space = " " * (not follows and len(lines[-1]) > indent)
        if len(lines[-1]) > indent and len(lines[-1]) + len(space) + len(word) > width:
            lines.append(" " * indent)
            space = ""
        lines[-1] += space + word
    return lines


def _pieces(found: str, room: int) -> list[tuple[str, bool]]:
    """A word, or what it falls into where it is too long; whether each follows without a space."""
    words = [found] if len(found) <= room else found.split(" ")
    return [
        (piece, number > 0) for word in words for number, piece in enumerate(_divided([word], room))
    ]


def shortened(name: str) -> str:
    """Return a name or path in which each digest or revision is cut to twelve digits."""
    return _DIGEST.sub(r"\1", name)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listing(name: str, *others: str) -> Table:
    """Return an empty table with a column `name`, whose cells may wrap, and columns `others`."""
    table = Table(name)
    for each in others:
        table.add_column(each, no_wrap=True, justify="left" if each in _WORDS else "right")
    return table


def fitted(
    out: Console,
    heading: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    least: Sequence[str],
) -> tuple[Table, str]:
    """Return a table that fits the console, and a line that names the columns left out, or "".

    `heading` and `names` are the title and the cells of the first column. `columns` maps the title
    of each other column to its cells.

    If the table is too wide, revisions in names are shortened first. Then columns in `least` are
    left out, one by one in this order, until there is room for the names.
    """
    names = [printable(name) for name in names]
    widths = {c: max(map(len, [c, *cells]), default=0) for c, cells in columns.items()}
    longest = max(map(len, [heading, *names]))
    room = out.width - 1 - _BORDER - longest
    if sum(widths.values()) + _BORDER * len(widths) > room:
        short_names = [shortened(name) for name in names]
        if len(set(short_names)) == len(set(names)):
            names, longest = short_names, max(map(len, [heading, *short_names]))
    word = max((len(word) for name in names for word in _WORD.findall(name)), default=0)
    room = out.width - 1 - _BORDER - max(min(_NAME, longest), word)
    left_out = list[str]()
    for column in (each for each in least if each in columns):
        if sum(width + _BORDER for c, width in widths.items() if c not in left_out) > room:
            left_out.append(column)
    shown = [column for column in columns if column not in left_out]
    table = listing(heading, *shown)
    for number, name in enumerate(names):
        table.add_row(Dotted(name), *(Text(columns[column][number]) for column in shown))
    more = f"No room for: {', '.join(left_out)}; a pipe and --json have all." if left_out else ""
    return table, more
