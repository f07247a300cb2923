"""The connections of clients, and the processes behind them, without blocking.

A client that does not read its replies is not read from, and is disconnected after a while. A
process is watched until it ends, because its mappings outlive its connections.
"""

import errno
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from tensor_dedup.memory_manager.backends.base import Memory
from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.memory_manager.protocol.codec import encode
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import Reply
from tensor_dedup.memory_manager.server.acceptor import AcceptedConnection
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.02


@dataclass(slots=True, eq=False)
class ClientSocket:
    """A client's socket, and the messages that are still to be sent to it.

    `outbox` has these messages, each with the memory whose descriptors are sent along. `drop` frees
    objects on another thread.
    """

    number: int
    process: int
    pid: int
    socket: socket.socket
    drop: Callable[[list[object]], None]
    outbox: deque[tuple[bytes, tuple[Memory, ...]]] = field(default_factory=deque)
    stuck_since: float | None = None
    retry_at: float | None = None
    events: int = 0  # what the selector watches for

    def flush(self, now: float) -> bool:
        """Send as much as the socket accepts; return False if the connection is broken."""
        self.retry_at = None
        waited = self.stuck_since is not None
        while self.outbox:
            try:
                data, descriptors = self.outbox[0][0], [m.fileno for m in self.outbox[0][1]]
                wire.send(self.socket, data, descriptors)
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
            self.stuck_since = None
            if waited:
                self.drop([self.outbox.popleft()])
            else:
                self.outbox.popleft()
        return True

    def _stuck(self, now: float) -> None:
        if self.stuck_since is None:
            self.stuck_since = now


def _too_many_in_flight(error: OSError) -> bool:
    return error.errno == errno.ETOOMANYREFS


class ClientEvents(Protocol):
    """A receiver of events about clients, in the order in which they happen."""

    def connected(self, client: ClientSocket) -> None:
        """Handle a new client."""

    def received(self, client: ClientSocket, datagram: wire.Datagram) -> None:
        """Handle a message of a client, and take ownership of its descriptors.

        The message is empty if the client has hung up.
        """

    def invalid(self, client: ClientSocket, code: Code, text: str) -> None:
        """Handle an invalid message of a client; `code` and `text` say what is wrong."""

    def disconnected(self, client: ClientSocket) -> None:
        """Handle the end of a client's connection."""

    def ended(self, process: int) -> None:
        """Handle the end of a process.

        If a process cannot be watched, this is called right after `disconnected`.
        """


