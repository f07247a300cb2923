"""What goes over the network: bytes and calls, counted from any thread."""

import threading


class Traffic:
    """Counts of what was sent and received through a bucket: payload bytes and calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = self.received = self.calls = 0

    def add(self, sent: int = 0, received: int = 0, calls: int = 1) -> None:
        """Count a call, or several."""
        with self._lock:
            self.sent += sent
            self.received += received
            self.calls += calls

    def counts(self) -> tuple[int, int]:
        """Return the bytes sent and received so far, and the calls."""
        with self._lock:
            return self.sent + self.received, self.calls
