"""The bookkeeping of slabs and residents: which exist, who uses them, and what they cost.

A slab is one block of memory, a resident one tensor in a sealed slab. A slab counts against the
budget as soon as it is requested. It stops counting when the manager has released it and no process
can have it mapped any more. If a connection breaks, the slabs that its process may have mapped
count until that process ends.

The manager's own records count against the budget, too.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tensor_dedup.memory_manager.core.records import KeyRecord

_MAX_CHECKPOINTS = 64  # names remembered for one tensor
# The manager's own memory in bytes; a test measures that it is no more.
SLAB_BYTES: Final = 2048  # the kernel's part of an open memory file included
RESIDENT_BYTES: Final = 960
LEASE_BYTES: Final = 224
ASLEEP_BYTES: Final = 144  # of a lease of an engine that sleeps, beside that
PUT_BYTES: Final = 768
KEY_BYTES: Final = 192  # of a put, beside the key's text
NAME_BYTES: Final = 144  # of a checkpoint for one tensor, beside its text
_LEAST_REMEMBERED: Final = 32 << 20
_SHARE_REMEMBERED: Final = 16


@dataclass(slots=True, eq=False)
class ResidentEntry:
    """A tensor in a sealed slab (block of memory).

    `holds` counts all uses of the tensor: leases, and unfinished puts (builds) that need it.
    `leases` counts only the leases, and `asleep` only the leases of sleeping engines.
    """

    digest: str
    slab: int
    offset: int
    nbytes: int
    leases: int = 0
    holds: int = 0
    asleep: int = 0
    checkpoints: set[str] = field(default_factory=set)
    records: set[KeyRecord] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class SlabState:
    """A slab: the block of memory that one put has filled or is filling.

    * `cost`: the bytes that count against the budget, including the manager's records about the
      slab.
    * `busy`: whether a backend job runs on the slab.
    * `doomed`: whether the slab will be released when that job ends.
    * `released_but_mapped`: the manager has released the slab, but a process may have it mapped.
    * `holds`: the sum of `ResidentEntry.holds` of the tensors in the slab.
    * `named`: the memory for the names of these tensors' checkpoints, in bytes.
    * `lingering`: the processes that may still have the slab mapped, as recorded by `linger`.
    """

    number: int
    nbytes: int
    cost: int
    residents: dict[str, ResidentEntry] = field(default_factory=dict)
    busy: bool = False
    doomed: bool = False
    released_but_mapped: bool = False
    owned: bool = True  # a put is filling it
    used: float = 0.0
    holds: int = 0
    named: int = 0
    lingering: set[int] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether the slab is in use, so that it cannot be evicted."""
        return self.busy or self.owned or bool(self.lingering) or bool(self.holds)


def _name_cost(checkpoint: str) -> int:
    """What it takes to remember that a tensor belongs to a checkpoint, in bytes."""
    return sys.getsizeof(checkpoint) + NAME_BYTES


