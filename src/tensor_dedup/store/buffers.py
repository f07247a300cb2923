"""Large page-aligned memory buffers for reading and writing files.

Buffers are reused where possible, because the first touch of memory is expensive: the kernel takes
longer to provide a fresh page than to copy a page of data into it.
"""

import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20
_REGION: Final = 64 << 20
ALIGNMENT: Final = 64

# Not in Python's mmap yet.
_POPULATE_READ: Final = 22
# What it ends with where a touch of the page would end in SIGBUS.
_EHWPOISON: Final = 133  # not in Python's errno: memory that the machine found to be broken
_FAULTS: Final = frozenset({errno.EFAULT, errno.EIO, _EHWPOISON})


def allocate(nbytes: int, *, huge: bool = False) -> memoryview:
    """Allocate writable, zeroed memory of at least `nbytes`, rounded up to whole pages.

    The memory is freed when the last view of it is garbage-collected. `huge` requests huge pages,
    which suit memory that is reused. Memory that is used once may be slower with huge pages,
    because the host may first have to assemble them.
    """
    size = -(-max(nbytes, 1) // PAGE) * PAGE
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and size >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


def address(view: memoryview) -> int:
    """Return the memory address of the first byte of `view`."""
    import numpy as np

    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def copy(view: memoryview, into: memoryview) -> None:
    """Copy the bytes of `view` into `into` with the GIL released; both have the same size.

    An assignment to a slice of a memoryview would hold the GIL.
    """
    import numpy as np

    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(view, np.uint8))


def allocate_all(sizes: Sequence[int]) -> list[memoryview]:
    """Allocate one buffer for each size in `sizes`, aligned to 64 bytes.

    Small buffers share one memory mapping, because a process may have only about 65,000 mappings. A
    shared mapping is freed when none of its buffers is referenced any more.
    """
    found: list[memoryview] = []
    at = 0
    while at < len(sizes):
        starts: list[int] = []
        end = 0
        while at < len(sizes) and (not starts or end + sizes[at] <= _REGION):
            starts.append(end)
            end = -(-(end + sizes[at]) // ALIGNMENT) * ALIGNMENT
            at += 1
        region = allocate(end)
        group = zip(starts, sizes[at - len(starts) : at], strict=True)
        found += [region[start : start + size] for start, size in group]
    return found


def map_file(fd: int, start: int, nbytes: int) -> memoryview:
    """Map `nbytes` of the file `fd` copy-on-write, from the offset `start`.

    `start` is a multiple of PAGE. The range must end within the file, because an access beyond the
    end of the file would kill the process (SIGBUS).

    Raises:
        OSError: The range cannot be mapped, or it reaches beyond the end of the file.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if os.fstat(fd).st_size < start + nbytes:
        raise OSError(errno.EINVAL, f"it ends before {start + nbytes}")
    return memoryview(mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, access, offset=start))


def bring_in(mapped: memoryview, start: int, nbytes: int) -> bool:
    """Load a range of `mapped`, made by `map_file`, into memory in a single call.

    Without this call, the kernel would load the range page by page at the first accesses. `start`
    is a multiple of PAGE. If a part of the range cannot be read, return False; an access to that
    part would kill the process (SIGBUS). Linux before 5.14 cannot detect this, so the result is
    always True there.
    """
    region = mapped.obj
    if isinstance(region, mmap.mmap):
        try:
            region.madvise(_POPULATE_READ, start, nbytes)
        except OSError as error:
            return error.errno not in _FAULTS
    return True


class BufferPool:
    """A pool of reusable buffers. Safe from any thread.

    A buffer returns to the pool when it is garbage-collected. The pool keeps at most `keep_bytes`
    of unused memory and frees the rest. `allocated` counts the buffers that were newly allocated.
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
        """Return a buffer of at least `nbytes` that is not in use; its content is undefined.

        The memory returns to the pool when the returned memoryview is garbage-collected. A tensor
        made by torch.frombuffer keeps the memoryview alive. A slice of the memoryview does not.
        """
        with self._lock:
            self._collect()
            fitting = [region for region in self._free if nbytes <= region.nbytes <= 2 * nbytes]
            region = min(fitting, key=lambda region: region.nbytes, default=None)
            if region is None:
                region = allocate(nbytes, huge=self._keep > 0)
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
