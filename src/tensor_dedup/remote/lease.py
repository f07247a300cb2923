"""The lease: how long a gc of a remote spares unused objects, and the clock that measures it."""

import time
from typing import Final

# Every push is over by then, or begins anew.
LEASE_S: Final = 7 * 24 * 3600.0
# Linux's monotonic clock stands still while the machine sleeps, others' do not.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Return the seconds since this machine was started, including the time it was asleep.

    A push or a gc measures its own duration with this clock, because a lease goes on while the
    machine is asleep.
    """
    return time.clock_gettime(_CLOCK)
