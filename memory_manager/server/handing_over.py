"""Tensors survive a restart under systemd: descriptors wait in its store (FDSTORE).

At the end the manager sends every sealed slab to systemd, and an index (a memory file, too) of what
lies where. The next one finds them as inherited descriptors. It trusts neither: the index is
decoded strictly, and slabs are checked and hashed like any that a client hands back.
"""

import array
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from tensor_dedup.memory_manager.backends.base import Memory
from tensor_dedup.memory_manager.core.world import World
from tensor_dedup.memory_manager.limits import Digest, Key, Message, Name, Part, Record, Size
from tensor_dedup.memory_manager.messages import Span
from tensor_dedup.memory_manager.wire import close_all

_FIRST_FD: Final = 3
_INDEX: Final = "index"
_MAX_INDEX: Final = 1 << 30
_NOTIFY_S: Final = 5.0


class StoredTensor(Part, frozen=True):
    """Where a tensor lies, and which checkpoints consist of it."""

    span: Span
    checkpoints: list[Name]


class StoredSlab(Part, frozen=True):
    """A slab by the name of its descriptor."""

    name: Name
    nbytes: Size
    tensors: list[StoredTensor]


class StoredRecord(Part, frozen=True):
    """A layer record."""

    key: Key
    record: Record
    digests: list[Digest]


class Index(Message, frozen=True):
    """Everything that the next manager is told."""

    slabs: list[StoredSlab]
    records: list[StoredRecord]
    pins: list[Name]


@dataclass(frozen=True, slots=True)
class Inherited:
    """What an earlier manager has left: the index, and descriptors by name (the caller's now)."""

    index: Index
    descriptors: dict[str, int]


def _room() -> int:
    """How many slabs systemd keeps for this service, beside the index."""
    text = os.environ.get("FDSTORE", "")
    return int(text) - 1 if text.isdecimal() else 0


def describe(world: World, memories: Mapping[int, Memory], room: int) -> Index:
    """What is handed over now: at most `room` sealed slabs with their tensors, records, pins.

    Pinned slabs come first, then those used last.
    """
    ledger = world.ledger
    fit = [s for number, s in ledger.slabs.items() if s.residents and number in memories]
    fit.sort(key=lambda slab: (not ledger.pinned_slab(slab), -slab.used))
    slabs = [
        StoredSlab(
            f"slab-{slab.number}",
            slab.nbytes,
            [
                StoredTensor(Span(r.offset, r.nbytes, r.digest), sorted(r.checkpoints))
                for r in slab.residents.values()
            ],
        )
        for slab in fit[:room]
    ]
    records = [StoredRecord(key, r.record, list(r.digests)) for key, r in world.records.items()]
    return Index(slabs, records, sorted(ledger.pins))


def hand_over(world: World, memories: Mapping[int, Memory]) -> int:
    """Leave the slabs with systemd, where it keeps descriptors for this service; how many."""
    room = _room()
    if room < 1:
        return 0
    index = describe(world, memories, room)
    fd = os.memfd_create(f"tensor-dedup-{_INDEX}", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(msgspec.msgpack.encode(index))
        for slab in index.slabs:
            memory = memories[int(slab.name.removeprefix("slab-"))]
            notify(f"FDSTORE=1\nFDNAME={slab.name}", (memory.fileno,))
        notify(f"FDSTORE=1\nFDNAME={_INDEX}", (fd,))  # last: without it the others mean nothing
    finally:
        os.close(fd)
    return len(index.slabs)


def inherit() -> Inherited:
    """Take what systemd has kept, and take it out of its store. Nothing, when there is nothing."""
    descriptors = _inherited_descriptors()
    for name in descriptors:
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
    fd = descriptors.pop(_INDEX, None)
    index = Index([], [], [])
    if fd is not None:
        try:
            data = os.pread(fd, min(os.fstat(fd).st_size, _MAX_INDEX), 0)
            index = msgspec.msgpack.decode(data, type=Index)
        except (OSError, msgspec.MsgspecError):
            index = Index([], [], [])  # of another version: the tensors are built again
        finally:
            os.close(fd)
    wanted = {slab.name for slab in index.slabs}
    close_all(fd for name, fd in descriptors.items() if name not in wanted)
    return Inherited(index, {name: fd for name, fd in descriptors.items() if name in wanted})


def _inherited_descriptors() -> dict[str, int]:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    numbers = range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0")))
    found: dict[str, int] = {}
    for name, fd in zip(names, numbers, strict=False):
        os.set_inheritable(fd, False)
        if name in found:
            os.close(fd)
        else:
            found[name] = fd
    return found


def notify(state: str, descriptors: tuple[int, ...] = ()) -> None:
    """Tell systemd, where it asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    # A supervisor that does not listen costs what it would have kept, and nothing else.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.settimeout(_NOTIFY_S)
        door.connect("\0" + address[1:] if address[0] == "@" else address)
        door.sendmsg([state.encode()], rights if descriptors else [])
