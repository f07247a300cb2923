"""Every message between a client and the manager. No I/O.

`codec` refuses unknown fields and tags, wrong types and sizes over the limits. `wire` sends
descriptors beside the message they belong to. PROTOCOL.md specifies what the messages mean.
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
    """A tensor of a slab to be written. `digest` announces its digest, "" if it is unknown."""

    nbytes: Size
    digest: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")] = ""


class DigestSpan(WirePart, frozen=True):
    """A tensor in a slab: `nbytes` from `offset` have this digest."""

    offset: Number
    nbytes: Size
    digest: Digest


class Extent(WirePart, frozen=True):
    """A leased tensor: bytes `offset` to `offset + nbytes` of the reply's slab number `slab`."""

    slab: Number
    offset: Number
    nbytes: Size
    digest: Digest
    lease: Number


class SlabRef(WirePart, frozen=True):
    """A slab whose descriptor travels with the reply, at the same position."""

    slab: Number
    nbytes: Size


class LayerHit(WirePart, frozen=True):
    """A layer record, and a lease on each tensor it names."""

    record: Record
    extents: list[Extent]


# What clients say.


class Hello(Message, frozen=True):
    """The first message. `name` tells people which program, model and rank this is."""

    name: Name


class Lookup(Message, frozen=True):
    """Ask which of these layers are published, and lease the tensors of their records."""

    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    checkpoint: Name = ""


class LookupDigests(Message, frozen=True):
    """Ask which tensors with these digests are resident, and lease them.

    A writer also sends the digests that it has computed.
    """

    digests: Annotated[list[Digest], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    checkpoint: Name = ""


class Reserve(Message, frozen=True):
    """Ask to build these layers. The granted ones form one put."""

    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    checkpoint: Name = ""


class Allocate(Message, frozen=True):
    """Ask for the slab of a put: one for all its tensors, written by this client only."""

    put: Number
    pieces: Annotated[list[PutPiece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]


class Progress(Message, frozen=True):
    """Report that the builder of a put is alive and making progress. Has no reply."""

    put: Number


class Seal(Message, frozen=True):
    """Ask to seal and hash a slab that is written and unmapped, and make it resident.

    `digests`: of the pieces, all of them, where they became known while writing.
    """

    put: Number
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_PIECES)] = msgspec.field(
        default_factory=list
    )


class Publish(Message, frozen=True, omit_defaults=True):
    """Publish a layer record. With `put` 0, republish one when nobody builds that layer.

    `also`: further keys that lead to the record, which nobody has reserved.
    """

    put: Number
    key: Key
    record: Record
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_RECORD_DIGESTS)]
    also: Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)] = msgspec.field(
        default_factory=list
    )


class Abandon(Message, frozen=True):
    """Give up a put. Its memory is unmapped and its descriptor closed when this is sent."""

    put: Number


class Wait(Message, frozen=True):
    """Wait until a layer is published, given up, or its builder has been silent for too long."""

    key: Key
    timeout_s: Seconds


class Release(Message, frozen=True):
    """Release leases whose mappings are gone. Has no reply."""

    leases: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_RELEASES)]


class StandBy(Message, frozen=True):
    """Tell whether an engine that sleeps holds these leases, and ask who else uses their tensors.

    A lease keeps its tensor either way.
    """

    leases: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_RELEASES)]
    asleep: bool = True


class Offer(Message, frozen=True):
    """Offer a sealed slab of a dead manager; its descriptor travels with this message."""

    nbytes: Size
    pieces: Annotated[list[DigestSpan], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    checkpoint: Name = ""


class Status(Message, frozen=True):
    """Ask for the totals."""


class Rows(Message, frozen=True):
    """Ask for a page of a table, from row `start`."""

    table: Literal["clients", "checkpoints", "residents", "builds"]
    start: Number = 0


class Pin(Message, frozen=True):
    """Keep a checkpoint's tensors, by its name, or one tensor, by its digest."""

    name: Name
    pinned: bool = True


class Evict(Message, frozen=True):
    """Evict the residents of a checkpoint or a digest, unless they are in use."""

    name: Name


class Stop(Message, frozen=True):
    """End the manager."""


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
    """The answer to Hello. `build_timeout_s`: how long a builder may be silent, in seconds.

    `hashes_itself`: digests are the manager's word; else every digest must be announced, and is the
    writer's. `device`: the UUID of the GPU whose memory this is, "" for the machine's memory.
    """

    pid: Number
    session: Number
    backend: Name
    hardware_readonly: bool
    build_timeout_s: float
    hashes_itself: bool = True
    device: Name = ""


class Found(Message, frozen=True):
    """The answer to Lookup: the first `len(layers)` of the keys; ask again for the others."""

    layers: list[LayerHit | None]
    slabs: list[SlabRef]


class FoundDigests(Message, frozen=True):
    """The answer to LookupDigests: the first `len(extents)` of the digests."""

    extents: list[Extent | None]
    slabs: list[SlabRef]


class Reserved(Message, frozen=True):
    """The answer to Reserve, key by key; `put` is 0 if nothing was granted."""

    put: Number
    answers: list[Literal["granted", "building", "ready"]]


class Allocated(Message, frozen=True):
    """The answer to Allocate: the offset of each piece in the slab whose descriptor comes along."""

    slab: SlabRef
    offsets: list[Number]


class Sealed(Message, frozen=True):
    """The answer to Seal: the digest of each piece. All are resident and held by the put."""

    digests: list[Digest]


class Waited(Message, frozen=True):
    """The answer to Wait. `silent_s`: seconds since the builder's last message."""

    outcome: Literal["ready", "free", "building", "stalled"]
    silent_s: float = 0.0


class StoodBy(Message, frozen=True):
    """The answer to StandBy: of each lease's tensor, whether somebody who is awake holds it."""

    awake: list[bool]


class Offered(Message, frozen=True):
    """The answer to Offer: a lease for each piece, 0 for those that were not accepted."""

    leases: list[Number]


class Done(Message, frozen=True):
    """The answer to a request without data to return. `count` and `nbytes` were affected."""

    count: Number = 0
    nbytes: Number = 0


class Refused(Message, frozen=True):
    """The request was refused, for a reason that programs can compare and people can read."""

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
    """Return the number of descriptors that come with a reply."""
    if isinstance(reply, Allocated):
        return 1
    return len(reply.slabs) if isinstance(reply, Found | FoundDigests) else 0
