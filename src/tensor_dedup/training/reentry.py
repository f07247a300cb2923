"""Saves that begin in the middle of another one, in the same thread: an error, not a deadlock.

A signal handler or a provider may begin a save, or wait for one, while its thread is saving.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensor_dedup.training.errors import NestedSaveError

_Result = TypeVar("_Result")


class SaveLock:
    """A lock for saves. `check` detects that the calling thread holds the lock already.

    This happens if a signal handler or a provider starts a save in the middle of another save.
    """

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0

    def check(self, root: Path) -> None:
        """Check that the calling thread does not hold the lock.

        Call this before `with lock:`. `root` is the folder of the store, for the message.

        Raises:
            NestedSaveError: The calling thread holds the lock.
        """
        if self._owner == threading.get_ident():
            raise NestedSaveError.at(root, "a save was begun in the middle of another one")

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


class Capturing(threading.local):
    """A flag for each thread that is set while the thread captures or commits a step.

    A signal handler may interrupt that work. If the handler waited for a save, and the save for the
    interrupted work, neither would ever end. The flag makes the wait an error instead.
    """

    _here = False

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work`, which captures or commits, with the flag set; return its result."""
        before, self._here = self._here, True
        try:
            return work()
        finally:
            self._here = before

    def check(self, root: Path) -> None:
        """Check that the calling thread may wait for saves to the store in the folder `root`.

        Raises:
            NestedSaveError: The calling thread is capturing or committing a step.
        """
        if self._here:
            what = "a save was begun or waited for in the middle of another one"
            raise NestedSaveError.at(root, what)
