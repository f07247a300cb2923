"""`tensor-dedup top`: the memory manager's numbers, live."""

import time
from contextlib import suppress

import click
from rich.console import Console, Group
from rich.live import Live

from tensor_dedup.cli import manager_verbs
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin


@click.command(name="top")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@manager_verbs.place_options
@json_option
def command(every: float, socket: str | None, as_json: bool) -> None:
    """Show the manager's numbers and tables until Ctrl-C. With --json: once, as `status` does."""
    with suppress(KeyboardInterrupt), Admin(socket) as admin:
        if as_json:
            overview = admin.overview()
            say(manager_verbs.document(overview, manager_verbs.on_device(admin)), as_json)
            return
        console = Console()
        live = Live(console=console, auto_refresh=False, screen=console.is_terminal)
        with live:
            while True:
                live.update(_screen(admin), refresh=True)
                time.sleep(every)


def _screen(admin: Admin) -> Group:
    overview = admin.overview(residents=False)
    use = manager_verbs.on_device(admin)
    return Group(
        manager_verbs.numbers(overview, use),
        manager_verbs.clients(overview, use),
        manager_verbs.checkpoints(overview),
        manager_verbs.builds(overview),
    )
