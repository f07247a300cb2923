"""`tensor-dedup stop`: end the memory manager."""

import errno
from typing import Final

import click

from tensor_dedup.cli.errors import BadData
from tensor_dedup.cli.manager_verbs import place_options
from tensor_dedup.cli.store_verbs import json_option, say
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.memory_manager.errors import ManagerGoneError
from tensor_dedup.memory_manager.protocol.paths import ENVIRONMENT, socket_path

_NOBODY: Final = (errno.ENOENT, errno.ECONNREFUSED)


@click.command(name="stop")
@place_options
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """End the memory manager. Engines keep what they have mapped; new ones load from disk.

    Exit status 1 when none runs.
    """
    try:
        admin = Admin(socket)
    except ManagerGoneError as error:
        if error.facts.get("errno") not in _NOBODY:
            raise
        raise BadData(
            f"no memory manager runs at {socket_path(socket)}, so there is nothing to stop; "
            f"--socket or {ENVIRONMENT} names another one"
        ) from error
    with admin:
        pid = admin.totals().pid
        admin.stop()
    document = {"socket": str(admin.path), "pid": pid, "stopped": True}
    say(document, as_json, f"the memory manager (process {pid}) has ended")
