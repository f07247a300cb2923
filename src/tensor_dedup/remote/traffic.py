"""Count the bytes and requests of a bucket."""

import threading


class Traffic:
    """Counters of a bucket's traffic: payload bytes sent and received, and requests.

    Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = self.received = self.calls = 0

    def add(self, sent: int = 0, received: int = 0, calls: int = 1) -> None:
        """Add bytes and a number of requests (`calls`) to the counters."""
        with self._lock:
            self.sent += sent
            self.received += received
            self.calls += calls

    def counts(self) -> tuple[int, int]:
        """Return the sum of the bytes sent and received, and the number of requests."""
        with self._lock:
            return self.sent + self.received, self.calls
