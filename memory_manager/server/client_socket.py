"""One connection as the event loop sees it: what came, what has still to go out."""

import errno
import socket
from collections import deque
from dataclasses import dataclass, field

from tensor_dedup.memory_manager.backends.base import Memory
from tensor_dedup.memory_manager.protocol import wire


@dataclass(slots=True, eq=False)
class ClientSocket:
    """A socket with its outbox. The outbox holds the memory whose descriptors it will send."""

    number: int
    process: int
    pid: int
    socket: socket.socket
    outbox: deque[tuple[bytes, tuple[Memory, ...]]] = field(default_factory=deque)
    stuck_since: float | None = None
    retry_at: float | None = None
    events: int = 0  # what the selector watches for

    def flush(self, now: float) -> bool:
        """Send what the socket takes; False when the connection is broken."""
        self.retry_at = None
        while self.outbox:
            data, memories = self.outbox[0]
            try:
                wire.send(self.socket, data, [memory.fileno for memory in memories])
            except BlockingIOError:
                self._stuck(now)
                return True
            except OSError as error:
                if not _too_many_in_flight(error):
                    return False
                # Descriptors that clients have not read yet count against this user's limit.
                self._stuck(now)
                self.retry_at = now + _RETRY_S
                return True
            self.outbox.popleft()
            self.stuck_since = None
        return True

    def _stuck(self, now: float) -> None:
        if self.stuck_since is None:
            self.stuck_since = now


_RETRY_S = 0.02


def _too_many_in_flight(error: OSError) -> bool:
    return error.errno == errno.ETOOMANYREFS
