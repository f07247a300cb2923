"""Memory into which steps are copied, used again from step to step; its size is bounded.

First touch is what a copy costs most: into fresh memory it takes three times as long as into memory
that held the step before. So blocks are kept, and a training asks for the same sizes each time.
"""

import os
import threading
from bisect import bisect_left, insort
from typing import Final

from tensor_dedup.store.buffers import PAGE, allocate

# More than this share of a block is not left unused.
_SLACK: Final = 8


def default_bytes() -> int:
    """A quarter of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class HostPool:
    """Blocks of host memory, `capacity` bytes of them at most. Any thread.

    Pinned blocks are page-locked by CUDA: copies from a device go into them by themselves.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """As new, in a forked child: its parent's threads hold the lock and the blocks."""
        self._lock = threading.Lock()
        # By whether they are pinned; in order of their sizes, for a model may have thousands.
        self._free: dict[bool, list[memoryview]] = {False: [], True: []}
        self._allocated = 0

    @property
    def allocated(self) -> int:
        """Bytes of all blocks, those that nobody has with them."""
        return self._allocated

    def take(self, nbytes: int, *, pinned: bool = False) -> memoryview | None:
        """A block of at least `nbytes`, until `give`; None: there is no room now."""
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            free = self._free[pinned]
            at = bisect_left(free, size, key=_size)
            if at < len(free) and _size(free[at]) <= size + size // _SLACK:
                return free.pop(at)
            self._shrink(self.capacity - size)
            if self._allocated + size > self.capacity:
                return None
            block = _allocate(size, pinned)
            self._allocated += block.nbytes if block is not None else 0
            return block

    def _shrink(self, most: int) -> None:
        """Let go of blocks nobody has, until there are at most so many bytes."""
        for free in self._free.values():
            while free and self._allocated > most:
                self._allocated -= free.pop().nbytes

    def give(self, block: memoryview, *, pinned: bool = False) -> None:
        """Give back what `take` gave."""
        with self._lock:
            insort(self._free[pinned], block, key=_size)

    def clear(self) -> None:
        """Let go of all blocks nobody has."""
        with self._lock:
            self._shrink(0)


def _size(block: memoryview) -> int:
    return block.nbytes


def _allocate(nbytes: int, pinned: bool) -> memoryview | None:
    try:
        if not pinned:
            return allocate(nbytes, huge=True)
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    except (OSError, MemoryError, RuntimeError):  # the last is torch's way to say the same
        return None
