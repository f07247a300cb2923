"""Handlers of the requests that build layers: Reserve, Allocate, Seal, Publish and others.

A put is the right of one client to build some layers. If its client is silent for too long, another
client can take its layers over.
"""

from tensor_dedup.memory_manager.core import build_log
from tensor_dedup.memory_manager.core.budget import KEY_BYTES, PUT_BYTES, SlabState
from tensor_dedup.memory_manager.core.effects import AllocateSlab, SealAndHash
from tensor_dedup.memory_manager.core.manager_state import (
    ClientState,
    ManagerState,
    PutState,
    refusal,
)
from tensor_dedup.memory_manager.core.put_states import Event, State
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.core.wait_queue import wake
from tensor_dedup.memory_manager.errors import RefusedError
from tensor_dedup.memory_manager.protocol.layout import offsets_of
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.protocol.messages import (
    Abandon,
    Allocated,
    Done,
    Progress,
    Publish,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    SlabRef,
)
from tensor_dedup.memory_manager.protocol.messages import Allocate as AllocateRequest


def reserve(state: ManagerState, now: float, connection: ClientState, message: Reserve) -> None:
    """Handle Reserve: grant the layers that are neither published nor being built.

    A layer whose builder has been silent for too long is taken over, and granted, too.
    """
    if len(connection.puts) >= state.settings.max_puts:
        raise refusal("limit", "this client holds as many puts as one may; finish or abandon some")
    answers = Reserved(0, [])
    granted = set[str]()
    for key in message.keys:
        _take_over(state, now, connection, key)
        if key in state.records:
            answers.answers.append("ready")
        elif key in state.builders or key in granted:
            answers.answers.append("building")
        else:
            answers.answers.append("granted")
            granted.add(key)
    number = _open_put(state, now, connection, granted, message.checkpoint) if granted else 0
    state.send(connection, Reserved(number, answers.answers))


def _open_put(
    state: ManagerState, now: float, connection: ClientState, keys: set[str], checkpoint: str
) -> int:
    cost = PUT_BYTES + sum(KEY_BYTES + len(key) for key in keys)
    if not state.ledger.remember(cost):
        raise refusal("limit", "the manager can remember no more reservations; try again later")
    number = state.next_put
    state.next_put += 1
    put = PutState(
        number, connection.number, connection.process, keys, now, checkpoint, opened=now, cost=cost
    )
    connection.puts[number] = put
    state.builders.update(dict.fromkeys(keys, put))
    return number


def _take_over(state: ManagerState, now: float, connection: ClientState, key: str) -> None:
    put = state.builders.get(key)
    if put is None or put.connection == connection.number:
        return
    if put.silent(now) < state.settings.build_timeout_s:
        return
    state.counters["takeovers"] += 1
    state.note("taken over", put=put.number, key=key, silent_s=round(put.silent(now), 1))
    put.step(Event.TAKE_OVER)
    slab = state.ledger.slabs[put.slab] if put.slab is not None else None
    if slab is not None:
        # The old builder may write into it for ever: nobody else will ever see it.
        state.charge(slab, put.process)
        if not slab.residents:
            state.ledger.drop(slab)
    _let_go(state, now, put)


def _let_go(state: ManagerState, now: float, put: PutState) -> None:
    """A put holds neither its layers nor its tensors any longer."""
    for resident in put.held:
        state.ledger.let_go(resident, now, leased=False)
    put.held = []
    if put.slab is not None and put.slab in state.ledger.slabs:
        state.ledger.disown(state.ledger.slabs[put.slab])
    keys, put.keys = put.keys, set()
    for key in sorted(keys):
        del state.builders[key]
        wake(state, key, "free")


def _mine(connection: ClientState, number: int, now: float) -> PutState:
    """Return the put of that number, which has just been heard of."""
    put = connection.puts.get(number)
    if put is None or not put.active:
        raise refusal(
            "stale_put",
            f"put {number} is not yours or was taken over: drop its memory, abandon it, and build "
            "privately",
        )
    put.progress = now
    return put


def allocate(
    state: ManagerState, now: float, connection: ClientState, message: AllocateRequest
) -> None:
    """Handle Allocate: count a slab against the budget, and ask the backend for its memory."""
    put = _mine(connection, message.put, now)
    put.step(Event.ALLOCATE)
    layout = state.settings.layout
    offsets, nbytes = offsets_of((piece.nbytes for piece in message.pieces), layout)
    try:
        slab = state.new_slab(nbytes, len(message.pieces), now)
    except RefusedError:
        put.step(Event.NO_MEMORY)
        raise
    put.slab = slab.number
    put.spans = tuple(
        (offset, piece.nbytes, piece.digest)
        for offset, piece in zip(offsets, message.pieces, strict=True)
    )
    _start(state, put, slab)
    state.effects.append(AllocateSlab(slab.number, nbytes, put.process))


