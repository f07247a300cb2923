"""Functions that hash, which count what they are given."""

import threading
from collections.abc import Callable
from typing import Any


class Counted:
    """A function that hashes, and how many bytes it was given since the last look."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._nbytes, self._lock = function, 0, threading.Lock()

    def __call__(self, data: Any = b"", *more: Any, **named: Any) -> Any:
        with self._lock:
            self._nbytes += memoryview(data).nbytes
        return self._function(data, *more, **named)

    def taken(self) -> int:
        """The bytes since the last call."""
        found, self._nbytes = self._nbytes, 0
        return found
