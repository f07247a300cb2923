"""Keep tensors across a restart of the manager, in systemd's file descriptor store (FDSTORE).

When the manager ends, it sends the descriptors of its sealed slabs to systemd, together with a
memory file that has an index of their contents. The next manager inherits the descriptors. It
decodes the index strictly. It checks and hashes the slabs like slabs that clients offer.

Slabs of GPU memory cannot be hashed, so their digests are taken from the index. There, each slab
has the name of its descriptor. Such a name is never used twice, so no slab gets the digests of
another one.
"""

import array
import logging
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from tensor_dedup.memory_manager.backends.base import Memory
from tensor_dedup.memory_manager.core.manager_state import ManagerState
from tensor_dedup.memory_manager.protocol.limits import (
    Digest,
    Key,
    Message,
    Name,
    Record,
    Size,
    WirePart,
)
from tensor_dedup.memory_manager.protocol.messages import DigestSpan
from tensor_dedup.memory_manager.protocol.wire import close_all

if TYPE_CHECKING:
    from tensor_dedup.memory_manager.core.records import KeyRecord

_log = logging.getLogger(__name__)
_FIRST_FD: Final = 3
_INDEX: Final = "index"
_HEADER: Final = b"TMHO" + (1).to_bytes(4, "little")  # the magic and the version of an index
_MAX_INDEX: Final = 1 << 30
_NOTIFY_S: Final = 5.0


class HandoverTensor(WirePart, frozen=True):
    """A tensor's place in its slab, and the names of the checkpoints it belongs to."""

    span: DigestSpan
    checkpoints: list[Name]


class HandoverSlab(WirePart, frozen=True):
    """A slab and its tensors.

    systemd keeps the slab's descriptor under NAME-GENERATION, with the index's `generation`.
    """

    name: Name
    nbytes: Size
    tensors: list[HandoverTensor]


class HandoverRecord(WirePart, frozen=True):
    """A layer record and its key. `also` has further keys that lead to it."""

    key: Key
    record: Record
    digests: list[Digest]
    also: list[Key]


class HandoverIndex(Message, frozen=True, tag="Index"):
    """The index for the next manager: slabs, layer records and pins.

    `generation` is random, and part of the name under which systemd keeps each descriptor. So a
    slab of an earlier index is never taken for one of this index.
    """

    generation: Name
    slabs: list[HandoverSlab]
    records: list[HandoverRecord]
    pins: list[Name]


_NOTHING: Final = HandoverIndex("", [], [], [])


@dataclass(frozen=True, slots=True)
class Inherited:
    """The state that an earlier manager left: the index, and the descriptors of slabs by name.

    The caller owns the descriptors.
    """

    index: HandoverIndex
    descriptors: dict[str, int]


def _room() -> int:
    """Return how many slabs systemd keeps for this service, beside the index."""
    text = os.environ.get("FDSTORE", "")
    return int(text) - 1 if text.isdecimal() else 0


def _stored(name: str, generation: str) -> str:
    return f"{name}-{generation}"


def describe(state: ManagerState, memories: Mapping[int, Memory], room: int) -> HandoverIndex:
    """Return the index of the slabs to leave for the next manager, at most `room` slabs.

    Pinned slabs come first, then those used most recently.
    """
    ledger = state.ledger
    fit = [s for number, s in ledger.slabs.items() if s.residents and number in memories]
    fit.sort(key=lambda slab: (not ledger.pinned_slab(slab), -slab.used))
    slabs = [
        HandoverSlab(
            f"slab-{slab.number}",
            slab.nbytes,
            [
                HandoverTensor(DigestSpan(r.offset, r.nbytes, r.digest), sorted(r.checkpoints))
                for r in slab.residents.values()
            ],
        )
        for slab in fit[:room]
    ]
    # Each once: tens of keys lead to one, and the index is never larger than the table of records.
    keys: defaultdict[KeyRecord, list[str]] = defaultdict(list)
    for key, record in state.records.items():
        keys[record].append(key)
    records = [
        HandoverRecord(first, each.record, list(each.digests), also)
        for each, (first, *also) in keys.items()
    ]
    return HandoverIndex(secrets.token_hex(8), slabs, records, sorted(ledger.pins))


def hand_over(state: ManagerState, memories: Mapping[int, Memory]) -> int:
    """Leave the sealed slabs and an index with systemd; return the number of slabs.

    The result is 0 if systemd keeps no descriptors for this service.
    """
    room = _room()
    if room < 1:
        return 0
    index = describe(state, memories, room)
    fd = os.memfd_create(f"tensor-dedup-{_INDEX}", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(_HEADER + msgspec.msgpack.encode(index))
        for slab in index.slabs:
            memory = memories[int(slab.name.removeprefix("slab-"))]
            name = _stored(slab.name, index.generation)
            notify(f"FDSTORE=1\nFDNAME={name}", (memory.fileno,))
        # Last: without it the others mean nothing.
        notify(f"FDSTORE=1\nFDNAME={_stored(_INDEX, index.generation)}", (fd,))
    finally:
        os.close(fd)
    return len(index.slabs)


def inherit() -> Inherited:
    """Take the index and the slabs that systemd has kept, and remove them from its store.

    The result is empty if systemd has kept nothing, or if the index is not valid.
    """
    descriptors = _inherited_descriptors()
    for name in descriptors:
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
    names = [name for name in descriptors if name.startswith(_stored(_INDEX, ""))]
    found = [_read(name, descriptors.pop(name)) for name in names]
    # Each speaks of its own slabs only, so any is right; of one that is older, slabs may be gone.
    index = max(found, key=lambda each: len(_slabs(each, descriptors)), default=_NOTHING)
    slabs = {name: descriptors.pop(stored) for name, stored in _slabs(index, descriptors).items()}
    close_all(descriptors.values())
    return Inherited(index, slabs)


def _read(name: str, fd: int) -> HandoverIndex:
    """Return the index that is stored under this name; `fd` is closed."""
    try:
        data = os.pread(fd, min(os.fstat(fd).st_size, _MAX_INDEX), 0)
        if not data.startswith(_HEADER):
            raise ValueError(f"it begins with {data[: len(_HEADER)]!r}, not with {_HEADER!r}")
        index = msgspec.msgpack.decode(memoryview(data)[len(_HEADER) :], type=HandoverIndex)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _log.warning("not taken back: %s is no index of this version (%s)", name, str(error))
        return _NOTHING
    finally:
        os.close(fd)
    return index if name == _stored(_INDEX, index.generation) else _NOTHING


def _slabs(index: HandoverIndex, descriptors: Mapping[str, int]) -> dict[str, str]:
    """Return what each slab of the index is stored under, of those that are there."""
    stored = {slab.name: _stored(slab.name, index.generation) for slab in index.slabs}
    return {name: under for name, under in stored.items() if under in descriptors}


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


def watched() -> bool:
    """Return whether systemd expects this process to send keep-alives (WatchdogSec=)."""
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return "WATCHDOG_USEC" in os.environ and pid == str(os.getpid())


def notify(state: str, descriptors: tuple[int, ...] = ()) -> None:
    """Send a notification and descriptors to systemd.

    If systemd does not run this process or does not listen, nothing is sent. Errors are ignored.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    # A supervisor that does not listen costs what it would have kept, and nothing else.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(_NOTIFY_S)
        systemd.connect("\0" + address[1:] if address[0] == "@" else address)
        systemd.sendmsg([state.encode()], rights if descriptors else [])
