"""A thread that reconnects a client when its manager has died.

The client connects to the next manager and offers it the slabs in which the client holds leases.
Mapped bytes stay valid meanwhile.
"""

import logging
import select
import threading
import weakref
from typing import Final, Protocol

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.client.leases import Lease, SharedSlab
from tensor_dedup.memory_manager.errors import (
    LeaseClosedError,
    MemoryManagerError,
    ProtocolError,
    RefusedError,
)
from tensor_dedup.memory_manager.protocol.limits import MAX_PIECES
from tensor_dedup.memory_manager.protocol.messages import (
    FoundDigests,
    LookupDigests,
    Offer,
    Offered,
)
from tensor_dedup.memory_manager.protocol.wire import close_all

_log = logging.getLogger(__name__)
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 2.0  # a load that begins meanwhile finds nothing of what this process holds
_SETTLE_S: Final = 0.05  # who has a request under way finds out first
# A hang-up ends the wait at once, also that of a client that is dropped. This limit is for a
# descriptor that was closed, and its number given to another file, just before the wait began.
_CHECK_MS: Final = 1000


class ReconnectingClient(Protocol):
    """The methods of a client that the reconnecting thread calls."""

    @property
    def closed(self) -> bool:
        """Whether the client's `close` was called."""

    def watched(self) -> int:
        """Return the descriptor of the client's socket to watch, or -1 without a connection."""

    def reconnect(self) -> object:
        """Connect to the next manager, and offer it the memory that is leased.

        If the present connection still works, nothing is done.

        Raises:
            MemoryManagerError: No connection could be made.
        """


def watch_manager(client: ReconnectingClient, stop: threading.Event) -> None:
    """Start a thread that reconnects this client whenever its manager has died.

    The thread holds only a weak reference to the client. It ends within about a second after the
    client was closed or dropped, or `stop` was set.
    """
    threading.Thread(
        target=_run, args=(weakref.ref(client), stop), name="tensor-dedup-watch", daemon=True
    ).start()


def _run(reference: "weakref.ref[ReconnectingClient]", stop: threading.Event) -> None:
    pause = _FIRST_S
    while not stop.is_set():
        client = reference()
        if client is None or client.closed:
            return
        fd: int | None = None
        try:
            client.reconnect()  # nothing, while the connection is good
            fd = client.watched()
        except MemoryManagerError as error:
            _log.debug("not reconnected: %s", str(error))
        # Before any waiting, and outside `except`: the error's frames hold the client, too.
        del client
        if fd is None:
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_S)
            continue
        pause = _FIRST_S
        if _has_hung_up(fd):  # which comes when the client is closed or dropped, too
            stop.wait(_SETTLE_S)


def _has_hung_up(fd: int) -> bool:
    """Wait a while for the other side, or this process, to shut the socket down."""
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, 0)  # nothing but POLLHUP and POLLERR: replies are somebody else's
    return bool(poll.poll(_CHECK_MS))


def offer_slab(connection: Connection, slab: SharedSlab) -> bool:
    """Offer a slab of a dead manager to the manager behind `connection`.

    Return whether that manager has accepted the slab. If so, the leases in the slab now belong to
    this connection.
    """
    leases = [lease for lease in slab.leases.living() if not lease.closed]
    spans = slab.spans()
    if not leases or len(spans) > MAX_PIECES:
        return False
    try:
        reply, _ = connection.ask(Offer(slab.nbytes, spans), Offered, (slab.fileno,))
    except RefusedError as error:
        _log.warning("a slab of %d bytes was not taken back: %s", slab.nbytes, str(error))
        return False
    if len(reply.leases) != len(spans):
        raise ProtocolError(f"{len(reply.leases)} leases for {len(spans)} tensors")
    numbers = dict(zip([span.offset for span in spans], reply.leases, strict=True))
    for lease in leases:
        number = numbers.pop(lease.offset, 0)
        if not number:  # a second lease on that tensor
            number = _lease_number(connection, lease.digest)
        _renew(lease, number, connection)
    return True


def _lease_number(connection: Connection, digest: str) -> int:
    reply, arrived = connection.ask(LookupDigests([digest]), FoundDigests)
    close_all(arrived)
    return reply.extents[0].lease if reply.extents and reply.extents[0] else 0


def _renew(lease: Lease, number: int, connection: Connection) -> None:
    try:
        if number:
            lease.renew(number, connection)
    except LeaseClosedError:  # closed meanwhile, by another thread
        connection.release(number)
