"""Take back slabs (blocks of memory) of an earlier manager.

A client offers them, or the earlier manager has left them with systemd. Each slab is checked, and
hashed if it is host memory, before its tensors are lent again.
"""

from collections.abc import Sequence
from contextlib import suppress

from tensor_dedup.memory_manager.core.budget import ResidentEntry, SlabState
from tensor_dedup.memory_manager.core.effects import ReclaimSlab
from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    PendingOffer,
    refusal,
)
from tensor_dedup.memory_manager.core.puts import announced_problem
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.layout import round_up
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import DigestSpan, Offer, Offered

_NOBODY = 0  # the connection of what was inherited


def offer(state: ManagerState, now: float, connection: ClientState, message: Offer) -> None:
    """Handle Offer: take back a slab of an earlier manager from a client.

    The offer is refused if there is no room, or if the slab is not what the client says.
    """
    slab = _slab_for(state, now, message.nbytes, message.pieces, connection.process)
    pieces = tuple(message.pieces)
    state.offers[slab.number] = PendingOffer(connection.number, pieces, message.checkpoint)


def inherit(
    state: ManagerState,
    now: float,
    nbytes: int,
    spans: Sequence[DigestSpan],
    checkpoints: Sequence[Sequence[str]],
) -> int:
    """Take over a slab that the last manager left with systemd; return its new number.

    `spans` are the tensors in the slab. `checkpoints` has the names of each tensor's checkpoints,
    in the same order.

    Raises:
        RefusedError: There is no room for the slab or its descriptor, or `nbytes` or `spans` is not
            valid.
    """
    slab = _slab_for(state, now, nbytes, spans, _NOBODY)
    names = tuple(tuple(each) for each in checkpoints)
    state.offers[slab.number] = PendingOffer(_NOBODY, tuple(spans), "", names)
    return slab.number


def leave(state: ManagerState, connection: ClientState) -> None:
    """Drop the slabs that a leaving client has offered and that are still being hashed."""
    for number, pending in state.offers.items():
        if pending.connection == connection.number:
            state.ledger.drop(state.ledger.slabs[number])


def _slab_for(
    state: ManagerState, now: float, nbytes: int, spans: Sequence[DigestSpan], process: int
) -> SlabState:
    end = 0
    for span in sorted(spans, key=lambda span: span.offset):
        # Tensors of a slab never share bytes: hashing what is offered costs its size, no more.
        if span.offset < end:
            raise refusal(
                "not_sealed",
                f"the tensor at byte {span.offset} begins inside of the one before, which ends at "
                f"{end}; offer tensors that do not overlap",
            )
        end = span.offset + span.nbytes
    if end > nbytes or nbytes != round_up(nbytes, state.settings.layout.unit):
        raise refusal("not_sealed", f"a slab of {nbytes} bytes cannot hold {end}")
    slab = state.new_slab(nbytes, len(spans), now)
    slab.busy = True
    pieces = tuple((span.offset, span.nbytes, span.digest) for span in spans)
    state.effects.append(ReclaimSlab(slab.number, nbytes, pieces, process))
    return slab


def hashed(
    state: ManagerState, now: float, number: int, result: list[str] | tuple[Code, str]
) -> None:
    """Handle the result of checking and hashing the slab `number` of an earlier manager.

    `result` is the list of digests or, after a failure, the code and text of the error.
    """
    pending, slab = state.offers.pop(number), state.ledger.slabs[number]
    wanted = state.ledger.idle(slab)
    connection = state.connections.get(pending.connection)
    spans = tuple((span.offset, span.nbytes, span.digest) for span in pending.spans)
    problem = announced_problem(spans, result)
    if not wanted:
        problem = "stale_put", "whoever offered it has gone"
    if problem is not None:
        if wanted:
            state.ledger.drop(slab)
        state.note("not taken back", nbytes=slab.nbytes, code=problem[0])
        if connection is not None:
            state.refuse(connection, *problem)
        return
    residents = [state.ledger.enter(slab, *span) for span in spans]
    state.ledger.disown(slab)
    if connection is not None:
        _lend(state, now, connection, residents, pending.checkpoint)
    for resident, names in zip(residents, pending.checkpoints, strict=False):
        for name in names:
            state.ledger.attribute(resident, name)
    state.detail("taken back", tensors=len(residents), nbytes=slab.nbytes)
    if not slab.residents:
        state.ledger.drop(slab)
    _enter_inherited_records(state)


def _lend(
    state: ManagerState,
    now: float,
    connection: ClientState,
    residents: list[ResidentEntry],
    checkpoint: str,
) -> None:
    if not state.may_lease(connection, len(residents)):
        state.refuse(connection, "limit", "this client holds as many leases as one may")
        return
    leases = [state.lease(connection, each, checkpoint, now) for each in residents]
    state.send(connection, Offered(leases))


def _enter_inherited_records(state: ManagerState) -> None:
    """The records whose tensors are all here now; when nothing more comes, the rest is dropped."""
    here = state.ledger.residents
    for key, record in list(state.inherited.items()):
        if all(digest in here for digest in record.digests):
            del state.inherited[key]
            if key not in state.builders:
                with suppress(RefusedError):  # what it leads to is there all the same
                    state.enter_record(key, record)
    if not any(each.connection == _NOBODY for each in state.offers.values()):
        state.inherited.clear()


def expect(state: ManagerState, records: dict[str, KeyRecord], pins: Sequence[str]) -> None:
    """Take over the layer records and pins of the last manager.

    A record can be looked up only when all its tensors have been taken back.
    """
    state.inherited.update(records)
    state.ledger.pins.update(pins)
