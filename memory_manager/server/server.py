"""The event loop: one thread that moves messages, memory and time into the core and effects out.

Nothing in it waits for one client: sockets do not block, memory is allocated, hashed and freed on
threads, as descriptors that clients have sent are closed, and a client that does not read its
replies is not read from, and is disconnected after a while.
"""

import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.core import Core, Settings
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    CancelJob,
    Close,
    Effect,
    End,
    Forget,
    FreeSlab,
    Note,
    ReclaimSlab,
    SealAndHash,
    Send,
)
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.errors import ProtocolError, RefusedError
from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.memory_manager.protocol.codec import decode_request, encode
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import (
    DESCRIPTORS_OF_REQUEST,
    Lookup,
    LookupDigests,
)
from tensor_dedup.memory_manager.server.acceptor import (
    AcceptedConnection,
    Acceptor,
    SocketFile,
    lacks_descriptors,
)
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser
from tensor_dedup.memory_manager.server.metrics import attach_seconds
from tensor_dedup.memory_manager.server.slab_jobs import Outcome, SlabJobs
from tensor_dedup.memory_manager.server.systemd_fdstore import Inherited, hand_over, notify, watched

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.protocol.tables import Totals

log = logging.getLogger("tensor_dedup.memory_manager")
_ACCEPT_PAUSE_S: Final = 0.5
_RETRY_S: Final = 0.02
_TOTALS_EVERY_S: Final = 1.0
_OPEN: Final = Path("/proc/self/fd")
_OF_A_CLIENT: Final = 2  # descriptors: its socket, and its process's end
# Descriptors to keep free for the next message: what a process cannot take is closed by the kernel,
# in the thread that receives it, and that may take as long as the sender likes.
_FOR_A_MESSAGE: Final = 256


@dataclass(frozen=True, slots=True)
class Options:
    """The timeouts in seconds after which a stalled client is cut off, and an unused manager ends.

    `descriptors`: how many this process may have open, None where it does not count them.
    `overview`: whether the server keeps an overview for other threads.
    """

    stall_timeout_s: float = 10.0
    idle_exit_s: float | None = None
    descriptors: int | None = None
    overview: bool = False


@dataclass(slots=True, eq=False)
class ClientSocket:
    """A connection as the event loop sees it: its socket, and the messages still to be sent.

    The outbox holds the memory whose descriptors it will send. What it held for a while may be
    freed with it: `drop` does that elsewhere.
    """

    number: int
    process: int
    pid: int
    socket: socket.socket
    drop: Callable[[list[object]], None]
    outbox: deque[tuple[bytes, tuple[Memory, ...]]] = field(default_factory=deque)
    stuck_since: float | None = None
    retry_at: float | None = None
    events: int = 0  # what the selector watches for

    def flush(self, now: float) -> bool:
        """Send as much as the socket accepts; return False if the connection is broken."""
        self.retry_at = None
        waited = self.stuck_since is not None
        while self.outbox:
            try:
                data, descriptors = self.outbox[0][0], [m.fileno for m in self.outbox[0][1]]
                wire.send(self.socket, data, descriptors)
            except BlockingIOError:
                self._stuck(now)
                return True
            except OSError as error:
                if not _too_many_in_flight(error):
                    return False
                # Descriptors that clients have not read yet count against this user's limit.
                self._stuck(now)
                self.retry_at = now + _RETRY_S
                return True
            self.stuck_since = None
            if waited:
                self.drop([self.outbox.popleft()])
            else:
                self.outbox.popleft()
        return True

    def _stuck(self, now: float) -> None:
        if self.stuck_since is None:
            self.stuck_since = now


def _too_many_in_flight(error: OSError) -> bool:
    return error.errno == errno.ETOOMANYREFS


