"""All messages between a client and the memory manager. No I/O.

`codec` refuses unknown fields, unknown messages, wrong types and sizes over the limits. `wire`
sends file descriptors beside the message they belong to. PROTOCOL.md specifies the meaning of each
message and of these terms:

* slab: one block of memory, filled by one client and then sealed
* resident: a tensor in a sealed slab, named by the digest of its bytes
* layer: a record (bytes that only engines understand) and its tensors, found by a key
* put: the right of one client to build some layers
* lease: the right of one client to use one resident
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from tensor_dedup.memory_manager.protocol.limits import (
    MAX_KEYS,
    MAX_PIECES,
    MAX_RECORD_DIGESTS,
    MAX_RELEASES,
    Code,
    Digest,
    Key,
    Message,
    Name,
    Number,
    Record,
    Seconds,
    Size,
    WirePart,
)
from tensor_dedup.memory_manager.protocol.tables import Page, Totals


class PutPiece(WirePart, frozen=True):
    """A tensor that is to be written: its size in bytes, and its digest ("" if unknown)."""

    nbytes: Size
    digest: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")] = ""


class DigestSpan(WirePart, frozen=True):
    """A tensor in a slab: its offset and size in bytes, and its digest."""

    offset: Number
    nbytes: Size
    digest: Digest


class Extent(WirePart, frozen=True):
    """A leased tensor: its place in a slab, its digest, and the number of the lease.

    `slab` is the index of the slab in the reply's list; `offset` and `nbytes` are in bytes.
    """

    slab: Number
    offset: Number
    nbytes: Size
    digest: Digest
    lease: Number


class SlabRef(WirePart, frozen=True):
    """The number of a slab, and its size in bytes.

    The descriptors of the slabs in a reply are sent with it, in the same order.
    """

    slab: Number
    nbytes: Size


class LayerHit(WirePart, frozen=True):
    """A layer that was found: its record, and a lease on each of its tensors."""

    record: Record
    extents: list[Extent]


# What clients say.


class Hello(Message, frozen=True):
    """The first message of a client. `name` is shown by `tensor-dedup status`."""

    name: Name


class Lookup(Message, frozen=True):
    """Ask which of these layers are published, and lease their tensors.

    `checkpoint` is the name under which the manager lists the tensors.
    """

    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    checkpoint: Name = ""


class LookupDigests(Message, frozen=True):
    """Ask which of these digests are resident, and lease those tensors.

    A client that builds layers sends the digests it has computed, and writes only what is missing.
    """

    digests: Annotated[list[Digest], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    checkpoint: Name = ""


class Reserve(Message, frozen=True):
    """Ask for the right to build these layers. The granted ones form one put."""

    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    checkpoint: Name = ""


class Allocate(Message, frozen=True):
    """Ask for the slab (block of memory) of a put, with room for all tensors in `pieces`."""

    put: Number
    pieces: Annotated[list[PutPiece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]


class Progress(Message, frozen=True):
    """Report that the builder of a put is alive and making progress. There is no reply."""

    put: Number


class Seal(Message, frozen=True):
    """Ask to seal and hash a slab that has been written and unmapped.

    The tensors in the slab then become resident. `digests` has the digests of all tensors. It can
    be empty if Allocate had all of them, or if the manager hashes the memory itself.
    """

    put: Number
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_PIECES)] = msgspec.field(
        default_factory=list
    )


class Publish(Message, frozen=True, omit_defaults=True):
    """Make a key lead to a layer record, whose tensors are resident.

    `put` is the number of the put that has reserved the key, or 0 without a reservation. `also` has
    further keys for the record. Further keys that cannot be used are skipped, for example because
    they have a record already.
    """

    put: Number
    key: Key
    record: Record
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_RECORD_DIGESTS)]
    also: Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)] = msgspec.field(
        default_factory=list
    )


class Abandon(Message, frozen=True):
    """Give up a put. The client must have unmapped the slab and closed its descriptor before."""

    put: Number


class Wait(Message, frozen=True):
    """Wait for a layer that another client builds, at most `timeout_s` seconds.

    The wait ends when the layer is published or given up, or its builder is silent for too long.
    """

    key: Key
    timeout_s: Seconds


class Release(Message, frozen=True):
    """Release leases whose tensors are no longer mapped. There is no reply."""

    leases: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_RELEASES)]


class StandBy(Message, frozen=True):
    """Mark leases as held by a sleeping engine or, with `asleep=False`, remove the marks.

    A marked lease still keeps its tensor in memory. The reply says which of the tensors are used by
    an engine that is awake.
    """

    leases: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_RELEASES)]
    asleep: bool = True


class Offer(Message, frozen=True):
    """Offer a sealed slab of a dead manager. Its descriptor is sent with this message."""

    nbytes: Size
    pieces: Annotated[list[DigestSpan], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    checkpoint: Name = ""


class Status(Message, frozen=True):
    """Ask for the manager's totals."""


