"""`tensor-dedup status`: what the memory manager holds, and for whom."""

import click

from tensor_dedup.cli import manager_verbs
from tensor_dedup.cli.names import console
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin


@click.command(name="status")
@manager_verbs.place_options
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """Show residents, bytes by checkpoint, leases and who holds them, hits, misses, budget.

    Of a GPU's manager also what NVML counts, where the package nvidia-ml-py is installed.
    """
    with Admin(socket) as admin:
        overview = admin.overview(residents=as_json)
        use = manager_verbs.on_device(admin)
    if as_json:
        say(manager_verbs.document(overview, use), as_json)
        return
    out = console()
    out.print(manager_verbs.numbers(overview, use))
    if overview.clients:
        out.print(manager_verbs.clients(overview, use))
    for rows, table in (
        (overview.checkpoints, manager_verbs.checkpoints),
        (overview.builds, manager_verbs.builds),
    ):
        if rows:
            out.print(table(overview))
