"""A CUDA driver for tests, over memory files: no GPU, and real pages, protections and processes.

A handle is a memory file, an address is a mapping of this process that mprotect really guards, a
context is a number. It is as strict as the documentation of each call, or stricter where that says
"undefined": a handle or address that is none, or no more, is an error. What several processes of
the tests share goes through descriptors, and through /proc for the old kind of sharing.
A copy that is begun on a stream is made at once or, where the driver is `late`, at the last moment
that CUDA allows: when an event after it, or the whole context, is waited for.
`RefusingDriver` is any driver that refuses one call on demand, and counts them.
"""

import ctypes
import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensor_dedup import libc
from tensor_dedup.memory_manager.cuda.driver import (
    IPC_HANDLE_BYTES,
    Access,
    GpuInfo,
    Result,
    refused,
)
from tensor_dedup.memory_manager.errors import NoMemoryError

_NOTHING: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE
_PROTECTION: Final = {
    Access.NONE: 0,
    Access.READ: mmap.PROT_READ,
    Access.READ_WRITE: mmap.PROT_READ | mmap.PROT_WRITE,
}


# Page-locked host memory by address: of the whole process, whichever driver has allocated it.
LOCKED: Final[dict[int, int]] = {}


@dataclass(frozen=True, slots=True)
class FakeMapping:
    """A whole memory file at an address. The descriptor is the mapping's own."""

    nbytes: int
    fd: int
    access: Access