class Ledger:
    """The ledger of all slabs (blocks of memory), their tensors, the pins, and the costs.

    * `budget`: the bytes that may be in use.
    * `mappings_hold`: whether mapped memory stays valid after the manager has freed the slab. If
      False, a released slab is freed only when no process can have it mapped.
    * `max_slabs`: the number of slabs that the manager may hold at a time, because each needs a
      descriptor.
    """

    def __init__(
        self, budget: int, *, mappings_hold: bool = True, max_slabs: int = sys.maxsize
    ) -> None:
        self.budget = budget
        self._mappings_hold = mappings_hold
        self._max_slabs = max_slabs
        self._max_remembered = max(_LEAST_REMEMBERED, budget // _SHARE_REMEMBERED)
        self._slab_costs = 0
        self._slab_bytes = 0
        self.remembered = 0  # bytes, of what is not part of a slab's cost
        self.open_slabs = 0  # that the manager has a descriptor of
        self.evicted_bytes = 0
        self.slabs: dict[int, SlabState] = {}
        self._idle: OrderedDict[int, SlabState] = OrderedDict()  # least recently used first
        self.residents: dict[str, ResidentEntry] = {}
        self.pins: set[str] = set()
        self.freed: list[int] = []  # for the caller, who empties it
        self.cancelled: list[int] = []  # busy slabs that nobody wants any more, likewise
        self.orphans: set[KeyRecord] = set()  # records that lost a tensor, likewise
        self._next = 1

    @property
    def charged(self) -> int:
        """The bytes that count against the budget: slabs, and the manager's own records."""
        return self._slab_costs + self.remembered

    @property
    def bookkeeping(self) -> int:
        """The part of `charged` that is for the manager's own records, in bytes."""
        return self.charged - self._slab_bytes

    # Slabs.

    def add(self, nbytes: int, now: float, tensors: int = 1) -> SlabState | None:
        """Add a new slab of `nbytes` bytes for this number of tensors.

        Unused slabs are evicted to make room for it. If that would not make enough room, return
        None and evict nothing.
        """
        cost = nbytes + SLAB_BYTES + tensors * RESIDENT_BYTES
        if not self._make_room(cost):
            return None
        slab = SlabState(self._next, nbytes, cost, used=now)
        self._next += 1
        self.slabs[slab.number] = slab
        self._slab_costs += cost
        self._slab_bytes += nbytes
        self.open_slabs += 1
        return slab

    def _make_room(self, cost: int) -> bool:
        short = self.charged + cost - self.budget
        victims: list[SlabState] = []
        for slab in self._evictable():
            if short <= 0:
                break
            short -= slab.cost
            victims.append(slab)
        if short > 0:
            return False
        for slab in victims:
            self.evict(slab)
        return True

    def _evictable(self) -> Iterator[SlabState]:
        return (slab for slab in self._idle.values() if not self.pinned_slab(slab))

    def has_descriptor(self) -> bool:
        """Return whether one more slab can be opened, after evicting unused ones if necessary."""
        if self.open_slabs >= self._max_slabs:
            self.evict_for_descriptors(1 + self.open_slabs - self._max_slabs)
        return self.open_slabs < self._max_slabs

    def evict_for_descriptors(self, count: int) -> int:
        """Evict up to `count` unused slabs of any size; return how many were evicted."""
        victims = [slab for slab, _ in zip(self._evictable(), range(count), strict=False)]
        for slab in victims:
            self.evict(slab)
        return len(victims)

    def evict(self, slab: SlabState) -> None:
        """Release a slab that is not in use, and count its bytes as evicted."""
        self.evicted_bytes += slab.nbytes
        self.drop(slab)

    def drop(self, slab: SlabState) -> None:
        """Release a slab, so that its tensors are no longer resident.

        If a backend job runs on the slab, its memory is released when the job ends.
        """
        for digest, resident in slab.residents.items():
            del self.residents[digest]
            self.orphans |= resident.records
        slab.residents = {}
        self.forget(slab.named)
        slab.owned, slab.named = False, 0
        if slab.busy:
            if not slab.doomed:
                self.cancelled.append(slab.number)
            slab.doomed = True
            return
        if not slab.released_but_mapped:
            slab.released_but_mapped = True
            if self._mappings_hold:
                self._free(slab)
        self._settle(slab)
        self._rank(slab)

    def _settle(self, slab: SlabState) -> None:
        gone = slab.released_but_mapped and not slab.lingering
        if gone and self.slabs.pop(slab.number, None) is not None:
            self._slab_costs -= slab.cost
            self._slab_bytes -= slab.nbytes
            if not self._mappings_hold:
                self._free(slab)

    def _free(self, slab: SlabState) -> None:
        self.freed.append(slab.number)
        self.open_slabs -= 1

    def _rank(self, slab: SlabState) -> None:
        """Note a change of who holds a slab: what is held by nobody now was used last."""
        self._idle.pop(slab.number, None)
        if not slab.held and not slab.released_but_mapped:
            self._idle[slab.number] = slab

    def idle(self, slab: SlabState) -> bool:
        """Record that the backend job on a slab has ended.

        If the slab was dropped while the job ran, release the slab now and return False. Otherwise
        return True.
        """
        slab.busy = False
        if slab.doomed:
            self.drop(slab)
        self._rank(slab)
        return not slab.doomed

    def disown(self, slab: SlabState) -> None:
        """Record that the slab does not belong to a put any more."""
        slab.owned = False
        self._rank(slab)

    def linger(self, slab: SlabState, process: int) -> None:
        """Record that `process` may still have this slab mapped. The slab is not evicted then."""
        slab.lingering.add(process)
        self._rank(slab)

    def unlinger(self, slab: SlabState, process: int) -> None:
        """Undo `linger`, because `process` has ended or has reported that it unmapped the slab."""
        slab.lingering.discard(process)
        self._settle(slab)
        self._rank(slab)

    # Residents.

    def enter(self, slab: SlabState, offset: int, nbytes: int, digest: str) -> ResidentEntry:
        """Make a tensor in a sealed slab resident, and return its entry.

        If the digest is resident already, return the existing entry instead.
        """
        first = self.residents.get(digest)
        if first is not None:
            return first
        resident = ResidentEntry(digest, slab.number, offset, nbytes)
        self.residents[digest] = slab.residents[digest] = resident
        return resident

    def hold(self, resident: ResidentEntry, now: float, *, leased: bool) -> None:
        """Count one more use of a tensor: by a lease if `leased` is True, otherwise by a put."""
        self._count(resident, now, 1, leased)

    def let_go(self, resident: ResidentEntry, now: float, *, leased: bool) -> None:
        """Undo one `hold` with the same value of `leased`."""
        self._count(resident, now, -1, leased)

    def _count(self, resident: ResidentEntry, now: float, by: int, leased: bool) -> None:
        slab = self.slabs[resident.slab]
        resident.holds += by
        resident.leases += by * leased
        slab.holds += by
        slab.used = now
        self._rank(slab)

    def attribute(self, resident: ResidentEntry, checkpoint: str) -> None:
        """Record that a tensor belongs to `checkpoint`.

        Nothing is recorded if the name is empty, or if a limit on the names of checkpoints is
        reached.
        """
        names = resident.checkpoints
        if not checkpoint or checkpoint in names or len(names) >= _MAX_CHECKPOINTS:
            return
        cost = _name_cost(checkpoint)
        if self.remember(cost):
            self.slabs[resident.slab].named += cost
            names.add(checkpoint)

    def has_others(self, slab: SlabState, checkpoint: str) -> bool:
        """Return whether any tensor in a slab belongs to another checkpoint than `checkpoint`."""
        return any(resident.checkpoints - {checkpoint} for resident in slab.residents.values())

    def leave_to_others(self, slab: SlabState, checkpoint: str) -> None:
        """Record that the tensors in a slab that have another checkpoint are not `checkpoint`'s."""
        cost = _name_cost(checkpoint)
        for resident in slab.residents.values():
            if checkpoint in resident.checkpoints and len(resident.checkpoints) > 1:
                resident.checkpoints.discard(checkpoint)
                slab.named -= cost
                self.forget(cost)

    def pinned(self, resident: ResidentEntry) -> bool:
        """Return whether a tensor is pinned, by its digest or by the name of a checkpoint."""
        return resident.digest in self.pins or not self.pins.isdisjoint(resident.checkpoints)

    def pinned_slab(self, slab: SlabState) -> bool:
        """Return whether any tensor in a slab is pinned."""
        return bool(self.pins) and any(map(self.pinned, slab.residents.values()))

    def named(self, name: str) -> list[ResidentEntry]:
        """Return the tensors of the checkpoint `name`, or the tensor whose digest is `name`."""
        found = self.residents.get(name)
        return [r for r in self.residents.values() if r is found or name in r.checkpoints]

    # What is remembered beside them: leases, names, records, reservations.

    def may_remember(self, nbytes: int) -> bool:
        """Return whether the manager's own records may grow by `nbytes`."""
        return self.remembered + nbytes <= self._max_remembered

    def remember(self, nbytes: int) -> bool:
        """Count `nbytes` for the manager's own records, and return True.

        If that would exceed the limit of these records, count nothing and return False. After a
        call, `charged` may be above the budget; `trim` then evicts unused slabs.
        """
        if not self.may_remember(nbytes):
            return False
        self.remembered += nbytes
        return True

    def forget(self, nbytes: int) -> None:
        """Undo `remember` for `nbytes`."""
        self.remembered -= nbytes

    def trim(self) -> None:
        """Evict unused slabs until `charged` is within the budget or no slab can be evicted."""
        while self.charged > self.budget:
            slab = next(self._evictable(), None)
            if slab is None:
                return
            self.evict(slab)
