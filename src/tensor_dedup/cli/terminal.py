"""What the verbs print and ask: lines and documents, progress, questions; options in common."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from tensor_dedup.cli import Declined, WrongUse, printable, repeating_given
from tensor_dedup.cli.tables import shortened, wrapped
from tensor_dedup.settings import parse_size
from tensor_dedup.text_table import human

_WIDE: Final = 10_000


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
