"""`tensor-dedup pin`: keep a checkpoint in memory."""

import click

from tensor_dedup.cli.held import look_up, name_of, not_held_error
from tensor_dedup.cli.manager_verbs import place_options
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.text_table import human


@click.command(name="pin")
@click.argument("name", metavar="X")
@click.option("--ahead", is_flag=True, help="Also when nothing of X is in memory yet.")
@place_options
@json_option
def command(name: str, ahead: bool, socket: str | None, as_json: bool) -> None:
    """Keep X in memory, a checkpoint or a digest, also while nobody uses it.

    X is what `status` calls it. What comes later under that name is kept too.
    """
    with Admin(socket) as admin:
        name = name_of(admin, name)
        if not ahead and not look_up(admin, name).here:
            raise not_held_error(admin, name, "`pin --ahead` keeps what will come under that name")
        done = admin.pin(name)
    document = {"name": name, "pinned": True, "tensors": done.count, "bytes": done.nbytes}
    so_far = f"{counted(done.count, 'tensor')}, {human(done.nbytes)} so far"
    now = so_far if done.count else "nothing yet"
    say(document, as_json, f"{name} is pinned: {now}")
