"""Every codec keeps the contract; the choice among them follows what samples show."""

import random
import struct
from collections.abc import Sequence

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


@pytest.mark.parametrize(("spread", "codec"), [(1.5, "nibble2"), (8.0, "step2")])
def test_small_steps_are_stored_as_steps(spread: float, codec: str) -> None:
    dice = random.Random(9)
    base = [dice.randrange(10_000, 50_000) for _ in range(30_000)]
    far = [dice.random() < 0.01 for _ in base]
    data = [w + round(dice.gauss(0, 900 if f else spread)) for w, f in zip(base, far, strict=True)]
    new, old = (struct.pack("<30000H", *words) for words in (data, base))
    assert _chosen(new, old, 2) == codec


@pytest.mark.parametrize("count", [1, 2, 5, 30_001])
def test_steps_that_do_not_fit_come_back(count: int) -> None:
    steps = [-9, -8, 7, 8, 127, 128, -128, -129, 40_000]
    base = [(n * 977) % (1 << 16) for n in range(count)]
    data = [(word + steps[n % len(steps)]) % (1 << 16) for n, word in enumerate(base)]
    old, new = (struct.pack(f"<{count}H", *words) for words in (base, data))
    for codec in (CODECS["nibble2"], CODECS["step2"]):
        out = bytearray(2 * count)
        blob = codec.encode(memoryview(new), memoryview(old), "entropy")
        codec.decode(memoryview(blob), memoryview(old), memoryview(out))
        assert out == new


def _planes(words: Sequence[int], width: int) -> list[bytes]:
    return [bytes(word >> 8 * n & 255 for word in words) for n in range(width)]


def _folded(word: int, width: int) -> int:
    half = 1 << (8 * width - 1)
    return 2 * word if word < half else 2 * (2 * half - word) - 1


def _streams(family: str, width: int, data: Sequence[int], base: Sequence[int]) -> list[bytes]:
    """The streams before the rest, as FORMAT.md says them."""
    whole = 1 << 8 * width
    moved = [(new - old) % whole for new, old in zip(data, base, strict=True)]
    xor = [new ^ old for new, old in zip(data, base, strict=True)]
    if family == "planes":
        return _planes(data, width)
    if family == "xor":
        return _planes(xor, width)
    if family == "diff":
        return _planes([_folded(word, width) for word in moved], width)
    if family == "sparse":
        where = [n for n, word in enumerate(xor) if word]
        changes = [_folded(moved[n], width) - 1 for n in where]
        lowest = [change % 2 for change in changes] + [0] * (-len(changes) % 8)
        signs = [
            sum(bit << n for n, bit in enumerate(lowest[at : at + 8]))
            for at in range(0, len(lowest), 8)
        ]
        sizes = _planes([change // 2 for change in changes], width)
        return [struct.pack("<I", len(data)), _places(where), bytes(signs), *sizes]
    most = 128 if family == "step" else 8
    where = [n for n, word in enumerate(moved) if most <= word < whole - most]
    if family == "step":
        small = bytes(word % 256 for word in moved)
    else:
        half = [(word + 8) % 16 for word in moved] + [0] * (len(moved) % 2)
        small = bytes(
            low | high << 4
            for low, high in zip(half[: len(half) // 2], half[len(half) // 2 :], strict=True)
        )
    return [small, _places(where), *_planes([_folded(moved[n], width) for n in where], width)]


def _places(places: Sequence[int]) -> bytes:
    stream, before = b"", -1
    for place in places:
        skips, last = divmod(place - before - 1, 255)
        stream += bytes(skips) + bytes([last + 1])
        before = place
    return stream


@pytest.mark.parametrize("count", [1, 6, 1501])
@pytest.mark.parametrize("name", CODECS)
def test_a_chunk_is_read_as_the_format_says(name: str, count: int) -> None:
    family, width = name[:-1], int(name[-1])
    whole = 1 << 8 * width
    dice = random.Random(name)
    steps = [0, 0, 0, 1, -1, -8, 7, -9, 8, 127, 128, -128, -129, whole // 2, whole // 3]
    base = [dice.randrange(whole) for _ in range(count)]
    data = [(word + dice.choice(steps)) % whole for word in base]
    old, new = (b"".join(n.to_bytes(width, "little") for n in words) for words in (base, data))
    rest = b"0123456"[: width - 1]
    blob = b"".join(
        struct.pack("<BII", 0, len(stream), len(stream)) + stream
        for stream in [*_streams(family, width, data, base), rest]
    )
    out = bytearray(len(new) + len(rest))
    under = memoryview(old + bytes(len(rest))) if CODECS[name].against_base else None
    CODECS[name].decode(memoryview(blob), under, memoryview(out))
    assert out == new + rest


def test_few_changes_are_stored_alone() -> None:
    data = bytearray(base := random.Random(4).randbytes(60_000))
    data[100:104] = b"\0\1\2\3"
    assert _chosen(bytes(data), base, 4) == "sparse4"


@pytest.mark.parametrize("apart", [40, 300, 3000])
def test_a_short_sample_does_not_hide_that_few_differ(apart: int) -> None:
    dice = random.Random(7)
    base = [dice.randrange(10_000, 50_000) for _ in range(16_000)]
    moved = {dice.randrange(len(base)) for _ in range(len(base) // apart)}
    data = [word + dice.choice([-1, 1]) * (n in moved) for n, word in enumerate(base)]
    new, old = (struct.pack("<16000H", *words) for words in (data, base))
    assert new != old
    assert _chosen(new, old, 2) == "sparse2"


def test_what_differs_almost_everywhere_is_not_stored_as_few_changes() -> None:
    dice = random.Random(3)
    base = [dice.randrange(1 << 30, 1 << 31) for _ in range(16_000)]
    data = [word + dice.choice([-1, 1]) * dice.randrange(1, 200) for word in base]
    new, old = (struct.pack("<16000I", *words) for words in (data, base))
    sparse, diff = (
        len(CODECS[name].encode(memoryview(new), memoryview(old), "entropy"))
        for name in ("sparse4", "diff4")
    )
    assert sparse < diff
    assert _chosen(new, old, 4) == "diff4"


@pytest.mark.parametrize("places", [[0], [254], [255], [256], [0, 1, 599], [509, 511, 2**17]])
def test_places_far_apart_come_back(places: Sequence[int]) -> None:
    base = bytes(2**18 + 2)
    data = bytearray(base)
    for place in places:
        data[2 * place] = 1
    for codec in (CODECS["sparse2"], CODECS["nibble2"], CODECS["step2"]):
        out = bytearray(len(data))
        blob = codec.encode(memoryview(data), memoryview(base), "entropy")
        codec.decode(memoryview(blob), memoryview(base), memoryview(out))
        assert out == data


def test_a_place_behind_the_last_word_is_refused() -> None:
    streams = [struct.pack("<I", 600), b"\0\0\x5b", b"\0", b"\0", b""]
    blob = b"".join(struct.pack("<BII", 0, len(each), len(each)) + each for each in streams)
    out = bytearray(600)
    with pytest.raises(CorruptFrameError, match="a place behind the last of 600 elements"):
        CODECS["sparse1"].decode(memoryview(blob), memoryview(bytes(600)), memoryview(out))
    fitting = blob.replace(b"\0\0\x5b", b"\0\0\x5a")
    CODECS["sparse1"].decode(memoryview(fitting), memoryview(bytes(600)), memoryview(out))
    assert out == bytes(599) + b"\xff"


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
