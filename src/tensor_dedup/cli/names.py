"""Names from files, as they may be shown: they are anybody's text, also a terminal's commands."""

from rich.text import Text


def printable(name: str) -> str:
    """The text with what no reader can see (escapes, controls, direction marks) written out."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def cell(name: str) -> Text:
    """For a cell of a table: the name itself, whatever brackets it has."""
    return Text(printable(name))
