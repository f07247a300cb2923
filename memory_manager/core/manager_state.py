"""The state that all parts of the core share.

Only one thread may use it. Times are in seconds of a monotonic clock.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tensor_dedup.memory_manager.core.budget import (
    ASLEEP_BYTES,
    LEASE_BYTES,
    Ledger,
    ResidentEntry,
    SlabState,
)
from tensor_dedup.memory_manager.core.effects import (
    CancelJob,
    Effect,
    Forget,
    FreeSlab,
    Note,
    Send,
)
from tensor_dedup.memory_manager.core.put_states import ACTIVE, Event, State, advance
from tensor_dedup.memory_manager.core.records import KeyRecord, Records
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.layout import MEMORY, SlabLayout
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import DigestSpan, Refused, Reply


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a manager; sizes in bytes, times in seconds."""

    budget: int
    pid: int = 0
    name: str = ""
    backend: str = "memfd"
    hardware_readonly: bool = False
    hashes_itself: bool = True
    mappings_hold: bool = True
    device: str = ""
    layout: SlabLayout = MEMORY
    build_timeout_s: float = 30.0
    hello_timeout_s: float = 5.0
    max_puts: int = 64  # of one connection
    max_leases: int = 1 << 18  # of one connection
    max_slabs: int = sys.maxsize  # that the manager has descriptors for
    first_put: int = 1  # generations of two managers should not meet


@dataclass(slots=True, eq=False)
class PutState:
    """A put: the right of one connection to build the layers `keys`.

    * `number` is never used again, so messages about an earlier put are recognised.
    * `spans` has the offset, size and announced digest ("" if unknown) of each tensor in the slab.
    * `held` has the entries of the put's tensors once the slab is sealed. They are not evicted
      while the put lasts.
    * `progress` is the time of the builder's last message.
    * `cost` is the memory that the manager needs to remember the put, in bytes.
    """

    number: int
    connection: int
    process: int
    keys: set[str]
    progress: float
    checkpoint: str
    state: State = State.RESERVED
    slab: int | None = None
    spans: tuple[tuple[int, int, str], ...] = ()
    held: list[ResidentEntry] = field(default_factory=list)
    opened: float = 0.0
    cost: int = 0  # of remembering it, in bytes

    @property
    def active(self) -> bool:
        """Whether the put still owns its layers: it is neither closed nor taken over."""
        return self.state in ACTIVE

    def step(self, event: Event) -> None:
        """Change the state as `event` requires.

        Raises:
            BadTransition: The event is not allowed in the current state.
        """
        self.state = advance(self.state, event)

    def silent(self, now: float) -> float:
        """Return the seconds since the builder's last message.

        The result is 0 while the manager itself works on the put.
        """
        if self.state in (State.ALLOCATING, State.SEALING):
            return 0.0
        return max(0.0, now - self.progress)


@dataclass(slots=True, eq=False)
class Tally:
    """The tensors that a client has built for one checkpoint and that are not logged yet."""

    since: float
    until: float
    tensors: int = 0
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class Waiting:
    """A Wait request that has not been answered: the layer key, and the deadline."""

    key: str
    until: float


@dataclass(slots=True, eq=False)
class ClientState:
    """A connection of a client. `name` is None until the client has sent Hello."""

    number: int
    process: int
    pid: int
    since: float
    name: str | None = None
    leases: dict[int, ResidentEntry] = field(default_factory=dict)
    leased: Counter[str] = field(default_factory=Counter)
    asleep: set[int] = field(default_factory=set)  # leases of engines that sleep
    puts: dict[int, PutState] = field(default_factory=dict)
    waiting: Waiting | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)  # by checkpoint

    @property
    def builds(self) -> bool:
        """Whether the client has an unfinished put."""
        return any(put.active for put in self.puts.values())


