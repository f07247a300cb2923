"""`tensor-dedup pin`: keep a checkpoint in memory."""

import click

from tensor_dedup.cli.manager_verbs import place_options, set_pin
from tensor_dedup.cli.store_verbs import json_option


@click.command(name="pin")
@click.argument("name", metavar="X")
@place_options
@json_option
def command(name: str, socket: str | None, as_json: bool) -> None:
    """Keep X in memory, a checkpoint or a digest, also while nobody uses it."""
    set_pin(name, socket, as_json, pinned=True)
