"""Writing of files with O_DIRECT, which bypasses the page cache."""

import errno
import threading
from typing import Final

from tensor_dedup.store.buffers import PAGE, address
from tensor_dedup.store.files import Files, Handle

# Less is written as fast through the page cache.
DIRECT_BYTES: Final = 1 << 20


class DirectFile:
    """A writer for one file that bypasses the page cache (O_DIRECT). Safe from any thread.

    `buffered` is a handle of the same file, open for writing, which the caller closes. These bytes
    are written through the page cache instead:

    - all bytes, if the file system does not support O_DIRECT
    - a write whose memory address or file offset is not a multiple of the page size
    - the incomplete page at the end of a write

    Call `finish` after the last `write`, because it writes the incomplete pages.
    """

    def __init__(self, files: Files, buffered: Handle) -> None:
        self._files, self._buffered = files, buffered
        self._direct: Handle | None = None
        self._refused = False
        # Through the page cache each would wait for the direct writes under way: 5 ms, not 10 us.
        self._ends: list[tuple[bytes, int]] = []
        self._opening = threading.Lock()

    def write(self, view: memoryview, at: int) -> None:
        """Write the bytes in `view` at offset `at` of the file.

        They are durable only after `finish` and an fsync of `buffered`.
        """
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
        """Write the incomplete pages at the ends of all writes. No other thread may be writing."""
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
        """Close the descriptor used for O_DIRECT. No thread may be writing.

        A second call has no effect.
        """
        handle, self._direct = self._direct, None
        if handle is not None:
            self._files.close(handle)
