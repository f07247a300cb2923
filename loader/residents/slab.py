"""Slabs: sealed memory files, and copy-on-write mappings of them. Linux only; imports no torch.

A slab is filled and then sealed: from then on the kernel refuses writes by any process. Each reader
maps the slab MAP_PRIVATE. Readers share the pages, and a reader that writes gets its own copy of
the page from the kernel. So no process can corrupt the data of another process, and no write fails.

A slab is filled by pwrite, never through a writable mapping. pwrite is faster, because it neither
zeroes nor faults the pages: 256 MiB took 163 ms, and 401 ms through a mapping (on a two-core
virtual machine). If memory is short, pwrite returns an error, whereas a store through a mapping
would end in SIGBUS.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Protocol

from tensor_dedup import libc
from tensor_dedup.errors import TensorDedupError
from tensor_dedup.loader.residents.mappings import BUDGET, MAPPINGS, MappingSpan, SlabRange
from tensor_dedup.memory_manager.protocol.layout import PAGE, next_offset, offsets_of, round_up

SLAB_NAME: Final = "tensor-dedup"
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
# NORESERVE: or the kernel would count every mapping as if all of it were to be copied.
_SHARED: Final = mmap.MAP_PRIVATE | libc.MAP_NORESERVE
_OVER: Final = _SHARED | libc.MAP_FIXED
ByteArray = ctypes.Array[ctypes.c_char]


class SharedMemoryError(TensorDedupError):
    """The base class of the errors of slabs.

    - OutOfMemoryError   the system refused memory, a mapping or a descriptor
        - MappingLimitError   a tensor that consists of parts would need too many mappings
    - SlabUsageError     a bug in the caller: a bad size, or a slab used after sealing
    """


class OutOfMemoryError(SharedMemoryError):
    """The system refused memory, a mapping or a descriptor; load the tensor privately."""


class MappingLimitError(OutOfMemoryError):
    """Mapping a tensor in parts would bring this process near the kernel's limit of mappings."""


class SlabUsageError(SharedMemoryError):
    """A range lies outside its slab, or a `SlabWriter` was used after sealing."""


def _refused(call: str, nbytes: int, code: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"{call} of {nbytes} bytes: {os.strerror(code)}; free memory, or raise the limit that was "
        "met (sysctl vm.max_map_count, ulimit -v, ulimit -n, the container's memory)",
        call=call,
        nbytes=nbytes,
        errno=code,
    )


def capacity_for(sizes: Iterable[int]) -> int:
    """Return the size in bytes of a slab that has room for tensors of these `sizes`.

    The tensors must be written in the order of `sizes`. Room for their alignment is included.
    """
    return offsets_of(sizes)[1]


