"""The core against clients that do anything, in any order, and die at any moment."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    rule,
)

from manager_runs.manager_fakes import PlayedCore
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    ReclaimSlab,
    SealAndHash,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE
from tensor_dedup.memory_manager.protocol.messages import (
    Abandon,
    DigestSpan,
    Evict,
    Hello,
    Lookup,
    LookupDigests,
    Offer,
    Pin,
    Progress,
    Publish,
    PutPiece,
    Release,
    Request,
    Reserve,
    Rows,
    Seal,
    StandBy,
    Status,
    Wait,
)
from tensor_dedup.memory_manager.protocol.messages import Allocate as AllocateRequest

KEYS = st.sampled_from(["a", "b", "c"])
DIGESTS = st.sampled_from([character * 64 for character in "0123456789"])
SLOTS = st.integers(0, 3)
NAMES = st.sampled_from(["base", "tuned", ""])


class Machine(PlayedCore):
    """What clients, time and the backend may do."""

    # What clients do.

    def client(self, slot: int) -> int:
        """The connection of a slot, made when it has none."""
        if self.slots.get(slot) not in self.process:
            self.connect(slot, hello=True, twin=False)
        return self.slots[slot]

    @rule(slot=SLOTS, hello=st.booleans(), twin=st.booleans())
    def connect(self, slot: int, hello: bool, twin: bool) -> None:
        alive = sorted(set(self.process.values()) & self.watched)
        process = alive[0] if twin and alive else next(self.numbers)
        number = self.slots[slot] = next(self.numbers)
        self.watched.add(process)
        self.process[number] = process
        self.puts[number], self.leases[number] = set(), set()
        self.do(self.core.connected(self.now, number, process, pid=process))
        if hello:
            self.ask(number, Hello(f"client {number}"))

    @rule(slot=SLOTS)
    def say_hello(self, slot: int) -> None:
        client = self.client(slot)
        self.ask(client, Hello("again"))

    @rule(slot=SLOTS, keys=st.lists(KEYS, min_size=1, max_size=3), name=NAMES)
    def lookup(self, slot: int, keys: list[str], name: str) -> None:
        client = self.client(slot)
        self.ask(client, Lookup(keys, name))

    @rule(slot=SLOTS, digests=st.lists(DIGESTS, min_size=1, max_size=4), name=NAMES)
    def lookup_digests(self, slot: int, digests: list[str], name: str) -> None:
        client = self.client(slot)
        self.ask(client, LookupDigests(digests, name))

    @rule(slot=SLOTS, keys=st.lists(KEYS, min_size=1, max_size=3), name=NAMES)
    def reserve(self, slot: int, keys: list[str], name: str) -> None:
        client = self.client(slot)
        self.ask(client, Reserve(keys, name))

    def any_put(self, client: int, data: st.DataObject) -> int:
        """Mostly one of one's own, in whatever state; also those of others, and of nobody."""
        own = sorted(self.state.connections[client].puts) if client in self.process else []
        others = sorted({put.number for put in self.state.builders.values()})
        return data.draw(st.sampled_from(own * 4 + others + [77]))

    @rule(slot=SLOTS, key=KEYS, digest=DIGESTS, pages=st.integers(1, 3), steps=st.integers(1, 5))
    def build(self, slot: int, key: str, digest: str, pages: int, steps: int) -> None:
        """As a good client does, up to some step."""
        client = self.client(slot)
        self.ask(client, Reserve([key], "base"))
        put = self.state.builders.get(key)
        if put is None or put.connection != client:
            return
        requests: list[Request] = [
            AllocateRequest(put.number, [PutPiece(pages * PAGE, digest)]),
            Seal(put.number),
            LookupDigests([digest], "base"),
            Publish(put.number, key, b"record", [digest]),
        ]
        for request in requests[: steps - 1]:
            self.ask(client, request)
            self.finish_all()

    @rule(slot=SLOTS, other=SLOTS, key=KEYS, steps=st.integers(1, 3), seconds=st.floats(0, 20))
    def contend(self, slot: int, other: int, key: str, steps: int, seconds: float) -> None:
        """One builds and falls silent, another waits and asks again."""
        self.build(slot, key, "5" * 64, 1, steps)
        client = self.client(other)
        for put in list(self.state.connections[client].puts):
            self.ask(client, Abandon(put))
        self.ask(client, Wait(key, 30.0))
        self.now += seconds
        self.do(self.core.tick(self.now))
        self.ask(client, Reserve([key]))

    def finish_all(self) -> None:
        while self.jobs:
            match self.jobs.pop():
                case AllocateSlab(slab, _):
                    self.memory.add(slab)
                    self.do(self.core.allocated(self.now, slab))
                case SealAndHash(slab, pieces) | ReclaimSlab(slab, _, pieces):
                    self.memory.add(slab)
                    found = [announced or "2" * 64 for _, _, announced in pieces]
                    self.do(self.core.hashed(self.now, slab, found))

    @rule(slot=SLOTS, pages=st.integers(1, 5), count=st.integers(1, 3), data=st.data())
    def allocate(self, slot: int, pages: int, count: int, data: st.DataObject) -> None:
        client = self.client(slot)
        announced = data.draw(st.sampled_from(["", "1" * 64]))
        pieces = [PutPiece(pages * PAGE // count, announced)] * count
        self.ask(client, AllocateRequest(self.any_put(client, data), pieces))

    @rule(slot=SLOTS, data=st.data())
    def progress(self, slot: int, data: st.DataObject) -> None:
        client = self.client(slot)
        self.ask(client, Progress(self.any_put(client, data)))

    @rule(slot=SLOTS, data=st.data())
    def seal(self, slot: int, data: st.DataObject) -> None:
        client = self.client(slot)
        self.ask(client, Seal(self.any_put(client, data)))

    @rule(
        slot=SLOTS,
        key=KEYS,
        also=st.lists(KEYS, max_size=2),
        digests=st.lists(DIGESTS, max_size=3),
        data=st.data(),
    )
    def publish(
        self, slot: int, key: str, also: list[str], digests: list[str], data: st.DataObject
    ) -> None:
        client = self.client(slot)
        put = data.draw(st.sampled_from([0, self.any_put(client, data)]))
        held = sorted(self.state.connections[client].leased) if client in self.process else []
        chosen = data.draw(st.sampled_from([digests, held[:3]]))
        self.ask(client, Publish(put, key, b"record", chosen, also))

    @rule(slot=SLOTS, data=st.data())
    def abandon(self, slot: int, data: st.DataObject) -> None:
        client = self.client(slot)
        self.ask(client, Abandon(self.any_put(client, data)))

    @rule(slot=SLOTS, key=KEYS, timeout_s=st.floats(0, 30))
    def wait(self, slot: int, key: str, timeout_s: float) -> None:
        client = self.client(slot)
        self.ask(client, Wait(key, timeout_s))
        if client in self.process and self.state.connections[client].waiting is not None:
            assert not self.state.connections[client].builds

    @rule(slot=SLOTS, data=st.data())
    def release(self, slot: int, data: st.DataObject) -> None:
        client = self.client(slot)
        known = sorted(self.leases.get(client, ())) or [5]
        self.ask(client, Release(data.draw(st.lists(st.sampled_from(known), min_size=1))))

    @rule(slot=SLOTS, asleep=st.booleans(), data=st.data())
    def stand_by(self, slot: int, asleep: bool, data: st.DataObject) -> None:
        client = self.client(slot)
        known = sorted(self.leases.get(client, ())) or [5]
        chosen = data.draw(st.lists(st.sampled_from([*known, 5]), min_size=1))
        self.ask(client, StandBy(chosen, asleep))

    @rule(slot=SLOTS, spans=st.lists(DIGESTS, min_size=1, max_size=3), pages=st.integers(1, 6))
    def offer(self, slot: int, spans: list[str], pages: int) -> None:
        client = self.client(slot)
        pieces = [DigestSpan(64 * index, 64, digest) for index, digest in enumerate(spans)]
        self.ask(client, Offer(pages * PAGE, pieces))

    @rule(slot=SLOTS, name=st.one_of(NAMES, DIGESTS), pinned=st.booleans())
    def pin(self, slot: int, name: str, pinned: bool) -> None:
        client = self.client(slot)
        self.ask(client, Pin(name, pinned))

    @rule(slot=SLOTS, name=st.one_of(NAMES, DIGESTS))
    def evict(self, slot: int, name: str) -> None:
        client = self.client(slot)
        self.ask(client, Evict(name))

    @rule(slot=SLOTS)
    def look_around(self, slot: int) -> None:
        client = self.client(slot)
        self.ask(client, Status())
        for table in ("clients", "checkpoints", "residents", "builds"):
            self.ask(client, Rows(table))

    @rule(slot=SLOTS)
    def hang_up(self, slot: int) -> None:
        client = self.client(slot)
        if client in self.process:
            self.hung_up(client)
            self.do(self.core.disconnected(self.now, client))

    @rule(slot=SLOTS)
    def send_garbage(self, slot: int) -> None:
        client = self.client(slot)
        if client in self.process:
            self.owed[client] += 1
            self.do(self.core.garbage(self.now, client, "protocol", "what is this"))

    @rule(slot=SLOTS)
    def die(self, slot: int) -> None:
        client = self.client(slot)
        process = self.process.get(client)
        if process is not None:
            self.end(process)

    @rule(data=st.data())
    def die_later(self, data: st.DataObject) -> None:
        if self.watched:
            self.end(data.draw(st.sampled_from(sorted(self.watched))))

    def end(self, process: int) -> None:
        for connection in [c for c, p in self.process.items() if p == process]:
            self.hung_up(connection)
        self.do(self.core.ended(self.now, process))
        assert process not in self.watched

    # What time and the backend do.

    @rule(seconds=st.floats(0, 12))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.core.tick(self.now))
        deadline = self.core.next_deadline(self.now)
        assert deadline is None or deadline > self.now - 1e-6

    @rule(data=st.data())
    def backend(self, data: st.DataObject) -> None:
        if self.jobs:
            job = data.draw(st.sampled_from(self.jobs))
            self.jobs.remove(job)
            self.finish(job, data)

    def finish(self, job: AllocateSlab | SealAndHash | ReclaimSlab, data: st.DataObject) -> None:
        match job:
            case AllocateSlab(slab, _):
                failure: Any = data.draw(st.sampled_from([None, None, ("no_memory", "none")]))
                if failure is None:
                    self.memory.add(slab)
                self.do(self.core.allocated(self.now, slab, failure))
            case SealAndHash(slab, pieces):
                found = [announced or data.draw(DIGESTS) for _, _, announced in pieces]
                bad: Any = data.draw(st.sampled_from([None, None, "still_writable", "no_memory"]))
                assert slab in self.memory
                self.do(self.core.hashed(self.now, slab, (bad, "bad") if bad else found))
            case ReclaimSlab(slab, _, pieces):
                right = data.draw(st.booleans())
                if right:
                    self.memory.add(slab)
                found = [announced for _, _, announced in pieces]
                self.do(self.core.hashed(self.now, slab, found if right else ("not_sealed", "no")))

    def teardown(self) -> None:
        """Everybody dies and the backend ends its work: nothing may be left but residents."""
        for process in sorted(self.watched):
            self.end(process)
        self.finish_all()
        state = self.state
        assert not state.connections
        assert not state.processes
        assert not state.builders
        assert not state.filling
        assert not state.offers
        assert set(state.ledger.slabs) == self.memory
        assert all(not slab.held and slab.residents for slab in state.ledger.slabs.values())


TestCore = Machine.TestCase
TestCore.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)

TestLongCore: Any = pytest.mark.long(type("TestLongCore", (Machine.TestCase,), {}))
TestLongCore.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