class Rows(Message, frozen=True):
    """Ask for rows of a table, beginning with row number `start`."""

    table: Literal["clients", "checkpoints", "residents", "builds"]
    start: Number = 0


class Pin(Message, frozen=True):
    """Protect a checkpoint's tensors, or one tensor, from eviction.

    With `pinned=False`, that protection ends. `name` is a checkpoint's name or a tensor's digest.
    """

    name: Name
    pinned: bool = True


class Evict(Message, frozen=True):
    """Free the slabs (blocks of memory) with the tensors of a checkpoint, or of one digest.

    A slab is kept if any tensor in it is in use or pinned and, unless the name is a digest, if
    another checkpoint has a tensor in it.
    """

    name: Name


class Stop(Message, frozen=True):
    """Ask the manager to end."""


Request: TypeAlias = (
    Hello
    | Lookup
    | LookupDigests
    | Reserve
    | Allocate
    | Progress
    | Seal
    | Publish
    | Abandon
    | Wait
    | Release
    | StandBy
    | Offer
    | Status
    | Rows
    | Pin
    | Evict
    | Stop
)

# What the manager answers.


class Welcome(Message, frozen=True):
    """The answer to Hello: a description of the manager.

    * `build_timeout_s`: the seconds for which a builder may be silent.
    * `hashes_itself`: whether the manager hashes what was written. If False, the client must send
      every digest and is trusted.
    * `device`: the UUID of the GPU whose memory is lent, or "" for host memory.
    """

    pid: Number
    session: Number
    backend: Name
    hardware_readonly: bool
    build_timeout_s: float
    hashes_itself: bool = True
    device: Name = ""


class Found(Message, frozen=True):
    """The answer to Lookup for the first `len(layers)` keys. Ask again for the other keys.

    The entry of a key without a published layer is None.
    """

    layers: list[LayerHit | None]
    slabs: list[SlabRef]


class FoundDigests(Message, frozen=True):
    """The answer to LookupDigests for the first `len(extents)` digests.

    Ask again for the other digests. The entry of a digest that is not resident is None.
    """

    extents: list[Extent | None]
    slabs: list[SlabRef]


class Reserved(Message, frozen=True):
    """The answer to Reserve, with one word for each key.

    `put` is the number of the put for the granted keys, or 0 if no key was granted.
    """

    put: Number
    answers: list[Literal["granted", "building", "ready"]]


class Allocated(Message, frozen=True):
    """The answer to Allocate: the slab, and the offset of each tensor in it.

    The slab's descriptor is sent along.
    """

    slab: SlabRef
    offsets: list[Number]


class Sealed(Message, frozen=True):
    """The answer to Seal: the digest of each tensor.

    The tensors are now resident, and are not evicted while the put lasts.
    """

    digests: list[Digest]


class Waited(Message, frozen=True):
    """The answer to Wait. `silent_s` is the time in seconds since the builder's last message."""

    outcome: Literal["ready", "free", "building", "stalled"]
    silent_s: float = 0.0


class StoodBy(Message, frozen=True):
    """The answer to StandBy: for each lease, whether an engine that is awake uses its tensor.

    Any client counts as such an engine if it has a lease that is not marked as asleep, or an
    unfinished put that needs the tensor.
    """

    awake: list[bool]


class Offered(Message, frozen=True):
    """The answer to Offer: the numbers of new leases, one for each of `Offer.pieces` in order."""

    leases: list[Number]


class Done(Message, frozen=True):
    """The answer to requests that return no data: how many items and bytes they affected."""

    count: Number = 0
    nbytes: Number = 0


class Refused(Message, frozen=True):
    """The refusal of a request: `code` for programs, `text` for people."""

    code: Code
    text: Annotated[str, msgspec.Meta(max_length=2048)]


Reply: TypeAlias = (
    Welcome
    | Found
    | FoundDigests
    | Reserved
    | Allocated
    | Sealed
    | Waited
    | StoodBy
    | Offered
    | Done
    | Refused
    | Totals
    | Page
)

# Who must bring a descriptor, and how many. All others bring none.
DESCRIPTORS_OF_REQUEST: Final[dict[type[Message], int]] = {Offer: 1}
WITHOUT_REPLY: Final = (Progress, Release)


def descriptors_of_reply(reply: Reply) -> int:
    """Return how many file descriptors are sent with a reply."""
    if isinstance(reply, Allocated):
        return 1
    return len(reply.slabs) if isinstance(reply, Found | FoundDigests) else 0
