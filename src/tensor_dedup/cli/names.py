"""Tables, and names in them: these come from files, and are anybody's text, also a terminal's
commands."""

from typing import Final

from rich.console import Console
from rich.text import Text

from tensor_dedup.cli.errors import printable

_WIDE: Final = 10_000


def cell(name: str) -> Text:
    """For a cell of a table: the name itself, whatever brackets it has."""
    return Text(printable(name))


def console() -> Console:
    """Where tables go. For other programs a line stays a line, and nothing is cut."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE)
