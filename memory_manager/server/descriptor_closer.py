"""Close descriptors and free memory on threads, so that the event loop never blocks on them.

Closing a descriptor can block without limit, for example if it is a file on NFS. Freeing the memory
of a slab takes about 0.3 s for each GiB.
"""

import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Final, TypeAlias

from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.memory_manager.server.worker_threads import start_threads

_NO_LINGER: Final = struct.pack("ii", 0, 0)
# More messages than a socket's queue holds: see `drain`.
_EMPTY_IN_A_ROW: Final = 1024
_END_S: Final = 1.0

_Work: TypeAlias = Callable[[], None]


class DescriptorCloser:
    """A pair of threads: one closes descriptors that clients have sent, one frees slabs.

    Safe from any thread. A client can block the first thread for as long as the client lives;
    `pending` then grows, and the server counts those descriptors as in use.
    """

    def __init__(self) -> None:
        """Start the threads.

        Raises:
            NoMemoryError: The system cannot start a thread.
        """
        self._received: SimpleQueue[int] = SimpleQueue()
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        [self._closer] = start_threads("tensor-dedup-close", 1, self._close_received)
        [self._freer] = start_threads("tensor-dedup-free", 1, self._free)

    @property
    def pending(self) -> int:
        """The number of received descriptors that are still open."""
        return self._counts["received"]

    @property
    def freeing(self) -> bool:
        """Whether memory passed to `drop` has not been freed yet."""
        return self._counts["dropped"] > self.freed

    @property
    def freed(self) -> int:
        """The number of calls of `drop` so far whose objects have been freed, slabs or not."""
        return self._counts["freed"]

    def _count(self, what: str, by: int) -> None:
        with self._lock:
            self._counts[what] += by

    def close_received(self, descriptors: Iterable[int]) -> None:
        """Close descriptors that a client has sent, on the thread for such descriptors."""
        for fd in descriptors:
            self._count("received", 1)
            self._received.put(fd)

    def drop(self, held: list[object]) -> None:
        """Free the objects in the list `held` on the thread that frees memory.

        The list must have the last references to these objects. It is cleared.
        """
        self._count("dropped", 1)
        self._work.put(held.clear)
        self._work.put(lambda: self._count("freed", 1))

    def afterwards(self, work: _Work) -> None:
        """Call `work` when everything passed to `drop` so far has been freed.

        `work` is called on the thread that frees memory, and must not raise.
        """
        self._work.put(work)

    def drain(self, connection: socket.socket) -> None:
        """Receive all unread messages of a client, so that closing its socket does not block.

        The kernel closes the descriptors in a socket's queue together with the socket, in the
        calling thread, and that can block.
        """
        # An empty message and the end look the same.
        nothing = 0
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # or more may come until it is closed
        with suppress(OSError):
            connection.setblocking(False)
            while nothing < _EMPTY_IN_A_ROW:
                try:
                    datagram = wire.receive(connection, self.close_received)
                except ProtocolError:
                    continue
                self.close_received(datagram.descriptors)
                nothing = 0 if datagram.data or datagram.descriptors else nothing + 1

    def end(self) -> None:
        """End the threads, after all memory is freed.

        If descriptors from clients cannot be closed within a second, they are left open.
        """
        self._work.put(None)
        self._received.put(-1)
        self._freer.join()
        self._closer.join(_END_S)

    def _close_received(self) -> None:
        while (fd := self._received.get()) >= 0:
            _no_linger(fd)
            with suppress(OSError):  # what was to be written is its writer's concern
                os.close(fd)
            self._count("received", -1)

    def _free(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work


def _no_linger(fd: int) -> None:
    with suppress(OSError):  # no socket
        connection = socket.socket(fileno=fd)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            connection.detach()
