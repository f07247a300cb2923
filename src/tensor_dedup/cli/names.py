"""Tables, and names in them: these come from files, and are anybody's text, also a terminal's
commands."""

import re
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tensor_dedup.cli.errors import printable

_WIDE: Final = 10_000
_PART: Final = re.compile(r"[^./]*[./]*")


def cell(name: str) -> Text:
    """For a cell of a table: the name itself, whatever brackets it has."""
    return Text(printable(name))


class Dotted:
    """For a cell of a table: a name that takes several lines breaks after a dot or a slash."""

    def __init__(self, name: str) -> None:
        self._name = printable(name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(len(part) for part in _PART.findall(self._name))
        limit = options.max_width
        return Measurement(min(widest, limit), min(len(self._name), limit))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, lines = "", list[str]()
        for part in _PART.findall(self._name):
            if line and len(line) + len(part) > options.max_width:
                lines.append(line)
                line = ""
            line += part
        yield Text("\n".join([*lines, line]), overflow="fold")


def counted(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listing(name: str, *others: str) -> Table:
    """A table of names, which may take several lines, and of what stays on one."""
    table = Table(name)
    for each in others:
        table.add_column(each, no_wrap=True)
    return table


def short(path: Path) -> str:
    """As people write it: `~` for their home."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        return str(path)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def console() -> Console:
    """Where tables go. For other programs a line stays a line, and nothing is cut."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE)
