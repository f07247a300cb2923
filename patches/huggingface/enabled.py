"""Whether sharing is enabled for the process, and whether one load opts out. Imports no torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig


class EnabledSwitch:
    """The configuration that `enable` has set, for the whole process.

    Worker threads inherit no context, so it is not held in one.
    """

    def __init__(self) -> None:
        self.config: TensorDedupConfig | None = None
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def set(self, config: TensorDedupConfig | None) -> TensorDedupConfig | None:
        """Set the configuration and return the previous one."""
        with self._lock:
            before, self.config = self.config, config
        return before


class OptOut(threading.local):
    """Whether a load with `tensor_dedup=False` is in progress in this thread.

    Models that are loaded as part of it are not shared either.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


SWITCH: Final = EnabledSwitch()
OPT_OUT: Final = OptOut()