class DeviceAddressMap:
    """What is reserved and what is mapped, by address. Answers False to what cannot be done."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, FakeMapping] = {}

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Take a range of addresses."""
        start = _map(0, nbytes + alignment, 0, _NOTHING, -1)
        address = -(-start // alignment) * alignment
        # What was taken only to align the rest goes back.
        _cut(start, address - start)
        _cut(address + nbytes, start + alignment - address)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> bool:
        """Give a whole range back in which nothing is mapped."""
        if self.reserved.get(address) != nbytes or self.overlaps(address, nbytes):
            return False
        del self.reserved[address]
        _cut(address, nbytes)
        return True

    def reserves(self, address: int, nbytes: int) -> bool:
        """Return whether a range lies in one reservation."""
        return any(
            start <= address and address + nbytes <= start + size
            for start, size in self.reserved.items()
        )

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Return whether anything is mapped in a range."""
        return any(
            start < address + nbytes and address < start + each.nbytes
            for start, each in self.mapped.items()
        )

    def map(self, address: int, mapped: FakeMapping) -> None:
        """Put a file there."""
        _map(address, mapped.nbytes, 0, mmap.MAP_SHARED | libc.MAP_FIXED, mapped.fd)
        self.mapped[address] = mapped

    def _whole(self, address: int, nbytes: int) -> list[int]:
        """The mappings that a range consists of, without a gap and without a rest."""
        starts, at = [], address
        while at < address + nbytes and at in self.mapped:
            starts.append(at)
            at += self.mapped[at].nbytes
        return starts if at == address + nbytes else []

    def unmap(self, address: int, nbytes: int) -> bool:
        """Take whole mappings away; the range stays reserved."""
        starts = self._whole(address, nbytes)
        for start in starts:
            gone = self.mapped.pop(start)
            _map(start, gone.nbytes, 0, _NOTHING | libc.MAP_FIXED, -1)
            os.close(gone.fd)
        return bool(starts)

    def allow(self, address: int, nbytes: int, access: Access) -> bool:
        """Protect whole mappings."""
        starts = self._whole(address, nbytes)
        for start in starts:
            self.mapped[start] = replace(self.mapped[start], access=access)
            libc.mprotect(start, self.mapped[start].nbytes, _PROTECTION[access])
        return bool(starts)

    def at(self, address: int) -> FakeMapping | None:
        """The mapping that an address lies in."""
        for start, each in self.mapped.items():
            if start <= address < start + each.nbytes:
                return each
        return None

    def allows(self, address: int, nbytes: int, access: Access) -> bool:
        """Return whether all of a range may be used so."""
        at = address
        while at < address + nbytes:
            start = next((s for s, each in self.mapped.items() if s <= at < s + each.nbytes), None)
            if start is None or self.mapped[start].access < access:
                return False
            at = start + self.mapped[start].nbytes
        return True


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    try:
        return libc.mmap(address, nbytes, protection, flags, fd)
    except OSError as error:
        raise NoMemoryError(f"mmap of {nbytes} bytes: {error.strerror}") from error


def _cut(address: int, nbytes: int) -> None:
    if nbytes:
        libc.munmap(address, nbytes)


GRANULARITY: Final = 64 << 10  # of a real GPU 2 MiB; small here, so that tests have many
_NAME: Final = "fake-gpu:"
_TOKEN: Final = struct.Struct("<4q")  # pid, descriptor, inode, bytes


def fake_uuid(ordinal: int) -> str:
    """The UUID of the fake GPU with that number."""
    return f"GPU-{ordinal:08x}-0000-0000-0000-000000000000"


class _Begun(NamedTuple):
    """A copy that a stream has not made yet."""

    number: int
    stream: int
    device: range
    do: Callable[[], object]


class _Event(NamedTuple):
    """What an event waits for: busy streams, and copies by number, of one stream or of all."""

    busy: frozenset[int]
    last: int
    stream: int | None


class _Opened(NamedTuple):
    address: int
    uses: int


class FakeDriver:
    """A `Driver` over memory files.

    `visible`: which GPUs, in the order of their ordinals (CUDA_VISIBLE_DEVICES). `late`: copies
    that are begun are made as late as possible. `traffic` counts the bytes of copies by the
    driver's calls, and the waits for a context or for an event."""

    def __init__(
        self, visible: tuple[int, ...] = (0,), nbytes: int = 1 << 40, *, late: bool = False
    ) -> None:
        self.late = late
        self.traffic: Counter[str] = Counter()
        self._copies: list[_Begun] = []
        self._visible = visible
        self._nbytes = nbytes
        self._owner = -1
        self._handles: dict[int, int] = {}
        self._next = 1
        self._space = DeviceAddressMap()
        self._allocations: dict[int, int] = {}  # address -> descriptor
        self._opened: dict[bytes, _Opened] = {}
        self._events: dict[int, _Event] = {}
        self._busy: dict[int, int] = {}  # stream -> how often it was made busy
        self._contexts = threading.local()
        self._lock = threading.RLock()
        self.capturing = False
        self.beside_torch = False  # its allocations, which no call of ours made, may be copied

    # For tests.

    def left(self) -> dict[str, int]:
        """How much of each kind was made and not given back."""
        found = {
            "handles": len(self._handles),
            "reservations": len(self._space.reserved),
            "mappings": len(self._space.mapped),
            "allocations": len(self._allocations),
            "opened": len(self._opened),
            "events": len(self._events),
            "contexts": len(self._stack()),
            "copies": len(self._copies),
        }
        return {kind: count for kind, count in found.items() if count}

    def begin(self, stream: int) -> None:
        """A stream works from now on."""
        self._busy[stream] = self._busy.get(stream, 0) + 1

    def end(self, stream: int) -> None:
        """A stream has done all its work."""
        self._busy.pop(stream)
        self._events = {
            number: each._replace(busy=each.busy - {stream})
            for number, each in self._events.items()
        }

    def access(self, address: int) -> Access:
        """What may be done at an address (cuMemGetAccess)."""
        mapped = self._space.at(address)
        return Access.NONE if mapped is None else mapped.access

    # The driver.

    def init(self) -> None:
        """Implement `Driver.init`."""
        if self._owner in (-1, os.getpid()):
            self._owner = os.getpid()
            return
        raise refused("cuInit", Result.NOT_INITIALIZED)

    def _ready(self, call: str) -> None:
        if self._owner != os.getpid():
            raise refused(call, Result.NOT_INITIALIZED)

    def devices(self) -> list[GpuInfo]:
        """Implement `Driver._ready`."""
        self._ready("cuDeviceGetCount")
        return [
            GpuInfo(ordinal, fake_uuid(number), self._nbytes, True)
            for ordinal, number in enumerate(self._visible)
        ]

    def _number(self, call: str, device: int) -> int:
        self._ready(call)
        if not 0 <= device < len(self._visible):
            raise refused(call, Result.INVALID_DEVICE)
        return self._visible[device]

    def granularity(self, device: int) -> int:
        """Implement `Driver._number`."""
        self._number("cuMemGetAllocationGranularity", device)
        return GRANULARITY

    def create(self, device: int, nbytes: int) -> int:
        """Implement `Driver.create`."""
        number = self._number("cuMemCreate", device)
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise refused("cuMemCreate", Result.INVALID_VALUE)
        return self._enter_handle(self._file("cuMemCreate", number, nbytes))

    def _file(self, call: str, number: int, nbytes: int) -> int:
        if nbytes > self._nbytes:
            raise refused(call, Result.OUT_OF_MEMORY, nbytes)
        fd = os.memfd_create(f"{_NAME}{number}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return fd

    def _enter_handle(self, fd: int) -> int:
        with self._lock:
            handle, self._next = self._next, self._next + 1
            self._handles[handle] = fd
            return handle

    def _fd(self, call: str, handle: int) -> int:
        self._ready(call)
        fd = self._handles.get(handle)
        if fd is None:
            raise refused(call, Result.INVALID_VALUE)
        return fd

    def release(self, handle: int) -> None:
        """Implement `Driver._enter_handle`."""
        os.close(self._fd("cuMemRelease", handle))
        del self._handles[handle]

    def export(self, handle: int) -> int:
        """Implement `Driver.export`."""
        return os.dup(self._fd("cuMemExportToShareableHandle", handle))

    def import_(self, fd: int) -> int:
        """Implement `Driver.import_`."""
        self._ready("cuMemImportFromShareableHandle")
        if _number_of(fd) is None:
            raise refused("cuMemImportFromShareableHandle", Result.INVALID_VALUE)
        return self._enter_handle(os.dup(fd))

    def device_of(self, handle: int) -> int:
        """Implement `Driver.device_of`."""
        call = "cuMemGetAllocationPropertiesFromHandle"
        number = _number_of(self._fd(call, handle))
        if number not in self._visible:
            raise refused(call, Result.INVALID_DEVICE)
        return self._visible.index(number)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Implement `Driver.reserve`."""
        self._ready("cuMemAddressReserve")
        if nbytes <= 0 or nbytes % mmap.PAGESIZE or alignment & (alignment - 1):
            raise refused("cuMemAddressReserve", Result.INVALID_VALUE)
        return self._space.reserve(nbytes, alignment or GRANULARITY)

    def free(self, address: int, nbytes: int) -> None:
        """Implement `Driver.free`."""
        self._ready("cuMemAddressFree")
        if not self._space.free(address, nbytes):
            raise refused("cuMemAddressFree", Result.INVALID_VALUE)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Implement `Driver.map`."""
        fd = self._fd("cuMemMap", handle)
        whole = nbytes == os.fstat(fd).st_size
        if not whole or address % GRANULARITY or not self._space.reserves(address, nbytes):
            raise refused("cuMemMap", Result.INVALID_VALUE)
        if self._space.overlaps(address, nbytes):
            raise refused("cuMemMap", Result.ALREADY_MAPPED)
        self._space.map(address, FakeMapping(nbytes, os.dup(fd), Access.NONE))

    def unmap(self, address: int, nbytes: int) -> None:
        """Implement `Driver.unmap`."""
        self._ready("cuMemUnmap")
        with self._lock:
            if any(max(each.device[0], address) <= min(each.device[-1], address + nbytes - 1)
                   for each in self._copies):  # fmt: skip
                raise refused("cuMemUnmap", Result.ILLEGAL_ADDRESS)
        if not self._space.unmap(address, nbytes):
            raise refused("cuMemUnmap", Result.INVALID_VALUE)

    def allow(self, address: int, nbytes: int, device: int, access: Access) -> None:
        """Implement `Driver.allow`."""
        self._number("cuMemSetAccess", device)
        if not self._space.allow(address, nbytes, access):
            raise refused("cuMemSetAccess", Result.INVALID_VALUE)

    # With a context.

    def _stack(self) -> list[int]:
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        found: list[int] = self._contexts.stack
        return found

    def _context(self, call: str) -> int:
        self._ready(call)
        if not self._stack():
            raise refused(call, Result.INVALID_CONTEXT)
        return self._stack()[-1]

    def enter(self, device: int) -> None:
        """Implement `Driver._context`."""
        self._number("cuDevicePrimaryCtxRetain", device)
        self._stack().append(device)

    def leave(self) -> None:
        """Implement `Driver.leave`."""
        self._context("cuCtxPopCurrent")
        self._stack().pop()

    def _may(self, call: str, address: int, nbytes: int, access: Access) -> None:
        self._context(call)
        if self.beside_torch and not self._space.reserves(address, 1):
            return
        if not self._space.allows(address, nbytes, access):
            raise refused(call, Result.INVALID_VALUE)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Implement `Driver._may`."""
        self._may("cuMemcpyHtoD", target, nbytes, Access.READ_WRITE)
        self.traffic["copy_in"] += nbytes
        ctypes.memmove(target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Implement `Driver.copy_out`."""
        self._may("cuMemcpyDtoH", source, nbytes, Access.READ)
        self.traffic["copy_out"] += nbytes
        ctypes.memmove(target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Implement `Driver.copy`."""
        self._may("cuMemcpyDtoD", source, nbytes, Access.READ)
        self._may("cuMemcpyDtoD", target, nbytes, Access.READ_WRITE)
        self.traffic["copy"] += nbytes
        ctypes.memmove(target, source, nbytes)

    def stream(self) -> int:
        """Implement `Driver.stream`."""
        self._context("cuStreamCreate")
        with self._lock:
            made, self._next = self._next, self._next + 1
            return made

    def begin_copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Implement `Driver.begin_copy_in`, from page-locked memory only."""
        self._may("cuMemcpyHtoDAsync", target, nbytes, Access.READ_WRITE)
        _require_locked("cuMemcpyHtoDAsync", source, nbytes)
        self.traffic["copy_in"] += nbytes
        self._begin(stream, range(target, target + nbytes), target, source)

    def begin_copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Implement `Driver.begin_copy_out`, to page-locked memory only."""
        self._may("cuMemcpyDtoHAsync", source, nbytes, Access.READ)
        _require_locked("cuMemcpyDtoHAsync", target, nbytes)
        self.traffic["copy_out"] += nbytes
        self._begin(stream, range(source, source + nbytes), target, source)

    def _begin(self, stream: int, device: range, target: int, source: int) -> None:
        if not self.late:
            ctypes.memmove(target, source, len(device))
            return
        with self._lock:
            number, self._next = self._next, self._next + 1
            do = partial(ctypes.memmove, target, source, len(device))
            self._copies.append(_Begun(number, stream, device, do))

    def _make(self, last: int, stream: int | None) -> None:
        """Make the copies up to this number: of one stream, or of all."""
        with self._lock:
            due = [each for each in self._copies if _is_due(each, last, stream)]
            for each in due:
                each.do()
            self._copies = [each for each in self._copies if each not in due]

    def record(self, stream: int) -> int:
        """Implement `Driver.record`."""
        self._context("cuEventCreate")
        self._not_capturing("cuEventRecord")
        with self._lock:
            event, self._next = self._next, self._next + 1
            self._events[event] = _Event(frozenset(self._busy) & {stream}, event, stream)
            return event

    def page_lock(self, nbytes: int) -> int:
        """Implement `Driver.page_lock`."""
        self._context("cuMemHostAlloc")
        address = _map(0, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _NOTHING, -1)
        LOCKED[address] = nbytes
        self.traffic["page_lock"] += nbytes
        return address

    def page_unlock(self, address: int) -> None:
        """Implement `Driver.page_unlock`."""
        self._context("cuMemFreeHost")
        if address not in LOCKED:
            raise refused("cuMemFreeHost", Result.INVALID_VALUE)
        _cut(address, LOCKED.pop(address))

    def synchronize(self) -> None:
        """Implement `Driver.synchronize`."""
        self._context("cuCtxSynchronize")
        self._not_capturing("cuCtxSynchronize")
        self.traffic["synchronize"] += 1
        self._make(self._next, None)
        for stream in list(self._busy):
            self.end(stream)

    def _not_capturing(self, call: str) -> None:
        if self.capturing:
            raise refused(call, Result.STREAM_CAPTURE_UNSUPPORTED)

    def mark(self) -> int:
        """Implement `Driver._not_capturing`."""
        self._context("cuEventCreate")
        self._not_capturing("cuCtxRecordEvent")
        with self._lock:
            event, self._next = self._next, self._next + 1
            self._events[event] = _Event(frozenset(self._busy), event, None)
            return event

    def _event(self, call: str, event: int) -> _Event:
        self._ready(call)
        if event not in self._events:
            raise refused(call, Result.INVALID_HANDLE)
        return self._events[event]

    def done(self, event: int) -> bool:
        """Implement `Driver._event`."""
        found = self._event("cuEventQuery", event)
        with self._lock:
            return not found.busy and not any(
                _is_due(each, found.last, found.stream) for each in self._copies
            )

    def wait(self, event: int) -> None:
        """Implement `Driver.wait`."""
        found = self._event("cuEventSynchronize", event)
        self.traffic["wait"] += 1
        self._make(found.last, found.stream)
        for stream in found.busy:
            self.end(stream)

    def forget(self, event: int) -> None:
        """Implement `Driver.forget`."""
        self._event("cuEventDestroy", event)
        del self._events[event]

    # The old kind of sharing.

    def allocate(self, nbytes: int) -> int:
        """Implement `Driver.allocate`."""
        device = self._context("cuMemAlloc")
        if nbytes <= 0:
            raise refused("cuMemAlloc", Result.INVALID_VALUE)
        whole = -(-nbytes // GRANULARITY) * GRANULARITY
        fd = self._file("cuMemAlloc", self._visible[device], whole)
        address = self._shown(fd, whole)
        self._allocations[address] = fd
        return address

    def _shown(self, fd: int, nbytes: int) -> int:
        """Map a whole file somewhere, readable and writable."""
        address = self._space.reserve(nbytes, GRANULARITY)
        self._space.map(address, FakeMapping(nbytes, os.dup(fd), Access.NONE))
        self._space.allow(address, nbytes, Access.READ_WRITE)
        return address

    def _hide(self, address: int) -> None:
        nbytes = self._space.reserved[address]
        self._space.unmap(address, nbytes)
        self._space.free(address, nbytes)

    def deallocate(self, address: int) -> None:
        """Implement `Driver._hide`."""
        self._context("cuMemFree")
        if address not in self._allocations:
            raise refused("cuMemFree", Result.INVALID_VALUE)
        self._hide(address)
        os.close(self._allocations.pop(address))

    def ipc_handle(self, address: int) -> bytes:
        """Implement `Driver.ipc_handle`."""
        self._context("cuIpcGetMemHandle")
        fd = self._allocations.get(address)
        if fd is None:
            raise refused("cuIpcGetMemHandle", Result.INVALID_VALUE)
        found = os.fstat(fd)
        token = _TOKEN.pack(os.getpid(), fd, found.st_ino, found.st_size)
        return token.ljust(IPC_HANDLE_BYTES, b"\0")

    def ipc_open(self, handle: bytes) -> int:
        """Implement `Driver.ipc_open`."""
        self._context("cuIpcOpenMemHandle")
        pid, number, inode, nbytes = _TOKEN.unpack(handle[: _TOKEN.size])
        if pid == os.getpid():
            raise refused("cuIpcOpenMemHandle", Result.INVALID_CONTEXT)
        with self._lock:
            known = self._opened.get(handle)
            if known is None:
                fd = _open_of(pid, number, inode)
                known = _Opened(self._shown(fd, nbytes), 0)
                os.close(fd)
            self._opened[handle] = _Opened(known.address, known.uses + 1)
            return known.address

    def ipc_close(self, address: int) -> None:
        """Implement `Driver.ipc_close`."""
        self._context("cuIpcCloseMemHandle")
        for handle, known in list(self._opened.items()):
            if known.address == address:
                self._opened[handle] = _Opened(address, known.uses - 1)
                if known.uses == 1:
                    self._hide(address)
                    del self._opened[handle]
                return
        raise refused("cuIpcCloseMemHandle", Result.INVALID_VALUE)


def _is_due(copy: _Begun, last: int, stream: int | None) -> bool:
    return copy.number <= last and stream in (None, copy.stream)


def _require_locked(call: str, address: int, nbytes: int) -> None:
    """CUDA takes other memory, too, but copies from it in another order."""
    if not any(
        start <= address and address + nbytes <= start + size for start, size in LOCKED.items()
    ):
        raise refused(call, Result.INVALID_VALUE)


def _number_of(fd: int) -> int | None:
    """Which fake GPU a descriptor's memory is on; None for any other file."""
    with suppress(OSError):
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        _, found, rest = name.partition(_NAME)
        return int(rest.split()[0]) if found and rest.split()[0].isdecimal() else None
    return None


def _open_of(pid: int, number: int, inode: int) -> int:
    """Another process's memory file. DeviceError when it, or its process, is gone."""
    with suppress(OSError):
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_ino == inode:
            return fd
        os.close(fd)
    raise refused("cuIpcOpenMemHandle", Result.MAP_FAILED)


# What takes something back: when it fails something stays, whatever anybody does.
CLEANING: Final = frozenset(
    {"release", "free", "unmap", "leave", "forget", "deallocate", "ipc_close", "page_unlock"}
)


class RefusingDriver:
    """Any driver, but its call number `refuse` (from 1) returns `code` and does nothing.

    `calls` are the names of those made since the count began, the refused one included. Calls
    that clean up are neither counted nor refused unless `cleaning`.
    """

    def __init__(self, inner: object, refuse: int = 0, code: Result = Result.OUT_OF_MEMORY) -> None:
        self._inner = inner
        self.refuse = refuse
        self.code = code
        self.cleaning = False
        self.calls: list[str] = []

    def again(self, refuse: int = 0) -> None:
        """Count from the beginning."""
        self.calls = []
        self.refuse = refuse

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._inner, name)
        if name in CLEANING and not self.cleaning:
            return call

        def counted(*arguments: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self.refuse:
                raise refused(name, self.code, 0)
            return call(*arguments)

        return counted
