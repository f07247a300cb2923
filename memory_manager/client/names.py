"""What a manager calls checkpoints and processes."""

import os

from tensor_dedup.memory_manager.protocol.limits import MAX_NAME


def checkpoint_name(given: str) -> str:
    """Of a path that is there the whole of it, for others start from other folders; else as given.

    As much of its end as a name may have.
    """
    # Not pathlib's: a link keeps its name, and what is too long for a path is no error.
    there = os.path.exists(given)  # noqa: PTH110
    return printed(os.path.abspath(given) if there else given)  # noqa: PTH100


def printed(text: str) -> str:
    """What can be printed of a text, and as much of its end as a name may have."""
    return "".join(char for char in text if char.isprintable())[-MAX_NAME:]
