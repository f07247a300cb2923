"""What a kind of memory must be able to do. Every backend is tested against the
same contract."""

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
        """A slab whose memory exists already: writing to it never fails for want of memory.

        Its size cannot be changed by who gets the descriptor. NoMemoryError, BackendError.
        """

    def seal(self, memory: Memory) -> None:
        """Make the bytes immutable, for everybody and for ever; a second time does nothing.

        StillWritableError while a writable mapping lives anywhere: the slab is then as before.
        Where it does not seal this only ends the writing: the writer says that it has unmapped.
        """

    def digests(self, memory: Memory, pieces: Pieces) -> list[str]:
        """Hash a sealed slab's tensors; nothing stays mapped. NoMemoryError, InterruptedError."""

    def reclaim(self, fd: int, nbytes: int) -> Memory:
        """Take a sealed slab of an earlier manager; owns `fd` from now on, also when it refuses.

        NotSealedError unless it is memory of this kind, of that size and that nobody can change
        (the last two where it seals: elsewhere nobody can tell).
        """

    def close(self) -> None:
        """Stop hashing at once: `digests` raises InterruptedError from now on."""
