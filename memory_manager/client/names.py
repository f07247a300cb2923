"""Names of checkpoints and processes, as a manager stores and displays them."""

import os

from tensor_dedup.memory_manager.protocol.limits import MAX_NAME


def checkpoint_name(given: str) -> str:
    """Return the name of a checkpoint: the absolute path of an existing one, or the given text.

    So processes in different working directories agree on it. A name that is too long keeps only
    its end.
    """
    # Not pathlib's: a link keeps its name, and what is too long for a path is no error.
    there = os.path.exists(given)  # noqa: PTH110
    return printed(os.path.abspath(given) if there else given)  # noqa: PTH100


def printed(text: str) -> str:
    """Return the printable characters of a text, only its end if that is too long for a name."""
    return "".join(char for char in text if char.isprintable())[-MAX_NAME:]
