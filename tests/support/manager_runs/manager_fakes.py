"""The memory manager's surroundings in tests: memory without a GPU, and clients that are played.

`FakeBackend` is files of a folder, with a digest that the writer announces. It has the weak side of
a GPU backend: nothing but manners keeps a reader from writing, and the manager cannot hash.
`fail_reserve` and `busy` play what a system may do. `PlayedCore` is a state machine: it plays what
surrounds the core and checks what always holds of it.
"""

import itertools
import os
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)

from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Spans
from tensor_dedup.memory_manager.core import Core, Settings
from tensor_dedup.memory_manager.core.budget import ASLEEP_BYTES, LEASE_BYTES, Ledger, SlabState
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    CancelJob,
    Close,
    Effect,
    Forget,
    FreeSlab,
    ReclaimSlab,
    SealAndHash,
    Send,
)
from tensor_dedup.memory_manager.core.manager_state import ManagerState
from tensor_dedup.memory_manager.core.records import key_cost
from tensor_dedup.memory_manager.errors import (
    BackendError,
    NoMemoryError,
    NotSealedError,
    RefusedError,
    StillWritableError,
)
from tensor_dedup.memory_manager.protocol import codec
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.messages import (
    WITHOUT_REPLY,
    Allocate,
    Allocated,
    Extent,
    Found,
    FoundDigests,
    Hello,
    Offered,
    PutPiece,
    Refused,
    Request,
    Reserve,
    Reserved,
    Seal,
    Sealed,
)


class FakeSlab:
    """One file of the folder; its descriptor is closed when nothing refers to this object."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


class FakeBackend:
    """Slabs that are files; sealing takes the right to open them for writing away."""

    capabilities: Final = Capabilities("fake", hardware_readonly=False, hashes_itself=False)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.fail_reserve = False
        self.busy = False

    def reserve(self, nbytes: int) -> FakeSlab:
        """Implement `Backend.__init__`."""
        if self.fail_reserve:
            raise NoMemoryError(f"{nbytes} bytes: the test says that there is none", nbytes=nbytes)
        self._count += 1
        path = self._folder / f"slab-{self._count}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        slab = FakeSlab(fd, nbytes)
        os.ftruncate(fd, nbytes)
        return slab

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Implement `Backend.commit`."""

    def seal(self, memory: Memory) -> None:
        """Implement `Backend.seal`."""
        if self.busy:
            raise StillWritableError("the test says that a writable mapping lives")
        os.fchmod(memory.fileno, 0o400)

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Implement `Backend.leaves`."""
        raise BackendError("this backend does not hash")

    def reclaim(self, fd: int, nbytes: int) -> FakeSlab:
        """Implement `Backend.reclaim`."""
        found = os.fstat(fd)
        if found.st_mode & 0o777 != 0o400 or found.st_size != nbytes:
            raise NotSealedError("the descriptor is no sealed file of that size")
        return FakeSlab(fd, nbytes)


BUDGET = 16 * PAGE


def unpinned(ledger: Ledger) -> list[SlabState]:
    """The slabs that nothing but their use keeps."""
    return [slab for slab in ledger.slabs.values() if not ledger.pinned_slab(slab)]


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
                case CancelJob(slab):
                    assert slab in {job.slab for job in self.jobs}
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
        assert ledger.charged == sum(s.cost for s in ledger.slabs.values()) + ledger.remembered
        # What is remembered may come when all memory is in use.
        assert ledger.charged - ledger.remembered <= BUDGET
        assert ledger.charged <= BUDGET or all(slab.held for slab in unpinned(ledger))
        assert ledger.bookkeeping == ledger.charged - sum(s.nbytes for s in ledger.slabs.values())

    @invariant()
    def what_nobody_uses_can_go(self) -> None:
        ledger = self.state.ledger
        idle = {s.number for s in ledger.slabs.values() if not s.held}
        assert {s.number for s in ledger._idle.values()} == idle
        assert all(
            slab.holds == sum(r.holds for r in slab.residents.values())
            for slab in ledger.slabs.values()
            if not slab.released_but_mapped and not slab.doomed
        )
        gone = {s.number for s in ledger.slabs.values() if s.released_but_mapped}
        mapped = gone if self.state.settings.mappings_hold else set()
        assert ledger.open_slabs == len(ledger.slabs) - len(mapped)

    @invariant()
    def what_is_remembered_is_charged(self) -> None:
        state = self.state
        connections = state.connections.values()
        leases = sum(len(c.leases) for c in connections)
        puts = sum(put.cost for c in connections for put in c.puts.values())
        entries = state.records.items()
        records = sum(key_cost(key) for key, _ in entries)
        records += sum(record.cost for record in {record for _, record in entries})
        named = sum(slab.named for slab in state.ledger.slabs.values())
        held = leases * LEASE_BYTES + sum(len(c.asleep) for c in connections) * ASLEEP_BYTES
        assert state.ledger.remembered == held + puts + records + named

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
        asleep = Counter(id(c.leases[number]) for c in connections for number in c.asleep)
        for resident in self.state.ledger.residents.values():
            assert resident.leases == leases.pop(id(resident), 0)
            assert resident.holds == resident.leases + puts.pop(id(resident), 0)
            assert resident.asleep == asleep.pop(id(resident), 0)
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


class PlayedClients:
    """Clients of a core whose memory and hashing a test plays."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.core = Core(settings or Settings(1 << 40))
        self.numbers = 0

    def client(self) -> int:
        self.numbers += 1
        self.core.connected(0.0, self.numbers, self.numbers, self.numbers)
        self.ask(self.numbers, Hello("played"))
        return self.numbers

    def ask(self, client: int, request: Request) -> list[Any]:
        """Its effects; of a request as it comes from outside, which shares nothing with others."""
        return list(self.core.received(0.0, client, codec.decode_request(codec.encode(request))))

    def reply(self, client: int, request: Request) -> Any:
        [found] = [e.reply for e in self.ask(client, request) if isinstance(e, Send)]
        return found

    def build(self, client: int, key: str, digests: list[str], name: str = "") -> int:
        reply = self.reply(client, Reserve([key], name))
        assert isinstance(reply, Reserved)
        pieces = [PutPiece(1, each) for each in digests]
        effects = self.ask(client, Allocate(reply.put, pieces))
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.reply, Refused)
                raise RefusedError(effect.reply.text, code=effect.reply.code)
        [made] = [e for e in effects if isinstance(e, AllocateSlab)]
        self.core.allocated(0.0, made.slab)
        [job] = [e for e in self.ask(client, Seal(reply.put)) if isinstance(e, SealAndHash)]
        self.core.hashed(0.0, job.slab, [each for _, _, each in job.pieces])
        return reply.put
