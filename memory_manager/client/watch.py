"""When the manager dies: connect to the next one, and offer it what this process still holds."""

import logging
import select
import threading
import weakref
from typing import Final, Protocol

from tensor_dedup.memory_manager.errors import MemoryManagerError

log = logging.getLogger("tensor_dedup.memory_manager.client")
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 2.0  # a load that begins meanwhile finds nothing of what this process holds
_SETTLE_S: Final = 0.05  # who has a request under way finds out first
_CHECK_MS: Final = 60_000


class ReconnectingClient(Protocol):
    """What a keeper needs of a client."""

    @property
    def closed(self) -> bool:
        """Was it closed by its user?"""

    def watched(self) -> int:
        """The descriptor that hangs up when the manager does; -1 without a connection."""

    def reconnect(self) -> object:
        """Connect again and offer what is held. MemoryManagerError."""


def watch_manager(client: ReconnectingClient, stop: threading.Event) -> None:
    """Start the thread that keeps this client connected. It does not keep the client alive."""
    threading.Thread(
        target=_run, args=(weakref.ref(client), stop), name="tensor-dedup-keeper", daemon=True
    ).start()


def _run(reference: "weakref.ref[ReconnectingClient]", stop: threading.Event) -> None:
    pause = _FIRST_S
    while not stop.is_set():
        client = reference()
        if client is None or client.closed:
            return
        try:
            client.reconnect()  # nothing, while the connection is good
        except MemoryManagerError as error:
            log.debug("not reconnected: %s", str(error))
            del client
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_S)
            continue
        fd = client.watched()
        del client  # only the descriptor is watched, and it hangs up when the client goes
        pause = _FIRST_S
        _wait_for_hang_up(fd)
        stop.wait(_SETTLE_S)


def _wait_for_hang_up(fd: int) -> None:
    """Sleep until the other side, or this process, has shut the socket down."""
    if fd < 0:
        return
    poll = select.poll()
    poll.register(fd, 0)  # nothing but POLLHUP and POLLERR: replies are somebody else's
    poll.poll(_CHECK_MS)
