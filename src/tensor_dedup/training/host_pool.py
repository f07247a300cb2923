"""Host memory for the copies of a save: a pool of limited size, reused from step to step.

Writing to fresh memory takes three times as long as writing to memory that held the previous step.
"""

import os
import threading
from bisect import bisect_left, insort
from typing import Final

from tensor_dedup.store.buffers import PAGE, allocate

# More than this share of a block is not left unused.
_SLACK: Final = 8


def default_bytes() -> int:
    """Return the default capacity of a pool in bytes: a quarter of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class HostPool:
    """A pool of reusable buffers in host memory, with at most `capacity` bytes in total.

    Copies that must be made at once may exceed the capacity until their buffers are returned.
    Page-locked buffers are registered with CUDA, so that a device can copy into them
    asynchronously. Safe from any thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def __repr__(self) -> str:
        return f"HostPool({self._allocated} of {self.capacity} bytes)"

    def reset(self) -> None:
        """Reset the pool in a forked child, where the pool begins without any buffers.

        The lock is replaced, because a thread of the parent may have held it during the fork.
        """
        self._lock = threading.Lock()
        # By whether they are page-locked; in order of their sizes, for a model may have thousands.
        self._free: dict[bool, list[memoryview]] = {False: [], True: []}
        self._allocated = 0

    @property
    def allocated(self) -> int:
        """The total size of all buffers in bytes, including unused ones."""
        return self._allocated

    def take(
        self, nbytes: int, *, page_locked: bool = False, beyond: bool = False
    ) -> memoryview | None:
        """Return a buffer of at least `nbytes` bytes, or None if the pool has no room for it now.

        With `beyond`, the capacity may be exceeded, and None means that the machine has no memory
        left. With `page_locked`, the buffer is registered with CUDA. Pass the buffer to `give` when
        it is no longer used.
        """
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            free = self._free[page_locked]
            at = bisect_left(free, size, key=_size)
            if at < len(free) and _size(free[at]) <= size + size // _SLACK:
                return free.pop(at)
            self._shrink(self.capacity - size)
            if self._allocated + size > self.capacity and not beyond:
                return None
            block = _allocate(size, page_locked)
            self._allocated += block.nbytes if block is not None else 0
            return block

    def _shrink(self, most: int) -> None:
        """Free unused blocks until at most `most` bytes are allocated."""
        for free in self._free.values():
            while free and self._allocated > most:
                self._allocated -= free.pop().nbytes

    def give(self, block: memoryview, *, page_locked: bool = False) -> None:
        """Return `block`, a buffer from `take`, to the pool.

        `page_locked` must be the same as in the call of `take`.
        """
        with self._lock:
            insort(self._free[page_locked], block, key=_size)
            self._shrink(self.capacity)

    def clear(self) -> None:
        """Free all buffers that are not in use."""
        with self._lock:
            self._shrink(0)


def _size(block: memoryview) -> int:
    return block.nbytes


def _allocate(nbytes: int, page_locked: bool) -> memoryview | None:
    try:
        if not page_locked:
            return allocate(nbytes, huge=True)
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    except (OSError, MemoryError, RuntimeError):  # the last is torch's way to say the same
        return None
