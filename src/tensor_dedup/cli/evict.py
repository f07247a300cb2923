"""`tensor-dedup evict`: give back memory that nobody uses."""

import click

from tensor_dedup.cli.held import look_up, name_of, not_held_error
from tensor_dedup.cli.manager_verbs import place_options
from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.text_table import human


@click.command(name="evict")
@click.argument("name", metavar="X")
@place_options
@json_option
@click.pass_context
def command(ctx: click.Context, name: str, socket: str | None, as_json: bool) -> None:
    """Drop X, a checkpoint or a digest, from memory: what is neither in use nor pinned.

    X is what `status` calls it. Memory is given back slab by slab, so tensors that lie beside X's
    go too. Exit status 1 when nothing could be dropped.
    """
    with Admin(socket) as admin:
        name = name_of(admin, name)
        if not look_up(admin, name).here:
            raise not_held_error(admin, name)
        done = admin.evict(name)
    document = {"name": name, "tensors": done.count, "bytes": done.nbytes}
    nothing = f"nothing of {name} was dropped: it is in use, or pinned; see `tensor-dedup status`"
    freed = f"{name}: {counted(done.count, 'tensor')} dropped, {human(done.nbytes)} free"
    say(document, as_json, freed if done.count else nothing)
    if not done.count:
        ctx.exit(1)
