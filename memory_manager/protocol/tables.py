"""What a manager reports about itself: its totals, and the rows of its tables. Sizes in bytes."""

from collections.abc import Iterable

import msgspec

from tensor_dedup.memory_manager.protocol.limits import Message, Number, WirePart


class Totals(Message, frozen=True, omit_defaults=True):
    """The answer to Status; sizes in bytes.

    `leaf_shared_bytes`: what processes use as parts of tensors that differ from it in others.
    """

    pid: Number
    name: str
    uptime_s: float
    budget: int
    charged: int
    resident_bytes: int
    residents: int
    slabs: int
    records: int
    pinned_bytes: int
    leased_bytes: int
    lingering_bytes: int
    leases: int
    clients: int
    builds: int
    waiting: int
    hits: int
    misses: int
    published: int
    evicted_bytes: int
    takeovers: int
    refusals: int
    pins: list[str]
    leaf_shared_bytes: int = 0


class ClientRow(WirePart, frozen=True):
    """A connected process and what it holds.

    `leased_bytes`: what it uses, so of a tensor of which it uses only leaves those alone.
    """

    pid: int
    name: str
    leases: int
    leased_bytes: int
    builds: int
    connected_s: float


def saved_bytes(clients: Iterable[ClientRow], leased_bytes: int) -> int:
    """Return the bytes that sharing saves: what each process uses, less what is there once for all.

    Of a process with several connections only the one that leases most counts, since two may lease
    the same: sharing saves at least this. `leased_bytes`: of all tensors in use, each once and
    whole, for a tensor stays as long as a leaf of it is used.
    """
    used: dict[int, int] = {}
    for row in clients:
        used[row.pid] = max(used.get(row.pid, 0), row.leased_bytes)
    return max(0, sum(used.values()) - leased_bytes)


class CheckpointRow(WirePart, frozen=True):
    """A checkpoint as clients named it; `nbytes` are its residents', shared ones included."""

    name: str
    residents: int
    nbytes: int
    leased_bytes: int
    pinned: bool


class ResidentRow(WirePart, frozen=True):
    """A resident tensor."""

    digest: str
    nbytes: int
    leases: int
    pinned: bool
    checkpoints: list[str]


class BuildRow(WirePart, frozen=True):
    """A put in progress."""

    put: int
    pid: int
    state: str
    keys: int
    nbytes: int
    silent_s: float


class Page(Message, frozen=True):
    """The answer to Rows: rows of that table, which has `total` rows in all."""

    total: Number
    clients: list[ClientRow] = msgspec.field(default_factory=list)
    checkpoints: list[CheckpointRow] = msgspec.field(default_factory=list)
    residents: list[ResidentRow] = msgspec.field(default_factory=list)
    builds: list[BuildRow] = msgspec.field(default_factory=list)
