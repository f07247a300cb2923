"""Slabs of an earlier manager: offered by clients that hold them, or inherited by this one."""

from collections.abc import Sequence

from tensor_dedup.memory_manager.core.effects import Adopt
from tensor_dedup.memory_manager.core.ledger import ResidentEntry, SlabState
from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    PendingOffer,
    refusal,
)
from tensor_dedup.memory_manager.core.puts import announced_problem
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.protocol.layout import round_up
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import DigestSpan, Offer, Offered

_NOBODY = 0  # the connection of what was inherited


def offer(world: ManagerState, now: float, connection: ClientState, message: Offer) -> None:
    """Take a slab of an earlier manager back, if there is room and it is what it is said to be."""
    slab = _slab_for(world, now, message.nbytes, message.pieces)
    pieces = tuple(message.pieces)
    world.offers[slab.number] = PendingOffer(connection.number, pieces, message.checkpoint)


def inherit(
    world: ManagerState,
    now: float,
    nbytes: int,
    spans: Sequence[DigestSpan],
    checkpoints: Sequence[Sequence[str]],
) -> int:
    """Take a slab that the last manager of this service has left; its number. RefusedError."""
    slab = _slab_for(world, now, nbytes, spans)
    names = tuple(tuple(each) for each in checkpoints)
    world.offers[slab.number] = PendingOffer(_NOBODY, tuple(spans), "", names)
    return slab.number


def _slab_for(
    world: ManagerState, now: float, nbytes: int, spans: Sequence[DigestSpan]
) -> SlabState:
    end = max(span.offset + span.nbytes for span in spans)
    if end > nbytes or nbytes != round_up(nbytes, world.settings.layout.unit):
        raise refusal("not_sealed", f"a slab of {nbytes} bytes cannot hold {end}")
    slab = world.ledger.add(nbytes, now)
    if slab is None:
        raise refusal("no_room", f"no room to take back a slab of {nbytes} bytes")
    slab.busy = True
    pieces = tuple((span.offset, span.nbytes, span.digest) for span in spans)
    world.effects.append(Adopt(slab.number, nbytes, pieces))
    return slab


def hashed(
    world: ManagerState, now: float, number: int, result: list[str] | tuple[Code, str]
) -> None:
    """The backend has checked and hashed a slab that was handed back, or could not."""
    pending, slab = world.offers.pop(number), world.ledger.slabs[number]
    world.ledger.idle(slab)
    slab.owned = False
    connection = world.connections.get(pending.connection)
    spans = tuple((span.offset, span.nbytes, span.digest) for span in pending.spans)
    problem = announced_problem(spans, result)
    if problem is None and connection is None and pending.connection != _NOBODY:
        problem = "stale_put", "whoever offered it has gone"
    if problem is not None:
        world.ledger.drop(slab)
        world.note("not taken back", nbytes=slab.nbytes, code=problem[0])
        if connection is not None:
            world.refuse(connection, *problem)
        return
    residents = [world.ledger.enter(slab, *span) for span in spans]
    if connection is not None:
        _lend(world, now, connection, residents, pending.checkpoint)
    for resident, names in zip(residents, pending.checkpoints, strict=False):
        for name in names:
            world.ledger.attribute(resident, name)
    world.detail("taken back", tensors=len(residents), nbytes=slab.nbytes)
    if not slab.residents:
        world.ledger.drop(slab)
    _enter_inherited_records(world)


def _lend(
    world: ManagerState,
    now: float,
    connection: ClientState,
    residents: list[ResidentEntry],
    checkpoint: str,
) -> None:
    if not world.may_lease(connection, len(residents)):
        world.refuse(connection, "limit", "this client holds as many leases as one may")
        return
    leases = [world.lease(connection, each, checkpoint, now) for each in residents]
    world.send(connection, Offered(leases))


def _enter_inherited_records(world: ManagerState) -> None:
    """The records whose tensors are all here now; when nothing more comes, the rest is dropped."""
    here = world.ledger.residents
    for key, record in list(world.inherited.items()):
        if all(digest in here for digest in record.digests):
            del world.inherited[key]
            if key not in world.builders:
                world.enter_record(key, record)
    if not any(each.connection == _NOBODY for each in world.offers.values()):
        world.inherited.clear()


def expect(world: ManagerState, records: dict[str, KeyRecord], pins: Sequence[str]) -> None:
    """The records and pins of the last manager."""
    world.inherited.update(records)
    world.ledger.pins.update(pins)
