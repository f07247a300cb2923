"""The event loop of the memory manager, which is one thread.

It passes messages, results and the time to the core, and performs the effects that the core
returns. It never blocks: sockets are non-blocking (`clients`), and other threads allocate, hash and
free memory (`slabs`) and close descriptors of clients (`descriptor_closer`).
"""

import errno
import logging
import selectors
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensor_dedup.memory_manager.backends.base import Backend
from tensor_dedup.memory_manager.core import Core, Settings
from tensor_dedup.memory_manager.core.effects import (
    Close,
    Effect,
    End,
    Forget,
    Note,
    Send,
)
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.errors import ProtocolError, RefusedError
from tensor_dedup.memory_manager.protocol import wire
from tensor_dedup.memory_manager.protocol.codec import decode_request
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import (
    DESCRIPTORS_OF_REQUEST,
    Lookup,
    LookupDigests,
)
from tensor_dedup.memory_manager.server.acceptor import (
    Acceptor,
    SocketFile,
    lacks_descriptors,
)
from tensor_dedup.memory_manager.server.clients import Clients, ClientSocket
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser
from tensor_dedup.memory_manager.server.metrics import attach_seconds
from tensor_dedup.memory_manager.server.slabs import Slabs
from tensor_dedup.memory_manager.server.systemd_fdstore import Inherited, notify, watched

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.protocol.tables import Totals