def _start(state: ManagerState, put: PutState, slab: SlabState) -> None:
    slab.busy = True
    state.filling[slab.number] = put


def allocated(
    state: ManagerState, now: float, number: int, failure: tuple[Code, str] | None
) -> None:
    """Handle the result of allocating the slab `number`.

    `failure` is None if the allocation succeeded, otherwise the code and text of the error.
    """
    put, slab = state.filling.pop(number), state.ledger.slabs[number]
    connection = state.connections.get(put.connection)
    if not state.ledger.idle(slab) or connection is None:
        _refuse_late(state, connection, put)
        return
    put.progress = now
    if failure is not None:
        put.step(Event.NO_MEMORY)
        put.slab, put.spans = None, ()
        state.ledger.drop(slab)
        state.refuse(connection, *failure)
        return
    put.step(Event.ALLOCATED)
    reply = Allocated(SlabRef(number, slab.nbytes), [offset for offset, _, _ in put.spans])
    state.send(connection, reply, (number,))


def _refuse_late(state: ManagerState, connection: ClientState | None, put: PutState) -> None:
    """The put ended before its request did: every request has a reply, this one too."""
    if connection is not None:
        state.refuse(connection, "stale_put", f"put {put.number} was abandoned meanwhile")


def progress(_state: ManagerState, now: float, connection: ClientState, message: Progress) -> None:
    """Handle Progress: note that the builder of a put is alive. There is no reply.

    If the put was taken over, the client is told in the reply to its next request.
    """
    put = connection.puts.get(message.put)
    if put is not None:
        put.progress = now


def seal(state: ManagerState, now: float, connection: ClientState, message: Seal) -> None:
    """Handle Seal: ask the backend to seal and hash the slab."""
    put = _mine(connection, message.put, now)
    spans = _announced(put.spans, message.digests)
    put.step(Event.SEAL)
    put.spans = spans
    slab = state.ledger.slabs[put.slab or 0]
    _start(state, put, slab)
    state.effects.append(SealAndHash(slab.number, put.spans, put.process))


def _announced(
    spans: tuple[tuple[int, int, str], ...], digests: list[str]
) -> tuple[tuple[int, int, str], ...]:
    """What is announced when all is written: nothing more, or every piece's digest."""
    if not digests:
        return spans
    if len(digests) != len(spans):
        raise refusal("wrong_state", f"{len(digests)} digests for {len(spans)} tensors; send all")
    for (_, _, before), now in zip(spans, digests, strict=True):
        if before not in ("", now):
            raise refusal("mismatch", f"a tensor was announced as {before}, and now as {now}")
    return tuple((at, size, now) for (at, size, _), now in zip(spans, digests, strict=True))


def hashed(
    state: ManagerState, now: float, number: int, result: list[str] | tuple[Code, str]
) -> None:
    """Handle the result of sealing and hashing the slab `number`.

    `result` is the list of digests or, after a failure, the code and text of the error.
    """
    put, slab = state.filling.pop(number), state.ledger.slabs[number]
    connection = state.connections.get(put.connection)
    if not state.ledger.idle(slab) or connection is None:
        _refuse_late(state, connection, put)
        return
    put.progress = now
    problem = announced_problem(put.spans, result)
    if problem is not None:
        _not_sealed(state, now, connection, put, problem)
        return
    put.step(Event.HASHED)
    digests = list(result)
    for (offset, nbytes, _), digest in zip(put.spans, digests, strict=True):
        resident = state.ledger.enter(slab, offset, nbytes, digest)
        state.ledger.hold(resident, now, leased=False)
        state.ledger.attribute(resident, put.checkpoint)
        put.held.append(resident)
    put.spans = ()
    if slab.residents:
        build_log.count(state, connection, put, now, slab)
    else:  # every tensor was resident elsewhere when the hash was known
        put.slab = None
        state.ledger.drop(slab)
    state.detail(
        "sealed", put=put.number, pid=connection.pid, tensors=len(digests), nbytes=slab.nbytes
    )
    state.send(connection, Sealed(digests))


