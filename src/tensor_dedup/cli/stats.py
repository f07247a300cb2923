"""`tensor-dedup stats`: what the store saves, and what it could give back."""

import click

from tensor_dedup.cli.names import counted
from tensor_dedup.cli.store_verbs import existing, json_option, say, store_option
from tensor_dedup.store import Stats
from tensor_dedup.store.format.tables import PLAIN
from tensor_dedup.text_table import human


@click.command(name="stats")
@store_option
@json_option
def command(store: str | None, as_json: bool) -> None:
    """Say how large the store is, what it saves, and what gc would give back."""
    found = existing(store).stats()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.containers.items()))
    say(
        found.to_dict(),
        as_json,
        f"checkpoints   {found.checkpoints} with {counted(found.tensors, 'tensor')}",
        f"their size    {human(found.logical_bytes)}",
        f"distinct      {human(found.unique_bytes)} ({found.dedup_ratio:.1%})",
        f"on disk       {human(found.disk_bytes)} in containers: {kinds or 'none'}",
        *_encoded(found),
        f"unused        {human(found.reclaimable_bytes)} that gc takes, "
        f"{human(found.dead_bytes)} in containers that are still needed",
        f"trash         {human(found.trash_bytes)}",
        *([f"damaged       {counted(found.damaged_files, 'file')}"] if found.damaged_files else []),
    )


def _encoded(found: Stats) -> list[str]:
    """A line on what encoding saves, and one for each codec."""
    encoded = {codec: c for codec, c in sorted(found.codecs.items()) if codec != PLAIN}
    if not encoded:
        return []
    nbytes = sum(coded.nbytes for coded in encoded.values())
    stored = sum(coded.stored_bytes for coded in encoded.values())
    return [
        f"encoded       {human(nbytes)} as {human(stored)} ({stored / nbytes:.1%})",
        *(
            f"  {codec:<12}{counted(coded.pieces, 'piece')}, {human(coded.nbytes)} as "
            f"{human(coded.stored_bytes)}"
            for codec, coded in encoded.items()
        ),
    ]
