"""The bytes of every message: what another build of this version sends and understands.

A message's class name is its tag and its field names are keys; parts are arrays in the order of
their fields. So a rename can change the protocol, and with it the version; here it shows.
"""

import msgspec
import pytest

from tensor_dedup.memory_manager.protocol import codec, messages, tables
from tensor_dedup.memory_manager.protocol.limits import Message, WirePart
from tensor_dedup.memory_manager.protocol.messages import (
    Abandon,
    Allocate,
    Allocated,
    DigestSpan,
    Done,
    Evict,
    Extent,
    Found,
    FoundDigests,
    Hello,
    LayerHit,
    Lookup,
    LookupDigests,
    Offer,
    Offered,
    Pin,
    Progress,
    Publish,
    PutPiece,
    Refused,
    Release,
    Reserve,
    Reserved,
    Rows,
    Seal,
    Sealed,
    SlabRef,
    StandBy,
    Status,
    StoodBy,
    Stop,
    Wait,
    Waited,
    Welcome,
)
from tensor_dedup.memory_manager.protocol.tables import (
    BuildRow,
    CheckpointRow,
    ClientRow,
    Page,
    ResidentRow,
    Totals,
)
from tensor_dedup.memory_manager.server import systemd_fdstore
from tensor_dedup.memory_manager.server.systemd_fdstore import (
    HandoverIndex,
    HandoverRecord,
    HandoverSlab,
    HandoverTensor,
)

