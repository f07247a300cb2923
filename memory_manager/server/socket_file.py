"""The socket's file, and the lock that says who may make and remove it."""

import fcntl
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tensor_dedup.memory_manager.errors import ManagerRunningError
from tensor_dedup.memory_manager.protocol import paths, wire

_BACKLOG: Final = 128


class SocketFile:
    """A listening socket at a path that this process owns until `close`."""

    def __init__(self, path: Path) -> None:
        """Raise ManagerRunningError, UnsafeSocketError, OSError."""
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
