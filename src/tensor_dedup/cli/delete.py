"""`tensor-dedup delete`: forget a stored checkpoint."""

import click

from tensor_dedup.cli.gc import space_after
from tensor_dedup.cli.store_verbs import ask, existing, json_option, say, store_option, yes_option


@click.command(name="delete")
@click.argument("name")
@yes_option
@store_option
@json_option
def command(name: str, yes: bool, store: str | None, as_json: bool) -> None:
    """Forget the checkpoint NAME. Its bytes stay until `gc` finds that nobody else uses them."""
    opened = existing(store)
    opened.check_exists(name)
    ask(f"Delete {name} from {opened.path}?", yes)
    opened.delete(name)
    reclaimable, space = space_after(opened)
    say({"deleted": name, **reclaimable}, as_json, f"{name} is deleted; {space}")
