"""Whether sharing is enabled in this process, and whether a load opts out. Imports no torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig


class EnabledSwitch:
    """The switch that enables sharing in the whole process.

    `config` is the configuration that `enable` has set, or None while sharing is disabled. All
    threads see the same configuration.
    """

    def __init__(self) -> None:
        self.config: TensorDedupConfig | None = None
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def set(self, config: TensorDedupConfig | None) -> TensorDedupConfig | None:
        """Set `config`, which is None to disable sharing, and return the previous configuration."""
        with self._lock:
            before, self.config = self.config, config
        return before


class OptOut(threading.local):
    """A context manager for a load with `tensor_dedup=False`, in the current thread.

    While it is active, models that are loaded as parts of that load are not shared either. `depth`
    counts how often the current thread has entered it.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


SWITCH: Final = EnabledSwitch()
OPT_OUT: Final = OptOut()
