"""Slabs and residents: what exists, who holds it, what it costs. Independent of the protocol.

A slab is charged from the moment it is requested until the manager has released it *and* no process
can have it mapped: a process whose connection broke is charged for what it held until it has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

_MAX_CHECKPOINTS = 64  # names remembered for one tensor


@dataclass(slots=True, eq=False)
class ResidentEntry:
    """A tensor in memory. `holds` counts leases, and puts that have not been closed."""

    digest: str
    slab: int
    offset: int
    nbytes: int
    leases: int = 0
    holds: int = 0
    checkpoints: set[str] = field(default_factory=set)
    records: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class SlabState:
    """The memory of one put.

    `busy`: a backend job runs on it. `released_but_mapped`: released, but perhaps still mapped
    somewhere.
    """

    number: int
    nbytes: int
    residents: dict[str, ResidentEntry] = field(default_factory=dict)
    busy: bool = False
    doomed: bool = False
    released_but_mapped: bool = False
    owned: bool = True  # a put is filling it
    used: float = 0.0
    lingering: set[int] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether it is in use, as far as the manager knows."""
        return (
            self.busy
            or self.owned
            or bool(self.lingering)
            or any(resident.holds for resident in self.residents.values())
        )


class Ledger:
    """All slabs and residents, pins, and the budget (in bytes of slabs).

    `mappings_hold`: what a process maps stays when the manager lets go; otherwise the manager must
    hold a slab until no process can have it mapped any more.
    """

    def __init__(self, budget: int, *, mappings_hold: bool = True) -> None:
        self.budget = budget
        self._mappings_hold = mappings_hold
        self.charged = 0
        self.evicted_bytes = 0
        self.slabs: dict[int, SlabState] = {}
        self.residents: dict[str, ResidentEntry] = {}
        self.pins: set[str] = set()
        self.freed: list[int] = []  # for the caller, who empties it
        self.orphans: set[str] = set()  # records that lost a tensor, likewise
        self._next = 1

    def add(self, nbytes: int, now: float) -> SlabState | None:
        """Charge a new slab, evicting unused ones; return None when there is no room."""
        if not self._make_room(nbytes):
            return None
        slab = SlabState(self._next, nbytes, used=now)
        self._next += 1
        self.slabs[slab.number] = slab
        self.charged += nbytes
        return slab

    def _make_room(self, nbytes: int) -> bool:
        short = self.charged + nbytes - self.budget
        if short <= 0:
            return True
        idle = sorted(self._evictable(), key=lambda slab: slab.used)
        if sum(slab.nbytes for slab in idle) < short:
            return False
        for slab in idle:
            if short <= 0:
                break
            short -= slab.nbytes
            self.evict(slab)
        return True

    def _evictable(self) -> Iterator[SlabState]:
        return (
            slab for slab in self.slabs.values() if not slab.held and not self.pinned_slab(slab)
        )

    def evict(self, slab: SlabState) -> None:
        """Release a slab that is not held."""
        self.evicted_bytes += slab.nbytes
        self.drop(slab)

    def drop(self, slab: SlabState) -> None:
        """Release a slab, after the backend job on it if there is one."""
        for digest, resident in slab.residents.items():
            del self.residents[digest]
            self.orphans |= resident.records
        slab.residents = {}
        slab.owned = False
        if slab.busy:
            slab.doomed = True
            return
        if not slab.released_but_mapped:
            slab.released_but_mapped = True
            if self._mappings_hold:
                self.freed.append(slab.number)
        self._settle(slab)

    def _settle(self, slab: SlabState) -> None:
        gone = slab.released_but_mapped and not slab.lingering
        if gone and self.slabs.pop(slab.number, None) is not None:
            self.charged -= slab.nbytes
            if not self._mappings_hold:
                self.freed.append(slab.number)

    def idle(self, slab: SlabState) -> bool:
        """Note that a slab's backend job is done; return False if it was released meanwhile."""
        slab.busy = False
        if slab.doomed:
            self.drop(slab)
        return not slab.doomed

    def linger(self, slab: SlabState, process: int) -> None:
        """Note that a process without a connection may have this slab mapped."""
        slab.lingering.add(process)

    def unlinger(self, slab: SlabState, process: int) -> None:
        """Note that a process has ended, or has said that it unmapped the slab."""
        slab.lingering.discard(process)
        self._settle(slab)

    def enter(self, slab: SlabState, offset: int, nbytes: int, digest: str) -> ResidentEntry:
        """Make a tensor of a sealed slab resident; return an older one of its digest, if any."""
        first = self.residents.get(digest)
        if first is not None:
            return first
        resident = ResidentEntry(digest, slab.number, offset, nbytes)
        self.residents[digest] = slab.residents[digest] = resident
        return resident

    def hold(self, resident: ResidentEntry, now: float, *, leased: bool) -> None:
        """Count a lease or a put that needs this tensor."""
        resident.holds += 1
        resident.leases += leased
        self.slabs[resident.slab].used = now

    def let_go(self, resident: ResidentEntry, now: float, *, leased: bool) -> None:
        """Undo one `hold`."""
        resident.holds -= 1
        resident.leases -= leased
        self.slabs[resident.slab].used = now

    def attribute(self, resident: ResidentEntry, checkpoint: str) -> None:
        """Record that this tensor is a part of a checkpoint."""
        if checkpoint and len(resident.checkpoints) < _MAX_CHECKPOINTS:
            resident.checkpoints.add(checkpoint)

    def pinned(self, resident: ResidentEntry) -> bool:
        """Return whether it is pinned, by its digest or by the name of a checkpoint."""
        return resident.digest in self.pins or not self.pins.isdisjoint(resident.checkpoints)

    def pinned_slab(self, slab: SlabState) -> bool:
        """Return whether any tensor in it is pinned."""
        return bool(self.pins) and any(map(self.pinned, slab.residents.values()))

    def named(self, name: str) -> list[ResidentEntry]:
        """Return the residents of a checkpoint, or the one of a digest."""
        found = self.residents.get(name)
        return [r for r in self.residents.values() if r is found or name in r.checkpoints]
