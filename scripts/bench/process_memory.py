"""What memory a process has: by the kernel's account, and by the allocator's."""

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from tensor_dedup import UnsupportedError

_libc: Final = ctypes.CDLL("libc.so.6", use_errno=True)
_FIRST = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in (*_FIRST, "uordblks", "fordblks", "keepcost")
    )


_libc.mallinfo2.restype = _MallInfo
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def settle() -> None:
    """Drop garbage, then trim."""
    gc.collect()
    trim()


def trim() -> None:
    """Give what the allocator keeps free back to the kernel."""
    _libc.malloc_trim(0)


def pss() -> int:
    """Bytes resident in this process; a page mapped twice counts once. Settle first."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise UnsupportedError("smaps_rollup has no line Pss; run this on Linux 4.14 or later")


def allocated() -> int:
    """Bytes malloc has lent (mallinfo2, all arenas) and those of slabs (files). Settle first."""
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + _slab_bytes()


def _slab_bytes() -> int:
    """Bytes of the sealed memory files that this process has open, asked of the kernel."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:tensor-dedup"):
                total += entry.stat().st_blocks * 512
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return total


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read a byte of every page of tensors: what is mapped has read nothing before."""
    for tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size()
        flat = torch.empty(0, dtype=torch.uint8)
        flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
        flat[:: mmap.PAGESIZE].sum()


def drop_pages(path: Path) -> None:
    """Take a file's pages out of the page cache. UnsupportedError when some stay."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        left = _cached_pages(fd, size)
    finally:
        os.close(fd)
    if left * mmap.PAGESIZE > size // 100:
        raise UnsupportedError(
            f"{path}: {left} pages stay in the page cache, so no load of it is cold; "
            "close what maps it, or use a file system that drops pages when told to"
        )


def read_pages(path: Path) -> None:
    """Bring a file's pages into the page cache."""
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _cached_pages(fd: int, size: int) -> int:
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise UnsupportedError(f"mmap: {os.strerror(ctypes.get_errno())}")
    try:
        flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        _libc.mincore(address, size, flags)
        return sum(byte & 1 for byte in flags.raw)
    finally:
        _libc.munmap(address, size)
