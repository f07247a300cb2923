"""`tensor-dedup unpin`: let a checkpoint be evicted again."""

import click

from tensor_dedup.cli.manager_verbs import place_options, set_pin
from tensor_dedup.cli.store_verbs import json_option


@click.command(name="unpin")
@click.argument("name", metavar="X")
@place_options
@json_option
def command(name: str, socket: str | None, as_json: bool) -> None:
    """Let X, a checkpoint or a digest, be evicted when memory is needed and nobody uses it."""
    set_pin(name, socket, as_json, pinned=False)
