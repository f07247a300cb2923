"""`tensor-dedup pin`: keep a checkpoint in memory."""

import click

from tensor_dedup.cli.manager_verbs import socket_option
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.loader.report_table import human
from tensor_dedup.memory_manager.client.admin import Admin


@click.command(name="pin")
@click.argument("name", metavar="X")
@socket_option
@json_option
def command(name: str, socket: str | None, as_json: bool) -> None:
    """Keep X in memory, a checkpoint or a digest, also while nobody uses it."""
    with Admin(socket) as admin:
        done = admin.pin(name, pinned=True)
    document = {"name": name, "pinned": True, "tensors": done.count, "bytes": done.nbytes}
    concerned = f"{done.count} tensors, {human(done.nbytes)}"
    say(document, as_json, f"{name} is pinned: {concerned} so far")
