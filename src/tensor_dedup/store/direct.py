"""Writing past the page cache."""

import errno
import threading
from typing import Final

from tensor_dedup.store.buffers import PAGE, address
from tensor_dedup.store.files import Files, Handle

# Less is written as fast through the page cache.
DIRECT_BYTES: Final = 1 << 20


class DirectFile:
    """A file whose whole pages are written past the page cache. Safe from any thread.

    The page cache would take a copy of everything, in fresh memory, for nobody. Where the file
    system cannot, or memory or place begin within a page, bytes are written through it. `buffered`
    is the file, open for writing, and stays the caller's. Call `finish` when all is written: the
    ends of what does not end with a page are kept until then.
    """

    def __init__(self, files: Files, buffered: Handle) -> None:
        self._files, self._buffered = files, buffered
        self._direct: Handle | None = None
        self._refused = False
        # Through the page cache each would wait for the direct writes under way: 5 ms, not 10 us.
        self._ends: list[tuple[bytes, int]] = []
        self._opening = threading.Lock()

    def write(self, view: memoryview, at: int) -> None:
        """Write bytes at an offset of the file. Nothing is durable before the file is synced."""
        paged = view.nbytes >= PAGE and at % PAGE == 0 and address(view) % PAGE == 0
        if paged and (handle := self._opened()) is not None:
            whole = view.nbytes // PAGE * PAGE
            try:
                self._files.pwrite(handle, view[:whole], at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                if whole < view.nbytes:
                    self._ends.append((bytes(view[whole:]), at + whole))
                return
        self._write_buffered(view, at)

    def _write_buffered(self, view: memoryview, at: int) -> None:
        self._files.pwrite(self._buffered, view, at)
        self._files.begin_writing(self._buffered, at, view.nbytes)

    def finish(self) -> None:
        """Write what is left, once no thread writes."""
        while self._ends:
            self._files.pwrite(self._buffered, *self._ends.pop())

    def _opened(self) -> Handle | None:
        with self._opening:
            if self._direct is None and not self._refused:
                try:
                    self._direct = self._files.open(self._buffered.path, "modify direct")
                except OSError:  # what is wrong with more than this way of writing, others will say
                    self._refused = True
            return self._direct

    def close(self) -> None:
        """Let go of the file, once no thread writes. Closing twice has no effect."""
        handle, self._direct = self._direct, None
        if handle is not None:
            self._files.close(handle)
