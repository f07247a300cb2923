"""An engine's connection to a memory manager: look up layers by key, and put missing ones.

    leases = client.get(keys)                                 # one message for 256 keys
    result = client.put({key: NewLayer(record, tensors)})     # reserve, write, seal, publish

A layer is a record (bytes that only engines understand) and its tensors. Both calls return leases
on the tensors. As long as a lease exists, the bytes of its tensor stay in place and unchanged.
"""

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self, TypeVar

from tensor_dedup.memory_manager.client.connection import Connection, start_one
from tensor_dedup.memory_manager.client.leases import Lease, SlabTable, lease_of
from tensor_dedup.memory_manager.client.names import printed
from tensor_dedup.memory_manager.client.puts import (
    Fill,
    NewLayer,
    Put,
    PutLayer,
    PutResult,
    Reservation,
    publish,
    write_data,
)
from tensor_dedup.memory_manager.client.watch import offer_slab, watch_manager
from tensor_dedup.memory_manager.errors import (
    LeaseClosedError,
    ManagerGoneError,
    MemoryManagerError,
    ProtocolError,
    RefusedError,
)
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.protocol.limits import (
    MAX_KEYS,
    MAX_PIECES,
    MAX_RELEASES,
)
from tensor_dedup.memory_manager.protocol.messages import (
    Done,
    Evict,
    Found,
    FoundDigests,
    Lookup,
    LookupDigests,
    Reserve,
    Reserved,
    StandBy,
    StoodBy,
    Wait,
    Waited,
    Welcome,
)

_log = logging.getLogger(__name__)
AUTO: Final = "auto"
# A request holds the connection, so a long wait is made of short ones: others get their turn.
_WAIT_SLICE_S: Final = 0.5
_ASK_AGAIN_S: Final = 0.05
_CONNECT_ATTEMPTS: Final = 3
# By name and not by import: a client never loads the server.
_SERVER: Final = "tensor_dedup.memory_manager.server"
_ALREADY_RUNNING: Final = 3  # the exit status of the server's module
_START_TIMEOUT_S: Final = 60.0
_IDLE_EXIT_S: Final = 600.0
# So often is a layer reserved again that its builder gave up, or that was evicted at once.
_PUT_ROUNDS: Final = 20
# Another builder writes one slab under a key, in well under a second; what takes this long is
# stuck in a way that the manager's own time-out has not ended.
PUT_WAIT_S: Final = 60.0
Outcome = Literal["ready", "free", "building", "stalled"]
_Item = TypeVar("_Item")


class _Session(NamedTuple):
    """A connection and its slabs; replaced as one, or a number could meet the wrong table."""

    connection: Connection
    slabs: SlabTable


@dataclass(frozen=True, slots=True)
class LayerFound:
    """A published layer: its record, and a lease on each of its tensors.

    The leases are in the order of the digests with which the layer was published.
    """

    record: bytes
    leases: tuple[Lease, ...]


