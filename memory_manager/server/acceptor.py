"""Accept connections from processes of this user only.

The socket's folder has mode 0700 and the socket 0600. The process that holds a lock file may create
and remove the socket. The kernel reports the user of each peer (SO_PEERCRED); other users are
refused.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from tensor_dedup.memory_manager.errors import ManagerRunningError, UnsafeSocketError
from tensor_dedup.memory_manager.protocol import paths, wire
from tensor_dedup.memory_manager.protocol.codec import encode
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import Refused

_BACKLOG: Final = 128
_LOCK_TEXT: Final = re.compile(rb"(?:\d+\n?)?")  # a process's number, or its beginning
_MAX_LOCK: Final = 32
_NO_LOCK_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
_NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketFile:
    """A listening socket and its file, which this process owns until `close`."""

    def __init__(self, path: Path) -> None:
        """Take the lock, create the socket and listen.

        Raises:
            ManagerRunningError: Another process has the lock, or answers at the path.
            UnsafeSocketError: The folder does not belong to this user alone, or there is another
                file at the path of the socket or of the lock.
            OSError: The socket cannot be created.
        """
        self.path: Final = path
        paths.make_folder(path.parent)
        with ExitStack() as undo:
            self._lock = _lock(path)
            undo.callback(os.close, self._lock)
            self.socket: Final = wire.new_socket()
            undo.callback(self.socket.close)
            _remove_dead_socket(path)
            _bind(self.socket, path)
            self._made = _identity(path)
            undo.pop_all()

    def close(self) -> None:
        """Stop listening, remove the file, and release the lock."""
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.path) == self._made:  # nobody has put something else there
                self.path.unlink()
        os.close(self._lock)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a manager that died; whoever has the lock may do that."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _not_ours(path, "is not a socket")
    if found.st_uid != os.geteuid():
        raise _not_ours(path, f"belongs to user {found.st_uid}")
    with wire.new_socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            text = f"is a socket that somebody may listen at ({error.strerror})"
            raise _not_ours(path, text) from error
    raise ManagerRunningError(
        f"somebody answers at {path} who does not hold {_lock_file(path).name}; end that process, "
        "or choose another --socket",
        path=str(path),
    )


def _not_ours(path: Path, what: str) -> UnsafeSocketError:
    return UnsafeSocketError(
        f"{path} {what}; a memory manager replaces nothing but the socket that one before it has "
        "left: choose another --socket, or remove that yourself",
        path=str(path),
    )


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    # The lock is a file of its own that is never removed: two processes that lock two files of one
    # name would both believe they are alone.
    file = _lock_file(path)
    try:
        fd = os.open(
            file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
        )
    except OSError as error:
        if error.errno in _NO_LOCK_FILE:
            raise _not_ours(file, f"is not a lock file ({error.strerror})") from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not _LOCK_TEXT.fullmatch(os.pread(fd, _MAX_LOCK, 0)):
        os.close(fd)
        raise _not_ours(file, "is not the lock file of a memory manager")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, _MAX_LOCK, 0).decode("ascii", "replace").strip()
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
    """An accepted connection. `pidfd` is None if the client's process has ended already."""

    socket: socket.socket
    pid: int
    pidfd: int | None


def lacks_descriptors(error: OSError) -> bool:
    """Return whether an error means that no descriptor, or no memory for one, is left."""
    return error.errno in _NOTHING_LEFT


class Acceptor:
    """An acceptor of connections.

    It keeps a spare descriptor, so that it can refuse clients when no other descriptor is left.
    """

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
            OSError: There is no descriptor left to accept the connection, which stays queued.
        """
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if lacks_descriptors(error):
                raise
            return None  # there is none, or the client has gone already
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

    def turn_away(self) -> bool:
        """Refuse the next connection, using the spare descriptor.

        Return True, or False if the spare descriptor is missing and cannot be replaced.
        """
        if self._spare is None:
            self._spare = _open_spare()
        if self._spare is None:
            return False
        os.close(self._spare)
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._refuse(connection, "crowded", "the manager has no descriptor left (ulimit -n)")
        self._spare = _open_spare()
        return True

    def _refuse(self, connection: socket.socket, code: Code, text: str) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            wire.send(connection, encode(Refused(code, text)))
        connection.close()

    def close(self) -> None:
        """Close the spare descriptor."""
        if self._spare is not None:
            os.close(self._spare)


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
