"""`tensor-dedup stop`: end the memory manager."""

import click

from tensor_dedup.cli.manager_verbs import place_options
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin


@click.command(name="stop")
@place_options
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """End the memory manager. Engines keep what they have mapped; new ones load from disk."""
    with Admin(socket) as admin:
        pid = admin.totals().pid
        admin.stop()
    document = {"socket": str(admin.path), "pid": pid, "stopped": True}
    say(document, as_json, f"the memory manager (process {pid}) has ended")
