"""Whether sharing is enabled in this process, and whether a load opts out. Imports no torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig


class EnabledSwitch:
    """The configuration that `enable` has set for the whole process, or None.

    It is not a context variable, because worker threads do not inherit those.
    """

    def __init__(self) -> None:
        self.config: TensorDedupConfig | None = None
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def set(self, config: TensorDedupConfig | None) -> TensorDedupConfig | None:
        """Set the configuration, None to disable sharing; return the previous one."""
        with self._lock:
            before, self.config = self.config, config
        return before


class OptOut(threading.local):
    """A context manager around a load with `tensor_dedup=False`, for the current thread.

    While `depth` is above 0, other models that are loaded as part of that load are not shared
    either.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


SWITCH: Final = EnabledSwitch()
OPT_OUT: Final = OptOut()
