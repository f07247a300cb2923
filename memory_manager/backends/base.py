"""The interface of a backend, which provides one kind of memory.

The same contract suite tests every backend.
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
    """The guarantees that a client may rely on.

    `hardware_readonly`: the hardware refuses writes through a reader's mapping. `seals`: after
    sealing nobody, the writer included, can change a byte or map the memory writable; without it,
    processes of one uid trust each other not to. `hashes_itself`: `digests` reads the bytes;
    otherwise it returns what the writer announced, which is trusted within one uid. `zeroed`:
    memory that nobody has written to is zero. `outlives`: a mapping keeps the memory even after the
    manager has ended. `device`: the GPU's UUID, "" for the machine's memory; `device_bytes`: the
    size of its memory.
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
    """The memory of one slab, returned to the system with the last reference to this object."""

    @property
    def nbytes(self) -> int:
        """The size in bytes, a multiple of the layout's unit."""

    @property
    def fileno(self) -> int:
        """Return the descriptor that is sent to clients; this object keeps owning it.

        It refers to the memory or, with `ipc`, to a ticket with the handle to open it by.
        """


class Backend(Protocol):
    """A source of slabs, which it makes, seals, hashes and reclaims. Safe from any thread.

    What takes long is done range by range, so that the caller can stop, or do something for
    somebody else, between two of them.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Return its capabilities, which never change."""

    def reserve(self, nbytes: int) -> Memory:
        """Return a slab. Holders of its descriptor cannot change its size.

        Nobody may write to a range of it before `commit`.

        Raises:
            NoMemoryError: The system has no memory or no descriptor left.
            BackendError: The memory cannot be provided for another reason.
        """

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Commit a range: writing to it never fails for want of memory from now on.

        Raises:
            NoMemoryError: The system has no memory left.
        """

    def seal(self, memory: Memory) -> None:
        """Make the bytes immutable for everybody, for good; sealing twice has no effect.

        A backend that cannot seal only ends the writing, and trusts the writer to have unmapped the
        slab.

        Raises:
            StillWritableError: A writable mapping still exists; the slab is unchanged.
        """

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Return the leaf digests of each of these spans of a sealed slab; nothing stays mapped.

        Raises:
            NoMemoryError: The spans cannot be mapped.
            BackendError: The backend does not hash.
        """

    def reclaim(self, fd: int, nbytes: int) -> Memory:
        """Reclaim a sealed slab of an earlier manager. It takes over `fd` unless it raises.

        Closing a descriptor that somebody else has opened can take as long as that process likes:
        where and when to do so is the caller's to say.

        Raises:
            NotSealedError: It is not memory of this kind, has another size, or can be changed; only
                a backend that seals can tell the last two. Or part of it was never written.
        """
