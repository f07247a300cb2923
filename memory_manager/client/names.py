"""Names of checkpoints and processes, as a manager stores and shows them."""

import os

from tensor_dedup.memory_manager.protocol.limits import MAX_NAME


def checkpoint_name(given: str) -> str:
    """Return the absolute path of `given` if that path exists, otherwise `given` itself.

    So processes with different working directories use the same name for a checkpoint. Characters
    that are not printable are removed. If the name is too long, only its end is kept.
    """
    # Not pathlib's: a link keeps its name, and what is too long for a path is no error.
    there = os.path.exists(given)  # noqa: PTH110
    return printed(os.path.abspath(given) if there else given)  # noqa: PTH100


def printed(text: str) -> str:
    """Return the printable characters of a text, cut to the last MAX_NAME of them."""
    return "".join(char for char in text if char.isprintable())[-MAX_NAME:]
