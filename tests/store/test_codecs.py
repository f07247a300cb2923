"""Every codec keeps the contract; the choice among them follows what samples show."""

import random
import struct

import pytest

from store_runs.contracts import CodecTests
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice, Sample, choose, distance, places
from tensor_dedup.store.codecs.interface import AGAINST_BASE, CHUNK_BYTES, LEAVES, Codec, Effort
from tensor_dedup.store.codecs.records import chunks, entry, head_bytes
from tensor_dedup.store.errors import CorruptFrameError
from tensor_dedup.store.writing.deltas import Plan, encoded_leaf


class TestCodecs(CodecTests):
    codec_name: str

    @pytest.fixture(autouse=True, params=CODECS)
    def _name(self, request: pytest.FixtureRequest) -> None:
        self.codec_name = str(request.param)

    def make(self) -> Codec:
        return CODECS[self.codec_name]


def _moved(count: int, most: int, share: float) -> tuple[bytes, bytes]:
    """Words of two bytes, and the same where a share of them moved by up to `most`."""
    dice = random.Random(3)
    base = [dice.randrange(1000, 60_000) for _ in range(count)]
    data = [w + dice.randint(-most, most) * (dice.random() < share) for w in base]
    return struct.pack(f"<{count}H", *data), struct.pack(f"<{count}H", *base)


def _chosen(data: bytes, base: bytes | None, width: int) -> str | None:
    sample = Sample(memoryview(data), None if base is None else memoryview(base))
    choice = choose([sample], width)
    return None if choice is None else choice.codec.name


def test_each_name_a_record_may_have_is_that_of_its_codec() -> None:
    own = {codec.name: codec.against_base for codec in CODECS.values()}
    assert own | {LEAVES: True} == dict(AGAINST_BASE)
    assert list(CODECS) == [codec.name for codec in CODECS.values()]


def test_noise_is_left_alone() -> None:
    assert _chosen(random.Random(1).randbytes(50_000), None, 2) is None
    assert (
        _chosen(random.Random(1).randbytes(50_000), random.Random(2).randbytes(50_000), 2) is None
    )


def test_small_steps_are_stored_as_steps() -> None:
    assert _chosen(*_moved(30_000, 3, 0.4), 2) == "step2"


def test_few_changes_are_stored_alone() -> None:
    data = bytearray(base := random.Random(4).randbytes(60_000))
    data[100:104] = b"\0\1\2\3"
    assert _chosen(bytes(data), base, 4) == "sparse4"


def test_equal_upper_bytes_are_found_without_a_base() -> None:
    dice = random.Random(5)
    data = b"".join(dice.randbytes(1) + b"\x3c" for _ in range(30_000))
    assert _chosen(data, None, 2) == "planes2"


def test_what_repeats_is_found_without_a_base() -> None:
    assert _chosen(random.Random(6).randbytes(500) * 100, None, 4) == "planes1"


def test_an_unrelated_base_is_not_used() -> None:
    dice = random.Random(5)
    data = b"".join(dice.randbytes(1) + b"\x3c" for _ in range(30_000))
    assert _chosen(data, random.Random(8).randbytes(60_000), 2) == "planes2"


def test_distance_is_the_share_of_bits() -> None:
    assert distance(Sample(memoryview(b"\xff\0"), memoryview(b"\xff\0"))) == 0
    assert distance(Sample(memoryview(b"\xff\0"), memoryview(b"\x0f\0"))) == 0.25
    assert distance(Sample(memoryview(b"\xff\0"))) == 1


@pytest.mark.parametrize("nbytes", [2, 4096, 128 << 10, (128 << 10) + 2, 3 << 20])
def test_samples_lie_inside_and_begin_with_an_element(nbytes: int) -> None:
    for start, stop in places(nbytes, 2):
        assert 0 <= start < stop <= nbytes
        assert start % 2 == 0


def test_a_head_leads_to_its_chunks() -> None:
    parts = [b"first", b"", b"third one"]
    head = b"".join(map(entry, parts))
    assert len(head) == head_bytes(2 * CHUNK_BYTES + 1)
    body = head + b"".join(parts)
    found = chunks(head, len(body))
    for chunk, part in zip(found, parts, strict=True):
        held = memoryview(body)[chunk.offset : chunk.offset + chunk.size]
        assert held == part
        assert chunk.holds(held)
    assert not found[0].holds(memoryview(b"fIrst"))
    assert not found[0].holds(memoryview(b"firs"))


def test_a_head_of_other_sizes_is_refused() -> None:
    head = entry(b"first")
    for stored in (len(head) + 4, len(head) + 6, 0):
        with pytest.raises(CorruptFrameError, match="chunks"):
            chunks(head, stored)


class _Wrong:
    """A codec that gives back one byte otherwise."""

    name, width, against_base = "planes4", 4, False

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        return CODECS[self.name].encode(data, base, effort)

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        CODECS[self.name].decode(blob, base, out)
        out[-1] ^= 1


def test_what_does_not_come_back_is_not_stored_encoded() -> None:
    data = memoryview(bytes(range(200)) * 50)
    for codec in (CODECS["planes4"], _Wrong()):
        blob = encoded_leaf(data, 0, Plan(CodecChoice(codec, "entropy", 0.5), None))
        assert (blob is not None) == (codec is CODECS["planes4"])