_log = logging.getLogger(__name__)
_ACCEPT_PAUSE_S: Final = 0.5
_ROOM_PAUSE_S: Final = 0.02  # until what was dropped may be free
_TOTALS_EVERY_S: Final = 1.0
_OPEN: Final = Path("/proc/self/fd")
_OF_A_CLIENT: Final = 2  # descriptors: its socket, and its process's end
# Descriptors to keep free for the next message: what a process cannot take is closed by the kernel,
# in the thread that receives it, and that may take as long as the sender likes.
_FOR_A_MESSAGE: Final = 256


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the event loop. Times are in seconds.

    * `stall_timeout_s`: a client that has not read its replies for this time is disconnected.
    * `idle_exit_s`: the manager ends after this time without clients, or never if it is None.
    * `descriptors`: the number of descriptors that this process may open, or None for no limit.
    * `overview`: whether to keep an overview that other threads can read.
    """

    stall_timeout_s: float = 10.0
    idle_exit_s: float | None = None
    descriptors: int | None = None
    overview: bool = False


class Server:
    """A memory manager on one socket. Call `run` in one thread; `stop` is safe from any thread.

    It implements `ClientEvents`, whose methods are called in the thread of `run`.
    """

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
        self._slabs = Slabs(backend, self._closer, self._spare_descriptors)
        self._acceptor = Acceptor(socket_file.socket)
        self._selector = selectors.DefaultSelector()
        self._clients = Clients(
            self._selector, self._closer, self, self._now, self._options.stall_timeout_s
        )
        self._effects: deque[Effect] = deque()
        self._arrived: list[int] = []  # descriptors of the message that is being handled
        self._began = time.monotonic()
        self._idle_since = 0.0
        self._accept_again: float | None = None
        self._own_descriptors = 0  # what is open before the first client comes
        self._ending = False
        self._totals_at = 0.0
        self.totals: Totals = self._core.totals(0.0)
        """A copy of the totals for other threads, at most about a second old."""
        self.bookkeeping = 0
        """The part of `totals.charged` that is for the manager's own records, in bytes; as old."""
        self.saved_bytes = 0
        """The bytes of memory that sharing saves; as old."""
        self.overview = self._core.overview(0.0) if self._options.overview else {}
        """What `tensor-dedup status --json` prints, without the residents; as old. It is empty
        without `Options.overview`. It is replaced as a whole, never changed."""
        self.device: Final = settings.device
        self.attach_seconds, self._attach_seconds = attach_seconds(self.device)
        """How long look-ups took, always up to date."""
        self._turned_at: float | None = None
        self._watched = watched()

    def stop(self) -> None:
        """Make `run` end soon. Safe from any thread and from signal handlers."""
        self._ending = True
        self._slabs.ring()

    def run(self) -> None:
        """Serve until stopped, then close everything.

        Memory that clients have mapped stays valid, except GPU memory of the `ipc` backend.
        """
        self._own_descriptors = sum(1 for _ in _OPEN.iterdir()) if _OPEN.is_dir() else 0
        self._watch_listener()
        self._selector.register(self._slabs.wake_up, selectors.EVENT_READ, self._slabs_done)
        try:
            while not self._ending:
                self._turned_at = self._now()
                self._turn()
        finally:
            self._turned_at = None
            self._close()

    @property
    def silence_s(self) -> float | None:
        """The seconds since the event loop last made progress, or None while it is not running.

        Safe from any thread.
        """
        turned_at = self._turned_at
        return None if turned_at is None else self._now() - turned_at

    def inherit(self, left: Inherited) -> None:
        """Take over the slabs, records and pins that the last manager left with systemd.

        Call it before `run`.
        """
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
                    self._slabs.inherit(number, fd)
                    fd = None
                    self._effects.extend(effects)
            except RefusedError as error:
                _log.warning("not taken back: %s", str(error))
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
        self._clients.look(now)
        if self._accept_again is not None and now >= self._accept_again:
            self._watch_listener()
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
        if self._clients.next_retry is not None:
            due.append(self._clients.next_retry)
        return max(0.0, min(due) - now)

    # The listener.

    def _watch_listener(self) -> None:
        self._accept_again = None
        self._selector.register(self._file.socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        freed = self._closer.freed
        try:
            if (short := self._descriptors_short()) > 0:
                raise OSError(errno.EMFILE, f"{short} descriptors short")
            accepted = self._acceptor.accept()
        except OSError as error:
            if not lacks_descriptors(error):
                raise
            self._make_way(freed)
            return
        if accepted is not None:
            self._clients.welcome(accepted)

    def _descriptors_short(self) -> int:
        """How many descriptors too few are free for one more client and its messages."""
        limit = self._options.descriptors
        if limit is None:
            return 0
        clients = self._clients.descriptors + _OF_A_CLIENT
        slabs = self._core.state.ledger.open_slabs
        used = self._own_descriptors + clients + slabs + self._closer.pending
        return used + min(_FOR_A_MESSAGE, limit // 4) - limit

    def _make_way(self, freed: int) -> None:
        """There is no descriptor for who connects: unused slabs go, or it is told."""
        count = max(_OF_A_CLIENT, self._descriptors_short())
        if self._spare_descriptors(freed, count):
            self._accept_later(_ROOM_PAUSE_S)
        elif not self._acceptor.turn_away():
            self._accept_later(_ACCEPT_PAUSE_S)
            _log.warning("no descriptor left to accept a client with; raise ulimit -n")

    def _accept_later(self, seconds: float) -> None:
        self._selector.unregister(self._file.socket)
        self._accept_again = self._now() + seconds

    # What clients do.

    def connected(self, client: ClientSocket) -> None:
        """Report a new client to the core."""
        self._effects.extend(
            self._core.connected(self._now(), client.number, client.process, client.pid)
        )

    def received(self, client: ClientSocket, datagram: wire.Datagram) -> None:
        """Pass a message to the core, and perform the effects at once.

        Descriptors of the message that no effect has used are closed.
        """
        self._arrived = datagram.descriptors
        try:
            if datagram.truncated:
                text = "descriptors of your message were lost: too many, or the manager has none"
                self.invalid(client, "protocol", text)
            elif datagram.data:
                self._request(client, datagram.data)
            else:
                self._clients.hang_up(client)
            self._do_effects()
        finally:
            self._closer.close_received(self._arrived)
            self._arrived = []

    def _request(self, client: ClientSocket, data: bytes) -> None:
        try:
            request = decode_request(data)
        except ProtocolError as error:
            self.invalid(
                client, "version" if "version" in error.facts else "protocol", error.message
            )
            return
        wanted = DESCRIPTORS_OF_REQUEST.get(type(request), 0)
        if len(self._arrived) != wanted:
            text = f"{type(request).__name__} comes with {wanted} descriptors, not with "
            self.invalid(client, "protocol", text + str(len(self._arrived)))
            return
        began = self._now()
        self._effects.extend(self._core.received(began, client.number, request))
        if isinstance(request, Lookup | LookupDigests):
            self._do_effects()
            self._attach_seconds.observe(self._now() - began)

    def invalid(self, client: ClientSocket, code: Code, text: str) -> None:
        """Report an invalid message of a client to the core."""
        self._effects.extend(self._core.garbage(self._now(), client.number, code, text))

    def disconnected(self, client: ClientSocket) -> None:
        """Report the end of a client's connection to the core."""
        self._effects.extend(self._core.disconnected(self._now(), client.number))

    def ended(self, process: int) -> None:
        """Report the end of a process to the core."""
        self._effects.extend(self._core.ended(self._now(), process))

    def _look_at_idleness(self, now: float) -> None:
        if self._clients:
            self._idle_since = now
        limit = self._options.idle_exit_s
        if limit is not None and now - self._idle_since >= limit:
            _log.info("nobody has been connected for %.0f s: ending", limit)
            self._ending = True

    # Effects.

    def _do_effects(self) -> None:
        while self._effects:
            self._do(self._effects.popleft())

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(connection, reply, slabs):
                if connection in self._clients:
                    self._clients.send(connection, reply, self._slabs.memories(slabs))
            case Close(connection):
                self._clients.dismiss(connection)
            case Forget(process):
                self._clients.forget(process)
            case Note(event, facts, detail):
                level = logging.DEBUG if detail else logging.INFO
                text = " ".join(f"{k}={v!s}" for k, v in facts.items())
                _log.log(level, "%s %s", event, text, extra={"event": event, "facts": facts})
            case End():
                self._ending = True
            case _:
                self._slabs.do(effect, self._arrived)

    def _slabs_done(self) -> None:
        for outcome in self._slabs.outcomes():
            now = self._now()
            if outcome.kind == "allocated":
                effects = self._core.allocated(now, outcome.slab, outcome.failure)
            else:
                result = outcome.failure or outcome.digests or []
                effects = self._core.hashed(now, outcome.slab, result)
            self._effects.extend(effects)
            self._do_effects()

    def _spare_descriptors(self, freed: int, count: int = 1) -> bool:
        """Return whether there may be a descriptor soon for what could not get one.

        `freed` is the value of `closer.freed` just before it asked. If nothing has been freed since
        and nothing is being freed, up to `count` unused slabs are evicted.
        """
        # In this order: what is freed between the two questions is seen by the second one.
        if self._closer.freeing or self._closer.freed != freed:
            return True
        effects = self._core.spare_descriptors(count)
        self._effects.extend(effects)
        self._do_effects()
        return bool(effects)

    def _close(self) -> None:
        """No new clients, then no clients, then no threads, then no memory."""
        self._file.close()
        self._effects.extend(self._core.ending())
        self._do_effects()
        self._clients.close()
        self._slabs.close(self._core.state)
        self._closer.end()
        self._acceptor.close()
        self._selector.close()
        _log.info("ended")
