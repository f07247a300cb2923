"""Large memory for reading and writing: whole pages, huge ones where the kernel has them.

First touch is the hidden cost of loading: a fresh page of 4 KiB costs more than the bytes read into
it. Huge pages cost a small part of that, and memory that is used again costs nothing.
"""

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Final

PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20


def allocate(nbytes: int) -> memoryview:
    """At least one page of zeros, writable; given back when nothing refers to it any more."""
    size = -(-max(nbytes, 1) // PAGE) * PAGE
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


class Pool:
    """Memory that is used again once nobody holds what was given. Safe from any thread.

    `keep_bytes` is how much is kept while nobody uses it. `allocated` counts regions that were new.
    """

    def __init__(self, keep_bytes: int) -> None:
        self.allocated = 0
        self._keep = keep_bytes
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        # What comes back comes from a finalizer, which may run in the middle of anything, `take`
        # included: it takes no lock.
        self._returned: deque[memoryview] = deque()

    def take(self, nbytes: int) -> memoryview:
        """At least `nbytes` that nobody else has; it holds what it held before.

        It comes back when this very object is gone: a tensor made of it by torch.frombuffer holds
        it, a slice of it does not.
        """
        with self._lock:
            self._collect()
            fitting = [region for region in self._free if nbytes <= region.nbytes <= 2 * nbytes]
            region = min(fitting, key=lambda region: region.nbytes, default=None)
            if region is None:
                region = allocate(nbytes)
                self.allocated += 1
            self._free = [other for other in self._free if other is not region]
        lent = region[:]
        weakref.finalize(lent, self._returned.append, region)
        return lent

    def _collect(self) -> None:
        kept = sum(region.nbytes for region in self._free)
        while self._returned:
            region = self._returned.popleft()
            kept += region.nbytes
            if kept <= self._keep:
                self._free.append(region)
