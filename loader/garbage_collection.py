"""Python's garbage collector, kept from looking at everything while much is made that stays."""

import gc
import os
import threading
from typing import Final

_NEVER: Final = 2**31 - 1  # the greatest threshold Python takes


class WithoutFullCollections:
    """While a thread is within, nothing old is looked through for garbage; a context manager.

    What a load makes is not garbage, but of a mixture of experts there is so much that one full
    collection after the other looks at every object of the process. What is young is collected as
    ever, so what a layer leaves in circles goes soon; so are all where somebody calls gc.collect.
    Reentrant, from any thread: thresholds of the process change with the first who comes, and are
    as they were when the last has gone. Whether the collector is enabled is left to the user, and
    so are thresholds that somebody else sets meanwhile.
    """

    def __init__(self) -> None:
        self._mine = _Entered()
        self._lock = threading.Lock()
        self._within = 0
        self._before: tuple[int, int, int] | None = None
        self._ours: tuple[int, int, int] | None = None
        os.register_at_fork(after_in_child=self._alone)

    def __enter__(self) -> None:
        with self._lock:
            if self._within == 0:
                self._before = gc.get_threshold()
                self._ours = (*self._before[:2], _NEVER)
                gc.set_threshold(*self._ours)
            self._within += 1
            self._mine.times += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._mine.times -= 1
            self._within -= 1
            if self._within == 0:
                self._give_back()

    def _give_back(self) -> None:
        before, ours, self._before, self._ours = self._before, self._ours, None, None
        if before is not None and gc.get_threshold() == ours:
            gc.set_threshold(*before)

    def _alone(self) -> None:
        # In a child: only the thread that forked is there, the others will never leave.
        self._lock = threading.Lock()
        self._within = self._mine.times
        if self._within == 0:
            self._give_back()


class _Entered(threading.local):
    """How often a thread is within."""

    times = 0


WITHOUT_FULL_COLLECTIONS: Final = WithoutFullCollections()