class Clients:
    """The clients of one manager. Only the event loop's thread may use this object.

    `selector` is the selector of the event loop, in which this object registers its callbacks. Each
    client and each process has a number that is never used again.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        closer: DescriptorCloser,
        events: ClientEvents,
        now: Callable[[], float],
        stall_timeout_s: float,
    ) -> None:
        self._selector = selector
        self._closer = closer
        self._events = events
        self._now = now
        self._stall_timeout_s = stall_timeout_s
        self._clients: dict[int, ClientSocket] = {}
        self._processes: dict[int, int | None] = {}  # number -> pidfd
        self._pids: dict[int, int] = {}  # pid -> number, of living processes
        self._numbers = 0

    def __len__(self) -> int:
        """Return the number of connected clients."""
        return len(self._clients)

    def __contains__(self, connection: int) -> bool:
        """Return whether the client with this number is connected."""
        return connection in self._clients

    @property
    def descriptors(self) -> int:
        """An upper bound of the descriptors in use for clients: one for each socket and process."""
        return len(self._clients) + len(self._processes)

    @property
    def next_retry(self) -> float | None:
        """The time at which `look` must send something again, or None if nothing has failed."""
        retries = (client.retry_at for client in self._clients.values())
        return min((at for at in retries if at is not None), default=None)

    def welcome(self, accepted: AcceptedConnection) -> None:
        """Add an accepted connection, and watch it and its process."""
        self._numbers += 1
        number = self._numbers
        process = self._process(accepted)
        client = ClientSocket(number, process, accepted.pid, accepted.socket, self._closer.drop)
        self._clients[number] = client
        self._events.connected(client)
        try:
            self._watch(client, selectors.EVENT_READ)
        except OSError as error:
            _log.warning("cannot watch pid=%d: %s", accepted.pid, str(error))
            self.hang_up(client)

    def _process(self, accepted: AcceptedConnection) -> int:
        """The number of the client's process: one, however often it connects."""
        known = self._pids.get(accepted.pid) if accepted.pid > 0 else None
        if known is not None:
            if accepted.pidfd is not None:
                os.close(accepted.pidfd)
            return known
        self._numbers += 1
        number = self._numbers
        self._processes[number] = accepted.pidfd
        if accepted.pidfd is not None:
            try:
                self._selector.register(
                    accepted.pidfd, selectors.EVENT_READ, lambda: self._ended(number)
                )
            except OSError as error:
                # Its connection stands for it, as where there is no descriptor for a process.
                _log.warning("cannot watch the end of pid=%d: %s", accepted.pid, str(error))
                os.close(accepted.pidfd)
                self._processes[number] = None
            else:
                self._pids[accepted.pid] = number
        return number

    def _ended(self, process: int) -> None:
        """A process has ended, whatever children of it hold its sockets."""
        gone = [client for client in self._clients.values() if client.process == process]
        self._events.ended(process)
        for client in gone:
            self._drop(client)

    def _ready(self, client: ClientSocket) -> None:
        if client.outbox:
            self._flush(client)
        else:
            self._read(client)

    def _read(self, client: ClientSocket) -> None:
        try:
            datagram = wire.receive(client.socket, self._closer.close_received)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._events.invalid(client, "protocol", error.message)
            return
        except OSError:
            self.hang_up(client)
            return
        self._events.received(client, datagram)

    def send(self, connection: int, reply: Reply, memories: tuple[Memory, ...]) -> None:
        """Queue a reply with the descriptors of `memories`. It is sent when the client reads."""
        client = self._clients[connection]
        client.outbox.append((encode(reply), memories))
        if client.stuck_since is None:
            self._flush(client)

    def _flush(self, client: ClientSocket) -> None:
        if not client.flush(self._now()):
            self.hang_up(client)
        elif client.retry_at is not None:
            self._watch(client, 0)
        else:
            # A client that does not read its replies is not read from either.
            self._watch(client, selectors.EVENT_WRITE if client.outbox else selectors.EVENT_READ)

    def _watch(self, client: ClientSocket, events: int) -> None:
        if events == client.events:
            return
        if client.events:
            self._selector.unregister(client.socket)
        if events:
            self._selector.register(client.socket, events, lambda: self._ready(client))
        client.events = events

    def look(self, now: float) -> None:
        """Look for clients that have not read for too long, and disconnect them.

        Failed sends are tried again.
        """
        limit = self._stall_timeout_s
        for client in list(self._clients.values()):
            if client.stuck_since is not None and now - client.stuck_since >= limit:
                _log.warning("cut off: pid=%d has not read for %.0f s", client.pid, limit)
                self.hang_up(client)
            elif client.retry_at is not None and now >= client.retry_at:
                self._flush(client)

    def hang_up(self, client: ClientSocket) -> None:
        """Close a connection, and report its end to the receiver of events."""
        self._drop(client)
        self._events.disconnected(client)
        if self._processes.get(client.process, 0) is None:
            # The end of this process cannot be seen: its connection stands for it.
            self._events.ended(client.process)

    def _drop(self, client: ClientSocket) -> None:
        if self._clients.pop(client.number, None) is not None:
            self._watch(client, 0)
            self._closer.drain(client.socket)
            client.socket.close()
            if client.outbox:
                unsent: list[object] = [client.outbox]
                client.outbox = deque()
                self._closer.drop(unsent)

    def dismiss(self, connection: int) -> None:
        """Close a connection that the core has dropped, after sending what its socket accepts.

        If the client is not connected any more, nothing is done.
        """
        client = self._clients.get(connection)
        if client is not None:
            client.flush(self._now())  # the reason, when the socket takes it
            self._drop(client)

    def forget(self, process: int) -> None:
        """Stop watching a process."""
        pidfd = self._processes.pop(process, None)
        for pid in [pid for pid, number in self._pids.items() if number == process]:
            del self._pids[pid]
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Close all connections, and stop watching processes.

        Queued replies are sent as far as the sockets accept them.
        """
        for connection in list(self._clients):
            self.dismiss(connection)
        for pidfd in self._processes.values():
            if pidfd is not None:
                os.close(pidfd)
