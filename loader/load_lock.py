"""The process-wide locks that are held while weights are loaded or converted."""

import os
import threading
from typing import Final


class LoadLock:
    """A reentrant lock, used as a context manager. A forked child starts with the lock free.

    The process has two of them:

    - `LOAD_LOCK` is held while a model is loaded. Loads replace functions of the frameworks and
      change process-wide settings, and two loads of one model at once would not share its tensors.
    - `MOVE_LOCK` is held while a model is converted.
    """

    def __init__(self) -> None:
        self._mine = _Taken()
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # A thread that does not exist in the child may have held it.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._mine.locks.append(lock)

    def __exit__(self, *error: object) -> None:
        # In a child that was forked since, another one than there is now.
        self._mine.locks.pop().release()


class _Taken(threading.local):
    """The locks that the current thread holds, in the order in which it took them."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


LOAD_LOCK: Final = LoadLock()
# Of conversions: two of equal models meet, and neither waits for a load that downloads. Whoever has
# both took this one last.
MOVE_LOCK: Final = LoadLock()