def announced_problem(
    spans: tuple[tuple[int, int, str], ...], result: list[str] | tuple[Code, str]
) -> tuple[Code, str] | None:
    """Return why a hashed slab cannot be used, as an error code and a text, or None if it can.

    The slab cannot be used if the backend failed, or if a digest differs from the one that the
    client announced.
    """
    if isinstance(result, tuple):
        return result
    for index, ((_, _, announced), found) in enumerate(zip(spans, result, strict=True)):
        if announced not in ("", found):
            return "mismatch", (
                f"tensor {index} was announced as {announced} and hashes to {found}; "
                "build privately, and hash the source again"
            )
    return None


def _not_sealed(
    state: ManagerState,
    now: float,
    connection: ClientState,
    put: PutState,
    problem: tuple[Code, str],
) -> None:
    if problem[0] == "still_writable":
        put.step(Event.STILL_WRITABLE)
    else:
        put.step(Event.MISMATCH)
        _close(state, now, connection, put)
    state.refuse(connection, *problem)


def _close(state: ManagerState, now: float, connection: ClientState, put: PutState) -> None:
    """A put has ended: forget it, and its slab unless that has become resident."""
    del connection.puts[put.number]
    state.ledger.forget(put.cost)
    slab = state.ledger.slabs.get(put.slab) if put.slab is not None else None
    if slab is not None and not slab.residents:
        state.ledger.drop(slab)
    _let_go(state, now, put)


def publish(state: ManagerState, now: float, connection: ClientState, message: Publish) -> None:
    """Handle Publish: enter a layer record. The client must hold all tensors of the record."""
    put = _mine(connection, message.put, now) if message.put else None
    if put is not None:
        if message.key not in put.keys:
            raise refusal("wrong_state", f"layer {message.key} is not reserved by this put")
        put.step(Event.PUBLISH)
    elif message.key in state.builders:
        raise refusal("being_built", f"layer {message.key} is being built by another client")
    _require_held(connection, put, message)
    record = KeyRecord(message.record, tuple(message.digests))
    new = state.enter_record(message.key, record) + _enter_also(state, message.also, record)
    state.counters["published"] += new
    if put is not None:
        _published(state, now, connection, put, message.key)
    state.send(connection, Done(count=int(new)))


def _enter_also(state: ManagerState, keys: list[str], record: KeyRecord) -> int:
    """Have more keys lead to a record that was published; return how many do now.

    A key that somebody builds is left to them, and where no more can be remembered the rest is left
    out: the layer is published all the same.
    """
    new = 0
    for key in keys:
        if key in state.builders:
            continue
        try:
            new += state.enter_record(key, record)
        except RefusedError:
            break
    return new


def _require_held(connection: ClientState, put: PutState | None, message: Publish) -> None:
    held = {resident.digest for resident in put.held} if put is not None else set()
    missing = [d for d in message.digests if d not in connection.leased and d not in held]
    if missing:
        raise refusal(
            "not_resident",
            f"{len(missing)} tensors of layer {message.key} are not leased by this client, the "
            f"first is {missing[0]}",
        )


def _published(
    state: ManagerState, now: float, connection: ClientState, put: PutState, key: str
) -> None:
    put.keys.discard(key)
    del state.builders[key]
    state.detail("published", key=key, put=put.number, pid=connection.pid)
    wake(state, key, "ready")
    if not put.keys:
        put.step(Event.FINISH)
        _close(state, now, connection, put)


def abandon(state: ManagerState, now: float, connection: ClientState, message: Abandon) -> None:
    """Handle Abandon: end a put. An unknown put is ignored.

    The client has unmapped the slab. The slab is freed if it has no resident tensors.
    """
    put = connection.puts.get(message.put)
    if put is None:
        state.send(connection, Done())
        return
    slab = state.ledger.slabs.get(put.slab) if put.slab is not None else None
    revoked = put.state is State.REVOKED
    put.step(Event.ABANDON)
    if revoked and slab is not None:
        state.processes[put.process].lingering.discard(slab.number)
        state.ledger.unlinger(slab, put.process)
    _close(state, now, connection, put)
    state.send(connection, Done(count=1))


def gone(state: ManagerState, now: float, connection: ClientState, put: PutState) -> None:
    """End a put because its connection is closed.

    The process may still have the slab mapped, so the slab counts against the budget until the
    process ends.
    """
    slab = state.ledger.slabs.get(put.slab) if put.slab is not None else None
    if slab is not None and put.state in (State.WRITING, State.SEALING):
        state.charge(slab, put.process)
    if put.active:
        state.note("builder gone", put=put.number, pid=connection.pid, layers=len(put.keys))
    put.step(Event.GONE)
    _close(state, now, connection, put)
