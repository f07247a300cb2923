"""The names by which a manager, and the people who look at it, know checkpoints and processes."""

import os

from tensor_dedup.memory_manager.protocol.limits import MAX_NAME


def checkpoint_name(given: str) -> str:
    """Return a checkpoint's name: the absolute path of one that exists, or else what was given.

    Processes that start in other folders then agree on it. Only as much of its end is kept as a
    name may have.
    """
    # Not pathlib's: a link keeps its name, and what is too long for a path is no error.
    there = os.path.exists(given)  # noqa: PTH110
    return printed(os.path.abspath(given) if there else given)  # noqa: PTH100


def printed(text: str) -> str:
    """Return the printable characters of a text, as many from its end as a name may have."""
    return "".join(char for char in text if char.isprintable())[-MAX_NAME:]
