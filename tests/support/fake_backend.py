"""Memory for tests: files of a folder, with a digest that the writer announces.

It has the weak side of a GPU backend: nothing but manners keeps a reader from writing, and the
manager cannot hash. `fail_reserve` and `busy` play what a system may do.
"""

import os
import weakref
from pathlib import Path
from typing import Final

from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Pieces
from tensor_dedup.memory_manager.errors import NoMemoryError, NotSealedError, StillWritableError


class FakeSlab:
    """One file of the folder; its descriptor is closed when nothing refers to this object."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


class FakeBackend:
    """Slabs that are files; sealing takes the right to open them for writing away."""

    capabilities: Final = Capabilities("fake", hardware_readonly=False, hashes_itself=False)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False
        self._count = 0
        self.fail_reserve = False
        self.busy = False

    def reserve(self, nbytes: int) -> FakeSlab:
        """Implement `Backend.__init__`."""
        if self.fail_reserve:
            raise NoMemoryError(f"{nbytes} bytes: the test says that there is none", nbytes=nbytes)
        self._count += 1
        path = self._folder / f"slab-{self._count}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        slab = FakeSlab(fd, nbytes)
        os.ftruncate(fd, nbytes)
        return slab

    def seal(self, memory: Memory) -> None:
        """Implement `Backend.seal`."""
        if self.busy:
            raise StillWritableError("the test says that a writable mapping lives")
        os.fchmod(memory.fileno, 0o400)

    def digests(self, memory: Memory, pieces: Pieces) -> list[str]:
        """What the writer said. NotSealedError where it said nothing."""
        if self._closed:
            raise InterruptedError("the manager is about to end")
        if not all(digest for _, _, digest in pieces):
            raise NotSealedError("this backend does not hash: announce every digest")
        return [digest for _, _, digest in pieces]

    def reclaim(self, fd: int, nbytes: int) -> FakeSlab:
        """Implement `Backend.reclaim`."""
        slab = FakeSlab(fd, nbytes)
        found = os.fstat(fd)
        if found.st_mode & 0o777 != 0o400 or found.st_size != nbytes:
            raise NotSealedError("the descriptor is no sealed file of that size")
        return slab

    def close(self) -> None:
        """Implement `Backend.close`."""
        self._closed = True
