"""Output and questions of the verbs: lines, JSON documents, progress bars; common options."""

import json
import math
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
_SHOWN: Final = 60  # characters of a value that is wrong


def short(path: Path) -> str:
    """Return a path with the user's home folder written as `~`."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        return str(path)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error that rich handles here: `Program` ends all verbs alike


def screen() -> Console:
    """Return a console on stdout that has the terminal's width."""
    return _Output()


def console() -> Console:
    """Return a console for tables. Lines are not wrapped if stdout is not a terminal."""
    found = screen()
    return found if found.is_terminal else _Output(width=_WIDE)


def error_lines(message: str) -> str:
    """Wrap an error message, which click prints after `Error: `, to the width of the terminal.

    If stderr is not a terminal, the message is returned unchanged.
    """
    err = Console(stderr=True)
    if not err.is_terminal:
        return message
    before = "Error: "
    return "\n".join(wrapped(before + message, err.width, 0)).removeprefix(before)


_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def json_option(verb: _Verb) -> _Verb:
    """Add the flag `--json` to a verb, which gets it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(
        verb
    )


def byte_size(least: int = 0) -> Callable[[str | int], int]:
    """Return a click option type for sizes in bytes, such as `4096` or `64GiB`.

    Sizes below `least` bytes are refused.
    """

    def converted(value: str | int) -> int:
        nbytes = parse_size(value)
        if nbytes is None:
            shown = repr(str(value)[:_SHOWN])
            what = f"{shown} is not a size; write for example 64GiB, at most 1024TiB"
            raise click.BadParameter(what)
        if nbytes < least:
            raise click.BadParameter(f"{nbytes} bytes are too few, {least} the least")
        return nbytes

    return converted


class FiniteRange(click.FloatRange):
    """A click option type: a FloatRange without `nan` and `inf`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return `value` as a finite float in the range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def yes_option(verb: _Verb) -> _Verb:
    """Add the flag `--yes` to a verb, which gets it as `yes`."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(verb)


def dry_run_option(verb: _Verb) -> _Verb:
    """Add the flag `--dry-run` to a verb, which gets it as `dry_run`."""
    return click.option("--dry-run", is_flag=True, help="Only say what would be done.")(verb)


def say(document: Mapping[str, object], as_json: bool, *lines: str) -> None:
    """Print `document` as JSON if `as_json` is True, otherwise `lines` of text."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        say_lines(*lines)


def say_lines(*lines: str, indent: int | None = None) -> None:
    """Print lines on stdout, wrapped to the width of the terminal.

    `indent` is the number of spaces before continuation lines, by default as in `wrapped`.
    """
    width = console().width
    for line in lines:
        for part in wrapped(printable(repeating_given(line)), width, indent):
            click.echo(part)


def ask(question: str, yes: bool) -> None:
    """Ask the user to confirm, and return if the user agrees; with `yes`, do not ask.

    Raises:
        Declined: The user does not agree.
        WrongUse: Nobody can answer: stdin is not a terminal, or ends.
    """
    if yes:
        return
    unanswered = WrongUse(f"{question} Refusing without confirmation; pass --yes.")
    if not sys.stdin.isatty():
        raise unanswered
    lines = wrapped(question, Console(stderr=True).width - len(" [y/N]: "))
    try:
        agreed = click.confirm("\n".join(lines), err=True)
    except click.Abort as error:  # which is what click makes of Ctrl-C, and of Ctrl-D
        if isinstance(error.__context__, EOFError):
            raise unanswered from None
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
    """A progress bar with bytes, rate and time left, on stderr. It is shown only on a terminal.

    It is a context manager that shows the bar while it is active.
    """

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
        """Set the number of bytes at which the bar is full."""
        self.bar.update(self._task, total=total_bytes)

    def describe(self, label: str) -> None:
        """Replace the text in front of the bar."""
        self.bar.update(self._task, description=label)

    def advance(self, nbytes: int) -> None:
        """Move the bar by `nbytes` bytes that are done."""
        self.bar.advance(self._task, nbytes)
