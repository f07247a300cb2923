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
    """Context manager: while it is active, the process runs no full garbage collections.

    A large model creates so many objects that full collections would follow one another, and each
    of them visits every object of the process. The younger generations are still collected, so
    reference cycles in a layer are freed soon. `gc.collect` works as usual.

    The context manager is reentrant and safe from any thread. The first thread to enter changes the
    collection thresholds of the process, and the last thread to leave restores them. A disabled
    collector stays disabled. Thresholds that other code sets meanwhile are kept.
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
    """Context manager: if the `with` block raises, restore torch's random number generators.

    The generators of the CPU and, if this process has used a GPU, of all GPUs get the state from
    before the block. So a load that is repeated draws the same numbers.
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
    """Return torch's module for the accelerator, for example `torch.cuda`, or None.

    Returns None if the machine has no accelerator, or if this process has not used it yet.
    """
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", lambda: False)
    # To ask for a state would begin it, and a load in host memory needs none.
    return module if begun() and hasattr(module, "get_rng_state_all") else None


def release_memory() -> None:
    """Return to the system the free memory that glibc keeps for later allocations.

    This takes milliseconds. With another C library it does nothing.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
