"""`tensor-dedup follow`: pull the steps of a run as they appear, and let engines load them."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Final

import click

from tensor_dedup.cli import printable
from tensor_dedup.cli.remote import interruptible, run_of_url, url_argument
from tensor_dedup.cli.store import store_option
from tensor_dedup.cli.terminal import FiniteRange, json_option, say_lines
from tensor_dedup.publishing.follower import (
    Event,
    FetchedEvent,
    Follower,
    FreedEvent,
    LoadedEvent,
)
from tensor_dedup.remote import Remote
from tensor_dedup.store import LocalStore
from tensor_dedup.store.steps.runs import check_run
from tensor_dedup.text_table import human

# What a pull that is cut short leaves, the next one goes on from.
_PATIENCE_S: Final = 5.0


@click.command(name="follow")
@url_argument
@click.option("--run", metavar="RUN", help="The run; by default the last component of URL.")
@click.option("--once", is_flag=True, help="Pull the latest step, let engines load it, and end.")
@click.option(
    "--every",
    type=FiniteRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look for a new step.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="http://HOST:PORT",
    help="A vLLM server that is to load each step; may be given several times.",
)
@store_option
@json_option
def command(
    url: str,
    run: str | None,
    once: bool,
    every: float,
    engines: tuple[str, ...],
    store: str | None,
    as_json: bool,
) -> None:
    """Pull the latest step of the run at URL, and each new one when it appears.

    URL is the remote to which the run is published: s3://BUCKET/RUN, gs://, az://, file:///FOLDER,
    or the folder of another store. Only what the store lacks of a step travels. Of the steps that
    were pulled like this, the last two stay; earlier ones are deleted with their files, unless an
    engine is loading them. Steps that were saved here or pulled by name stay.

    Each --engine is asked to load each step, by POST /update_weights, with which vLLM updates its
    weights. What does not answer is tried again after a pause that grows to a minute.

    It ends with Ctrl-C or SIGTERM, or with --once after one round. With --json, each line is a JSON
    document.
    """
    named = check_run(run if run is not None else run_of_url(url))
    remote, opened = Remote.open(url), LocalStore.open(store)

    if once:
        with interruptible():
            Follower(opened, remote, named, engines, lambda event: _tell(event, as_json)).once()
        return
    # What is printed is printed by this thread: click knows it, and its reader may go away.
    events = SimpleQueue[Event | None]()
    follower = Follower(opened, remote, named, engines, events.put)
    _print_all(follower, events, every, as_json)


def _print_all(
    follower: Follower, events: SimpleQueue[Event | None], every: float, as_json: bool
) -> None:
    """Print the events of `follower` until a signal or an error ends it."""
    stop, failed = threading.Event(), list[Exception]()

    def work() -> None:
        try:
            follower.until(stop, every)
        except Exception as error:  # noqa: BLE001 (raised by the main thread)
            failed.append(error)
        finally:
            events.put(None)

    def end(_number: int, _frame: FrameType | None) -> None:
        events.put(None)

    worker = threading.Thread(target=work, daemon=True)
    with _handled(end):
        worker.start()
        try:
            while (event := events.get()) is not None:
                _tell(event, as_json)
        finally:
            stop.set()
            worker.join(_PATIENCE_S)
        if worker.is_alive():  # a request cannot be given up before it is answered
            sys.stdout.flush()
            os._exit(0)
    if failed:
        raise failed[0]


@contextmanager
def _handled(end: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(event: Event, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(event.to_dict()))
    elif isinstance(event, FetchedEvent):
        say_lines(_step_line(event))
    elif isinstance(event, FreedEvent):
        say_lines(f"{event.run}  {human(event.freed_bytes)} of earlier steps freed")
    elif isinstance(event, LoadedEvent):
        say_lines(f"{event.name}  {event.engine} has it, {event.seconds:.1f} s")
    else:
        again = f"{event.error}; it is tried again until it succeeds"
        click.echo(printable(again), err=True)
    sys.stdout.flush()


def _step_line(event: FetchedEvent) -> str:
    transfer = event.found.transfer
    if transfer is None:
        came = "in the store already"
    else:
        came = f"{human(transfer.wire_bytes)} in {event.seconds:.1f} s"
        came += f", {transfer.requests} requests" if transfer.requests else ""
    return f"{event.found.name}  {came}"
