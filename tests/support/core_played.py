"""What surrounds the manager's core, played; and what always holds of it."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)

from tensor_dedup.memory_manager.core import Core, Settings
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    Close,
    Effect,
    Forget,
    FreeSlab,
    ReclaimSlab,
    SealAndHash,
    Send,
)
from tensor_dedup.memory_manager.core.manager_state import ManagerState
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.messages import (
    WITHOUT_REPLY,
    Allocated,
    Extent,
    Found,
    FoundDigests,
    Offered,
    Request,
    Reserved,
    Sealed,
)

BUDGET = 8 * PAGE


class PlayedCore(RuleBasedStateMachine):
    """Plays the sockets, the memory and the clock around a core."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(BUDGET, build_timeout_s=10, hello_timeout_s=5, max_puts=3)
        self.core = Core(self.settings)
        self.now = 0.0
        self.slots: dict[int, int] = {}
        self.numbers = itertools.count(1)
        self.jobs: list[AllocateSlab | SealAndHash | ReclaimSlab] = []
        self.memory: set[int] = set()  # slabs whose descriptor the manager has
        self.process: dict[int, int] = {}  # open connections
        self.watched: set[int] = set()
        self.owed: Counter[int] = Counter()
        self.puts: dict[int, set[int]] = {}
        self.leases: dict[int, set[int]] = {}

    @initialize(hold=st.booleans())
    def begin(self, hold: bool) -> None:
        """Memory that a mapping holds, and memory that the manager must hold for it."""
        self.core = Core(replace(self.settings, mappings_hold=hold))

    @property
    def state(self) -> ManagerState:
        return self.core.state

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(connection, reply, slabs):
                    assert set(slabs) <= self.memory
                    self.owed[connection] -= 1
                    self.learn(connection, reply, slabs)
                case Close(connection, _):
                    self.hung_up(connection)
                case AllocateSlab() | SealAndHash() | ReclaimSlab():
                    self.jobs.append(effect)
                case FreeSlab(slab):
                    assert slab not in {job.slab for job in self.jobs}
                    self.memory.discard(slab)
                case Forget(process):
                    self.watched.remove(process)

    def learn(self, connection: int, reply: Any, slabs: tuple[int, ...]) -> None:
        extents: list[Extent | None] = []
        match reply:
            case Reserved(put, _) if put:
                self.puts[connection].add(put)
            case Allocated():
                assert len(slabs) == 1
            case Found(layers, refs):
                assert [ref.slab for ref in refs] == list(slabs)
                extents = [extent for layer in layers if layer for extent in layer.extents]
            case FoundDigests(extents, refs):
                assert [ref.slab for ref in refs] == list(slabs)
            case Offered(leases):
                self.leases[connection].update(leases)
            case Sealed(digests):
                assert set(digests) <= set(self.state.ledger.residents)
        self.leases[connection].update(extent.lease for extent in extents if extent)

    def hung_up(self, connection: int) -> None:
        del self.process[connection]
        self.owed.pop(connection, None)

    def ask(self, connection: int, request: Request) -> None:
        if connection in self.process:
            self.owed[connection] += not isinstance(request, WITHOUT_REPLY)
            self.do(self.core.received(self.now, connection, request))

    # What always holds.

    @invariant()
    def the_budget_is_kept(self) -> None:
        ledger = self.state.ledger
        assert ledger.charged == sum(slab.nbytes for slab in ledger.slabs.values()) <= BUDGET

    @invariant()
    def what_can_be_seen_is_there(self) -> None:
        ledger = self.state.ledger
        for digest, resident in ledger.residents.items():
            slab = ledger.slabs[resident.slab]
            assert resident.slab in self.memory
            assert slab.residents[digest] is resident
            assert not slab.released_but_mapped
            assert not slab.busy
        for key, record in self.state.records.items():
            assert set(record.digests) <= set(ledger.residents)
            assert key not in self.state.builders

    @invariant()
    def holds_are_counted(self) -> None:
        connections = self.state.connections.values()
        leases = Counter(id(r) for c in connections for r in c.leases.values())
        puts = Counter(id(r) for c in connections for p in c.puts.values() for r in p.held)
        for resident in self.state.ledger.residents.values():
            assert resident.leases == leases.pop(id(resident), 0)
            assert resident.holds == resident.leases + puts.pop(id(resident), 0)
        assert not leases
        assert not puts

    @invariant()
    def each_layer_has_one_builder(self) -> None:
        active = [
            (key, put)
            for connection in self.state.connections.values()
            for put in connection.puts.values()
            if put.active
            for key in put.keys
        ]
        assert len(active) == len(self.state.builders)
        assert dict(active) == self.state.builders

    @invariant()
    def every_request_is_answered_once(self) -> None:
        parked = Counter(n for n, c in self.state.connections.items() if c.waiting is not None)
        filling = Counter(put.connection for put in self.state.filling.values())
        offers = Counter(offer.connection for offer in self.state.offers.values())
        for connection in self.process:
            pending = parked[connection] + filling[connection] + offers[connection]
            assert self.owed[connection] == pending
