"""Handlers of the administrative requests: totals, tables, pin, evict and stop."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from tensor_dedup.memory_manager.core.budget import ResidentEntry
from tensor_dedup.memory_manager.core.effects import End
from tensor_dedup.memory_manager.core.manager_state import ClientState, ManagerState, refusal
from tensor_dedup.memory_manager.core.records import KeyRecord
from tensor_dedup.memory_manager.protocol.layout import PAGE_ALIGNED_FROM
from tensor_dedup.memory_manager.protocol.limits import COMMAND, MAX_NAMES_SHOWN, MAX_ROWS
from tensor_dedup.memory_manager.protocol.messages import Done, Evict, Pin, Rows, Status, Stop
from tensor_dedup.memory_manager.protocol.tables import (
    BuildRow,
    CheckpointRow,
    ClientRow,
    Page,
    ResidentRow,
    Totals,
    saved_bytes,
)

_MAX_PINS = 64
_Range = tuple[int, int]
# The number of a tensor among those that the record names, the first byte of it, and how many.
_Part = tuple[int, int, int]


class _Composition(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of the record of a tensor in parts of others, as PROTOCOL.md has it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str
    parts: tuple[_Part, ...]


class _Use(NamedTuple):
    """What a client uses of what it leases, and how much of that as parts of other tensors."""

    nbytes: int
    leaf_bytes: int


def totals(state: ManagerState, now: float, started: float) -> Totals:
    """Return the manager's totals. `now - started` is reported as its uptime in seconds."""
    ledger = state.ledger
    living = [slab for slab in ledger.slabs.values() if not slab.released_but_mapped]
    residents = list(ledger.residents.values())
    clients = [c for c in state.connections.values() if c.name is not None]
    count = state.counters
    return Totals(
        pid=state.settings.pid,
        name=state.settings.name,
        uptime_s=now - started,
        budget=ledger.budget,
        charged=ledger.charged,
        resident_bytes=_nbytes(residents),
        residents=len(residents),
        slabs=len(living),
        records=len(state.records),
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
        leaf_shared_bytes=_leaf_bytes(clients),
    )


def saved(state: ManagerState, now: float) -> int:
    """Return a lower bound of the bytes of memory that sharing saves."""
    clients = [_client(c, now) for c in state.connections.values() if c.name is not None]
    leased = _nbytes(r for r in state.ledger.residents.values() if r.leases)
    return saved_bytes(clients, leased)


def overview(state: ManagerState, now: float) -> dict[str, Any]:
    """Return the manager's totals and tables, without the table of resident tensors.

    The result is a dict in the form that `tensor-dedup status --json` prints.
    """
    clients = [c for c in state.connections.values() if c.name not in (None, COMMAND)]
    tables: dict[str, list[Any]] = {
        "clients": [_client(c, now) for c in clients],
        "checkpoints": _checkpoints(state),
        "builds": list(_builds(state, now)),
    }
    rows = {name: [asdict(row) for row in table] for name, table in tables.items()}
    return {"totals": asdict(totals(state, now, 0.0)), "saved_bytes": saved(state, now), **rows}


def _nbytes(residents: "list[ResidentEntry] | Iterator[ResidentEntry]") -> int:
    return sum(resident.nbytes for resident in residents)


def status(state: ManagerState, now: float, connection: ClientState, _message: Status) -> None:
    """Handle Status: answer with the totals.

    `now` is the time in seconds since the manager started.
    """
    state.send(connection, totals(state, now, 0.0))


