"""The effects: what the core asks the server to do, in the order given."""

from dataclasses import dataclass, field
from typing import TypeAlias

from tensor_dedup.memory_manager.protocol.messages import Reply


@dataclass(frozen=True, slots=True)
class Send:
    """Send a reply, with the descriptors of these slabs."""

    connection: int
    reply: Reply
    slabs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection, after the replies that were sent before. The core has forgotten it."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class AllocateSlab:
    """Reserve memory for a slab, for this process; then call `allocated`."""

    slab: int
    nbytes: int
    process: int = 0


@dataclass(frozen=True, slots=True)
class SealAndHash:
    """Seal a slab and hash these (offset, nbytes, announced digest or ""); then call `hashed`."""

    slab: int
    pieces: tuple[tuple[int, int, str], ...]
    process: int = 0


@dataclass(frozen=True, slots=True)
class ReclaimSlab:
    """Check the descriptor that came with this message, hash as above; then call `hashed`."""

    slab: int
    nbytes: int
    pieces: tuple[tuple[int, int, str], ...]
    process: int = 0


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Nobody waits for the job on this slab any more: end it soon, then call as if it was done."""

    slab: int


@dataclass(frozen=True, slots=True)
class FreeSlab:
    """Close a slab's descriptor. No backend job is running on it."""

    slab: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop watching this process, to which nothing is charged any more."""

    process: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event to the log; `detail` events only if details are asked for."""

    event: str
    facts: dict[str, object] = field(default_factory=dict)
    detail: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """Stop the manager."""


Effect: TypeAlias = (
    Send
    | Close
    | AllocateSlab
    | SealAndHash
    | ReclaimSlab
    | CancelJob
    | FreeSlab
    | Forget
    | Note
    | End
)
