"""The options that several benchmarks have."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

CONTEXT: Final = {"help_option_names": ["-h", "--help"]}
QUICK: Final = 3
Option = Callable[[Any], Any]


def repeats(name: str, default: int) -> Option:
    """How many pairs or rounds are measured; few of them with `--quick`."""
    many = click.option(name, default=default, show_default=True, type=click.IntRange(min=1))
    return lambda command: many(quick(command))


quick: Final[Option] = click.option(
    "--quick", is_flag=True, help=f"{QUICK} of them, and small: shows that it runs."
)


def only(parts: Sequence[str]) -> Option:
    """Which parts are measured: all where none is named."""
    return click.option(
        "--only", multiple=True, type=click.Choice(parts), help="Repeat for several."
    )


def work(holds: str) -> Option:
    """Where what is measured is made."""
    return click.option(
        "--work",
        type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
        help=f"Folder for {holds} [default: in the user's cache directory].",
    )


def json_file(what: str) -> Option:
    """Where figures are written."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Write {what}.",
    )


write: Final[Option] = click.option(
    "--write", is_flag=True, help="Put the section into docs/benchmarks/tables.md."
)
