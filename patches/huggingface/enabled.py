"""What was asked for: sharing switched on, for the process, and refused, for one load. No torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig


class EnabledSwitch:
    """What `enable` has set, for the whole process: worker threads inherit no context."""

    def __init__(self) -> None:
        self.config: TensorDedupConfig | None = None
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def set(self, config: TensorDedupConfig | None) -> TensorDedupConfig | None:
        """Set, and return what was set before."""
        with self._lock:
            before, self.config = self.config, config
        return before


class OptOut(threading.local):
    """Whether a load with `tensor_dedup=False` is under way here: its models are refused too."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


SWITCH: Final = EnabledSwitch()
REFUSAL: Final = OptOut()