def connect(
    where: str | os.PathLike[str] = AUTO,
    *,
    name: str = "",
    keep_connected: bool = True,
    device: str = "",
) -> "Client":
    """Connect to the manager at the socket `where`, or at the default path with "auto".

    With "auto", a manager is started if none answers. `name` is shown by `tensor-dedup status`.
    With `keep_connected`, the client reconnects by itself after the manager has died, and offers
    the memory that is leased here to the next manager. If `device` is the UUID of a GPU, the client
    connects to the manager of that GPU's memory, whose socket lies beside `where`.

    Raises:
        ManagerGoneError: No manager answers, or it lends the memory of another device; load into
            private memory instead.
        UnsafeSocketError: The socket or its folder does not belong to this user alone.
        RefusedError: The manager refuses the connection.
        ProtocolError: The process that answers uses another protocol.
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
            return Connection(path, printed(name), device=device)
        except ManagerGoneError:
            # None is there, or one that is about to end has its last moment: start the next.
            start_manager(beside, device)
    return Connection(path, printed(name), device=device)


def start_manager(path: Path, device: str = "", budget: int | None = None) -> bool:
    """Start a manager in the background at the socket `path`, and wait until clients can connect.

    Return True, or False if another process has started a manager meanwhile. If `device` is the
    UUID of a GPU, the manager lends the memory of that GPU, and its socket lies beside `path`.
    `budget` is in bytes; by default the server chooses. The manager is detached from this process,
    and ends after ten minutes without clients. Several processes may call this at once.

    Raises:
        ManagerGoneError: The manager does not start.
        UnsafeSocketError: The folder of the socket does not belong to this user alone.
    """
    command = [
        sys.executable, "-m", _SERVER, "--detach",
        "--socket", str(path), "--idle-exit", str(_IDLE_EXIT_S), "--device", device,
    ]  # fmt: skip
    if budget is not None:
        command += ["--budget", str(budget)]
    try:
        paths.make_folder(path.parent)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ManagerGoneError(f"no memory manager could be started: {error}") from error
    if done.returncode not in (0, _ALREADY_RUNNING):
        raise ManagerGoneError(
            f"no memory manager could be started at {path}: "
            f"{done.stderr.strip() or 'exit status ' + str(done.returncode)}",
            status=done.returncode,
        )
    return done.returncode == 0


def _check_device(connection: Connection, device: str) -> None:
    found = connection.welcome.device
    if found != device:
        connection.close()
        raise ManagerGoneError(
            f"{connection.path}: this memory manager lends memory of {found or 'the machine'}, not "
            f"of {device or 'the machine'}; {start_one(device)}",
            device=found,
        )


class Client:
    """A connection of this process to a memory manager.

    It is safe from any thread. In a forked child it is unusable until `reconnect` was called. A
    tensor stays in place while there is a lease on it. Mapped memory stays valid even if the
    manager dies, except memory of the `ipc` backend.

    If the manager does not answer, requests raise ManagerGoneError, and `put` returns the error in
    its result. The caller can then load into private memory.
    """

    def __init__(self, connection: Connection, name: str = "") -> None:
        self._session = _Session(connection, SlabTable())
        self._name = name
        self._records: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self._closed = threading.Event()
        self._switch = threading.Lock()
        _CLIENTS.add(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self.connected else "disconnected"
        return f"<Client of {self._connection.path}, {state}>"

    @property
    def _connection(self) -> Connection:
        return self._session.connection

    @property
    def welcome(self) -> Welcome:
        """The manager's description of itself: its process, its backend and its device."""
        return self._connection.welcome

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def connected(self) -> bool:
        """Whether the client is connected to a manager.

        It stays True after the manager has hung up, until the client has noticed that.
        """
        return self._connection.alive

    def watched(self) -> int:
        """Return the descriptor of the socket to watch with `poll`, or -1 without a connection."""
        return self._connection.fileno() if self._connection.alive else -1

    def keep_connected(self) -> None:
        """Start a thread that reconnects when the manager dies. `close` ends the thread."""
        watch_manager(self, self._closed)

    def beside(self) -> "Client":
        """Return another connection to the same manager, which does not reconnect by itself.

        A connection has one request at a time, and a request that allocates or hashes memory takes
        long. Threads that each have a connection are served side by side. Close the leases of the
        new client before you close it.

        Raises:
            ManagerGoneError: The manager does not answer.
            RefusedError: The manager refuses another connection.
        """
        return Client(self._connect_again(), self._name)

    def _connect_again(self) -> Connection:
        now = self._connection
        return Connection(now.path, printed(self._name), device=now.welcome.device)

    def close(self) -> None:
        """Close the connection, which ends all leases.

        Mappings stay valid, but the manager counts their memory against its budget until this
        process ends.
        """
        self._closed.set()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Get.

    def get(self, keys: Sequence[str], checkpoint: str = "") -> list[LayerFound | None]:
        """Look up layers by key, and lease the tensors of the layers that are published.

        The results are in the order of `keys`; the result for a key without a published layer is
        None. `checkpoint` is the name under which the manager lists the tensors.
        """
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
        """Lease tensors by digest.

        The results are in the order of `digests`; the result for a digest that is not resident is
        None. A client that builds a layer calls this with the digests it has computed, and then
        writes only the missing tensors.
        """
        found: list[Lease | None] = []
        for batch in _batches(digests, MAX_PIECES):
            rest: Sequence[str] = batch
            while rest:
                page = _lease_page(self._session, rest, checkpoint)
                found += page
                rest = _rest(rest, len(page))
        return found

    def stand_by(self, leases: Sequence[Lease], *, asleep: bool = True) -> list[bool]:
        """Mark leases as held by a sleeping engine or, with `asleep=False`, remove the marks.

        A marked lease still keeps its tensor in memory. Return for each lease whether an engine
        that is awake uses its tensor. This is the case if any client

        * has an unmarked lease on the tensor, or
        * is building a layer with the tensor.

        Raises:
            RefusedError: The code is "not_resident" if the manager does not know one of the leases,
                or "limit" if it has no memory left for the marks.
        """
        found: list[bool] = []
        for batch in _batches(leases, MAX_RELEASES):
            numbers = [each.number for each in batch]
            reply, _ = self._connection.ask(StandBy(numbers, asleep), StoodBy)
            if len(reply.awake) != len(numbers):
                raise ProtocolError(f"{len(reply.awake)} answers for {len(numbers)} leases")
            found += reply.awake
        return found

    def evict(self, name: str) -> int:
        """Free the slabs (blocks of memory) with the tensors of a checkpoint.

        `name` is the name of a checkpoint or the digest of one tensor. A slab is kept if any tensor
        in it is in use or pinned and, unless `name` is a digest, if another checkpoint has a tensor
        in it. Return the bytes of the freed slabs.
        """
        return self._connection.ask(Evict(name), Done)[0].nbytes

    # Put.

    def put(
        self,
        layers: Mapping[str, NewLayer],
        checkpoint: str = "",
        *,
        fill: Fill | None = None,
        wait_s: float = PUT_WAIT_S,
    ) -> PutResult:
        """Build `layers` in the manager's memory and publish them, or lease those that exist.

        `layers` maps layer keys to the layers. `fill` writes the tensors into the manager's memory;
        by default their `data` is copied.

        * If a layer is published already, its tensors are leased. If the published layer has
          another record or other digests, the layer is left out of the result.
        * If another process is building a layer, this call waits for it, at most `wait_s` seconds
          for all layers together. If that process gives up or falls silent, this call builds the
          layer.

        A MemoryManagerError is returned in the result instead of being raised; layers that were put
        before the error stay usable. A thread that has an unfinished put must not call this method,
        because two processes could then wait for each other.
        """
        result = PutResult()
        deadline = time.monotonic() + wait_s
        try:
            for batch in _put_batches(layers):
                self._put_batch(batch, checkpoint, fill or write_data(batch), deadline, result)
        except MemoryManagerError as error:
            result.error = error
        return result

    def _put_batch(
        self,
        waiting: dict[str, NewLayer],
        checkpoint: str,
        fill: Fill,
        deadline: float,
        result: PutResult,
    ) -> None:
        waiting, rounds = dict(waiting), 0
        while waiting and rounds < _PUT_ROUNDS:
            # First what is granted, then what others build: who holds a reservation never waits,
            # so no two processes can wait for each other.
            reservation = self.reserve(list(waiting), checkpoint)
            if reservation.put is not None:
                granted = {key: waiting.pop(key) for key in reservation.of("granted")}
                with reservation.put as put:
                    result.layers |= put.build(granted, fill)
                    result.unusable |= put.unusable
            outcomes = {
                key: self._wait_beside_own(key, deadline) for key in reservation.of("building")
            }
            for key, outcome in outcomes.items():
                if outcome == "building":
                    result.still_building.append(key)
                    del waiting[key]
            rounds += None not in outcomes.values()
            # What is not found now was given up, or evicted: it is reserved again.
            others = list(waiting)
            for key, found in zip(others, self.get(others, checkpoint), strict=True):
                if found is not None:
                    layer = waiting.pop(key)
                    if _is_layer(found, layer):
                        result.layers[key] = PutLayer(found.leases, written=False)

    def _wait_beside_own(self, key: str, deadline: float) -> Outcome | None:
        """Wait for a layer that another client builds; None: reserve it again, in a moment.

        A client that builds does not wait at the manager, which knows no threads. Another thread of
        this one may be reading from a disk all the while, and waits for nobody, so this one asks
        again: whether the layer is there, or whether its builder has given up.
        """
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return self.wait(key, left_s)
        except RefusedError as error:
            if error.code != "holds_reservation":
                raise
        if not left_s:
            return "building"
        time.sleep(min(left_s, _ASK_AGAIN_S))
        return None

    def reserve(self, keys: Sequence[str], checkpoint: str = "") -> Reservation:
        """Request the right to build the layers with these keys, at most MAX_KEYS of them.

        The layers that are granted form one put. Publish or abandon it before you wait for other
        layers.

        Raises:
            RefusedError: The code is "limit" if this client holds the maximum number of puts, or
                the manager has no memory left for the reservation.
        """
        connection = self._connection
        reply, _ = connection.ask(Reserve(list(keys), checkpoint), Reserved)
        if len(reply.answers) != len(keys):
            raise ProtocolError(f"{len(reply.answers)} answers for {len(keys)} layers")
        answers = dict(zip(keys, reply.answers, strict=True))
        granted = [key for key, answer in answers.items() if answer == "granted"]
        if not granted:
            return Reservation(answers, None)
        return Reservation(answers, Put(connection, reply.put, granted, checkpoint, self.lease))

    def wait(self, key: str, timeout_s: float) -> Outcome:
        """Wait up to `timeout_s` seconds for a layer that another client builds.

        Return the outcome:

        * "ready": the layer is published. Look it up.
        * "free": its builder gave up. Reserve the layer.
        * "stalled": its builder has been silent for too long. Reserve the layer to take it over.
        * "building": the time is up. Build the layer in private memory.

        Raises:
            RefusedError: The code is "holds_reservation" if this client has an unfinished put.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            slice_s = max(0.0, min(_WAIT_SLICE_S, deadline - time.monotonic()))
            reply, _ = self._connection.ask(Wait(key, slice_s), Waited, extra_s=slice_s)
            if reply.outcome != "building" or time.monotonic() >= deadline:
                return reply.outcome

    def publish(self, keys: Sequence[str], record: bytes, digests: Sequence[str]) -> int:
        """Publish a layer record under `keys`, without a reservation.

        This client must hold leases on all tensors in `digests`. Return how many keys got the
        record. A key that has a record already keeps it. Keys after the first are skipped if their
        layers are being built, or if the manager has no memory left.

        Raises:
            RefusedError: A tensor is not leased, the layer of the first key is being built, or the
                manager has no memory left for the first key.
        """
        return publish(self._connection, 0, record, digests, keys)

    def remember(self, keys: Sequence[str], record: bytes, digests: Sequence[str]) -> list[str]:
        """Note a layer record, so that `reconnect` publishes it again with the next manager.

        `digests` are the record's tensors, on which this client must hold leases. Return the keys
        for which the note is new or has changed.
        """
        new = (record, tuple(digests))
        found = [key for key in keys if self._records.get(key) != new]
        self._records.update(dict.fromkeys(found, new))
        return found

    def forget(self, keys: Sequence[str]) -> None:
        """Undo `remember` for these keys. Keys that were not noted are ignored.

        Call it when this process no longer has the layer.
        """
        for key in keys:
            self._records.pop(key, None)

    # After the manager's death.

    def reconnect(self) -> int:
        """Connect to the manager that replaced a dead one, and offer the memory leased here.

        Layer records from `remember` are published again. Return the number of slabs (blocks of
        memory) that the new manager has accepted, or 0 if the present connection still works.

        Raises:
            ManagerGoneError: No manager answers.
            UnsafeSocketError: The socket or its folder does not belong to this user alone.
            LeaseClosedError: This client is closed.
        """
        with self._switch:
            self._require_open()
            if self._connection.check():
                return 0
            slabs = self._session.slabs.living()
            connection = self._connect_again()
            try:
                session = _Session(connection, SlabTable(slabs))
                taken = sum(offer_slab(connection, slab) for slab in slabs)
                self._session = session
                self._require_open()  # `close` may have come, and seen the old connection only
            except BaseException:
                connection.close()
                raise
        self._publish_again(connection)
        _log.info(
            "reconnected to %s: %d of %d slabs taken back", connection.path, taken, len(slabs)
        )
        return taken

    def _require_open(self) -> None:
        if self.closed:
            raise LeaseClosedError("this client is closed; connect a new one")

    def _publish_again(self, connection: Connection) -> None:
        layers: dict[tuple[bytes, tuple[str, ...]], list[str]] = {}
        for key, layer in list(self._records.items()):
            layers.setdefault(layer, []).append(key)
        for (record, digests), keys in layers.items():
            while keys:
                try:
                    publish(connection, 0, record, digests, keys)
                    break
                except RefusedError as error:
                    _log.debug("layer %s was not published again: %s", keys[0], str(error))
                    # Who builds it keeps this key; the others still lead to what is here.
                    keys = keys[1:] if error.code == "being_built" else []


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


def _is_layer(found: LayerFound, wanted: NewLayer) -> bool:
    digests = [tensor.digest for tensor in wanted.tensors]
    return (
        found.record == wanted.record
        and len(found.leases) == len(digests)
        and all(
            digest in ("", lease.digest)
            for digest, lease in zip(digests, found.leases, strict=True)
        )
    )


def _put_batches(layers: Mapping[str, NewLayer]) -> Iterator[dict[str, NewLayer]]:
    """Yield the layers in portions that one reservation, and one slab, can hold."""
    batch: dict[str, NewLayer] = {}
    tensors = 0
    for key, layer in layers.items():
        if len(batch) == MAX_KEYS or (batch and tensors + len(layer.tensors) > MAX_PIECES):
            yield batch
            batch, tensors = {}, 0
        batch[key] = layer
        tensors += len(layer.tensors)
    if batch:
        yield batch


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
