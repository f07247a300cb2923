"""The limits and field types of the protocol, and the base classes of its messages."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

MAX_MESSAGE: Final = 128 << 10  # a Unix socket takes about 200 KiB in one datagram by default
MAX_DESCRIPTORS: Final = 128  # of the 253 that Linux passes in one message
MAX_KEYS: Final = 256
MAX_PIECES: Final = 1024
MAX_RECORD: Final = 32 << 10
MAX_RECORD_DIGESTS: Final = 128  # of one layer: each may lie in a slab of its own
MAX_RELEASES: Final = 4096
MAX_ROWS: Final = 64
MAX_NAME: Final = 128
MAX_NAMES_SHOWN: Final = 3  # of the checkpoints that one tensor belongs to
MAX_WAIT_S: Final = 3600.0
COMMAND: Final = "tensor-dedup command"  # the name of who only looks, or asks for a change

Code: TypeAlias = Literal[
    "protocol",  # no message of this version: the connection is closed
    "version",  # the other side speaks another version: the connection is closed
    "forbidden",  # another user: the connection is closed
    "crowded",  # no descriptors left for another client: the connection is closed
    "limit",  # more puts, leases or records than one client may hold
    "wrong_state",  # not at this point of this put
    "stale_put",  # the put was taken over, or there is none of that number
    "holds_reservation",  # a client that holds a reservation does not wait
    "no_room",  # the budget is full of memory that is in use
    "no_memory",  # the system has no memory or no descriptor left
    "still_writable",  # a writable mapping of the slab lives
    "mismatch",  # bytes are not what was announced
    "not_sealed",  # an offered descriptor is not sealed memory
    "not_resident",  # a record names bytes that are not here, or not leased
    "being_built",  # somebody else holds the reservation of that key
    "stopping",  # the manager is about to end
]

# Printable: keys and names go to logs and terminals.
Key = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,128}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 50))]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
Record = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages. The class name is sent as a tag in the field `t`."""


class WirePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of the structs inside messages, which are encoded as arrays without field names."""
