"""Messages with file descriptors over a Unix socket, for clients and the manager.

SOCK_SEQPACKET preserves the boundaries of messages and keeps the descriptors of each message with
it. The receiver owns the descriptors.
"""

import array
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol.limits import MAX_MESSAGE

_INT_BYTES: Final = array.array("i").itemsize
_SO_PEERPIDFD: Final = 77  # Linux 6.5
_UCRED: Final = struct.Struct("3i")
_BUFFER: Final = 2 * MAX_MESSAGE
# Room for as many as Linux passes in one message, and not only for MAX_DESCRIPTORS: what does not
# fit is closed by the kernel inside of recvmsg, and that may take as long as its sender likes.
_MOST_AT_ONCE: Final = 253
_ANCILLARY: Final = socket.CMSG_SPACE(_MOST_AT_ONCE * _INT_BYTES)


class Peer(NamedTuple):
    """The process at the other end of a socket, as reported by the kernel."""

    pid: int
    uid: int


class Datagram(NamedTuple):
    """One received message. `data` is empty if the other side has hung up.

    `truncated` is True if descriptors were lost: there were too many, or this process could open no
    more.
    """

    data: bytes
    descriptors: list[int]
    truncated: bool = False


def new_socket() -> socket.socket:
    """Return a new unconnected SOCK_SEQPACKET Unix socket."""
    return configure(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def configure(connection: socket.socket) -> socket.socket:
    """Make the socket's send buffer large enough for any message; return the socket."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return connection


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that has connected or listens at the other end.

    Raises:
        OSError: The kernel does not know the process.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid, uid)


def pidfd_of(connection: socket.socket, pid: int) -> int | None:
    """Return a descriptor that becomes readable when the peer's process ends.

    Return None if the process has ended already.

    Raises:
        OSError: There is no descriptor left.
    """
    with contextlib.suppress(OSError):
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT_BYTES)
        fd = int.from_bytes(raw, "little")
        os.set_inheritable(fd, False)
        return fd
    # An older kernel. The pid may have been reused by now: then the charge ends with that process.
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except ProcessLookupError:
        return None


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one message, entirely or not at all.

    Raises:
        BlockingIOError: The socket does not block, and sending would have to wait.
        OSError: The connection is broken.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([data], ancillary if descriptors else [], socket.MSG_NOSIGNAL)


def close_all(descriptors: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in descriptors:
        os.close(fd)


def receive(
    connection: socket.socket, discard: Callable[[list[int]], None] = close_all
) -> Datagram:
    """Receive one message.

    If the descriptors of a message cannot be used, `discard` is called to close them.

    Raises:
        ProtocolError: The message was too large; its end is lost.
        OSError: The connection is broken.
    """
    try:
        data, ancillary, flags, _ = _receive(connection)
    except ConnectionResetError:
        # The other side hung up before it had read everything. Linux says so first, once; what it
        # said before, which is why, comes next.
        data, ancillary, flags, _ = _receive(connection)
    descriptors = [fd for level, kind, raw in ancillary for fd in _rights(level, kind, raw)]
    if flags & socket.MSG_CTRUNC:
        discard(descriptors)
        descriptors = []
    if flags & socket.MSG_TRUNC or len(data) > MAX_MESSAGE:
        discard(descriptors)
        raise ProtocolError(f"a message of more than {MAX_MESSAGE} bytes")
    return Datagram(data, descriptors, bool(flags & socket.MSG_CTRUNC))


def _receive(connection: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
    return connection.recvmsg(MAX_MESSAGE + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)


def _rights(level: int, kind: int, raw: bytes) -> list[int]:
    if level != socket.SOL_SOCKET or kind != socket.SCM_RIGHTS:
        return []
    return list(array.array("i", raw[: len(raw) - len(raw) % _INT_BYTES]))