def rows(state: ManagerState, now: float, connection: ClientState, message: Rows) -> None:
    """Handle Rows: answer with the rows of a table from the requested number on.

    The answer has at most MAX_ROWS rows. The order of a table's rows is stable.
    """
    start = message.start
    if message.table == "clients":
        clients = [_client(c, now) for c in state.connections.values() if c.name is not None]
        page = Page(len(clients), clients=clients[start : start + MAX_ROWS])
    elif message.table == "checkpoints":
        checkpoints = _checkpoints(state)
        page = Page(len(checkpoints), checkpoints=checkpoints[start : start + MAX_ROWS])
    elif message.table == "residents":
        found = list(state.ledger.residents.values())
        shown = [_resident(state, each) for each in found[start : start + MAX_ROWS]]
        page = Page(len(found), residents=shown)
    else:
        builds = list(_builds(state, now))
        page = Page(len(builds), builds=builds[start : start + MAX_ROWS])
    state.send(connection, page)


def _leaf_bytes(clients: Iterable[ClientState]) -> int:
    """Return what processes use as parts of other tensors, counted as `saved_bytes` does."""
    used: dict[int, int] = {}
    for client in clients:
        used[client.pid] = max(used.get(client.pid, 0), _use(client).leaf_bytes)
    return sum(used.values())


def _use(connection: ClientState) -> _Use:
    """Return what a client uses of the tensors that it leases.

    A lease does not say what it is for, but the records of tensors in parts do: each takes a lease
    on every tensor that it names. Whatever has a lease beyond those counts as a whole. One that
    names nothing but tensors of others is taken for granted where it can be, so that no more is
    counted than is used; the next one only where its own rest is leased, too.
    """
    leased = {each.digest: each for each in connection.leases.values()}
    found = _compositions(leased)
    left = dict(connection.leased)
    whole: defaultdict[str, list[_Range]] = defaultdict(list)
    parts: defaultdict[str, list[_Range]] = defaultdict(list)
    # A tensor that has parts of one in parts names all that one does, and more: it comes first.
    for digests in sorted(found, key=len, reverse=True):
        for composition in found[digests].values():
            own = _own(composition, digests, leased)
            times = min(left[digest] for digest in digests)
            for digest in digests if times else ():
                left[digest] -= times if own else 1
            for number, start, nbytes in composition.parts if times else ():
                to = whole if digests[number] == own else parts
                to[digests[number]].append((start, start + nbytes))
    for digest, count in left.items():
        if count:
            whole[digest] = [(0, leased[digest].nbytes)]
    return _Use(
        sum(_covered([*whole[digest], *parts[digest]]) for digest in leased),
        sum(map(_covered, parts.values())),
    )


def _compositions(
    leased: dict[str, ResidentEntry],
) -> dict[tuple[str, ...], dict[str, _Composition]]:
    """Return, by what they name, the tensors in parts of which all that they name is leased."""
    found: dict[tuple[str, ...], dict[str, _Composition]] = defaultdict(dict)
    for resident in leased.values():
        for record in resident.records:
            if not all(digest in leased for digest in record.digests):
                continue  # first, for a base may have the records of many others
            composition = _composition(record, [leased[digest].nbytes for digest in record.digests])
            if composition is not None:
                found[record.digests][composition.digest] = composition
    return found


def _composition(record: KeyRecord, sizes: list[int]) -> _Composition | None:
    """Return what a record says that a tensor consists of; None for one of another kind.

    Clients write records: one that has more of a tensor than there is is of no kind.
    """
    try:
        found = msgspec.msgpack.decode(record.record, type=_Composition)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    inside = all(
        0 <= n < len(sizes) and min(at, size) >= 0 and at + size <= sizes[n]
        for n, at, size in found.parts
    )
    return found if inside else None


def _own(
    composition: _Composition, digests: tuple[str, ...], leased: dict[str, ResidentEntry]
) -> str:
    """Return the digest of what was put of a tensor because no other had it; "" for nothing."""
    last, nbytes = len(digests) - 1, leased[digests[-1]].nbytes
    used = sum(size for number, _, size in composition.parts if number == last)
    return digests[-1] if used >= nbytes or nbytes <= PAGE_ALIGNED_FROM else ""


def _covered(ranges: list[_Range]) -> int:
    total = at = 0
    for start, end in sorted(ranges):
        total += max(0, end - max(at, start))
        at = max(at, end)
    return total


