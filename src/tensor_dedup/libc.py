"""Memory and file calls of libc that Python lacks, or whose Python versions are unsuitable here.

Python's mmap duplicates the descriptor, and its close() unmaps memory that tensors still use.
"""

import ctypes
import mmap as _mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

MAPS: Final = Path("/proc/self/maps")
_MAX_MAPPINGS: Final = Path("/proc/sys/vm/max_map_count")
_DEFAULT_MAX_MAPPINGS: Final = 65_530
PROT_NONE: Final = 0
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MAP_FIXED_NOREPLACE: Final = 0x100000  # before Linux 4.17 a hint: ask where it lies
MADV_DONTFORK: Final = 10
_PUNCH_HOLE: Final = 0x03  # and keep the size
_MREMAP_OVER: Final = 1 | 2  # MREMAP_MAYMOVE and MREMAP_FIXED
_FAILED: Final = ctypes.c_void_p(-1).value
_OWN: Final = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS
_WRITABLE: Final = _mmap.PROT_READ | _mmap.PROT_WRITE

_size, _int, _address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _address
_libc.mmap.argtypes = [_address, _size, _int, _int, _int, ctypes.c_long]
_libc.mremap.restype = _address
_libc.mremap.argtypes = [_address, _size, _size, _int, _address]
_libc.munmap.argtypes = [_address, _size]
_libc.madvise.argtypes = [_address, _size, _int]
_libc.mprotect.argtypes = [_address, _size, _int]
_libc.memcmp.argtypes = [_address, _address, _size]
_libc.fstatfs.argtypes = [_int, _address]
_libc.fallocate.argtypes = [_int, _int, ctypes.c_long, ctypes.c_long]
_libc.ioctl.argtypes = [_int, ctypes.c_ulong, _address]
_EXT4: Final = 0xEF53
# linux/fs.h and linux/fiemap.h
_FIDEDUPERANGE: Final = 0xC0189436
_FS_IOC_FIEMAP: Final = 0xC020660B
_DIFFERS: Final = 1  # FILE_DEDUPE_RANGE_DIFFERS
_FIEMAP_SYNC: Final = 1
_LAST_EXTENT: Final = 1
# FIEMAP_EXTENT_UNKNOWN, DELALLOC, DATA_INLINE, DATA_TAIL and UNWRITTEN: no bytes in a place of
# their own.
_NO_PLACE: Final = 0x2 | 0x4 | 0x200 | 0x400 | 0x800
_EXTENTS_AT_ONCE: Final = 256
_WHOLE_FILE: Final = (1 << 64) - 1
_CACHESTAT: Final = 451  # on every architecture; Linux 6.5 and later
_SYNC_RANGE_WRITE: Final = 2
_sync_range: Final = getattr(_libc, "sync_file_range", None)
if _sync_range is not None:
    _sync_range.argtypes = [_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class MappingLine(NamedTuple):
    """A memory mapping of this process, from address `start` to address `end`.

    `line` is the rest of its line in /proc/self/maps: permissions, offset, device, inode and path.
    """

    start: int
    end: int
    line: str


class DiskExtent(NamedTuple):
    """A part of a file that lies in one piece on the disk: `nbytes` from the offset `start`.

    `place` is where it lies there, in bytes. Extents of two files of one file system with the same
    place are the same space.
    """

    start: int
    nbytes: int
    place: int


class _DedupeRange(ctypes.Structure):
    """A struct file_dedupe_range with one struct file_dedupe_range_info."""

    _fields_ = (
        ("source_start", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("targets", ctypes.c_uint16),
        ("reserved_1", ctypes.c_uint16),
        ("reserved_2", ctypes.c_uint32),
        ("target", ctypes.c_int64),
        ("target_start", ctypes.c_uint64),
        ("deduped", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("reserved_3", ctypes.c_uint32),
    )


class _FileExtent(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("reserved_1", ctypes.c_uint64 * 2),
        ("flags", ctypes.c_uint32),
        ("reserved_2", ctypes.c_uint32 * 3),
    )


class _FileMap(ctypes.Structure):
    """A struct fiemap."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("mapped", ctypes.c_uint32),
        ("room", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("extents", _FileExtent * _EXTENTS_AT_ONCE),
    )


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _names = ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    _fields_ = tuple((name, ctypes.c_uint64) for name in _names)


def mmap(at: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map memory as mmap(2) does, and return its address.

    With `at` 0, the kernel chooses the address.

    Raises:
        OSError: The kernel refuses.
    """
    found = _libc.mmap(at or None, nbytes, protection, flags, fd, offset)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def view(address: int, nbytes: int) -> memoryview:
    """Return a view of the `nbytes` bytes (at least 1) at `address`.

    The view does not keep the memory alive, and writing through it to memory that is mapped
    read-only ends the process.
    """
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def munmap(address: int, nbytes: int) -> None:
    """Unmap `nbytes` bytes of memory at `address`. The range must not be used afterwards."""
    _libc.munmap(address, nbytes)


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel on the use of a range of memory; `advice` is one of the MADV constants.

    A refusal of the kernel is ignored.
    """
    _libc.madvise(address, nbytes, advice)


def mprotect(address: int, nbytes: int, protection: int) -> None:
    """Set the access protection of a range of memory; `protection` combines PROT constants.

    A refusal of the kernel is ignored.
    """
    _libc.mprotect(address, nbytes, protection)


def equal(first: int, second: int, nbytes: int) -> bool:
    """Return whether the `nbytes` bytes at the addresses `first` and `second` are equal.

    Other threads of Python can run during the call.
    """
    return not _libc.memcmp(first, second, nbytes)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Free the disk space of a range of a file. The range then reads as zeros.

    If the file system cannot do this, the file stays unchanged.
    """
    _libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes)


def is_ext4(fd: int) -> bool:
    """Return whether an open file is on ext4 (or ext2 or ext3)."""
    status = (ctypes.c_long * 64)()  # more than a struct statfs, which begins with the type
    return not _libc.fstatfs(fd, status) and status[0] == _EXT4


def grow(fd: int, size: int) -> None:
    """Extend a file to at least `size` bytes and reserve disk space for them, if possible.

    Errors are ignored.
    """
    _libc.fallocate(fd, 0, 0, size)


def begin_writing(fd: int, start: int, nbytes: int) -> None:
    """Start writing a range of a file to disk without waiting, if the kernel supports it."""
    if _sync_range is not None:
        _sync_range(fd, start, nbytes, _SYNC_RANGE_WRITE)


def dedupe(source: int, target: int, start: int, nbytes: int) -> int | None:
    """Make a range of the file `target` share the disk space of the same range of `source`.

    The kernel locks and compares the two ranges itself, and writes nothing. Return how many bytes
    from `start` are shared now, which may be fewer than `nbytes`, or None if the ranges differ.
    `start` and `nbytes` are multiples of the file system's block, but the last block of two files
    of one size may be short.

    Raises:
        OSError: The file system cannot do this, or not for these two files.
    """
    order = _DedupeRange(source_start=start, nbytes=nbytes, targets=1)
    order.target, order.target_start = target, start
    if _libc.ioctl(source, _FIDEDUPERANGE, ctypes.byref(order)):
        raise _error()
    if order.status < 0:
        raise OSError(-order.status, os.strerror(-order.status))
    return None if order.status == _DIFFERS else min(nbytes, int(order.deduped))


def extents(fd: int) -> Iterator[DiskExtent]:
    """Yield where a file lies on the disk, in order. Parts without a place there are left out.

    Raises:
        OSError: The file system does not tell.
    """
    found = _FileMap(nbytes=_WHOLE_FILE, flags=_FIEMAP_SYNC, room=_EXTENTS_AT_ONCE)
    last = False
    while not last:
        found.nbytes = _WHOLE_FILE - found.start
        if _libc.ioctl(fd, _FS_IOC_FIEMAP, ctypes.byref(found)):
            raise _error()
        part = found.extents[: found.mapped]
        for each in part:
            if not each.flags & _NO_PLACE:
                yield DiskExtent(each.start, each.nbytes, each.place)
        last = not part or bool(part[-1].flags & _LAST_EXTENT)
        found.start = 0 if not part else part[-1].start + part[-1].nbytes


def cached_bytes(fd: int, start: int, nbytes: int) -> int | None:
    """Return how many bytes of a range of a file are in the page cache, or None if unknown."""
    pages, wanted = _Pages(), _Range(start, nbytes)
    failed = _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(pages), 0)
    return None if failed else min(nbytes, int(pages.cached) * _mmap.PAGESIZE)


def mappings() -> Iterator[MappingLine]:
    """Yield all memory mappings of this process, in order of address.

    Raises:
        OSError: The kernel does not list them.
    """
    lines = MAPS.read_text(errors="surrogateescape").splitlines()
    return map(_mapping, lines)


def _mapping(line: str) -> MappingLine:
    addresses, _, rest = line.partition(" ")
    start, _, end = addresses.partition("-")
    return MappingLine(int(start, 16), int(end, 16), rest)


def count_mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the kernel does not tell."""
    try:
        return MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def max_mappings() -> int:
    """Return how many mappings a process may have, or the usual limit if it cannot be read."""
    try:
        return int(_MAX_MAPPINGS.read_text())
    except (OSError, ValueError):
        return _DEFAULT_MAX_MAPPINGS


def own_memory(nbytes: int, at: int = 0) -> int:
    """Map `nbytes` bytes of zeroed private memory and return their address.

    If `at` is given, the memory is mapped at this address.

    Raises:
        OSError: The kernel refuses, or something is already mapped at `at`.
    """
    found = mmap(at, nbytes, _WRITABLE, _OWN | (MAP_FIXED_NOREPLACE if at else 0))
    if at and found != at:
        munmap(found, nbytes)  # an old kernel, which takes the flag for a hint
        raise FileExistsError(f"something lies at {at:#x}")
    return found


def move_over(source: int, target: int, nbytes: int, name: str) -> None:
    """Move the mapping at `source` over the mapping at `target`.

    A thread that reads `target` meanwhile gets the old or the new contents. `name` is the name of
    the file that is mapped at `target`.

    If the kernel has too little memory, it can leave nothing mapped at `target`. A copy of the new
    contents is then mapped there. A read before that gets SIGSEGV. If the copy fails too, the
    process is aborted.

    Raises:
        OSError: The move failed, and both mappings are unchanged.
    """
    try:
        _mremap(source, target, nbytes)
    except OSError:
        if not _fill(source, target, nbytes, name):
            raise


def _mremap(source: int, target: int, nbytes: int) -> None:
    if _libc.mremap(source, nbytes, nbytes, _MREMAP_OVER, target) == _FAILED:
        raise _error()


def _fill(source: int, target: int, nbytes: int, name: str) -> bool:
    """Put a copy where the kernel has left nothing; False: the mapping is there.

    mremap(2) takes away what lay there, and then fails when it gets no memory for its tables, as in
    a container at its limit. Who reads in between ends by SIGSEGV, as everybody would without this.
    """
    try:
        own_memory(nbytes, target)
    except OSError as error:
        if isinstance(error, FileExistsError) and _may_be_mapped_at(target, name):
            return False
        # Whoever has the address would find nothing, or what another thread has put there since.
        os.write(2, b"tensor-dedup: no memory left to make tensors private; ending the process\n")
        os.abort()
    ctypes.memmove(target, source, nbytes)
    munmap(source, nbytes)
    return True


def _may_be_mapped_at(address: int, name: str) -> bool:
    """Is what lies there of a file with that name? True where the kernel does not tell."""
    try:
        return any(each.start <= address < each.end and name in each.line for each in mappings())
    except OSError:
        return True


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