DIGEST = "0123456789abcdef" * 4
# In MessagePack, as hexadecimal digits; DIGEST stands for those of its 64 characters.
EXAMPLES: list[tuple[Message | WirePart, str]] = [
    (PutPiece(4096), "92cd1000a0"),
    (PutPiece(4097, DIGEST), "92cd1001d940DIGEST"),
    (DigestSpan(64, 4096, DIGEST), "9340cd1000d940DIGEST"),
    (Extent(1, 64, 4096, DIGEST, 7), "950140cd1000d940DIGEST07"),
    (SlabRef(3, 8192), "9203cd2000"),
    (
        LayerHit(b"\x00record", [Extent(1, 64, 4096, DIGEST, 7)]),
        "92c407007265636f726491950140cd1000d940DIGEST07",
    ),
    (Hello("a client"), "82a174a548656c6c6fa46e616d65a86120636c69656e74"),
    (
        Lookup(["key", "other"], "base"),
        ("83a174a64c6f6f6b7570a46b65797392a36b6579a56f74686572aa636865636b706f696e74a462617365"),
    ),
    (
        LookupDigests([DIGEST], "base"),
        (
            "83a174ad4c6f6f6b757044696765737473a76469676573747391d940DIGESTaa636865636b706f69"
            "6e74a462617365"
        ),
    ),
    (
        Reserve(["key"], "base"),
        ("83a174a752657365727665a46b65797391a36b6579aa636865636b706f696e74a462617365"),
    ),
    (
        Allocate(5, [PutPiece(4096), PutPiece(4097, DIGEST)]),
        ("83a174a8416c6c6f63617465a370757405a67069656365739292cd1000a092cd1001d940DIGEST"),
    ),
    (Progress(5), "82a174a850726f6772657373a370757405"),
    (Seal(5, [DIGEST]), "83a174a45365616ca370757405a76469676573747391d940DIGEST"),
    (Seal(5), "83a174a45365616ca370757405a76469676573747390"),
    (
        Publish(5, "key", b"record", [DIGEST]),
        (
            "85a174a75075626c697368a370757405a36b6579a36b6579a67265636f7264c4067265636f7264a7"
            "6469676573747391d940DIGEST"
        ),
    ),
    (
        Publish(5, "key", b"record", [DIGEST], ["mark"]),
        (
            "86a174a75075626c697368a370757405a36b6579a36b6579a67265636f7264c4067265636f7264a7"
            "6469676573747391d940DIGESTa4616c736f91a46d61726b"
        ),
    ),
    (Abandon(5), "82a174a74162616e646f6ea370757405"),
    (Wait("key", 0.5), "83a174a457616974a36b6579a36b6579a974696d656f75745f73cb3fe0000000000000"),
    (Release([7, 300]), "82a174a752656c65617365a66c65617365739207cd012c"),
    (StandBy([7, 300]), "83a174a75374616e644279a66c65617365739207cd012ca661736c656570c3"),
    (
        Offer(8192, [DigestSpan(64, 4096, DIGEST)], "base"),
        (
            "84a174a54f66666572a66e6279746573cd2000a6706965636573919340cd1000d940DIGESTaa6368"
            "65636b706f696e74a462617365"
        ),
    ),
    (Status(), "81a174a6537461747573"),
    (Rows("builds", 64), "83a174a4526f7773a57461626c65a66275696c6473a5737461727440"),
    (Pin("base", False), "83a174a350696ea46e616d65a462617365a670696e6e6564c2"),
    (Evict("base"), "82a174a54576696374a46e616d65a462617365"),
    (Stop(), "81a174a453746f70"),
    (
        Welcome(1234, 2, "vmm", True, 30.0, False, "GPU-01234567"),
        (
            "88a174a757656c636f6d65a3706964cd04d2a773657373696f6e02a76261636b656e64a3766d6db1"
            "68617264776172655f726561646f6e6c79c3af6275696c645f74696d656f75745f73cb403e000000"
            "000000ad6861736865735f697473656c66c2a6646576696365ac4750552d3031323334353637"
        ),
    ),
    (
        Found([LayerHit(b"record", [Extent(0, 64, 4096, DIGEST, 7)]), None], [SlabRef(3, 8192)]),
        (
            "83a174a5466f756e64a66c61796572739292c4067265636f726491950040cd1000d940DIGEST07c0"
            "a5736c616273919203cd2000"
        ),
    ),
    (
        FoundDigests([Extent(0, 64, 4096, DIGEST, 7), None], [SlabRef(3, 8192)]),
        (
            "83a174ac466f756e6444696765737473a7657874656e747392950040cd1000d940DIGEST07c0a573"
            "6c616273919203cd2000"
        ),
    ),
    (
        Reserved(5, ["granted", "building", "ready"]),
        (
            "83a174a85265736572766564a370757405a7616e737765727393a76772616e746564a86275696c64"
            "696e67a57265616479"
        ),
    ),
    (
        Allocated(SlabRef(3, 8192), [0, 4096]),
        ("83a174a9416c6c6f6361746564a4736c61629203cd2000a76f6666736574739200cd1000"),
    ),
    (Sealed([DIGEST]), "82a174a65365616c6564a76469676573747391d940DIGEST"),
    (
        Waited("stalled", 31.5),
        (
            "83a174a6576169746564a76f7574636f6d65a77374616c6c6564a873696c656e745f73cb403f8000"
            "00000000"
        ),
    ),
    (StoodBy([True, False]), "82a174a753746f6f644279a56177616b6592c3c2"),
    (Offered([7, 0]), "82a174a74f666665726564a66c6561736573920700"),
    (Done(2, 8192), "83a174a4446f6e65a5636f756e7402a66e6279746573cd2000"),
    (
        Refused("no_room", "the budget is full"),
        (
            "83a174a752656675736564a4636f6465a76e6f5f726f6f6da474657874b274686520627564676574"
            "2069732066756c6c"
        ),
    ),
    (
        Totals(
            1,
            "m.sock",
            1.5,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            11,
            12,
            13,
            14,
            15,
            16,
            17,
            18,
            19,
            20,
            21,
            ["base"],
        ),
        (
            "de0018a174a6546f74616c73a370696401a46e616d65a66d2e736f636ba8757074696d655f73cb3f"
            "f8000000000000a662756467657403a76368617267656404ae7265736964656e745f627974657305"
            "a97265736964656e747306a5736c61627307a77265636f72647308ac70696e6e65645f6279746573"
            "09ac6c65617365645f62797465730aaf6c696e676572696e675f62797465730ba66c65617365730c"
            "a7636c69656e74730da66275696c64730ea777616974696e670fa46869747310a66d697373657311"
            "a97075626c697368656412ad657669637465645f627974657313a974616b656f7665727314a87265"
            "667573616c7315a470696e7391a462617365"
        ),
    ),
    (ClientRow(1234, "vllm", 3, 4096, 1, 2.5), "96cd04d2a4766c6c6d03cd100001cb4004000000000000"),
    (CheckpointRow("base", 3, 4096, 64, True), "95a46261736503cd100040c3"),
    (ResidentRow(DIGEST, 4096, 2, False, ["base"]), "95d940DIGESTcd100002c291a462617365"),
    (
        BuildRow(5, 1234, "writing", 2, 4096, 0.5),
        "9605cd04d2a777726974696e6702cd1000cb3fe0000000000000",
    ),
    (
        Page(
            9,
            [ClientRow(1234, "vllm", 3, 4096, 1, 2.5)],
            [CheckpointRow("base", 3, 4096, 64, True)],
            [ResidentRow(DIGEST, 4096, 2, False, ["base"])],
            [BuildRow(5, 1234, "writing", 2, 4096, 0.5)],
        ),
        (
            "86a174a450616765a5746f74616c09a7636c69656e74739196cd04d2a4766c6c6d03cd100001cb40"
            "04000000000000ab636865636b706f696e74739195a46261736503cd100040c3a97265736964656e"
            "74739195d940DIGESTcd100002c291a462617365a66275696c6473919605cd04d2a777726974696e"
            "6702cd1000cb3fe0000000000000"
        ),
    ),
    (HandoverTensor(DigestSpan(64, 4096, DIGEST), ["base"]), "929340cd1000d940DIGEST91a462617365"),
    (
        HandoverSlab("slab-3", 8192, [HandoverTensor(DigestSpan(64, 4096, DIGEST), ["base"])]),
        "93a6736c61622d33cd200091929340cd1000d940DIGEST91a462617365",
    ),
    (
        HandoverRecord("key", b"record", [DIGEST], ["another"]),
        "94a36b6579c4067265636f726491d940DIGEST91a7616e6f74686572",
    ),
    (
        HandoverIndex(
            "0123456789abcdef",
            [HandoverSlab("slab-3", 8192, [])],
            [HandoverRecord("key", b"record", [DIGEST], [])],
            ["base"],
        ),
        (
            "85a174a5496e646578aa67656e65726174696f6eb030313233343536373839616263646566a5736c"
            "6162739193a6736c61622d33cd200090a77265636f7264739194a36b6579c4067265636f726491d9"
            "40DIGEST90a470696e7391a462617365"
        ),
    ),
]


@pytest.mark.parametrize(("value", "expected"), EXAMPLES, ids=lambda each: type(each).__name__)
def test_the_bytes_of_a_message_do_not_change(value: Message | WirePart, expected: str) -> None:
    data = bytes.fromhex(expected.replace("DIGEST", DIGEST.encode().hex()))
    assert msgspec.msgpack.encode(value) == data
    assert msgspec.msgpack.decode(data, type=type(value)) == value


def test_every_message_has_its_bytes_here() -> None:
    declared = {
        each
        for module in (messages, tables, systemd_fdstore)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Message | WirePart)
    }
    assert declared - {Message, WirePart} == {type(value) for value, _ in EXAMPLES}


def test_the_header_does_not_change() -> None:
    assert codec.encode(Stop()).hex() == "544d010081a174a453746f70"
