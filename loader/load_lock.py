"""The one lock under which weights are loaded in this process, whichever framework loads."""

import os
import threading
from typing import Final


class LoadLock:
    """Held by one thread at a time, which may take it again; a context manager. Free after fork.

    Loading replaces functions of the frameworks and process-wide settings, and two loads of one
    model at once would each make what one could share.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # A thread that does not exist in the child may have held it.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


LOAD_LOCK: Final = LoadLock()
