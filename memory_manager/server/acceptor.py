"""Who may come in: connections of this user, while there are descriptors."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.memory_manager.protocol.codec import encode
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import Refused

_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class AcceptedConnection(NamedTuple):
    """A connection that was let in. `pidfd` is None when its process has ended already."""

    socket: socket.socket
    pid: int
    pidfd: int | None


class Acceptor:
    """Accepts connections. Keeps one descriptor in reserve, to say no when there is no other."""

    def __init__(
        self, listener: socket.socket, peer_of: Callable[[socket.socket], wire.Peer] = wire.peer_of
    ) -> None:
        self._listener = listener
        self._peer_of = peer_of
        self._spare = _open_spare()
        self.refused = 0

    def accept(self) -> AcceptedConnection | None:
        """The next connection, or None when there is none or it was refused.

        BlockingIOError when the system has no descriptor even to say no with: try again later.
        """
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._turn_away()
            return None  # the client has gone already
        connection.setblocking(False)
        return self._admit(wire.configure(connection))

    def _admit(self, connection: socket.socket) -> AcceptedConnection | None:
        try:
            peer = self._peer_of(connection)
        except OSError as error:
            self._refuse(connection, "forbidden", f"who you are is not known: {error.strerror}")
            return None
        if peer.uid != os.geteuid():
            text = f"this manager serves user {os.geteuid()}, you are {peer.uid}; start your own"
            self._refuse(connection, "forbidden", text)
            return None
        try:
            return AcceptedConnection(connection, peer.pid, wire.pidfd_of(connection, peer.pid))
        except OSError as error:
            self._refuse(connection, "crowded", f"no descriptor left: {error.strerror}")
            return None

    def _turn_away(self) -> None:
        if self._spare is None:
            self._spare = _open_spare()
        if self._spare is None:
            raise BlockingIOError(errno.EMFILE, "no descriptor left, not even to say so")
        os.close(self._spare)
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._refuse(connection, "crowded", "the manager has no descriptor left (ulimit -n)")
        self._spare = _open_spare()

    def _refuse(self, connection: socket.socket, code: Code, text: str) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            wire.send(connection, encode(Refused(code, text)))
        connection.close()

    def close(self) -> None:
        """Give the descriptor in reserve back."""
        if self._spare is not None:
            os.close(self._spare)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
