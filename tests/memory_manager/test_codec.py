"""Any bytes are a message or one typed error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_dedup.memory_manager.errors import ProtocolError
from tensor_dedup.memory_manager.protocol import codec
from tensor_dedup.memory_manager.protocol.limits import (
    MAX_KEYS,
    MAX_MESSAGE,
    MAX_NAME,
    MAX_PIECES,
    MAX_RECORD,
    MAX_RECORD_DIGESTS,
    MAX_RELEASES,
)
from tensor_dedup.memory_manager.protocol.messages import (
    Allocate,
    DigestSpan,
    Extent,
    Found,
    Hello,
    LayerHit,
    Lookup,
    LookupDigests,
    Offer,
    Publish,
    PutPiece,
    Refused,
    Release,
    Request,
    Rows,
    SlabRef,
    StandBy,
    Status,
    Stop,
    Wait,
)

DIGEST = "0123456789abcdef" * 4
HEADER = codec.encode(Stop())[: codec.HEADER_BYTES]
REQUESTS: list[Request] = [
    Hello("a client"),
    Lookup(["k" * 128] * MAX_KEYS, "n" * MAX_NAME),
    LookupDigests([DIGEST] * MAX_PIECES),
    Allocate(1 << 62, [PutPiece(1 << 50, DIGEST)] * MAX_PIECES),
    Publish(1, "k" * 128, bytes(MAX_RECORD), [DIGEST] * MAX_RECORD_DIGESTS, ["k" * 128] * MAX_KEYS),
    Offer(4096, [DigestSpan(1 << 40, 1 << 40, DIGEST)] * MAX_PIECES),
    Release([1 << 62] * MAX_RELEASES),
    StandBy([1 << 62] * MAX_RELEASES, False),
    Wait("key", 3600.0),
    Rows("clients", 7),
    Status(),
    Stop(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_the_largest_messages_fit_and_come_back(request_: Request) -> None:
    data = codec.encode(request_)
    assert len(data) <= MAX_MESSAGE
    assert codec.decode_request(data) == request_


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (codec.decode_request, codec.decode_reply):
        for candidate in (data, HEADER + data):
            try:
                decode(candidate)
            except ProtocolError:
                continue


@given(st.sampled_from(REQUESTS), st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    request_: Request, data: st.DataObject
) -> None:
    encoded = bytearray(codec.encode(request_)[:2000])
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode_request(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    except ProtocolError:
        return
    assert codec.decode_request(codec.encode(decoded)) == decoded


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from([type(r).__name__ for r in REQUESTS]), st.dictionaries(st.text(), JSON))
def test_any_fields_are_a_message_or_a_protocol_error(tag: str, fields: dict[str, object]) -> None:
    data = HEADER + msgspec.msgpack.encode({"t": tag, **fields})
    try:
        codec.decode_request(data)
    except ProtocolError:
        return


def packed(**fields: object) -> bytes:
    return HEADER + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        codec.MAGIC,
        b"XX\x01\x00",
        HEADER,
        packed(t="Stop", extra=1),
        packed(t="Nonsense"),
        packed(t="Hello", name="a\nb"),
        packed(t="Hello", name="n" * (MAX_NAME + 1)),
        packed(t="Lookup", keys=[]),
        packed(t="Lookup", keys=["k"] * (MAX_KEYS + 1)),
        packed(t="Lookup", keys=["has space"]),
        packed(t="Lookup", keys=["k\n"]),
        packed(t="LookupDigests", digests=[DIGEST.upper()]),
        packed(t="LookupDigests", digests=[DIGEST + "\n"]),
        packed(t="Allocate", put=-1, pieces=[[1, ""]]),
        packed(t="Allocate", put=1, pieces=[[0, ""]]),
        packed(t="Allocate", put=1, pieces=[[1 << 51, ""]]),
        packed(t="Publish", put=1, key="k", record=bytes(MAX_RECORD + 1), digests=[]),
        packed(t="Wait", key="k", timeout_s=float("nan")),
        packed(t="Wait", key="k", timeout_s=float("inf")),
        packed(t="Wait", key="k", timeout_s=-1.0),
        packed(t="Rows", table="passwords", start=0),
        codec.encode(Stop()) + bytes(MAX_MESSAGE),
        codec.encode(Refused("limit", "a reply is no request")),
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_request(data)


def test_another_version_is_named() -> None:
    data = codec.MAGIC + (9).to_bytes(2, "little") + b"\xc1 whatever"
    with pytest.raises(ProtocolError, match="version 9") as caught:
        codec.decode_request(data)
    assert caught.value.facts["version"] == 9


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_protocol_before_version_1_is_refused_in_words(version: int) -> None:
    former = b"TD" + version.to_bytes(2, "little") + codec.encode(Stop())[codec.HEADER_BYTES :]
    for decode in (codec.decode_request, codec.decode_reply):
        with pytest.raises(ProtocolError, match=r"b'TD.*same version of tensor-dedup.*restart"):
            decode(former)


def test_what_is_too_large_is_not_sent() -> None:
    extents = [Extent(0, 0, 1, DIGEST, 1)] * 500
    reply = Found([LayerHit(bytes(MAX_RECORD), extents)] * 4, [SlabRef(1, 4096)])
    with pytest.raises(ProtocolError, match="send less"):
        codec.encode(reply)
