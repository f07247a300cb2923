"""A folder in which the processes of an engine leave their reports for the one that asks."""

import atexit
import os
import shutil
import tempfile

ENVIRONMENT = "TENSOR_DEDUP_REPORT_DIR"


def gather_from_children() -> str:
    """Return the folder where child processes write their reports; create it the first time.

    It is private (0700), inherited through the environment, and removed when this process ends.
    A process that was given one by its parent uses that one. Not safe from several threads at
    once: two engines' arguments made concurrently could leave an extra empty folder.
    """
    folder = os.environ.get(ENVIRONMENT)
    if folder:
        return folder
    folder = os.environ[ENVIRONMENT] = tempfile.mkdtemp(prefix="tensor-dedup-reports-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    # A forked child inherits this callback; only the process that made the folder removes it.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
