"""Encode messages as datagrams, and decode them. No I/O.

A datagram is `MAGIC`, the version (2 bytes, little-endian) and one msgspec struct in MessagePack.
The version comes before the struct, so that it can be read even if the rest has changed. Any bytes
either decode to a message or raise ProtocolError.
"""

from typing import Final, TypeVar

import msgspec

from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol.limits import MAX_MESSAGE
from tensor_dedup.memory_manager.protocol.messages import Reply, Request

MAGIC: Final = b"TM"
VERSION: Final = 1
HEADER_BYTES: Final = 4

_Struct = TypeVar("_Struct")
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Encode a message as a datagram.

    Raises:
        ProtocolError: The datagram would be larger than the receiver accepts.
    """
    data = MAGIC + VERSION.to_bytes(2, "little") + _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(
            f"{type(message).__name__}: {len(data)} bytes, limit {MAX_MESSAGE}; send less at once",
            nbytes=len(data),
        )
    return data


def decode_request(data: bytes) -> Request:
    """Decode the request in a datagram.

    Raises:
        ProtocolError: The datagram is not a valid request. If the other side has another version,
            the error's `facts` have that version as `version`.
    """
    return _decode(data, _requests)


def decode_reply(data: bytes) -> Reply:
    """Decode the reply in a datagram.

    Raises:
        ProtocolError: The datagram is not a valid reply.
    """
    return _decode(data, _replies)


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
        raise ProtocolError(
            f"the other side does not speak this protocol (its message begins with {data[:4]!r}); "
            "install the same version of tensor-dedup for both, and restart the manager"
        )
    version = int.from_bytes(data[2:HEADER_BYTES], "little")
    if version != VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the protocol, this one {VERSION}; "
            "install the same version of tensor-dedup for both, and restart the manager",
            version=version,
        )
