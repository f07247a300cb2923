"""Memory of one GPU of the old kind, for where descriptors of it are not to be had. On request.

cudaIpc handles come from a process with a CUDA context, so a helper has one; this process has none.
Nothing keeps a reader from writing, an address cannot be chosen, and all of it goes when the helper
does, which ends with the manager: `vmm` is better wherever it works.
"""

import errno
import os
import threading
import weakref
from typing import Final

from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Pieces
from tensor_dedup.memory_manager.backends.helper import Helper
from tensor_dedup.memory_manager.backends.vmm import ALIGNMENT, announced
from tensor_dedup.memory_manager.cuda.tickets import write_ticket
from tensor_dedup.memory_manager.errors import NoMemoryError, NotSealedError
from tensor_dedup.memory_manager.protocol.layout import SlabLayout

_UNIT: Final = 2 << 20  # cudaMalloc's own; smaller slabs would cost as much


class IpcSlab:
    """An allocation of the helper's; it is freed when nothing refers to this object."""

    def __init__(self, helper: Helper, number: int, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, _free, helper, number, fd).atexit = False


def _free(helper: Helper, number: int, fd: int) -> None:
    os.close(fd)
    helper.free(number)


class IpcBackend:
    """The `ipc` backend: one GPU. The slab's descriptor is a ticket (`cuda.tickets`)."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._closed = threading.Event()
        self.capabilities: Final = Capabilities(
            "ipc",
            hardware_readonly=False,
            hashes_itself=False,
            zeroed=False,
            outlives=False,
            device=helper.device,
            device_bytes=helper.total,
            layout=SlabLayout(_UNIT, ALIGNMENT),
        )

    def reserve(self, nbytes: int) -> IpcSlab:
        """See Backend."""
        if self._closed.is_set():
            raise InterruptedError(errno.EINTR, "the manager is about to end")
        number, handle = self._helper.allocate(nbytes)
        try:
            return IpcSlab(self._helper, number, write_ticket(handle, nbytes), nbytes)
        except OSError as error:
            self._helper.free(number)
            raise NoMemoryError(f"no descriptor for a ticket: {error.strerror}") from error

    def seal(self, memory: Memory) -> None:
        """See Backend."""

    def digests(self, memory: Memory, pieces: Pieces) -> list[str]:
        """What the writer said. NotSealedError where it said nothing."""
        if self._closed.is_set():
            raise InterruptedError(errno.EINTR, "the manager is about to end")
        return announced(pieces)

    def reclaim(self, fd: int, nbytes: int) -> IpcSlab:
        """Refuse: the memory went with the helper that had it. NotSealedError."""
        os.close(fd)
        raise NotSealedError("memory of the backend `ipc` does not outlive its manager; load again")

    def close(self) -> None:
        """End hashing; the helper, and the memory, go when the last slab and this object have."""
        self._closed.set()
