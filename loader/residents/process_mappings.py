"""Query the kernel for the memory mappings of this process, one address at a time.

Since Linux 6.11, a single address can be queried (PROCMAP_QUERY). On older kernels, all mappings
are listed. A process that has loaded a model has thousands of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tensor_dedup import libc
from tensor_dedup.loader.residents.param_data import param_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MEMORY_FILE: Final = "/memfd:"


class FileMapping(NamedTuple):
    """A memory mapping: its address range, the mapped file, and the offset in the file.

    `device` (as the kernel writes it, "fe:00") and `inode` identify the file; another file may lie
    at `path` by now. `common` is True if this mapping is shared and writable.
    """

    start: int
    end: int
    offset: int = 0
    device: str = ""
    inode: int = 0
    path: str = ""
    common: bool = False

    @property
    def is_file(self) -> bool:
        """Whether this is a private mapping of a file on a file system (not of a memfd)."""
        return bool(self.inode) and not self.common and not self.path.startswith(_MEMORY_FILE)


class ProcessMappings:
    """A cache of this process's mappings, each of which is queried once. For one thread.

    If /proc cannot be read, no mapping is found.
    """

    def __init__(self) -> None:
        self._kernel = _Kernel.open()
        self._found = _Ordered(() if self._kernel is not None else _listed())

    def file(self, tensor: torch.Tensor) -> FileMapping | None:
        """Return the private mapping of a file in which the memory of `tensor` begins, or None."""
        found = self._around(tensor)
        return found if found is not None and found.is_file else None

    def is_common(self, tensor: torch.Tensor) -> bool:
        """Return whether other processes can write to the memory in which `tensor` begins."""
        found = self._around(tensor)
        return found is not None and found.common

    def _around(self, tensor: torch.Tensor) -> FileMapping | None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
            return None
        address = param_data(tensor).data_ptr()
        found = self._found.at(address)
        if found is None and self._kernel is not None:
            found = self._kernel.mapping(address)
            if found is not None:
                self._found.add(found)
        return found


class _Ordered:
    """Mappings that do not overlap, sorted by address."""

    def __init__(self, mappings: Iterable[FileMapping]) -> None:
        self._mappings = sorted(mappings)
        self._starts = [each.start for each in self._mappings]

    def at(self, address: int) -> FileMapping | None:
        index = bisect_right(self._starts, address) - 1
        found = self._mappings[index] if index >= 0 else None
        return found if found is not None and address < found.end else None

    def add(self, mapping: FileMapping) -> None:
        index = bisect_right(self._starts, mapping.start)
        self._starts.insert(index, mapping.start)
        self._mappings.insert(index, mapping)


class _Query(ctypes.Structure):
    """The `struct procmap_query` of linux/fs.h."""

    _fields_ = (
        ("size", ctypes.c_uint64),
        ("query_flags", ctypes.c_uint64),
        ("query_addr", ctypes.c_uint64),
        ("vma_start", ctypes.c_uint64),
        ("vma_end", ctypes.c_uint64),
        ("vma_flags", ctypes.c_uint64),
        ("vma_page_size", ctypes.c_uint64),
        ("vma_offset", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("vma_name_size", ctypes.c_uint32),
        ("build_id_size", ctypes.c_uint32),
        ("vma_name_addr", ctypes.c_uint64),
        ("build_id_addr", ctypes.c_uint64),
    )


# _IOWR('f', 17, struct procmap_query)
_PROCMAP_QUERY: Final = 3 << 30 | ctypes.sizeof(_Query) << 16 | ord("f") << 8 | 17
_WRITABLE: Final = 0x02
_SHARED: Final = 0x08
_NAME_BYTES: Final = 4096


class _Kernel:
    """An open /proc/self/maps that answers queries."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self._name = ctypes.create_string_buffer(_NAME_BYTES)

    @classmethod
    def open(cls) -> _Kernel | None:
        """Open the file, or return None if the kernel is too old or hides the answers."""
        try:
            found = cls(os.open(libc.MAPS, os.O_RDONLY | os.O_CLOEXEC))
            found.mapping(ctypes.addressof(found._name))
        except OSError:
            return None
        return found

    def mapping(self, address: int) -> FileMapping | None:
        """Return the mapping at an address, or None.

        Raises:
            OSError: The kernel gives no answer.
        """
        query = _Query(
            size=ctypes.sizeof(_Query),
            query_addr=address,
            vma_name_size=_NAME_BYTES,
            vma_name_addr=ctypes.addressof(self._name),
        )
        try:
            fcntl.ioctl(self._fd, _PROCMAP_QUERY, query)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if error.errno != errno.ENAMETOOLONG:
                raise
            query.vma_name_size = query.vma_name_addr = 0
            fcntl.ioctl(self._fd, _PROCMAP_QUERY, query)
        path = self._name.raw[: max(query.vma_name_size - 1, 0)]
        return FileMapping(
            query.vma_start,
            query.vma_end,
            query.vma_offset,
            f"{query.dev_major:02x}:{query.dev_minor:02x}",
            query.inode,
            os.fsdecode(path),
            bool(query.vma_flags & _SHARED and query.vma_flags & _WRITABLE),
        )


def _listed() -> Iterator[FileMapping]:
    """Yield every mapping except private ones of memory files; nothing if /proc cannot be read."""
    try:
        every = libc.mappings()
    except OSError:
        return
    for start, end, line in every:
        # Residents are thousands of lines that say nothing here.
        if _MEMORY_FILE in line and line[3] == "p":
            continue
        allowed, offset, device, inode, *path = line.split(maxsplit=4)
        common = allowed.endswith("s") and "w" in allowed
        yield FileMapping(start, end, int(offset, 16), device, int(inode), "".join(path), common)
