"""The client: look layers up, build what nobody has, hold leases."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, TypeVar

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.client.leases import Lease, SharedSlab, SlabTable, lease_of
from tensor_dedup.memory_manager.client.puts import Put, Reservation
from tensor_dedup.memory_manager.client.start import start_manager
from tensor_dedup.memory_manager.client.watch import watch_manager
from tensor_dedup.memory_manager.errors import (
    LeaseClosedError,
    ManagerGoneError,
    ProtocolError,
    RefusedError,
)
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS, MAX_NAME, MAX_PIECES
from tensor_dedup.memory_manager.protocol.messages import (
    Done,
    Found,
    FoundDigests,
    Lookup,
    LookupDigests,
    Offer,
    Offered,
    Publish,
    Reserve,
    Reserved,
    Wait,
    Waited,
    Welcome,
)
from tensor_dedup.memory_manager.protocol.wire import close_all

log = logging.getLogger("tensor_dedup.memory_manager.client")
AUTO: Final = "auto"
# A request holds the connection, so a long wait is made of short ones: others get their turn.
_WAIT_SLICE_S: Final = 0.5
_CONNECT_ATTEMPTS: Final = 3
Outcome = Literal["ready", "free", "building", "stalled"]
_Item = TypeVar("_Item")


class _Session(NamedTuple):
    """A connection and its slabs; replaced as one, or a number could meet the wrong table."""

    connection: Connection
    slabs: SlabTable


@dataclass(frozen=True, slots=True)
class LayerFound:
    """A layer record, and a lease on each of its tensors, in the order they were published."""

    record: bytes
    leases: tuple[Lease, ...]


def connect(
    where: str | os.PathLike[str] = AUTO,
    *,
    name: str = "",
    keep_connected: bool = True,
    device: str = "",
) -> "Client":
    """Connect to the manager at a socket's path; "auto": at the default one, started if need be.

    `name` is for people who look at `tensor-dedup status`. `keep_connected`: when the manager
    dies, connect to the next one by itself and offer it what is leased. `device`: the UUID of a
    GPU, to borrow its memory: its manager's socket stands beside the one at `where`.
    ManagerGoneError: nobody answers, load privately. UnsafeSocketError: somebody else might.
    """
    auto = os.fspath(where) == AUTO
    beside = paths.socket_path(None if auto else where)
    connection = _connected(beside, name, device, start=auto)
    _check_device(connection, device)
    client = Client(connection, name)
    if keep_connected:
        client.keep_connected()
    return client


def _connected(beside: Path, name: str, device: str, *, start: bool) -> Connection:
    path = paths.device_socket(beside, device)
    for _ in range(_CONNECT_ATTEMPTS if start else 0):
        try:
            return Connection(path, name[:MAX_NAME])
        except ManagerGoneError:
            # None is there, or one that is about to end has its last moment: start the next.
            start_manager(beside, device)
    return Connection(path, name[:MAX_NAME])


def _check_device(connection: Connection, device: str) -> None:
    found = connection.welcome.device
    if found != device:
        connection.close()
        raise ManagerGoneError(
            f"{connection.path}: this memory manager lends memory of {found or 'the machine'}, not "
            f"of {device or 'the machine'}; start one with `tensor-dedup serve --device UUID`",
            device=found,
        )


class Client:
    """One process's connection to a memory manager. Safe from any thread; none in a forked child.

    Every method raises ManagerGoneError when the manager does not answer: load privately; what is
    leased stays mapped and valid.
    """

    def __init__(self, connection: Connection, name: str = "") -> None:
        self._session = _Session(connection, SlabTable())
        self._name = name
        self._records: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self._closed = threading.Event()
        self._switch = threading.Lock()
        _CLIENTS.add(self)

    @property
    def _connection(self) -> Connection:
        return self._session.connection

    @property
    def welcome(self) -> Welcome:
        """What the manager said of itself."""
        return self._connection.welcome

    @property
    def closed(self) -> bool:
        """Was it closed by its user?"""
        return self._closed.is_set()

    @property
    def connected(self) -> bool:
        """Is there a manager at the other end, as far as is known?"""
        return self._connection.alive

    def watched(self) -> int:
        """The socket's descriptor; -1 when there is no connection."""
        return self._connection.fileno() if self._connection.alive else -1

    def keep_connected(self) -> None:
        """Start a thread that reconnects when the manager dies; it ends with `close`."""
        watch_manager(self, self._closed)

    def close(self) -> None:
        """Hang up: the manager takes all leases back. What is mapped stays valid and charged."""
        self._closed.set()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Looking up.

    def lookup(self, keys: Sequence[str], checkpoint: str = "") -> list[LayerFound | None]:
        """The layers of these keys, in order; None for those that nobody has published."""
        return [
            found for batch in _batches(keys, MAX_KEYS) for found in self._pages(batch, checkpoint)
        ]

    def _pages(self, keys: Sequence[str], checkpoint: str) -> Iterator[LayerFound | None]:
        while keys:
            connection, table = self._session
            reply, arrived = connection.ask(Lookup(list(keys), checkpoint), Found)
            slabs = table.enter(reply.slabs, arrived)
            for layer in reply.layers:
                if layer is None:
                    yield None
                    continue
                leases = [lease_of(extent, slabs, connection) for extent in layer.extents]
                yield LayerFound(layer.record, tuple(each for each in leases if each))
            keys = _rest(keys, len(reply.layers))

    def lease(self, digests: Sequence[str], checkpoint: str = "") -> list[Lease | None]:
        """Leases on the tensors with these digests, in order; None for those that are not here.

        A builder offers what it has computed this way, and writes only the rest.
        """
        found: list[Lease | None] = []
        for batch in _batches(digests, MAX_PIECES):
            rest: Sequence[str] = batch
            while rest:
                page = _lease_page(self._session, rest, checkpoint)
                found += page
                rest = _rest(rest, len(page))
        return found

    # Building.

    def reserve(self, keys: Sequence[str], checkpoint: str = "") -> Reservation:
        """Ask to build these layers (at most MAX_KEYS): what is granted is one put.

        Publish or abandon the put before waiting for anything. RefusedError ("limit").
        """
        connection = self._connection
        reply, _ = connection.ask(Reserve(list(keys), checkpoint), Reserved)
        answers = dict(zip(keys, reply.answers, strict=True))
        granted = [key for key, answer in answers.items() if answer == "granted"]
        if not granted:
            return Reservation(answers, None)
        return Reservation(answers, Put(connection, reply.put, granted, checkpoint, self.lease))

    def wait(self, key: str, timeout_s: float) -> Outcome:
        """Wait for somebody else's layer; RefusedError while this process holds a reservation.

        "ready": look it up. "free": its builder gave up, reserve it. "stalled": the builder has
        been silent for too long; reserving takes over. "building": time is up, build privately.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            slice_s = max(0.0, min(_WAIT_SLICE_S, deadline - time.monotonic()))
            reply, _ = self._connection.ask(Wait(key, slice_s), Waited, extra_s=slice_s)
            if reply.outcome != "building" or time.monotonic() >= deadline:
                return reply.outcome

    def remember(self, key: str, record: bytes, digests: Sequence[str]) -> bool:
        """Publish this record again should the manager be replaced, if its tensors are leased.

        False: it is remembered already.
        """
        new = (record, tuple(digests))
        if self._records.get(key) == new:
            return False
        self._records[key] = new
        return True

    def forget(self, key: str) -> None:
        """The record's layer is gone from this process."""
        self._records.pop(key, None)

    # After the manager's death.

    def reconnect(self) -> int:
        """Connect to the manager that is there now and offer it what is held; slabs taken back.

        Nothing happens while the connection is good. ManagerGoneError, UnsafeSocketError.
        """
        with self._switch:
            if self.closed:
                raise LeaseClosedError("this client is closed; connect a new one")
            if self._connection.check():
                return 0
            slabs = self._session.slabs.living()
            connection = Connection(self._connection.path, self._name[:MAX_NAME])
            session = _Session(connection, SlabTable(slabs))
            taken = sum(_offer(session, slab) for slab in slabs)
            self._session = session
        self._publish_again(connection)
        log.info("reconnected to %s: %d of %d slabs taken back", connection.path, taken, len(slabs))
        return taken

    def _publish_again(self, connection: Connection) -> None:
        for key, (record, digests) in list(self._records.items()):
            try:
                connection.ask(Publish(0, key, record, list(digests)), Done)
            except RefusedError as error:
                log.debug("layer %s was not published again: %s", key, str(error))


