"""What people ask: status, tables, pins, evictions, the end."""

from collections.abc import Iterator

from tensor_dedup.memory_manager.core.effects import End
from tensor_dedup.memory_manager.core.ledger import ResidentEntry
from tensor_dedup.memory_manager.core.manager_state import ClientState, ManagerState, refusal
from tensor_dedup.memory_manager.protocol.limits import MAX_NAMES_SHOWN, MAX_ROWS
from tensor_dedup.memory_manager.protocol.messages import Done, Evict, Pin, Rows, Status, Stop
from tensor_dedup.memory_manager.protocol.tables import (
    BuildRow,
    CheckpointRow,
    ClientRow,
    Page,
    ResidentRow,
    Totals,
)

_MAX_PINS = 64


def totals(world: ManagerState, now: float, started: float) -> Totals:
    """The numbers of now."""
    ledger = world.ledger
    living = [slab for slab in ledger.slabs.values() if not slab.released_but_mapped]
    residents = list(ledger.residents.values())
    clients = [c for c in world.connections.values() if c.name is not None]
    count = world.counters
    return Totals(
        pid=world.settings.pid,
        name=world.settings.name,
        uptime_s=now - started,
        budget=ledger.budget,
        charged=ledger.charged,
        resident_bytes=_nbytes(residents),
        residents=len(residents),
        slabs=len(living),
        records=len(world.records),
        pinned_bytes=_nbytes(r for r in residents if ledger.pinned(r)),
        leased_bytes=_nbytes(r for r in residents if r.leases),
        lingering_bytes=sum(s.nbytes for s in ledger.slabs.values() if s.lingering),
        leases=sum(len(c.leases) for c in clients),
        clients=len(clients),
        builds=sum(put.active for c in clients for put in c.puts.values()),
        waiting=sum(c.waiting is not None for c in clients),
        hits=count["hits"],
        misses=count["misses"],
        published=count["published"],
        evicted_bytes=ledger.evicted_bytes,
        takeovers=count["takeovers"],
        refusals=count["refusals"],
        pins=sorted(ledger.pins),
    )


def _nbytes(residents: "list[ResidentEntry] | Iterator[ResidentEntry]") -> int:
    return sum(resident.nbytes for resident in residents)


def status(world: ManagerState, now: float, connection: ClientState, _message: Status) -> None:
    """The totals. The core knows no start: `uptime_s` is since time 0 of its clock."""
    world.send(connection, totals(world, now, 0.0))


def rows(world: ManagerState, now: float, connection: ClientState, message: Rows) -> None:
    """A page of one table, in a stable order."""
    start = message.start
    if message.table == "clients":
        clients = [_client(c, now) for c in world.connections.values() if c.name is not None]
        page = Page(len(clients), clients=clients[start : start + MAX_ROWS])
    elif message.table == "checkpoints":
        checkpoints = _checkpoints(world)
        page = Page(len(checkpoints), checkpoints=checkpoints[start : start + MAX_ROWS])
    elif message.table == "residents":
        found = list(world.ledger.residents.values())
        shown = [_resident(world, each) for each in found[start : start + MAX_ROWS]]
        page = Page(len(found), residents=shown)
    else:
        builds = list(_builds(world, now))
        page = Page(len(builds), builds=builds[start : start + MAX_ROWS])
    world.send(connection, page)


def _client(connection: ClientState, now: float) -> ClientRow:
    unique = {id(r): r.nbytes for r in connection.leases.values()}
    return ClientRow(
        connection.pid,
        connection.name or "",
        len(connection.leases),
        sum(unique.values()),
        sum(put.active for put in connection.puts.values()),
        now - connection.since,
    )


def _checkpoints(world: ManagerState) -> list[CheckpointRow]:
    found: dict[str, list[ResidentEntry]] = {}
    for resident in world.ledger.residents.values():
        for name in resident.checkpoints:
            found.setdefault(name, []).append(resident)
    return [
        CheckpointRow(
            name,
            len(residents),
            _nbytes(residents),
            _nbytes(r for r in residents if r.leases),
            name in world.ledger.pins,
        )
        for name, residents in sorted(found.items())
    ]


def _resident(world: ManagerState, resident: ResidentEntry) -> ResidentRow:
    return ResidentRow(
        resident.digest,
        resident.nbytes,
        resident.leases,
        world.ledger.pinned(resident),
        sorted(resident.checkpoints)[:MAX_NAMES_SHOWN],
    )


def _builds(world: ManagerState, now: float) -> Iterator[BuildRow]:
    for connection in world.connections.values():
        for put in connection.puts.values():
            slab = world.ledger.slabs.get(put.slab) if put.slab is not None else None
            nbytes = slab.nbytes if slab is not None else 0
            yield BuildRow(
                put.number, connection.pid, put.state.value, len(put.keys), nbytes, put.silent(now)
            )


def pin(world: ManagerState, _now: float, connection: ClientState, message: Pin) -> None:
    """Pin or unpin a name or a digest; what comes later under that name is pinned too."""
    pins = world.ledger.pins
    if message.pinned and len(pins) >= _MAX_PINS and message.name not in pins:
        raise refusal("limit", f"{_MAX_PINS} pins are the most; unpin something first")
    if message.pinned:
        pins.add(message.name)
    else:
        pins.discard(message.name)
    found = world.ledger.named(message.name)
    world.note(
        "pinned" if message.pinned else "unpinned", name=repr(message.name), tensors=len(found)
    )
    world.send(connection, Done(len(found), _nbytes(found)))


def evict(world: ManagerState, _now: float, connection: ClientState, message: Evict) -> None:
    """Drop the slabs of a name that nobody uses and nobody pinned; says what was dropped."""
    ledger = world.ledger
    slabs = [ledger.slabs[n] for n in {r.slab for r in ledger.named(message.name)}]
    idle = [slab for slab in slabs if not slab.held and not ledger.pinned_slab(slab)]
    count = sum(len(slab.residents) for slab in idle)
    nbytes = sum(slab.nbytes for slab in idle)
    for slab in idle:
        ledger.evict(slab)
    world.note("evicted", name=repr(message.name), tensors=count, nbytes=nbytes)
    world.send(connection, Done(count, nbytes))


def stop(world: ManagerState, _now: float, connection: ClientState, _message: Stop) -> None:
    """Acknowledge, then end."""
    world.stopping = True
    world.note("stop requested", pid=connection.pid)
    world.send(connection, Done())
    world.effects.append(End())
