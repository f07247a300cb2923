"""Encoding messages as datagrams, and decoding them. No I/O.

A datagram is `MAGIC`, the version (2 bytes, little-endian) and one msgspec struct in MessagePack.
The version is outside the struct, so that a peer of another version can be told so. Any bytes
decode to a message or raise ProtocolError.
"""

from typing import Final, TypeVar

import msgspec

from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol.limits import MAX_MESSAGE
from tensor_dedup.memory_manager.protocol.messages import Publish, Reply, Request, StandBy
from tensor_dedup.memory_manager.protocol.tables import Totals

MAGIC: Final = b"TD"
# 2: Welcome names the device, and says who hashes; 3: StandBy; 4: Publish has `also`, Totals
# `leaf_shared_bytes`.
VERSION: Final = 4
OLDEST: Final = 2  # what is understood, too: later ones have only added to it
MANY_KEYS_FROM: Final = 4  # in this version Publish may have several keys
_STAND_BY_FROM: Final = 3
HEADER_BYTES: Final = 4

_Struct = TypeVar("_Struct")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply, version: int = VERSION) -> bytes:
    """Return the datagram of a message, in a version that the receiver speaks.

    Raises:
        ProtocolError: It is larger than the receiver accepts, or unknown in that version.
    """
    if version < _STAND_BY_FROM and isinstance(message, StandBy):
        raise ProtocolError(
            f"the memory manager speaks version {version} of the protocol, which cannot say who "
            "sleeps; restart it with this version of tensor-dedup",
            version=version,
        )
    if version < MANY_KEYS_FROM and isinstance(message, Publish) and message.also:
        raise ProtocolError(
            f"version {version} of the protocol publishes one key at a time", version=version
        )
    if version < MANY_KEYS_FROM and isinstance(message, Totals):
        message = msgspec.structs.replace(message, leaf_shared_bytes=0)  # which is not sent
    data = MAGIC + version.to_bytes(2, "little") + _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(
            f"{type(message).__name__}: {len(data)} bytes, limit {MAX_MESSAGE}; send less at once",
            nbytes=len(data),
        )
    return data


def decode_request(data: bytes) -> Request:
    """Return the request in a datagram of any version from `OLDEST` on.

    Raises:
        ProtocolError: It is not a valid request. If the other side has another version, the fact
            `version` names it.
    """
    return _decode(data, _requests)


def decode_reply(data: bytes) -> Reply:
    """Return the reply in a datagram of any version from `OLDEST` on.

    Raises:
        ProtocolError: It is not a valid reply.
    """
    return _decode(data, _replies)


def version_of(data: bytes) -> int:
    """Return the version of a datagram that has been decoded."""
    return int.from_bytes(data[2:HEADER_BYTES], "little")


def _decode(data: bytes, decoder: "msgspec.msgpack.Decoder[_Struct]") -> _Struct:
    _check_header(data)
    try:
        return decoder.decode(memoryview(data)[HEADER_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no message of version {VERSION}: {error}") from error


def _check_header(data: bytes) -> None:
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes, limit {MAX_MESSAGE}")
    if len(data) < HEADER_BYTES or data[:2] != MAGIC:
        raise ProtocolError("this is no message of tensor-dedup")
    version = version_of(data)
    if not OLDEST <= version <= VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the protocol, this one {VERSION}; "
            "install the same version of tensor-dedup for both, and restart the manager",
            version=version,
        )
