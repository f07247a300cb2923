"""The interface of a backend, which provides one kind of memory.

A backend provides memory in slabs: blocks that one client fills, and that are then sealed and lent
to others. All backends pass the same tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tensor_dedup.memory_manager.protocol.layout import MEMORY, SlabLayout

# Offset, size and announced digest ("" when not known) of each tensor of a slab.
Pieces = Sequence[tuple[int, int, str]]
# Offset and size.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The properties of a backend.

    * `hardware_readonly`: the hardware refuses writes through a reader's mapping.
    * `hashes_itself`: the manager hashes the bytes. If False, it trusts the digests that the writer
      sends.
    * `seals`: no process can change a sealed slab. If False, every process of the user is trusted
      not to do so.
    * `zeroed`: memory that was never written is zero.
    * `outlives`: a mapping keeps the memory alive after the manager has ended.
    * `device`: the UUID of the GPU, or "" for host memory.
    * `device_bytes`: the size of that GPU's memory in bytes, or 0 for host memory.
    * `layout`: the alignment rules of slabs.
    """

    name: str
    hardware_readonly: bool
    hashes_itself: bool
    seals: bool = False
    zeroed: bool = True
    outlives: bool = True
    device: str = ""
    device_bytes: int = 0
    layout: SlabLayout = MEMORY


class Memory(Protocol):
    """The memory of one slab. It is freed when this object is garbage-collected."""

    @property
    def nbytes(self) -> int:
        """The size in bytes, a multiple of the unit in the backend's `SlabLayout`."""

    @property
    def fileno(self) -> int:
        """The file descriptor that is sent to clients. This object owns and closes it.

        The descriptor refers to the memory itself or, with the `ipc` backend, to a small file that
        holds the CUDA IPC handle of the memory.
        """


class Backend(Protocol):
    """A source of slabs, the blocks of memory that a manager lends. Safe from any thread.

    `commit` and `leaves` can be slow, so they take ranges of a slab. The caller can split the work
    into steps, and serve another client between two steps.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The properties of this backend, which never change."""

    def reserve(self, nbytes: int) -> Memory:
        """Return a new slab of `nbytes` bytes, whose size is fixed.

        Before a range of the slab is written, `commit` must be called for that range.

        Raises:
            NoMemoryError: The system has no memory or no descriptor left.
            BackendError: The memory cannot be provided for another reason.
        """

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Allocate the memory behind a range, so that writes to it cannot fail for lack of memory.

        Raises:
            NoMemoryError: The system has no memory left.
        """

    def seal(self, memory: Memory) -> None:
        """Make the bytes of a slab immutable for every process. Sealing twice has no effect.

        A backend that cannot seal does nothing, and trusts the writer to have unmapped the slab.

        Raises:
            StillWritableError: A writable mapping still exists; the slab is unchanged.
        """

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Return the leaf digests (one for each 2 MiB) of each span of a sealed slab.

        A span is an offset and a size in bytes. The slab is mapped only during the call.

        Raises:
            NoMemoryError: The spans cannot be mapped.
            BackendError: The backend does not hash.
        """

    def reclaim(self, fd: int, nbytes: int) -> Memory:
        """Take over a sealed slab of an earlier manager; `fd` is the slab's descriptor.

        The returned object owns `fd`. If this method raises, the caller still owns `fd`.

        Raises:
            NotSealedError: `fd` is not memory that this backend can take over. A backend that can
                seal also refuses a slab that is not sealed, has holes, or has another size than
                `nbytes`.
        """
