"""The effects: actions that the core asks the server to perform, in the given order.

After a slow job, the server reports the result to the core by the method that the effect names.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from tensor_dedup.memory_manager.protocol.messages import Reply


@dataclass(frozen=True, slots=True)
class Send:
    """Send a reply to a client, with the descriptors of the listed slabs."""

    connection: int
    reply: Reply
    slabs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after sending the replies that are queued for it.

    The core has forgotten the connection already.
    """

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class AllocateSlab:
    """Allocate memory for a slab that `process` has requested; then call `Core.allocated`."""

    slab: int
    nbytes: int
    process: int = 0


@dataclass(frozen=True, slots=True)
class SealAndHash:
    """Seal a slab and hash its tensors; then call `Core.hashed`.

    A piece is the offset, size and digest of a tensor; the digest is "" if the client sent none.
    """

    slab: int
    pieces: tuple[tuple[int, int, str], ...]
    process: int = 0


@dataclass(frozen=True, slots=True)
class ReclaimSlab:
    """Check and hash a slab of an earlier manager; then call `Core.hashed`.

    The slab's descriptor came with the client's message, or was inherited from the earlier manager.
    A piece is the offset, size and digest of a tensor.
    """

    slab: int
    nbytes: int
    pieces: tuple[tuple[int, int, str], ...]
    process: int = 0


@dataclass(frozen=True, slots=True)
class CancelJob:
    """End the job on a slab soon, because its result is not needed.

    The end of the job is still reported to the core.
    """

    slab: int


@dataclass(frozen=True, slots=True)
class FreeSlab:
    """Release the memory of a slab. No job is running on it."""

    slab: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop watching a process that has no connection and no memory counted for it."""

    process: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write an event to the log.

    If `detail` is True, the event is written only if detailed logging is on.
    """

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
