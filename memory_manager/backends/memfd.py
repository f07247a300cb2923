"""A backend for host memory: memory files (`memfd_create`) with seals. Linux only.

After a file is sealed, the kernel refuses every write to it. The manager maps a slab only while it
hashes the slab.
"""

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tensor_dedup import libc
from tensor_dedup.digest import leaf_digests
from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Spans
from tensor_dedup.memory_manager.errors import (
    BackendError,
    NoMemoryError,
    NotSealedError,
    StillWritableError,
)
from tensor_dedup.memory_manager.protocol.layout import PAGE

NAME: Final = "tensor-dedup"
_SIZE_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_ALL_SEALS: Final = _SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x0008  # Linux 6.3; older ones answer EINVAL
_BLOCK: Final = 512  # of st_blocks, whatever the file system's own


class MemfdSlab:
    """A memory file. Its descriptor is closed when this object is garbage-collected."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


class MemfdBackend:
    """The backend for host memory, in sealed memory files."""

    capabilities: Final = Capabilities(
        "memfd", hardware_readonly=True, hashes_itself=True, seals=True
    )

    def reserve(self, nbytes: int) -> MemfdSlab:
        """Return a new memory file of `nbytes` bytes, whose size is sealed.

        Raises:
            NoMemoryError: The system has no memory or no descriptor left.
        """
        with _refusals(nbytes):
            slab = MemfdSlab(_memory_file(), nbytes)
            os.ftruncate(slab.fileno, nbytes)
            fcntl.fcntl(slab.fileno, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        return slab

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range, so that a later write to the range cannot end in SIGBUS.

        Raises:
            NoMemoryError: The system has no memory left.
        """
        with _refusals(memory.nbytes):
            os.posix_fallocate(memory.fileno, offset, nbytes)

    def seal(self, memory: Memory) -> None:
        """Seal a memory file against writes and changes of size, by any process.

        Raises:
            StillWritableError: A writable mapping still exists; the file is not sealed.
        """
        if _seals(memory.fileno) & _ALL_SEALS == _ALL_SEALS:
            return
        try:
            fcntl.fcntl(memory.fileno, fcntl.F_ADD_SEALS, _ALL_SEALS)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise StillWritableError(
                    "a writable mapping of this slab lives; unmap it everywhere, then seal again"
                ) from error
            raise BackendError(f"sealing: {error.strerror}", errno=error.errno) from error

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Return the leaf digests (one for each 2 MiB) of each span of a sealed slab.

        A span is an offset and a size in bytes.

        Raises:
            NoMemoryError: The spans cannot be mapped.
        """
        begin = min(offset for offset, _ in spans) // PAGE * PAGE
        end = max(offset + nbytes for offset, nbytes in spans)
        size = end - begin
        # Private: older kernels refuse a shared mapping of a sealed file, be it to read. And by
        # libc: Python's mmap needs a descriptor more, and there may be none left.
        with _refusals(memory.nbytes):
            address = libc.mmap(0, size, mmap.PROT_READ, mmap.MAP_PRIVATE, memory.fileno, begin)
        try:
            with libc.view(address, size) as view:
                return [_leaves(view, offset - begin, nbytes) for offset, nbytes in spans]
        finally:
            libc.munmap(address, size)

    def reclaim(self, fd: int, nbytes: int) -> MemfdSlab:
        """Return the slab of an earlier manager that `fd` refers to, and take ownership of `fd`.

        If this method raises, the caller still owns `fd`.

        Raises:
            NotSealedError: `fd` is not a sealed memory file of tensor-dedup, has another size than
                `nbytes`, or has holes.
        """
        # The seals first: to ask another file system for anything may take as long as it likes.
        if _seals(fd) & _ALL_SEALS != _ALL_SEALS or not _is_ours(fd):
            raise NotSealedError("the descriptor is no sealed memory file of tensor-dedup")
        found = os.fstat(fd)
        if found.st_size != nbytes or nbytes % PAGE:
            raise NotSealedError(f"the memory file has {found.st_size} bytes, {nbytes} were said")
        if (there := found.st_blocks * _BLOCK) < nbytes:
            # Reading a hole makes pages: somebody who brings no memory would be lent the manager's.
            raise NotSealedError(
                f"the memory file has holes, {there} of its {nbytes} bytes are there; a slab of a "
                "manager has none"
            )
        return MemfdSlab(fd, nbytes)


def _leaves(view: memoryview, start: int, nbytes: int) -> list[bytes]:
    with view[start : start + nbytes] as piece:
        return leaf_digests(piece)


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(NAME, flags)


def _seals(fd: int) -> int:
    try:
        return int(fcntl.fcntl(fd, fcntl.F_GET_SEALS))
    except OSError:
        return 0  # no memory file


def _is_ours(fd: int) -> bool:
    # The name is for people and for accounting (the PSS of mappings of that name), no proof.
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{NAME}")
    except OSError:
        return False


@contextmanager
def _refusals(nbytes: int) -> Iterator[None]:
    """Raise the system's refusals as NoMemoryError."""
    try:
        yield
    except InterruptedError:
        raise
    except OSError as error:
        raise NoMemoryError(
            f"{nbytes} bytes of shared memory: {error.strerror}; free memory, or raise what limits "
            "the manager (ulimit -n, its container's memory, sysctl vm.max_map_count)",
            nbytes=nbytes,
            errno=error.errno,
        ) from error
