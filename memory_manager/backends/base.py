"""What a backend, the maker of one kind of memory, must be able to do.

Every backend is tested against the same contract.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tensor_dedup.memory_manager.protocol.layout import MEMORY, SlabLayout

# Offset, size and announced digest ("" when not known) of each tensor of a slab.
Pieces = Sequence[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a client may rely on.

    `hardware_readonly`: a reader's mapping cannot be written; the hardware refuses. `seals`: after
    sealing nobody at all, the writer included, can change a byte or map the memory writable.
    Without it the writer's word and manners count, within one uid. `hashes_itself`: `digests` reads
    the bytes; otherwise it returns what the writer announced, which is trusted within one uid.
    `zeroed`: what nobody has written is zero. `outlives`: a mapping keeps the memory, whatever
    becomes of the manager and its end of it. `device`: the GPU's UUID, "" for the machine's memory;
    `device_bytes`: how much it has.
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
    """One slab. It is given back to the system when nothing refers to this object."""

    @property
    def nbytes(self) -> int:
        """Its size: a multiple of the layout's unit."""

    @property
    def fileno(self) -> int:
        """The descriptor that clients are sent. It stays this object's.

        It leads to the memory or, with `ipc`, to a ticket that says how to open it.
        """


class Backend(Protocol):
    """Makes, seals, hashes and takes back slabs. Every method is safe from any thread."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; the same for its whole life."""

    def reserve(self, nbytes: int) -> Memory:
        """Return a slab whose memory exists: writing to it never fails for want of memory.

        Whoever gets its descriptor cannot change its size.

        Raises:
            NoMemoryError: The system has no memory or no descriptor left.
            BackendError: The memory cannot be had for another reason.
        """

    def seal(self, memory: Memory) -> None:
        """Make the bytes immutable, for everybody and for ever; once more does nothing.

        A backend that cannot seal only ends the writing: it believes the writer's word that it has
        unmapped the slab.

        Raises:
            StillWritableError: A writable mapping lives somewhere; the slab is as before.
        """

    def digests(self, memory: Memory, pieces: Pieces) -> list[str]:
        """Return the digests of a sealed slab's tensors; nothing stays mapped.

        Raises:
            NoMemoryError: The slab cannot be mapped.
            NotSealedError: The backend does not hash, and a digest was not announced.
            InterruptedError: The backend has been closed.
        """

    def reclaim(self, fd: int, nbytes: int) -> Memory:
        """Take back a sealed slab of an earlier manager. It owns `fd`, also when it refuses.

        Raises:
            NotSealedError: It is not memory of this kind, or not of that size, or can be changed
                (the last two are known only of a backend that seals).
        """

    def close(self) -> None:
        """Stop hashing at once: `digests` raises InterruptedError from now on."""
