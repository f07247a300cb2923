"""What the command line prints: tables, names in them, bytes and progress, documents, questions.

Names come from files, and are anybody's text, also a terminal's commands: none is printed as it is.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli import Declined, WrongUse, printable, repeating_given
from tensor_dedup.settings import parse_size
from tensor_dedup.text_table import human

_WIDE: Final = 10_000
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
    """Return a table cell with exactly this name, whatever brackets it has."""
    return Text(printable(name))


class Dotted:
    """A table cell with a name, which wraps after a dot or a slash, and inside no word."""

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
    """Return a text in lines that end between words, each but the first one indented.

    By default they are so by the text's label, which two spaces end, or its own indent. A word that
    is longer than a line ends after a dot or a slash; numbers stay with their units, and commands
    in one line, where that is wide enough.
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
    """Return a name or a path with the first twelve digits of revisions and digests in it."""
    return _DIGEST.sub(r"\1", name)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listing(name: str, *others: str) -> Table:
    """Return a table of names, which may wrap, and of columns that may not."""
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
    """Return a table of names and columns, and a line about those for which there is no room.

    Where a terminal is narrow, revisions in names are shortened, and then the columns in `least`
    go, one by one, so that names are readable.
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


def short(path: Path) -> str:
    """Return a path with `~` for the user's home."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        return str(path)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def console() -> Console:
    """Return the console for tables. When piped, a line is neither wrapped nor cut."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE)


def error_lines(message: str) -> str:
    """Return an error's message as a terminal shows it after `Error: `; elsewhere as it is."""
    err = Console(stderr=True)
    if not err.is_terminal:
        return message
    before = "Error: "
    return "\n".join(wrapped(before + message, err.width, 0)).removeprefix(before)


_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def json_option(verb: _Verb) -> _Verb:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(
        verb
    )


def byte_size(least: int = 0) -> Callable[[str | int], int]:
    """The `type` of an option that is a number of bytes, with a unit or without one."""

    def converted(value: str | int) -> int:
        nbytes = value if isinstance(value, int) else parse_size(value)
        if nbytes is None:
            raise click.BadParameter(f"{value!r} is not a size; write for example 64GiB")
        if nbytes < least:
            raise click.BadParameter(f"{nbytes} bytes are too few, {least} the least")
        return nbytes

    return converted


def yes_option(verb: _Verb) -> _Verb:
    """`--yes`, as `yes`."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(verb)


def say(document: Mapping[str, object], as_json: bool, *lines: str) -> None:
    """Print one JSON document, or lines of text, on stdout."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        say_lines(*lines)


def say_lines(*lines: str, indent: int | None = None) -> None:
    """Print lines on stdout; at a terminal, each in as many as it needs, as `wrapped` does."""
    width = console().width
    for line in lines:
        for part in wrapped(printable(repeating_given(line)), width, indent):
            click.echo(part)


def ask(question: str, yes: bool) -> None:
    """Go on only when the user agrees; otherwise fail. WrongUse when there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUse(f"{question} Refusing without confirmation; pass --yes.")
    lines = wrapped(question, Console(stderr=True).width - len(" [y/N]: "))
    try:
        agreed = click.confirm("\n".join(lines), err=True)
    except click.Abort:  # which is what click makes of Ctrl-C
        raise KeyboardInterrupt from None
    if not agreed:
        raise Declined("declined; nothing was changed")


class _Rate(ProgressColumn):
    """Bytes a second, in the units of the sizes beside it."""

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{human(int(rate))}/s")


# What a size of so many, and what need not travel, take of a line; and the least of a bar.
_DOWNLOAD: Final = 36
_BAR: Final = 12


class ByteBar:
    """A bar on stderr with bytes, rate and time left; nothing where stderr is no terminal."""

    def __init__(self, label: str) -> None:
        console = Console(stderr=True)
        self._label = label = shortened(printable(label))
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            DownloadColumn(binary_units=True),
        ]
        # As much of the rest as there is room for; a cut bar says nothing.
        room = console.width - len(label) - _DOWNLOAD
        for width, column in ((12, _Rate()), (8, TimeRemainingColumn())):
            if (room := room - width) > 0:
                columns.append(column)
        if room > _BAR:
            columns.insert(1, BarColumn())
        self.bar = Bar(
            *columns,
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self.bar.add_task(label, total=None)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def start(self, total_bytes: int) -> None:
        """`total_bytes` will be handled."""
        self.bar.update(self._task, total=total_bytes)

    def describe(self, label: str) -> None:
        """Put another text in front of the bar."""
        self.bar.update(self._task, description=label)

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self.bar.advance(self._task, nbytes)
