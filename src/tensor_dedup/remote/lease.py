"""The lease: how long a sweep spares what nothing refers to, and the clock that measures it."""

import time
from typing import Final

# Every push is over by then, or begins anew.
LEASE_S: Final = 7 * 24 * 3600.0
# Linux's monotonic clock stands still while the machine sleeps, others' do not.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return the seconds since this machine was started, those in which it slept included.

    What others judge by the server's clock has to be measured so: that clock does not stop.
    """
    return time.clock_gettime(_CLOCK)
