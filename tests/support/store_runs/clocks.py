"""A wall clock that somebody sets, as a process sees it: what `time` says, how files are dated.

The kernel's ctime cannot be set here, and the monotonic clock is never set anywhere.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tensor_dedup.store.files import Handle, Mode, RealFiles

HOUR_NS = 3600 * 10**9
# Back and forth, a second and by days, from one reading to the next.
JUMPS = (0, -1, 5, -30, 0.001, 2, -2, 49)


class SetClock:
    """A clock that is `hours` off; with `jumps`, so many more, the next one at each reading."""

    def __init__(self, hours: float = 0.0, jumps: Sequence[float] = (0,)) -> None:
        self.hours = hours
        self._jumps, self._read = jumps, 0

    def now_ns(self) -> int:
        """The time in ns since 1970."""
        self._read += 1
        hours = self.hours + self._jumps[self._read % len(self._jumps)]
        return _real_ns() + int(hours * HOUR_NS)

    def rule(self, patch: pytest.MonkeyPatch) -> None:
        """Let `time` say what this clock says."""
        patch.setattr(time, "time_ns", self.now_ns)
        patch.setattr(time, "time", lambda: self.now_ns() / 1e9)


class ClockedFiles(RealFiles):
    """The disk of a machine with this clock."""

    def __init__(self, clock: SetClock) -> None:
        self.clock = clock

    def _date(self, handle: Handle) -> None:
        now = self.clock.now_ns()
        os.utime(handle.fd, ns=(now, now))

    def open(self, path: Path, mode: Mode) -> Handle:
        handle = super().open(path, mode)
        if mode == "create":
            self._date(handle)
        return handle

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        super().pwrite(handle, data, offset)
        self._date(handle)

    def truncate(self, handle: Handle, size: int) -> None:
        super().truncate(handle, size)
        self._date(handle)

    def clone(self, source: Handle, target: Handle) -> bool:
        done = super().clone(source, target)
        self._date(target)
        return done

    def copy_range(self, source: Handle, target: Handle, start: int, nbytes: int) -> int:
        copied = super().copy_range(source, target, start, nbytes)
        self._date(target)
        return copied

    def now(self) -> int:
        return self.clock.now_ns() // 10**9


def stand_still(patch: pytest.MonkeyPatch) -> None:
    """Let the present of every store stay what it is now; files are dated by their clocks still.

    A step's manifest says when it was saved, and its name, a digest, in which folder it lies: at
    one time, equal saves make equal folders, and so the same operations.
    """
    present = int(time.time())
    for files in (RealFiles, ClockedFiles):
        patch.setattr(files, "now", lambda _files: present)


_real_ns = time.time_ns
