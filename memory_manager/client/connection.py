"""A single connection to the memory manager: it sends requests and receives replies."""

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

from tensor_dedup.memory_manager.errors import (
    ManagerGoneError,
    NoMemoryError,
    ProtocolError,
    RefusedError,
    UnsafeSocketError,
)
from tensor_dedup.memory_manager.protocol import paths, wire
from tensor_dedup.memory_manager.protocol.codec import decode_reply, decode_request, encode
from tensor_dedup.memory_manager.protocol.limits import MAX_RELEASES
from tensor_dedup.memory_manager.protocol.messages import (
    Extent,
    Found,
    FoundDigests,
    Hello,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
    descriptors_of_reply,
)

_Answer = TypeVar("_Answer", bound=Reply)
# A reply of a manager that is alive takes as long as hashing a slab does. This is for one that is
# stopped or gone wrong: an engine must not wait for it for ever.
REPLY_TIMEOUT_S: Final = 120.0
CONNECT_TIMEOUT_S: Final = 10.0


class Connection:
    """A socket to the manager. Safe from any thread; unusable in a forked child.

    Requests are sent one at a time. After a failure the connection is closed for good, and every
    request raises ManagerGoneError.
    """

    def __init__(
        self, path: Path, name: str, timeout_s: float = REPLY_TIMEOUT_S, *, device: str = ""
    ) -> None:
        """Connect and send Hello.

        `device` is the UUID of the GPU whose manager is expected at `path`, or "" for host memory.
        It is named only in errors, in the command that starts such a manager.

        Raises:
            ManagerGoneError: No manager answers.
            UnsafeSocketError: The socket or its folder does not belong to this user alone.
            RefusedError: The manager cannot serve another client, or has another version.
            ProtocolError: The process that answers uses another protocol.
        """
        self.path: Final = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._released: deque[int] = deque()
        self._socket: socket.socket | None = None
        self._start_one = start_one(device)
        self._socket = _connect(path, self._start_one)
        _LIVING.add(self)
        try:
            self.welcome: Final[Welcome] = self.ask(Hello(name), Welcome)[0]
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the connection is open. It is always False in a forked child."""
        return self._socket is not None and self._owner == os.getpid()

    def check(self) -> bool:
        """Return whether the manager is still connected; close the connection if it has hung up.

        While another thread's request is in progress this returns True, because that request
        notices a hang-up itself.
        """
        if self.alive and self._lock.acquire(blocking=False):
            try:
                if _has_hung_up(self.fileno()):
                    self.close()
            finally:
                self._lock.release()
            self._send_releases_if_free()
        return self.alive

    def fileno(self) -> int:
        """Return the descriptor of the socket, for `poll`, or -1 if it is closed."""
        connection = self._socket
        return connection.fileno() if connection is not None else -1

    def ask(
        self,
        request: Request,
        answer: type[_Answer],
        descriptors: tuple[int, ...] = (),
        extra_s: float = 0.0,
    ) -> tuple[_Answer, list[int]]:
        """Send a request, and return the reply and the descriptors that came with it.

        `answer` is the expected type of the reply. The caller owns the descriptors. `extra_s`
        extends the usual timeout of a reply, in seconds.

        Raises:
            RefusedError: The manager refused the request; the error's `code` is the reason.
            ManagerGoneError: The manager does not answer.
            ProtocolError: The request is invalid and was not sent, or the reply is invalid and the
                connection was closed.
            NoMemoryError: This process cannot open the descriptors of the reply.
        """
        data = _checked(request)
        with self._lock:
            self._send_releases()
            reply, arrived = self._exchange(data, descriptors, extra_s)
        self._send_releases_if_free()
        return self._expect(reply, arrived, answer)

    def _exchange(
        self, data: bytes, descriptors: tuple[int, ...], extra_s: float
    ) -> tuple[Reply, list[int]]:
        connection = self._open()
        try:
            connection.settimeout(self._timeout_s + extra_s)
            with contextlib.suppress(BrokenPipeError):  # it has hung up: hear what it said last
                wire.send(connection, data, descriptors)
            datagram = wire.receive(connection)
            if not datagram.data:
                raise ManagerGoneError(f"{self.path}: the memory manager has hung up")
            return self._decode(datagram)
        except NoMemoryError:
            raise  # a whole reply was read
        except OSError as error:
            self.close()
            raise ManagerGoneError(
                f"{self.path}: the memory manager does not answer ({error.strerror or error}); "
                f"load privately, or {self._start_one}",
                errno=error.errno,
            ) from error
        except BaseException:
            # Interrupted, be it by Ctrl-C: the reply that is still to come must not be taken for
            # that of the next request.
            self.close()
            raise

    def _decode(self, datagram: wire.Datagram) -> tuple[Reply, list[int]]:
        try:
            reply = decode_reply(datagram.data)
            if datagram.truncated:
                self._give_back(reply)
                raise NoMemoryError(
                    "descriptors of the memory manager's reply were lost: this process has none "
                    "left; raise ulimit -n, or load privately"
                )
            if len(datagram.descriptors) != descriptors_of_reply(reply):
                raise ProtocolError(
                    f"{type(reply).__name__} with {len(datagram.descriptors)} descriptors"
                )
        except ProtocolError as error:
            wire.close_all(datagram.descriptors)
            raise ProtocolError(f"{self.path}: {error.message}", **error.facts) from error
        return reply, datagram.descriptors

    def _give_back(self, reply: Reply) -> None:
        """Release the leases of a reply that cannot be used."""
        extents: list[Extent | None] = []
        if isinstance(reply, FoundDigests):
            extents = reply.extents
        elif isinstance(reply, Found):
            extents = [each for layer in reply.layers if layer for each in layer.extents]
        self._released.extend(extent.lease for extent in extents if extent is not None)

    def _expect(
        self, reply: Reply, arrived: list[int], answer: type[_Answer]
    ) -> tuple[_Answer, list[int]]:
        if isinstance(reply, answer):
            return reply, arrived
        wire.close_all(arrived)
        if isinstance(reply, Refused):
            raise RefusedError(f"the memory manager refused: {reply.text}", code=reply.code)
        self.close()
        raise ProtocolError(f"{type(reply).__name__} is no answer to this request")

    def _open(self) -> socket.socket:
        connection = self._socket
        if connection is None or self._owner != os.getpid():
            raise ManagerGoneError(
                f"{self.path}: the connection to the memory manager is closed; connect again"
            )
        return connection

    def tell(self, request: Request) -> None:
        """Send a request that has no reply.

        Raises:
            ManagerGoneError: The connection is closed or broken.
        """
        data = encode(request)
        try:
            with self._lock:
                connection = self._open()
                connection.settimeout(self._timeout_s)
                wire.send(connection, data)
        except OSError as error:
            self.close()  # else each further message would wait as long again
            raise ManagerGoneError(f"{self.path}: {error.strerror or error}") from error
        self._send_releases_if_free()

    def wait_for_end(self) -> None:
        """Wait until the manager has closed the connection, or the timeout of a reply is over."""
        with self._lock:
            connection = self._open()
            connection.settimeout(self._timeout_s)
            try:
                while (datagram := wire.receive(connection)).data:
                    wire.close_all(datagram.descriptors)
            except (OSError, ProtocolError):
                return

    def release(self, lease: int) -> None:
        """Give back the lease with this number, now or with the next request.

        The method never blocks and never fails, so finalizers can call it.
        """
        self._released.append(lease)
        self._send_releases_if_free()

    def _send_releases_if_free(self) -> None:
        # Whoever finds the lock taken leaves it to its holder, who looks again after letting it go.
        while self._released and self.alive and self._lock.acquire(blocking=False):
            try:
                if not self._send_releases():
                    return
            finally:
                self._lock.release()

    def _send_releases(self) -> bool:
        connection = self._socket
        while self._released and connection is not None and self._owner == os.getpid():
            batch = [
                self._released.popleft() for _ in range(min(len(self._released), MAX_RELEASES))
            ]
            try:
                connection.settimeout(0)
                wire.send(connection, encode(Release(batch)))
            except OSError:
                self._released.extendleft(reversed(batch))
                return False  # with the next request, or with the connection
        return True

    def close(self) -> None:
        """Close the connection, which ends all leases. Closing twice has no effect."""
        connection, self._socket = self._socket, None
        if connection is not None:
            if self._owner == os.getpid():
                _shut_down(connection)
            connection.close()

    def __del__(self) -> None:
        # Every lease holds its connection, so no tensor is in use any more. A thread that polls the
        # socket would keep it open if its descriptor were only closed: see `_shut_down`.
        self.close()


def _checked(request: Request) -> bytes:
    """Encode a request; raise ProtocolError where the manager would take it for garbage."""
    data = encode(request)
    decode_request(data)
    return data


def _has_hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def _shut_down(connection: socket.socket) -> None:
    # Wakes a thread that polls or waits, whose call keeps the socket open beyond `close`.
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def start_one(device: str) -> str:
    """Return the advice to start a manager of a GPU's memory, or of host memory if ""."""
    return f"start one with `tensor-dedup serve{device and f' --device {device}'}`"


def _connect(path: Path, advice: str) -> socket.socket:
    """Return a connected socket whose other end is this user's."""
    try:
        with ExitStack() as undo:
            paths.check_folder(path.parent)
            connection = undo.enter_context(wire.new_socket())
            connection.settimeout(CONNECT_TIMEOUT_S)
            _connect_patiently(connection, path)
            _check_peer(connection, path)
            undo.pop_all()
    except OSError as error:
        raise ManagerGoneError(
            f"{path}: no memory manager answers ({error.strerror or error}); {advice}",
            errno=error.errno,
        ) from error
    return connection


def _check_peer(connection: socket.socket, path: Path) -> None:
    peer = wire.peer_of(connection)
    if peer.uid != os.geteuid():
        raise UnsafeSocketError(f"{path}: user {peer.uid} listens there, not you")


def _connect_patiently(connection: socket.socket, path: Path) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection.connect(str(path))
        except BlockingIOError:  # the queue of those who want to connect is full
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


_LIVING: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child holds no connection: or its parent's leases would live as long as it does."""
    for connection in list(_LIVING):
        connection._lock = threading.Lock()  # its holder does not exist here
        connection._released.clear()
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