def bytes_at(address: int, nbytes: int, owner: object) -> ByteArray:
    """Return a buffer over `nbytes` bytes at `address`; the buffer keeps `owner` alive."""
    array = (ctypes.c_char * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # array types have a __dict__
    return array


def _map(
    fd: int, offset: int, nbytes: int, protection: int, flags: int = _SHARED, at: int = 0
) -> int:
    try:
        return libc.mmap(at, nbytes, protection, flags, fd, offset)
    except OSError as error:
        raise _refused("mmap", nbytes, error.errno or 0) from error


def _unmap(address: int, nbytes: int) -> None:
    # First forgotten, then unmapped: another thread may get this address from the next mmap.
    MAPPINGS.forget(address)
    libc.munmap(address, nbytes)


# Every mapping of a slab, by the address it begins at.
_mapped: Final[weakref.WeakValueDictionary[int, ByteArray]] = weakref.WeakValueDictionary()


class _ReplacementLock:
    """The lock under which memory is made private.

    Two threads that replaced one range at once would lose the writes in between.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()


_replacing: Final = _ReplacementLock()


def make_private(address: int, nbytes: int) -> int:
    """Replace a whole mapping of a slab by private memory with the same bytes and address.

    The mapping is the one that contains the `nbytes` bytes at `address`. Returns the number of
    bytes copied, or 0 if there is no such mapping. Pointers into the mapping stay valid, and the
    slab is released. During the call, other threads may read the memory, but not write to it.

    Raises:
        OutOfMemoryError: There is no memory for the copy; nothing has changed.
    """
    with _replacing.lock:
        return _make_private(address, nbytes)


def _make_private(address: int, nbytes: int) -> int:
    found = MAPPINGS.around(address, nbytes)
    array = None if found is None else _mapped.get(found[0])
    if found is None or array is None:
        return 0
    start, span = found
    try:
        fresh = libc.own_memory(span.length)
    except OSError as error:
        raise _refused("mmap", span.length, error.errno or 0) from error
    first, size = ctypes.addressof(array), len(array)
    ctypes.memmove(fresh + first - start, first, size)
    # First forgotten, then replaced: it must not be taken for the slab's when it is not.
    MAPPINGS.forget(start)
    try:
        # One step for the kernel: who reads meanwhile finds the old pages or the new, all equal.
        libc.move_over(fresh, start, span.length, SLAB_NAME)
    except OSError as error:
        MAPPINGS.add(start, span)
        libc.munmap(fresh, span.length)
        raise _refused("mremap", span.length, error.errno or 0) from error
    array.owner = None  # type: ignore[attr-defined]
    return size


class OwnedFd:
    """A file descriptor that is closed when this object is garbage-collected."""

    def __init__(self, fd: int) -> None:
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


_serials = itertools.count(1)


class HasFd(Protocol):
    """An interface for objects that own an open file descriptor.

    The descriptor stays open as long as the object lives.
    """

    @property
    def fileno(self) -> int:
        """The open file descriptor."""


class Slab:
    """A sealed memory file of `nbytes` bytes, a multiple of the page size. It never changes.

    The file is closed when nothing refers to this object; every mapping of the slab refers to it.
    `serial` is unique in the process, and a forked child inherits it. Safe from any thread and
    after fork.
    """

    def __init__(self, descriptor: HasFd, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes: Final = nbytes
        self.serial: Final = next(_serials)

    @property
    def fileno(self) -> int:
        """The file descriptor. This object closes it, and callers must not."""
        return self._descriptor.fileno

    def map(self, offset: int, nbytes: int, owner: object, *, writable: bool = True) -> ByteArray:
        """Map a range of the slab copy-on-write, and return the mapping as a buffer.

        The buffer keeps `owner` and the slab alive. When the buffer is garbage-collected, the range
        is unmapped. With `writable=False`, a write ends the process (SIGSEGV).

        Raises:
            SlabUsageError: The range is empty or exceeds the slab.
            OutOfMemoryError: The kernel refused the mapping.
        """
        layout = ExtentLayout((SlabExtent(self, offset, nbytes),))
        return layout.map(owner, writable=writable)


class SlabExtent(NamedTuple):
    """A range of bytes of a slab. It keeps the slab alive."""

    slab: Slab
    offset: int
    nbytes: int


class ExtentLayout:
    """Ranges of slabs to be mapped side by side. Immutable, safe from any thread.

    Extents meet at page boundaries, because only whole pages can be mapped.
    """

    __slots__ = ("_extents", "_length", "_nbytes", "_overlays", "_pieces", "_under")

    def __init__(self, extents: Sequence[SlabExtent]) -> None:
        """Plan the mapping of `extents`, in this order.

        Raises:
            SlabUsageError: An extent is outside its slab, or two extents do not meet at a page
                boundary.
        """
        self._extents = tuple(extents)
        self._pieces = (_pages(extents[0]),) if len(extents) == 1 else _side_by_side(extents)
        self._length = sum(piece.nbytes for piece in self._pieces)
        self._nbytes = sum(extent.nbytes for extent in extents)
        self._under, self._overlays = _calls(self._extents, self._pieces)

    def map(self, owner: object, *, writable: bool = True) -> ByteArray:
        """Map the extents copy-on-write and return the mapping as a buffer.

        The buffer keeps `owner` and the slabs alive. When the buffer is garbage-collected, the
        extents are unmapped. With `writable=False`, a write ends the process (SIGSEGV).

        Raises:
            MappingLimitError: This process has nearly as many mappings as the kernel allows.
            OutOfMemoryError: The kernel refused the mapping.
        """
        length, pieces = self._length, self._pieces
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with ExitStack() as undo:
            fd, offset, at, nbytes = self._under
            if len(pieces) == 1:
                address = _map(fd, offset, length, protection)
                undo.callback(_unmap, address, length)
            else:
                why_not = BUDGET.take(len(pieces))
                if why_not is not None:
                    raise MappingLimitError(why_not)
                address = _map(-1, 0, length, libc.PROT_NONE, _SHARED | mmap.MAP_ANONYMOUS)
                undo.callback(_unmap, address, length)
                _map(fd, offset, nbytes, protection, _OVER, address + at)
                for fd, offset, at, nbytes in self._overlays:
                    _map(fd, offset, nbytes, protection, _OVER, address + at)
            MAPPINGS.add(address, MappingSpan(length, pieces, writable))
            array = bytes_at(
                address + self._extents[0].offset % PAGE, self._nbytes, (self._extents, owner)
            )
            weakref.finalize(array, _unmap, address, length).atexit = False
            undo.pop_all()
        _mapped[address] = array
        return array


class _Call(NamedTuple):
    """A range of a file that is mapped `at` bytes after the beginning."""

    fd: int
    offset: int
    at: int
    nbytes: int


def _calls(extents: Sequence[SlabExtent], pieces: Sequence[SlabRange]) -> tuple[_Call, list[_Call]]:
    """Return what is mapped first, and what over it.

    Most pieces of a fine-tune lie in its base's slab as they do in memory: one call maps them all,
    with what lies between, and costs what one of the others does.
    """
    starts = accumulate((piece.nbytes for piece in pieces), initial=0)
    every = [
        _Call(slab.fileno, piece.offset, at, piece.nbytes)
        for (slab, *_), piece, at in zip(extents, pieces, starts, strict=False)
    ]
    along = Counter((call.fd, call.offset - call.at) for call in every)
    [((fd, beyond), _)] = along.most_common(1)
    below = [call for call in every if (call.fd, call.offset - call.at) == (fd, beyond)]
    first, last = below[0], below[-1]
    under = _Call(fd, first.offset, first.at, last.at + last.nbytes - first.at)
    apart = set(below)
    return under, [call for call in every if call not in apart]


def _pages(extent: SlabExtent) -> SlabRange:
    """Return the whole pages that an extent lies in.

    Raises:
        SlabUsageError: The extent is outside its slab.
    """
    slab, offset, nbytes = extent
    if nbytes <= 0 or offset < 0 or offset + nbytes > slab.nbytes:
        raise SlabUsageError(
            f"bytes {offset} to {offset + nbytes} of a slab of {slab.nbytes}; map what was written",
            offset=offset,
            nbytes=nbytes,
            slab_bytes=slab.nbytes,
        )
    inside = offset % PAGE
    return SlabRange(slab.serial, offset - inside, round_up(inside + nbytes))


def _side_by_side(extents: Sequence[SlabExtent]) -> tuple[SlabRange, ...]:
    """Return the whole pages that extents lie in, each beginning where the one before ends.

    Raises:
        SlabUsageError: An extent is outside its slab, or does not begin or end with a page.
    """
    for before, after in pairwise(extents):
        if after.offset % PAGE or (before.offset + before.nbytes) % PAGE:
            raise SlabUsageError(
                f"an extent that ends at {before.offset + before.nbytes} of its slab and one that "
                f"begins at {after.offset} do not meet at a page; copy what lies between",
                end=before.offset + before.nbytes,
                offset=after.offset,
            )
    return tuple(map(_pages, extents))


class SlabWriter:
    """A writer that fills one slab of at most `capacity` bytes and seals it.

    For one thread at a time, except where a method says otherwise.
    """

    def __init__(self, capacity: int) -> None:
        """Create the memory file of the slab.

        Raises:
            OutOfMemoryError: There is no descriptor left.
        """
        self._capacity = round_up(capacity)
        self._end = 0
        self._descriptor: OwnedFd | None = _memory_file(self._capacity)

    def _open(self) -> OwnedFd:
        if self._descriptor is None:
            raise SlabUsageError("this slab is sealed; begin another one")
        return self._descriptor

    def _take(self, nbytes: int) -> int:
        self._open()
        offset = next_offset(self._end, nbytes)
        if offset + nbytes > self._capacity:
            raise SlabUsageError(
                f"{nbytes} bytes at {offset} do not fit a slab of {self._capacity}; "
                "make it as large as capacity_for() says",
                offset=offset,
                nbytes=nbytes,
                capacity=self._capacity,
            )
        self._end = offset + nbytes
        return offset

    def write(self, data: memoryview, beyond: int = 0) -> int:
        """Copy bytes to the next free place in the slab; return their offset.

        The bytes begin `beyond` bytes after an aligned offset.

        Raises:
            OutOfMemoryError: There is no memory left.
            SlabUsageError: The bytes do not fit, or the slab is sealed.
        """
        offset = self._take(data.nbytes + beyond) + beyond
        self.put(data, offset)
        return offset

    def take(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes for `put` to write later, and return their offset.

        Raises:
            SlabUsageError: The bytes do not fit, or the slab is sealed.
        """
        return self._take(nbytes)

    def put(self, data: memoryview, offset: int) -> None:
        """Copy the contiguous bytes `data` to `offset`, in a range that `take` has reserved.

        Safe from several threads at once.

        Raises:
            OutOfMemoryError: There is no memory left.
            SlabUsageError: The slab is sealed.
        """
        fd = self._open().fileno
        rest, at = data.cast("B"), offset
        while rest.nbytes:
            try:
                written = os.pwrite(fd, rest, at)
            except OSError as error:
                raise _refused("pwrite", rest.nbytes, error.errno or 0) from error
            rest, at = rest[written:], at + written

    def get(self, into: memoryview, offset: int) -> None:
        """Fill `into` with bytes that `put` wrote, from `offset` on.

        Safe from several threads at once.
        """
        fd, rest, at = self._open().fileno, into.cast("B"), offset
        while rest.nbytes and (count := os.preadv(fd, [rest], at)):
            rest, at = rest[count:], at + count

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free the memory pages that lie wholly in a range whose bytes are not needed any more.

        If the system refuses, the memory is freed with the slab.
        """
        start, end = round_up(offset), (offset + nbytes) // PAGE * PAGE
        if end > start:
            # Where it is refused the memory stays, and goes with the slab.
            libc.punch(self._open().fileno, start, end - start)

    def seal(self) -> Slab:
        """Make the bytes immutable and return the slab, trimmed to its used size.

        The writer cannot be used afterwards.

        Raises:
            SharedMemoryError: The file is mapped for writing somewhere.
            OutOfMemoryError: The kernel refused to trim or to seal it.
        """
        descriptor = self._open()
        nbytes = round_up(self._end)
        try:
            os.ftruncate(descriptor.fileno, nbytes)
            fcntl.fcntl(descriptor.fileno, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise _not_sealed(error) from error
        self._descriptor = None
        return Slab(descriptor, nbytes)


def _memory_file(nbytes: int) -> OwnedFd:
    try:
        fd = os.memfd_create(SLAB_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _refused("memfd_create", nbytes, error.errno or 0) from error
    descriptor = OwnedFd(fd)
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise _refused("ftruncate", nbytes, error.errno or 0) from error
    return descriptor


def _not_sealed(error: OSError) -> SharedMemoryError:
    if error.errno == errno.EBUSY:
        return SharedMemoryError(
            "the kernel sees a writable mapping of this slab; drop it, then seal again"
        )
    return _refused("sealing", 0, error.errno or 0)
