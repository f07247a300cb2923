"""`tensor-dedup unpin`: let a checkpoint be evicted again."""

import click

from tensor_dedup.cli.held import look_up, name_of, not_held_error
from tensor_dedup.cli.manager_verbs import place_options
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.text_table import human


@click.command(name="unpin")
@click.argument("name", metavar="X")
@place_options
@json_option
def command(name: str, socket: str | None, as_json: bool) -> None:
    """Let X, a checkpoint or a digest, be evicted when memory is needed and nobody uses it.

    X is what `status` calls it.
    """
    with Admin(socket) as admin:
        name = name_of(admin, name)
        held = look_up(admin, name)
        if not held.here and not held.pinned:
            raise not_held_error(admin, name)
        done = admin.pin(name, pinned=False)
    document = {"name": name, "pinned": False, "tensors": done.count, "bytes": done.nbytes}
    was = "is not pinned any more" if held.pinned else "was not pinned"
    here = f"{counted(done.count, 'tensor')}, {human(done.nbytes)} here"
    say(document, as_json, f"{name} {was}: {here}")
