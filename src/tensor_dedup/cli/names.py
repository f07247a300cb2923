"""Names from files in tables: they are anybody's text, also a terminal's commands."""

from rich.text import Text

from tensor_dedup.cli.errors import printable


def cell(name: str) -> Text:
    """For a cell of a table: the name itself, whatever brackets it has."""
    return Text(printable(name))