class Server:
    """A memory manager on one socket. `run` in one thread; `stop` from anywhere."""

    def __init__(
        self,
        socket_file: SocketFile,
        backend: Backend,
        settings: Settings,
        options: Options | None = None,
    ) -> None:
        self._file = socket_file
        self._options = options or Options()
        self._core = Core(settings)
        self._closer = DescriptorCloser()
        self._jobs = SlabJobs(backend, self._closer)
        self._acceptor = Acceptor(socket_file.socket)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, ClientSocket] = {}
        self._memories: dict[int, Memory] = {}
        self._processes: dict[int, int | None] = {}  # number -> pidfd
        self._pids: dict[int, int] = {}  # pid -> number, of living processes
        self._effects: deque[Effect] = deque()
        self._handed: dict[int, int] = {}  # inherited descriptors, by slab
        self._arrived: list[int] = []  # descriptors of the message that is being handled
        self._began = time.monotonic()
        self._numbers = 0
        self._idle_since = 0.0
        self._accept_again: float | None = None
        self._own_descriptors = 0  # what is open before the first client comes
        self._retries: dict[int, AllocateSlab] = {}  # by slab, while memory is allocated
        self._ending = False
        self._totals_at = 0.0
        self.totals: Totals = self._core.totals(0.0)
        """A copy of the numbers for other threads, at most about a second old."""
        self.bookkeeping = 0
        """The part of `totals.charged` that is the manager's own memory, in bytes; likewise."""
        self.saved_bytes = 0
        """The bytes that sharing saves; likewise."""
        self.overview = self._core.overview(0.0) if self._options.overview else {}
        """What `status --json` says, without the residents; likewise, and empty without the option.
        It is replaced as a whole, never changed."""
        self.device: Final = settings.device
        self.attach_seconds, self._attach_seconds = attach_seconds(self.device)
        """How long look-ups took; likewise, and at once."""
        self._turned_at: float | None = None
        self._watched = watched()

    def stop(self) -> None:
        """Make `run` end soon. Safe from any thread and from signal handlers."""
        self._ending = True
        self._jobs.ring()

    def run(self) -> None:
        """Serve until stopped; then close everything. Memory that clients mapped stays valid."""
        self._own_descriptors = sum(1 for _ in _OPEN.iterdir()) if _OPEN.is_dir() else 0
        self._watch_listener()
        self._selector.register(self._jobs.wake_up, selectors.EVENT_READ, self._jobs_done)
        try:
            while not self._ending:
                self._turned_at = self._now()
                self._turn()
        finally:
            self._turned_at = None
            self._close()

    @property
    def silence_s(self) -> float | None:
        """The seconds since the event loop last went round; None while it does not run.

        Safe from any thread.
        """
        turned_at = self._turned_at
        return None if turned_at is None else self._now() - turned_at

    def inherit(self, left: Inherited) -> None:
        """Take over what the last manager of this service left with systemd, before `run`."""
        records = {
            key: KeyRecord(r.record, tuple(r.digests))
            for r in left.index.records
            for key in (r.key, *r.also)
        }
        self._core.expect(records, left.index.pins)
        for slab in left.index.slabs:
            spans = [tensor.span for tensor in slab.tensors]
            names = [tensor.checkpoints for tensor in slab.tensors]
            fd = left.descriptors.pop(slab.name, None)
            try:
                if fd is not None and spans:
                    number, effects = self._core.inherit(0.0, slab.nbytes, spans, names)
                    self._handed[number], fd = fd, None
                    self._effects.extend(effects)
            except RefusedError as error:
                log.warning("not taken back: %s", str(error))
            finally:
                wire.close_all([] if fd is None else [fd])
        self._do_effects()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            key.data()
            self._do_effects()
        now = self._now()
        self._effects.extend(self._core.tick(now))
        self._do_effects()
        self._look_at_clients(now)
        self._do_effects()
        self._look_at_idleness(now)
        if now - self._totals_at >= _TOTALS_EVERY_S:
            self.totals, self._totals_at = self._core.totals(now), now
            self.bookkeeping = self._core.state.ledger.bookkeeping
            self.saved_bytes = self._core.saved_bytes(now)
            if self._options.overview:
                self.overview = self._core.overview(now)
            if self._watched:
                notify("WATCHDOG=1")

    def _patience(self) -> float:
        """Return the seconds until something is due if nothing happens; at most one."""
        now = self._now()
        due = [now + 1.0]
        deadline = self._core.next_deadline(now)
        if deadline is not None:
            due.append(deadline)
        due += [client.retry_at for client in self._clients.values() if client.retry_at is not None]
        return max(0.0, min(due) - now)

    # Connections.

    def _watch_listener(self) -> None:
        self._accept_again = None
        self._selector.register(self._file.socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            if (short := self._descriptors_short()) > 0:
                raise OSError(errno.EMFILE, f"{short} descriptors short")
            accepted = self._acceptor.accept()
        except OSError as error:
            if not lacks_descriptors(error):
                raise
            self._make_way()
            return
        if accepted is not None:
            self._welcome(accepted)

    def _descriptors_short(self) -> int:
        """How many descriptors too few are free for one more client and its messages."""
        limit = self._options.descriptors
        if limit is None:
            return 0
        clients = len(self._clients) + len(self._processes) + _OF_A_CLIENT
        slabs = self._core.state.ledger.open_slabs
        used = self._own_descriptors + clients + slabs + self._closer.pending
        return used + min(_FOR_A_MESSAGE, limit // 4) - limit

    def _make_way(self) -> None:
        """There is no descriptor for who connects: unused slabs go, or it is told."""
        count = max(_OF_A_CLIENT, self._descriptors_short())
        if self._closer.freeing:  # what has gone already may be enough
            self._accept_later(_RETRY_S)
        elif effects := self._core.spare_descriptors(count):
            self._effects.extend(effects)
            self._accept_later(_RETRY_S)
        elif not self._acceptor.turn_away():
            self._accept_later(_ACCEPT_PAUSE_S)
            log.warning("no descriptor left to accept a client with; raise ulimit -n")

    def _accept_later(self, seconds: float) -> None:
        self._selector.unregister(self._file.socket)
        self._accept_again = self._now() + seconds

    def _welcome(self, accepted: AcceptedConnection) -> None:
        self._numbers += 1
        number = self._numbers
        process = self._process(accepted)
        client = ClientSocket(number, process, accepted.pid, accepted.socket, self._closer.drop)
        self._clients[number] = client
        self._effects.extend(self._core.connected(self._now(), number, process, accepted.pid))
        try:
            self._watch(client, selectors.EVENT_READ)
        except OSError as error:
            log.warning("cannot watch pid=%d: %s", accepted.pid, str(error))
            self._hung_up(client)

    def _process(self, accepted: AcceptedConnection) -> int:
        """The number of the client's process: one, however often it connects."""
        known = self._pids.get(accepted.pid) if accepted.pid > 0 else None
        if known is not None:
            if accepted.pidfd is not None:
                os.close(accepted.pidfd)
            return known
        self._numbers += 1
        number = self._numbers
        self._processes[number] = accepted.pidfd
        if accepted.pidfd is not None:
            try:
                self._selector.register(
                    accepted.pidfd, selectors.EVENT_READ, lambda: self._ended(number)
                )
            except OSError as error:
                # Its connection stands for it, as where there is no descriptor for a process.
                log.warning("cannot watch the end of pid=%d: %s", accepted.pid, str(error))
                os.close(accepted.pidfd)
                self._processes[number] = None
            else:
                self._pids[accepted.pid] = number
        return number

    def _ended(self, process: int) -> None:
        """A process has ended, whatever children of it hold its sockets."""
        gone = [client for client in self._clients.values() if client.process == process]
        self._effects.extend(self._core.ended(self._now(), process))
        for client in gone:
            self._drop(client)

    def _ready(self, client: ClientSocket) -> None:
        if client.outbox:
            self._flush(client)
        else:
            self._read(client)

    def _read(self, client: ClientSocket) -> None:
        try:
            datagram = wire.receive(client.socket, self._closer.close_received)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._garbage(client, "protocol", error.message)
            return
        except OSError:
            self._hung_up(client)
            return
        self._arrived = datagram.descriptors
        try:
            if datagram.truncated:
                text = "descriptors of your message were lost: too many, or the manager has none"
                self._garbage(client, "protocol", text)
            elif datagram.data:
                self._received(client, datagram.data)
            else:
                self._hung_up(client)
            self._do_effects()
        finally:
            self._closer.close_received(self._arrived)
            self._arrived = []

    def _received(self, client: ClientSocket, data: bytes) -> None:
        try:
            request = decode_request(data)
        except ProtocolError as error:
            self._garbage(
                client, "version" if "version" in error.facts else "protocol", error.message
            )
            return
        wanted = DESCRIPTORS_OF_REQUEST.get(type(request), 0)
        if len(self._arrived) != wanted:
            text = f"{type(request).__name__} comes with {wanted} descriptors, not with "
            self._garbage(client, "protocol", text + str(len(self._arrived)))
            return
        began = self._now()
        self._effects.extend(self._core.received(began, client.number, request))
        if isinstance(request, Lookup | LookupDigests):
            self._do_effects()
            self._attach_seconds.observe(self._now() - began)

    def _garbage(self, client: ClientSocket, code: Code, text: str) -> None:
        self._effects.extend(self._core.garbage(self._now(), client.number, code, text))

    def _hung_up(self, client: ClientSocket) -> None:
        self._drop(client)
        self._effects.extend(self._core.disconnected(self._now(), client.number))
        if self._processes.get(client.process, 0) is None:
            # Nobody can say when this process ends: its connection stands for it.
            self._effects.extend(self._core.ended(self._now(), client.process))

    def _drop(self, client: ClientSocket) -> None:
        if self._clients.pop(client.number, None) is not None:
            self._watch(client, 0)
            self._closer.drain(client.socket)
            client.socket.close()
            if client.outbox:
                unsent: list[object] = [client.outbox]
                client.outbox = deque()
                self._closer.drop(unsent)

    def _flush(self, client: ClientSocket) -> None:
        if not client.flush(self._now()):
            self._hung_up(client)
        elif client.retry_at is not None:
            self._watch(client, 0)
        else:
            # A client that does not read its replies is not read from either.
            self._watch(client, selectors.EVENT_WRITE if client.outbox else selectors.EVENT_READ)

    def _watch(self, client: ClientSocket, events: int) -> None:
        if events == client.events:
            return
        if client.events:
            self._selector.unregister(client.socket)
        if events:
            self._selector.register(client.socket, events, lambda: self._ready(client))
        client.events = events

    def _look_at_clients(self, now: float) -> None:
        limit = self._options.stall_timeout_s
        for client in list(self._clients.values()):
            if client.stuck_since is not None and now - client.stuck_since >= limit:
                log.warning("cut off: pid=%d has not read for %.0f s", client.pid, limit)
                self._hung_up(client)
            elif client.retry_at is not None and now >= client.retry_at:
                self._flush(client)
        if self._accept_again is not None and now >= self._accept_again:
            self._watch_listener()

    def _look_at_idleness(self, now: float) -> None:
        if self._clients:
            self._idle_since = now
        limit = self._options.idle_exit_s
        if limit is not None and now - self._idle_since >= limit:
            log.info("nobody has been connected for %.0f s: ending", limit)
            self._ending = True

    # Effects.

    def _do_effects(self) -> None:
        while self._effects:
            self._do(self._effects.popleft())

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Close(connection):
                self._close_client(connection)
            case Forget(process):
                self._forget(process)
            case Note(event, facts, detail):
                level = logging.DEBUG if detail else logging.INFO
                text = " ".join(f"{k}={v!s}" for k, v in facts.items())
                log.log(level, "%s %s", event, text, extra={"event": event, "facts": facts})
            case End():
                self._ending = True
            case _:
                self._do_memory(effect)

    def _do_memory(
        self, effect: AllocateSlab | SealAndHash | ReclaimSlab | CancelJob | FreeSlab
    ) -> None:
        match effect:
            case AllocateSlab(slab, nbytes, process):
                self._retries[slab] = effect
                self._jobs.allocate(slab, process, nbytes)
            case SealAndHash(slab, pieces, process):
                self._jobs.seal_and_hash(slab, process, self._memories[slab], pieces)
            case ReclaimSlab(slab, nbytes, pieces, process):
                inherited = self._handed.pop(slab, None)
                fd = self._arrived.pop() if inherited is None else inherited
                self._jobs.reclaim(slab, process, fd, nbytes, pieces)
            case CancelJob(slab):
                self._jobs.cancel(slab)
            case FreeSlab(slab) if slab in self._memories:
                self._closer.drop([self._memories.pop(slab)])

    def _send(self, effect: Send) -> None:
        client = self._clients.get(effect.connection)
        if client is None:
            return
        memories = tuple(self._memories[slab] for slab in effect.slabs)
        client.outbox.append((encode(effect.reply), memories))
        if client.stuck_since is None:
            self._flush(client)

    def _close_client(self, connection: int) -> None:
        client = self._clients.get(connection)
        if client is not None:
            client.flush(self._now())  # the reason, when the socket takes it
            self._drop(client)

    def _forget(self, process: int) -> None:
        pidfd = self._processes.pop(process, None)
        for pid in [pid for pid, number in self._pids.items() if number == process]:
            del self._pids[pid]
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _jobs_done(self) -> None:
        for outcome in self._jobs.outcomes():
            self._fetch(outcome)
            self._do_effects()

    def _fetch(self, outcome: Outcome) -> None:
        if outcome.memory is not None:
            # And nowhere else: what is freed is freed by the closer.
            self._memories[outcome.slab], outcome.memory = outcome.memory, None
        now = self._now()
        if outcome.kind == "allocated":
            again = self._retries.pop(outcome.slab)
            if outcome.short_of_descriptors and (effects := self._core.spare_descriptors(1)):
                self._effects.extend(effects)
                self._do_effects()
                self._retries[again.slab] = again
                self._closer.afterwards(
                    lambda: self._jobs.allocate(again.slab, again.process, again.nbytes)
                )
                return
            self._effects.extend(self._core.allocated(now, outcome.slab, outcome.failure))
        else:
            result = outcome.failure or outcome.digests or []
            self._effects.extend(self._core.hashed(now, outcome.slab, result))

    def _close(self) -> None:
        """No new clients, then no clients, then no threads, then no memory."""
        self._file.close()
        self._effects.extend(self._core.ending())
        self._do_effects()
        for client in list(self._clients.values()):
            client.flush(self._now())
            self._drop(client)
        self._jobs.close()
        if handed := hand_over(self._core.state, self._memories):
            log.info("handed over slabs=%d", handed)
        for pidfd in self._processes.values():
            if pidfd is not None:
                os.close(pidfd)
        while self._memories:
            self._closer.drop([self._memories.popitem()[1]])
        self._closer.end()
        self._acceptor.close()
        self._selector.close()
        log.info("ended")
