"""Process-wide state that a load suspends, restores or releases.

A load suspends full garbage collections, which would visit all objects again and again while many
long-lived ones are created. A load that fails and is repeated restores torch's random generators.
Memory that the allocator keeps after a load is released.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_libc: Final = ctypes.CDLL(None)
_NEVER: Final = 2**31 - 1  # the greatest threshold Python takes


class WithoutFullCollections:
    """A context manager that suspends full garbage collections of the process.

    A large model creates so many objects that full collections, each of which visits every object
    of the process, follow one another. The younger generations are still collected, so reference
    cycles of a layer are freed soon, and gc.collect works as usual.

    Reentrant and usable from any thread: the first thread to enter changes the thresholds of the
    process, and the last one to leave restores them. A disabled collector stays disabled, and
    thresholds that other code sets meanwhile are kept.
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
    """The number of times the current thread has entered."""

    times = 0


WITHOUT_FULL_COLLECTIONS: Final = WithoutFullCollections()


@contextmanager
def rng_restored_on_failure() -> Iterator[None]:
    """Restore the states of torch's random number generators if the block raises.

    A load that is then repeated draws the same numbers. The generators are that of the CPU and, if
    this process has used a GPU, those of all GPUs.
    """
    module = accelerator()
    here = torch.get_rng_state()
    there = None if module is None else module.get_rng_state_all()
    try:
        yield
    except BaseException:
        torch.set_rng_state(here)
        if module is not None:
            module.set_rng_state_all(there)
        raise


def accelerator() -> Any:
    """Return torch's module for the accelerator in use, for example torch.cuda, or None."""
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", lambda: False)
    # To ask for a state would begin it, and a load in host memory needs none.
    return module if begun() and hasattr(module, "get_rng_state_all") else None


def release_memory() -> None:
    """Release free memory that glibc keeps for later allocations to the system.

    This takes milliseconds. With another C library it does nothing.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
