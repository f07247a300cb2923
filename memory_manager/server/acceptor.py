"""Access control: the socket's file is this user's alone, and the kernel identifies the peer.

The folder has mode 0700 and the socket 0600 (`protocol.paths`), a lock says which process may make
and remove the socket, and a peer of another user is refused by SO_PEERCRED.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from tensor_dedup.memory_manager.errors import ManagerRunningError
from tensor_dedup.memory_manager.protocol import paths, wire
from tensor_dedup.memory_manager.protocol.codec import encode
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import Refused

_BACKLOG: Final = 128
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class SocketFile:
    """A listening socket at a path that this process owns until `close`."""

    def __init__(self, path: Path) -> None:
        """Take the lock, make the socket and listen.

        Raises:
            ManagerRunningError: Another process has the lock.
            UnsafeSocketError: The folder is not this user's alone.
            OSError: The socket cannot be made.
        """
        self.path: Final = path
        paths.make_folder(path.parent)
        with ExitStack() as undo:
            self._lock = _lock(path)
            undo.callback(os.close, self._lock)
            self.socket: Final = wire.new_socket()
            undo.callback(self.socket.close)
            # Whoever has the lock may remove what a manager that died has left.
            path.unlink(missing_ok=True)
            _bind(self.socket, path)
            undo.pop_all()

    def close(self) -> None:
        """Stop listening and remove the file; the lock goes last."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def _lock(path: Path) -> int:
    # The lock is a file of its own that is never removed: two processes that lock two files of one
    # name would both believe they are alone.
    fd = os.open(
        path.with_name(path.name + ".lock"),
        os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
        0o600,
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise ManagerRunningError(
            f"a memory manager (process {owner or 'unknown'}) owns {path}; stop it with "
            f"`tensor-dedup stop --socket {path}`, or choose another --socket",
            path=str(path),
            pid=owner,
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _bind(listener: socket.socket, path: Path) -> None:
    # The folder is closed to others already; the mask is for the moment between bind and chmod.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    listener.setblocking(False)


class AcceptedConnection(NamedTuple):
    """An accepted connection. `pidfd` is None if its process has ended already."""

    socket: socket.socket
    pid: int
    pidfd: int | None


class Acceptor:
    """Accepts connections. Keeps one descriptor in reserve, to refuse when none is left."""

    def __init__(
        self, listener: socket.socket, peer_of: Callable[[socket.socket], wire.Peer] = wire.peer_of
    ) -> None:
        self._listener = listener
        self._peer_of = peer_of
        self._spare = _open_spare()
        self.refused = 0

    def accept(self) -> AcceptedConnection | None:
        """Return the next connection, or None if there is none or it was refused.

        Raises:
            BlockingIOError: There is no descriptor left even to refuse with; try again later.
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
        """Close the descriptor in reserve."""
        if self._spare is not None:
            os.close(self._spare)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
