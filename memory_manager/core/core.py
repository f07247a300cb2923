"""The entry points of the state machine: each takes an event and returns the effects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensor_dedup.memory_manager.core import admin, build_log, puts, query, reclaim, wait_queue
from tensor_dedup.memory_manager.core.budget import Ledger
from tensor_dedup.memory_manager.core.effects import Close, Effect
from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    Process,
    Settings,
)
from tensor_dedup.memory_manager.core.put_states import BadTransition
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.limits import COMMAND, Code, Message
from tensor_dedup.memory_manager.protocol.messages import (
    WITHOUT_REPLY,
    Abandon,
    Allocate,
    DigestSpan,
    Evict,
    Hello,
    Lookup,
    LookupDigests,
    Offer,
    Pin,
    Progress,
    Publish,
    Release,
    Request,
    Reserve,
    Rows,
    Seal,
    StandBy,
    Status,
    Stop,
    Wait,
    Welcome,
)
from tensor_dedup.memory_manager.protocol.tables import Totals

__all__ = ["Core", "Settings"]

_Handler = Callable[[ManagerState, float, ClientState, Any], None]
_HANDLERS: Final[Mapping[type[Message], _Handler]] = {
    Lookup: query.lookup,
    LookupDigests: query.lookup_digests,
    Release: query.release,
    StandBy: query.stand_by,
    Reserve: puts.reserve,
    Allocate: puts.allocate,
    Progress: puts.progress,
    Seal: puts.seal,
    Publish: puts.publish,
    Abandon: puts.abandon,
    Offer: reclaim.offer,
    Wait: wait_queue.wait,
    Status: admin.status,
    Rows: admin.rows,
    Pin: admin.pin,
    Evict: admin.evict,
    Stop: admin.stop,
}


class Core:
    """The state machine of the memory manager, without sockets, memory, threads or a clock.

    Only one thread at a time may use it. Methods take the time `now` in seconds of a monotonic
    clock. Methods that handle an event return effects: actions that the caller must perform in
    order. The caller numbers the connections and processes, and never uses a number twice.
    """

    def __init__(self, settings: Settings) -> None:
        ledger = Ledger(
            settings.budget,
            mappings_hold=settings.mappings_hold,
            max_slabs=settings.max_slabs,
        )
        self._state = ManagerState(settings, ledger, next_put=settings.first_put)

    @property
    def state(self) -> ManagerState:
        """The state, which callers may read but not change."""
        return self._state

    def connected(self, now: float, number: int, process: int, pid: int) -> list[Effect]:
        """Handle the new connection `number` from a process whose user has been checked."""
        state = self._state
        state.connections[number] = ClientState(number, process, pid, now)
        state.processes.setdefault(process, Process(process)).connections.add(number)
        return self._effects()

    def received(self, now: float, number: int, request: Request) -> list[Effect]:
        """Handle a request of a client."""
        connection = self._state.connections.get(number)
        if connection is not None:
            try:
                self._handle(now, connection, request)
            except RefusedError as error:
                code: Any = error.code
                self._state.refuse(connection, code, error.message)
            except BadTransition as error:
                self._state.refuse(connection, "wrong_state", error.message)
        return self._effects()

    def _handle(self, now: float, connection: ClientState, request: Request) -> None:
        if isinstance(request, Hello):
            self._hello(now, connection, request)
        elif connection.name is None:
            self._hang_up(now, connection, "protocol", "the first message is Hello, once")
        else:
            if not isinstance(request, WITHOUT_REPLY):
                wait_queue.interrupt(self._state, now, connection)
            _HANDLERS[type(request)](self._state, now, connection, request)

    def _hello(self, now: float, connection: ClientState, request: Hello) -> None:
        if connection.name is not None:
            self._hang_up(now, connection, "protocol", "the first message is Hello, once")
            return
        connection.name = request.name
        _told(self._state, connection)("connected", pid=connection.pid, name=repr(request.name))
        settings = self._state.settings
        reply = Welcome(
            settings.pid,
            connection.number,
            settings.backend,
            settings.hardware_readonly,
            settings.build_timeout_s,
            settings.hashes_itself,
            settings.device,
        )
        self._state.send(connection, reply)

    def _hang_up(self, now: float, connection: ClientState, code: Code, text: str) -> None:
        """Refuse for good: tell why, close, forget."""
        state = self._state
        state.refuse(connection, code, text)
        state.note("hung up", pid=connection.pid, code=code, text=text)
        state.effects.append(Close(connection.number, text))
        self._drop(now, connection)
        state.forget_if_idle(connection.process)

    def garbage(self, now: float, number: int, code: Code, text: str) -> list[Effect]:
        """Handle an invalid message: refuse it with this code, and close the connection.

        If the connection is closed already, nothing is done.
        """
        connection = self._state.connections.get(number)
        if connection is not None:
            self._hang_up(now, connection, code, text)
        return self._effects()

    def disconnected(self, now: float, number: int) -> list[Effect]:
        """Handle the end of a connection, closed by either side. Its process may still run."""
        connection = self._state.connections.get(number)
        if connection is not None:
            self._drop(now, connection)
            self._state.forget_if_idle(connection.process)
        return self._effects()

    def _drop(self, now: float, connection: ClientState) -> None:
        state = self._state
        state.processes[connection.process].connections.discard(connection.number)
        if connection.name is not None:
            build_log.say_all(state, connection)
            held = {"leases": len(connection.leases), "builds": len(connection.puts)}
            facts = {"pid": connection.pid, "name": repr(connection.name), **held}
            _told(state, connection)("disconnected", **facts)
        connection.waiting = None
        for slab in {r.slab for r in connection.leases.values()}:
            state.charge(state.ledger.slabs[slab], connection.process)
        reclaim.leave(state, connection)
        for put in list(connection.puts.values()):
            puts.gone(state, now, connection, put)
        for lease in list(connection.leases):
            state.unlease(connection, lease, now)
        del state.connections[connection.number]

    def ended(self, now: float, process: int) -> list[Effect]:
        """Handle the end of a process: close its connections, and free everything that it held."""
        state = self._state
        known = state.processes.get(process)
        if known is not None:
            for number in list(known.connections):
                self._drop(now, state.connections[number])
            for slab in known.lingering:
                if slab in state.ledger.slabs:
                    state.ledger.unlinger(state.ledger.slabs[slab], process)
            known.lingering.clear()
            state.forget_if_idle(process)
        return self._effects()

    def allocated(
        self, now: float, slab: int, failure: tuple[Code, str] | None = None
    ) -> list[Effect]:
        """Handle the result of an AllocateSlab effect.

        `failure` is None if the allocation succeeded, otherwise the code and text of the error.
        """
        puts.allocated(self._state, now, slab, failure)
        return self._effects()

    def hashed(self, now: float, slab: int, result: list[str] | tuple[Code, str]) -> list[Effect]:
        """Handle the result of a SealAndHash or ReclaimSlab effect.

        `result` is the list of digests or, after a failure, the code and text of the error.
        """
        handed_back = slab in self._state.offers
        (reclaim if handed_back else puts).hashed(self._state, now, slab, result)
        return self._effects()

    def spare_descriptors(self, count: int) -> list[Effect]:
        """Evict up to `count` unused slabs, because the manager needs their descriptors."""
        self._state.ledger.evict_for_descriptors(count)
        return self._effects()

    def expect(self, records: dict[str, KeyRecord], pins: Sequence[str]) -> None:
        """Take over the pins and layer records of the last manager, before any client connects.

        A record can be looked up as soon as all its tensors have been taken over and hashed. If a
        client is building the layer by then, the record is dropped.
        """
        reclaim.expect(self._state, records, pins)

    def inherit(
        self,
        now: float,
        nbytes: int,
        spans: Sequence[DigestSpan],
        checkpoints: Sequence[Sequence[str]],
    ) -> tuple[int, list[Effect]]:
        """Take over a slab of the last manager.

        Return the new number of the slab, and the effects. `spans` and `checkpoints` describe the
        tensors in the slab, in the same order.

        Raises:
            RefusedError: There is no room for the slab or its descriptor, or `nbytes` or `spans` is
                not valid.
        """
        number = reclaim.inherit(self._state, now, nbytes, spans, checkpoints)
        return number, self._effects()

    def tick(self, now: float) -> list[Effect]:
        """Handle the passing of time: end waits that are over, and close idle connections.

        Connections are idle if their clients have not sent Hello in time.
        """
        wait_queue.look(self._state, now)
        build_log.look(self._state, now)
        limit = self._state.settings.hello_timeout_s
        for connection in list(self._state.connections.values()):
            if connection.name is None and now - connection.since >= limit:
                self._hang_up(now, connection, "protocol", f"no Hello within {limit} seconds")
        return self._effects()

    def ending(self) -> list[Effect]:
        """Return the last effects, before the manager ends."""
        for connection in self._state.connections.values():
            build_log.say_all(self._state, connection)
        return self._effects()

    def next_deadline(self, now: float) -> float | None:
        """Return the time by which `tick` must be called, or None if there is no deadline."""
        limit = self._state.settings.hello_timeout_s
        silent = [c.since + limit for c in self._state.connections.values() if c.name is None]
        wait = wait_queue.next_deadline(self._state, now)
        return min([*silent, *([wait] if wait is not None else [])], default=None)

    def totals(self, now: float) -> Totals:
        """Return the manager's totals."""
        return admin.totals(self._state, now, 0.0)

    def saved_bytes(self, now: float) -> int:
        """Return a lower bound of the bytes of memory that sharing saves."""
        return admin.saved(self._state, now)

    def overview(self, now: float) -> dict[str, Any]:
        """Return the manager's totals and tables, without the table of resident tensors.

        The result is a dict in the form that `tensor-dedup status --json` prints.
        """
        return admin.overview(self._state, now)

    def _effects(self) -> list[Effect]:
        self._state.settle()
        effects, self._state.effects = self._state.effects, []
        return effects


def _told(state: ManagerState, connection: ClientState) -> Callable[..., None]:
    """Who looks at a manager comes and goes all the time: that is a detail."""
    return state.detail if connection.name == COMMAND else state.note
