"""Names of checkpoints and processes, as a manager stores and shows them."""

import os

from tensor_dedup.memory_manager.protocol.limits import MAX_NAME


def checkpoint_name(given: str) -> str:
    """Return the absolute path of `given` if it exists, otherwise `given` itself.

    Processes with different working directories so use the same name for a checkpoint. Only
    printable characters are kept, and only the end of a name that is too long.
    """
    # Not pathlib's: a link keeps its name, and what is too long for a path is no error.
    there = os.path.exists(given)  # noqa: PTH110
    return printed(os.path.abspath(given) if there else given)  # noqa: PTH100


def printed(text: str) -> str:
    """Return the printable characters of a text, cut to the last MAX_NAME of them."""
    return "".join(char for char in text if char.isprintable())[-MAX_NAME:]
