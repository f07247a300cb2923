"""The totals of a manager and the rows of its tables. Sizes are in bytes.

A resident is a tensor in the manager's memory, a lease the right of a client to use one, and a put
the right of a client to build layers.
"""

from collections.abc import Iterable

import msgspec

from tensor_dedup.memory_manager.protocol.limits import Message, Number, WirePart


class Totals(Message, frozen=True, omit_defaults=True):
    """The answer to Status: the state of the manager in numbers. Sizes are in bytes.

    * `charged` counts against `budget`. It includes the manager's own records.
    * `lingering_bytes`: a process may still have a slab mapped after its connection or its put has
      ended. This is the size of all such slabs.
    * `leaf_shared_bytes`: a client may map some leaves (pieces of 2 MiB) of a tensor as parts of
      another tensor. This is the size of all parts that are mapped so.
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
    """A connected client and its use of memory.

    If the client uses only some leaves (pieces of 2 MiB) of a tensor, only those leaves count in
    `leased_bytes`.
    """

    pid: int
    name: str
    leases: int
    leased_bytes: int
    builds: int
    connected_s: float


def saved_bytes(clients: Iterable[ClientRow], leased_bytes: int) -> int:
    """Return a lower bound of the bytes of memory that sharing saves.

    `leased_bytes` is the size of all tensors in use, each counted once. The result is the sum of
    the bytes that the processes use, minus `leased_bytes`. If a process has several connections,
    only the one with the most bytes counts.
    """
    used: dict[int, int] = {}
    for row in clients:
        used[row.pid] = max(used.get(row.pid, 0), row.leased_bytes)
    return max(0, sum(used.values()) - leased_bytes)


class CheckpointRow(WirePart, frozen=True):
    """A checkpoint, by the name that clients gave it.

    `nbytes` includes the bytes of tensors that it shares with other checkpoints.
    """

    name: str
    residents: int
    nbytes: int
    leased_bytes: int
    pinned: bool


class ResidentRow(WirePart, frozen=True):
    """A tensor in the manager's memory. `checkpoints` has at most three of its checkpoints."""

    digest: str
    nbytes: int
    leases: int
    pinned: bool
    checkpoints: list[str]


class BuildRow(WirePart, frozen=True):
    """A put (a client's right to build layers) in progress.

    `silent_s` is the time in seconds since the builder's last message.
    """

    put: int
    pid: int
    state: str
    keys: int
    nbytes: int
    silent_s: float


class Page(Message, frozen=True):
    """The answer to Rows: some rows of one table. `total` is the number of rows of that table."""

    total: Number
    clients: list[ClientRow] = msgspec.field(default_factory=list)
    checkpoints: list[CheckpointRow] = msgspec.field(default_factory=list)
    residents: list[ResidentRow] = msgspec.field(default_factory=list)
    builds: list[BuildRow] = msgspec.field(default_factory=list)