@dataclass(slots=True, eq=False)
class Process:
    """A process with connections, or with slabs that it may still have mapped.

    A connection or a put may end while the process still has its slabs mapped. `lingering` has the
    numbers of these slabs.
    """

    number: int
    connections: set[int] = field(default_factory=set)
    lingering: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class PendingOffer:
    """A slab of an earlier manager that is being checked and hashed.

    `connection` is the number of the client that offered the slab. It is 0 if the last manager left
    the slab with systemd. `checkpoints` has the names of each tensor's checkpoints, if they are
    known.
    """

    connection: int
    spans: tuple[DigestSpan, ...]
    checkpoint: str
    checkpoints: tuple[tuple[str, ...], ...] = ()


@dataclass(slots=True, eq=False)
class ManagerState:
    """The whole state of the manager, and the effects (actions) to be returned next."""

    settings: Settings
    ledger: Ledger
    records: Records = field(default_factory=Records)
    connections: dict[int, ClientState] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    builders: dict[str, PutState] = field(
        default_factory=dict
    )  # layer key -> the put that holds it
    filling: dict[int, PutState] = field(default_factory=dict)  # slab -> its put, while busy
    offers: dict[int, PendingOffer] = field(default_factory=dict)
    inherited: dict[str, KeyRecord] = field(default_factory=dict)  # whose tensors are awaited
    counters: Counter[str] = field(default_factory=Counter)
    effects: list[Effect] = field(default_factory=list)
    stopping: bool = False
    next_put: int = 1
    next_lease: int = 1

    def send(self, connection: ClientState, reply: Reply, slabs: Iterable[int] = ()) -> None:
        """Send a reply to a client, if it is still connected.

        The descriptors of `slabs` are sent along.
        """
        if connection.number in self.connections:
            self.effects.append(Send(connection.number, reply, tuple(slabs)))

    def refuse(self, connection: ClientState, code: Code, text: str) -> None:
        """Answer a request with a refusal, and count it."""
        self.counters["refusals"] += 1
        self.send(connection, Refused(code, text[:2048]))

    def note(self, event: str, **facts: object) -> None:
        """Write an event to the log, with these facts."""
        self.effects.append(Note(event, facts))

    def detail(self, event: str, **facts: object) -> None:
        """Write an event to the log if detailed logging is on."""
        self.effects.append(Note(event, facts, detail=True))

    def may_lease(self, connection: ClientState, count: int) -> bool:
        """Return whether a client may have `count` more leases."""
        few = len(connection.leases) + count <= self.settings.max_leases
        return few and self.ledger.may_remember(count * LEASE_BYTES)

    def may_sleep(self, connection: ClientState, leases: Iterable[int]) -> bool:
        """Return whether there is memory to mark these leases as held by a sleeping engine."""
        return self.ledger.may_remember(len({*leases} - connection.asleep) * ASLEEP_BYTES)

    def new_slab(self, nbytes: int, tensors: int, now: float) -> SlabState:
        """Add a slab of `nbytes` bytes for this number of tensors, and return it.

        Unused slabs are evicted to make room for it.

        Raises:
            RefusedError: There is not enough room, or no descriptor left.
        """
        slab = self.ledger.add(nbytes, now, tensors) if self.ledger.has_descriptor() else None
        if slab is not None:
            return slab
        if not self.ledger.has_descriptor():
            raise refusal(
                "no_memory",
                f"no descriptor left: {self.ledger.open_slabs} slabs are in use; build privately, "
                "or raise the manager's limit (ulimit -n)",
            )
        raise refusal(
            "no_room",
            f"no room for {nbytes} bytes: {self.ledger.charged} of {self.ledger.budget} bytes are "
            "in use; build privately, or give the manager a larger --budget",
        )

    def lease(
        self, connection: ClientState, resident: ResidentEntry, checkpoint: str, now: float
    ) -> int:
        """Lease a tensor to a client; return the number of the lease. Check `may_lease` first."""
        self.ledger.hold(resident, now, leased=True)
        self.ledger.remember(LEASE_BYTES)
        self.ledger.attribute(resident, checkpoint)
        number = self.next_lease
        self.next_lease += 1
        connection.leases[number] = resident
        connection.leased[resident.digest] += 1
        return number

    def unlease(self, connection: ClientState, number: int, now: float) -> None:
        """End a lease. An unknown number, such as one that was released before, is ignored."""
        resident = connection.leases.pop(number, None)
        if resident is None:
            return
        self.set_asleep(connection, number, resident, asleep=False)
        self.ledger.let_go(resident, now, leased=True)
        self.ledger.forget(LEASE_BYTES)
        connection.leased[resident.digest] -= 1
        if not connection.leased[resident.digest]:
            del connection.leased[resident.digest]

    def set_asleep(
        self, connection: ClientState, number: int, resident: ResidentEntry, *, asleep: bool
    ) -> None:
        """Mark a lease as held by a sleeping engine, or remove the mark with `asleep=False`.

        Check `may_sleep` before you mark a lease.
        """
        if asleep and number not in connection.asleep:
            resident.asleep += 1
            connection.asleep.add(number)
            self.ledger.remember(ASLEEP_BYTES)
        elif not asleep and number in connection.asleep:
            resident.asleep -= 1
            connection.asleep.discard(number)
            self.ledger.forget(ASLEEP_BYTES)

    def charge(self, slab: SlabState, process: int) -> None:
        """Count a slab against the budget until `process`, which may have it mapped, has ended.

        If the process has ended already, nothing is done.
        """
        if process in self.processes:
            self.ledger.linger(slab, process)
            self.processes[process].lingering.add(slab.number)

    def enter_record(self, key: str, record: KeyRecord) -> bool:
        """Make a layer key lead to a record, whose tensors must be resident.

        Return True, or False if the key has a record already. If there is no memory left for
        records, the least recently used keys are dropped.

        Raises:
            RefusedError: Dropping keys does not make enough room.
        """
        if key in self.records:
            return False
        for own in self.records.keys_of(record):
            self.records.get(own)  # which makes them the last to go
        # Anew each time: what goes may be the last of the keys of an equal record.
        while not self.ledger.remember(self.records.cost(key, record)):
            oldest = self.records.oldest
            if oldest is None or oldest in self.records.keys_of(record):
                raise refusal("no_room", "the manager can remember no more; close other clients")
            self.drop_record(oldest)
        self.records.put(key, record)
        for digest in record.digests:
            self.ledger.residents[digest].records.add(record)
        while (oldest := self.records.oldest_in_excess()) is not None:
            self.drop_record(oldest)
        return True

    def drop_record(self, key: str) -> None:
        """Remove a layer key; an unknown key is ignored.

        If the key was the last one that leads to its record, the record is removed, too. The
        tensors of the record stay resident.
        """
        record = self.records.get(key)
        if record is None:
            return
        self.ledger.forget(self.records.drop(key))
        for digest in record.digests if not self.records.keys_of(record) else ():
            resident = self.ledger.residents.get(digest)
            if resident is not None:
                resident.records.discard(record)

    def forget_if_idle(self, number: int) -> None:
        """Stop watching a process if it has no connection and no slabs counted for it."""
        process = self.processes.get(number)
        if process is not None and not process.connections and not process.lingering:
            del self.processes[number]
            self.effects.append(Forget(number))

    def settle(self) -> None:
        """Evict unused slabs until the budget is no longer exceeded or none can be evicted.

        Then remove records that have lost a tensor, and add to `effects` the slabs that the server
        must free and the jobs that it must cancel.
        """
        self.ledger.trim()
        for record in list(self.ledger.orphans):
            for key in self.records.keys_of(record):
                self.drop_record(key)
        self.ledger.orphans.clear()
        self.effects.extend(CancelJob(slab) for slab in self.ledger.cancelled)
        self.ledger.cancelled.clear()
        self.effects.extend(FreeSlab(slab) for slab in self.ledger.freed)
        self.ledger.freed.clear()


def refusal(code: Code, text: str) -> RefusedError:
    """Return the error that a handler raises to refuse a request."""
    return RefusedError(text, code=code)
