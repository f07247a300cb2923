"""What the verbs of the store have in common: which store, progress, asking, the answer."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from tensor_dedup.cli.errors import WrongUse, printable
from tensor_dedup.cli.names import cell, console, short
from tensor_dedup.store import Store
from tensor_dedup.store.init import ENVIRONMENT, own_path

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def store_option(verb: _Verb) -> _Verb:
    """`--store DIR`, as `store`; None means the environment's or the user's own."""
    return click.option(
        "--store",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help=f"The store; by default ${ENVIRONMENT}, else {short(own_path())}.",
    )(verb)


def json_option(verb: _Verb) -> _Verb:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(
        verb
    )


def yes_option(verb: _Verb) -> _Verb:
    """`--yes`, as `yes`."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(verb)


def existing(store: str | None) -> Store:
    """The store that is there; NotAStoreError rather than a new one."""
    return Store.open(store, create=False)


def empty(store: Store, what: str) -> str:
    """That there is nothing, where that was, and how to look elsewhere."""
    return f"{store.path} holds {what}; --store DIR or {ENVIRONMENT} names another store"


def print_table(store: Store, table: Table) -> None:
    """A table of what a store has, under the store's path."""
    out = console()
    out.print(cell(f"store {store.path}"), soft_wrap=True)
    out.print(table)


def say(document: Mapping[str, object], as_json: bool, *lines: str) -> None:
    """One JSON document, or lines for people, on stdout."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        for line in lines:
            click.echo(printable(line))


def ask(question: str, yes: bool) -> None:
    """Go on only when the user agrees. WrongUse when there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUse(f"{question} Nobody can be asked here: say --yes")
    click.confirm(question, abort=True, err=True)


class ByteBar:
    """A bar on stderr with bytes, rate and time left; nothing where stderr is no terminal."""

    def __init__(self, label: str) -> None:
        console = Console(stderr=True)
        self._label = label
        self.bar = Bar(
            TextColumn(label),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self.bar.add_task(label, total=None)

    def __enter__(self) -> "ByteBar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def start(self, total_bytes: int) -> None:
        """`total_bytes` will be handled."""
        self.bar.update(self._task, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self.bar.advance(self._task, nbytes)