def _lease_page(
    session: _Session, digests: Sequence[str], checkpoint: str = ""
) -> list[Lease | None]:
    reply, arrived = session.connection.ask(LookupDigests(list(digests), checkpoint), FoundDigests)
    slabs = session.slabs.enter(reply.slabs, arrived)
    for asked, extent in zip(digests, reply.extents, strict=False):
        if extent is not None and extent.digest != asked:
            session.connection.close()
            raise ProtocolError(f"asked for {asked}, and was given {extent.digest}")
    return [lease_of(extent, slabs, session.connection) for extent in reply.extents]


def _offer(session: _Session, slab: SharedSlab) -> bool:
    """Offer a slab; every living lease in it then is one of the new connection."""
    leases = [lease for lease in slab.leases.living() if not lease.closed]
    spans = slab.spans()
    if not leases or len(spans) > MAX_PIECES:
        return False
    connection = session.connection
    try:
        reply, _ = connection.ask(Offer(slab.nbytes, spans), Offered, (slab.fileno,))
    except RefusedError as error:
        log.warning("a slab of %d bytes was not taken back: %s", slab.nbytes, str(error))
        return False
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


def _batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _rest(items: Sequence[str], answered: int) -> Sequence[str]:
    if not 0 < answered <= len(items):
        raise ProtocolError(f"{answered} of {len(items)} questions were answered")
    return items[answered:]


_CLIENTS: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork() -> None:
    """The child may `reconnect`, which gives it leases of its own on what it inherited."""
    for client in list(_CLIENTS):
        client._switch = threading.Lock()  # its holder does not exist here


os.register_at_fork(after_in_child=_after_fork)