def _client(connection: ClientState, now: float) -> ClientRow:
    return ClientRow(
        connection.pid,
        connection.name or "",
        len(connection.leases),
        _use(connection).nbytes,
        sum(put.active for put in connection.puts.values()),
        now - connection.since,
    )


def _checkpoints(state: ManagerState) -> list[CheckpointRow]:
    found: dict[str, list[ResidentEntry]] = {}
    for resident in state.ledger.residents.values():
        for name in resident.checkpoints:
            found.setdefault(name, []).append(resident)
    return [
        CheckpointRow(
            name,
            len(residents),
            _nbytes(residents),
            _nbytes(r for r in residents if r.leases),
            name in state.ledger.pins,
        )
        for name, residents in sorted(found.items())
    ]


def _resident(state: ManagerState, resident: ResidentEntry) -> ResidentRow:
    return ResidentRow(
        resident.digest,
        resident.nbytes,
        resident.leases,
        state.ledger.pinned(resident),
        sorted(resident.checkpoints)[:MAX_NAMES_SHOWN],
    )


def _builds(state: ManagerState, now: float) -> Iterator[BuildRow]:
    for connection in state.connections.values():
        for put in connection.puts.values():
            slab = state.ledger.slabs.get(put.slab) if put.slab is not None else None
            nbytes = slab.nbytes if slab is not None else 0
            yield BuildRow(
                put.number, connection.pid, put.state.value, len(put.keys), nbytes, put.silent(now)
            )


def pin(state: ManagerState, _now: float, connection: ClientState, message: Pin) -> None:
    """Handle Pin: pin or unpin a checkpoint's name, or a digest.

    A pinned tensor is not evicted. Tensors that are added under a pinned name later are pinned,
    too.
    """
    pins = state.ledger.pins
    if message.pinned and len(pins) >= _MAX_PINS and message.name not in pins:
        raise refusal("limit", f"{_MAX_PINS} pins are the most; unpin something first")
    if message.pinned:
        pins.add(message.name)
    else:
        pins.discard(message.name)
    found = state.ledger.named(message.name)
    state.note(
        "pinned" if message.pinned else "unpinned", name=repr(message.name), tensors=len(found)
    )
    state.send(connection, Done(len(found), _nbytes(found)))


def evict(state: ManagerState, _now: float, connection: ClientState, message: Evict) -> None:
    """Handle Evict: free the slabs with the tensors of a checkpoint, or of one digest.

    A slab is kept if any tensor in it is in use or pinned. Of a checkpoint, a slab is also kept if
    another checkpoint has a tensor in it; its tensors are then no longer the evicted one's. The
    answer has the number of tensors freed, and the bytes of their slabs.
    """
    ledger = state.ledger
    slabs = [ledger.slabs[n] for n in {r.slab for r in ledger.named(message.name)}]
    unused = [slab for slab in slabs if not slab.held and not ledger.pinned_slab(slab)]
    of_others = set[int]()
    if message.name not in ledger.residents:  # a digest is evicted whosever it is
        of_others = {s.number for s in unused if ledger.has_others(s, message.name)}
    idle = [slab for slab in unused if slab.number not in of_others]
    count = sum(len(slab.residents) for slab in idle)
    nbytes = sum(slab.nbytes for slab in idle)
    for slab in idle:
        ledger.evict(slab)
    for number in of_others:
        ledger.leave_to_others(ledger.slabs[number], message.name)
    if idle:
        state.note("evicted", name=repr(message.name), tensors=count, nbytes=nbytes)
    else:
        why = "of other checkpoints, too" if of_others else "in use or pinned"
        state.note(f"not evicted: {why}", name=repr(message.name))
    state.send(connection, Done(count, nbytes))


def stop(state: ManagerState, _now: float, connection: ClientState, _message: Stop) -> None:
    """Handle Stop: acknowledge it, and end the manager."""
    state.stopping = True
    state.note("stop requested", pid=connection.pid)
    state.send(connection, Done())
    state.effects.append(End())
