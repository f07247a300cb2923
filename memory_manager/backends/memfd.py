"""Sealed memory files: after sealing, the kernel itself refuses every write. Linux only.

The manager maps a slab only while it hashes it, so the bytes are charged once, wherever they are
read.
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests
from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Pieces
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
_CHUNK: Final = 16 * LEAF_BYTES  # about 10 ms of hashing: how long closing may have to wait

_FILL: Final = 256 << 20  # 0.1 s


class MemfdSlab:
    """A memory file, whose descriptor is closed with the last reference to this object."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


class MemfdBackend:
    """The `memfd` backend. It hashes on its own threads, one for each available CPU."""

    capabilities: Final = Capabilities(
        "memfd", hardware_readonly=True, hashes_itself=True, seals=True
    )

    def __init__(self) -> None:
        threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(threads, "tensor-dedup-hash")
        self._closed = threading.Event()

    def reserve(self, nbytes: int) -> MemfdSlab:
        """Implement `Backend.reserve`."""
        with _refusals(nbytes):
            slab = MemfdSlab(_memory_file(), nbytes)
            os.ftruncate(slab.fileno, nbytes)
            self._fill(slab)
            fcntl.fcntl(slab.fileno, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        return slab

    def _fill(self, slab: MemfdSlab) -> None:
        """Have the pages made now, or a writer would meet SIGBUS when memory is short."""
        for start in range(0, slab.nbytes, _FILL):
            if self._closed.is_set():
                raise InterruptedError(errno.EINTR, "the manager is about to end")
            os.posix_fallocate(slab.fileno, start, min(_FILL, slab.nbytes - start))

    def seal(self, memory: Memory) -> None:
        """Implement `Backend.seal`."""
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

    def digests(self, memory: Memory, pieces: Pieces) -> list[str]:
        """Implement `Backend.digests`."""
        with _refusals(memory.nbytes), _mapped(memory) as view:
            jobs = [self._submit(view, offset, nbytes) for offset, nbytes, _ in pieces]
            # All of them, also after a failure: the mapping must not go under a thread's feet.
            done = [[future.exception() or future.result() for future in job] for job in jobs]
        leaves = [[leaf for part in parts for leaf in _leaves(part)] for parts in done]
        return [combine(nbytes, each) for (_, nbytes, _), each in zip(pieces, leaves, strict=True)]

    def _submit(
        self, view: memoryview, offset: int, nbytes: int
    ) -> "list[Future[list[bytes] | None]]":
        return [
            self._pool.submit(self._hash, view, offset + start, min(_CHUNK, nbytes - start))
            for start in range(0, nbytes, _CHUNK)
        ]

    def _hash(self, view: memoryview, start: int, nbytes: int) -> list[bytes] | None:
        if self._closed.is_set():
            return None
        with view[start : start + nbytes] as piece:
            return leaf_digests(piece)

    def reclaim(self, fd: int, nbytes: int) -> MemfdSlab:
        """Implement `Backend.reclaim`."""
        slab = MemfdSlab(fd, nbytes)
        if not _is_ours(fd) or _seals(fd) & _ALL_SEALS != _ALL_SEALS:
            raise NotSealedError("the descriptor is no sealed memory file of tensor-dedup")
        size = os.fstat(fd).st_size
        if size != nbytes or nbytes % PAGE:
            raise NotSealedError(f"the memory file has {size} bytes, {nbytes} were said")
        return slab

    def close(self) -> None:
        """Implement `Backend.close`."""
        # The threads stay for the jobs that are being ended; they go with this object.
        self._closed.set()


def _leaves(part: object) -> list[bytes]:
    if isinstance(part, BaseException):
        raise part
    if part is None:
        raise InterruptedError(errno.EINTR, "the manager is about to end")
    return part if isinstance(part, list) else []


@contextmanager
def _mapped(memory: Memory) -> Iterator[memoryview]:
    # Private: older kernels refuse a shared mapping of a sealed file, be it to read.
    with (
        mmap.mmap(
            memory.fileno, memory.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
        ) as mapping,
        memoryview(mapping) as view,
    ):
        yield view


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
