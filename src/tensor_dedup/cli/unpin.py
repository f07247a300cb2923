"""`tensor-dedup unpin`: let a checkpoint be evicted again."""

import click

from tensor_dedup.cli.manager_verbs import socket_option
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.loader.report_table import human
from tensor_dedup.memory_manager.client.admin import Admin


@click.command(name="unpin")
@click.argument("name", metavar="X")
@socket_option
@json_option
def command(name: str, socket: str | None, as_json: bool) -> None:
    """Let X, a checkpoint or a digest, be evicted when memory is needed and nobody uses it."""
    with Admin(socket) as admin:
        done = admin.pin(name, pinned=False)
    document = {"name": name, "pinned": False, "tensors": done.count, "bytes": done.nbytes}
    concerned = f"{done.count} tensors, {human(done.nbytes)}"
    say(document, as_json, f"{name} is not pinned any more: {concerned} of it are here")
