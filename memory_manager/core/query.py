"""Handlers of the requests that look up layers and tensors, and of those that concern leases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensor_dedup.memory_manager.core.budget import ResidentEntry
from tensor_dedup.memory_manager.core.manager_state import ClientState, ManagerState, refusal
from tensor_dedup.memory_manager.protocol.limits import MAX_DESCRIPTORS, MAX_MESSAGE
from tensor_dedup.memory_manager.protocol.messages import (
    Extent,
    Found,
    FoundDigests,
    LayerHit,
    Lookup,
    LookupDigests,
    Release,
    SlabRef,
    StandBy,
    StoodBy,
)

# Upper bounds of what a part takes in a datagram.
_EXTENT_BYTES = 120
_HIT_BYTES = 32
_SLAB_BYTES = 24
_ROOM = MAX_MESSAGE - 256


@dataclass(slots=True)
class _Page:
    """A reply that grows until the next item would not fit."""

    slabs: dict[int, int] = field(default_factory=dict)  # number -> position
    nbytes: int = 0

    def take(self, residents: Sequence[ResidentEntry], extra: int) -> bool:
        """Make room for an item that needs these tensors; False when it does not fit."""
        new = dict.fromkeys(r.slab for r in residents if r.slab not in self.slabs)
        nbytes = extra + _EXTENT_BYTES * len(residents) + _SLAB_BYTES * len(new)
        if len(self.slabs) + len(new) > MAX_DESCRIPTORS or self.nbytes + nbytes > _ROOM:
            return False
        self.nbytes += nbytes
        for slab in new:
            self.slabs[slab] = len(self.slabs)
        return True

    def refs(self, state: ManagerState) -> list[SlabRef]:
        return [SlabRef(number, state.ledger.slabs[number].nbytes) for number in self.slabs]


def lookup(state: ManagerState, now: float, connection: ClientState, message: Lookup) -> None:
    """Handle Lookup: answer for as many layers as fit into one reply, and lease their tensors."""
    page, layers = _Page(), list[LayerHit | None]()
    lend = _lender(state, now, connection, message.checkpoint, page)
    for key in message.keys:
        record = state.records.get(key)
        residents = [state.ledger.residents[d] for d in record.digests] if record else []
        may = state.may_lease(connection, len(residents))
        if not may or not page.take(residents, _HIT_BYTES + (len(record.record) if record else 0)):
            break
        hit = LayerHit(record.record, [lend(r) for r in residents]) if record else None
        layers.append(hit)
    _require_some(len(layers))
    hits = sum(layer is not None for layer in layers)
    state.counters["hits"] += hits
    state.counters["misses"] += len(layers) - hits
    state.send(connection, Found(layers, page.refs(state)), page.slabs)


def lookup_digests(
    state: ManagerState, now: float, connection: ClientState, message: LookupDigests
) -> None:
    """Handle LookupDigests: answer for as many digests as fit into one reply.

    The tensors with these digests are leased.
    """
    page, extents = _Page(), list[Extent | None]()
    lend = _lender(state, now, connection, message.checkpoint, page)
    for digest in message.digests:
        resident = state.ledger.residents.get(digest)
        may = resident is None or state.may_lease(connection, 1)
        if not may or not page.take([resident] if resident else [], 2):
            break
        extents.append(lend(resident) if resident else None)
    _require_some(len(extents))
    state.send(connection, FoundDigests(extents, page.refs(state)), page.slabs)


def _require_some(answered: int) -> None:
    # One item always fits a page, so nothing but the number of leases stops the first.
    if not answered:
        raise refusal("limit", "this client holds as many leases as one may; release some")


def _lender(
    state: ManagerState, now: float, connection: ClientState, checkpoint: str, page: _Page
) -> Callable[[ResidentEntry], Extent]:
    def lend(resident: ResidentEntry) -> Extent:
        number = state.lease(connection, resident, checkpoint, now)
        position = page.slabs[resident.slab]
        return Extent(position, resident.offset, resident.nbytes, resident.digest, number)

    return lend


def release(state: ManagerState, now: float, connection: ClientState, message: Release) -> None:
    """Handle Release: end leases. There is no reply."""
    for number in message.leases:
        state.unlease(connection, number, now)


def stand_by(state: ManagerState, _now: float, connection: ClientState, message: StandBy) -> None:
    """Handle StandBy: mark leases as held by a sleeping engine, or remove the marks.

    The reply says for each tensor whether an engine that is awake uses it. Any client counts as
    such an engine if it has a lease without the mark, or an unfinished put that needs the tensor.
    All leases are marked before the reply is made.
    """
    for number in message.leases:
        if number not in connection.leases:
            raise refusal("not_resident", f"there is no lease {number} of this client's")
    if message.asleep and not state.may_sleep(connection, message.leases):
        raise refusal("limit", "the manager can remember no more; close other clients")
    held = [connection.leases[number] for number in message.leases]
    for number, resident in zip(message.leases, held, strict=True):
        state.set_asleep(connection, number, resident, asleep=message.asleep)
    state.send(connection, StoodBy([each.holds > each.asleep for each in held]))
