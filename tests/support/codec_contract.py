"""The tests that every codec must pass. Only tests import this; subclass CodecTests."""

import random
import struct
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Iterator

from tensor_dedup.store.codecs.interface import CHUNK_BYTES, Codec, Effort
from tensor_dedup.store.errors import CorruptFrameError

_EFFORTS: tuple[Effort, ...] = ("entropy", "matches")
# How much more than its answer decoding may take, whatever it is given.
_MEMORY = 12


class CodecTests(ABC):
    """What the store relies on. Subclass it, say how to make yours, and let pytest collect it."""

    @abstractmethod
    def make(self) -> Codec:
        """The codec."""

    def _pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Bytes and their base, of sizes and kinds that matter."""
        dice = random.Random(5)
        noise = dice.randbytes
        for size in (0, 1, 7, 8, 9, 63, 64, 1000, 4096, 70_001):
            base = noise(size)
            yield noise(size), base
            yield base, base
            yield bytes(size), base
            yield bytes(b ^ (dice.random() < 0.01) for b in base), base
        near = bytearray(noise(1 << 16))
        yield bytes(near), bytes((b + dice.choice([0, 1, 255])) % 256 for b in near)

    def _encoded(self, data: bytes, base: bytes, effort: Effort = "entropy") -> bytes:
        codec = self.make()
        return codec.encode(
            memoryview(data), memoryview(base) if codec.against_base else None, effort
        )

    def _decoded(self, blob: bytes, base: bytes) -> bytes:
        codec = self.make()
        # Not where an allocator would align it.
        memory = bytearray(b"\xa5" * (len(base) + 2))
        with memoryview(memory) as whole, whole[1 : 1 + len(base)] as out:
            codec.decode(memoryview(blob), memoryview(base) if codec.against_base else None, out)
        assert (memory[0], memory[-1]) == (0xA5, 0xA5)
        return bytes(memory[1:-1])

    def test_what_was_encoded_comes_back(self) -> None:
        for data, base in self._pairs():
            for effort in _EFFORTS:
                assert self._decoded(self._encoded(data, base, effort), base) == data

    def test_a_whole_chunk_comes_back(self) -> None:
        base = random.Random(6).randbytes(CHUNK_BYTES)
        changed = bytearray(base)
        for at in range(0, CHUNK_BYTES, 1013):
            changed[at] = (changed[at] + 1) % 256
        assert self._decoded(self._encoded(bytes(changed), base), base) == changed

    def test_noise_hardly_grows(self) -> None:
        data, base = (random.Random(n).randbytes(1 << 18) for n in (7, 8))
        # A word that differs costs at most itself and where it is.
        assert len(self._encoded(data, base)) < 5.1 * len(data)

    def test_it_knows_its_own_width_and_need(self) -> None:
        codec = self.make()
        assert codec.name.endswith(str(codec.width))
        assert codec.width in (1, 2, 4, 8)

    def test_a_cut_end_is_refused(self) -> None:
        data, base = random.Random(9).randbytes(5000), random.Random(10).randbytes(5000)
        blob = self._encoded(data, base)
        for cut in (0, 1, 8, 9, len(blob) // 2, len(blob) - 1):
            assert self._refused(blob[:cut], base)
        assert self._refused(blob + b"\0", base)

    def test_another_size_is_refused(self) -> None:
        data, base = random.Random(9).randbytes(5000), random.Random(10).randbytes(5000)
        blob = self._encoded(data, base)
        for size in (0, 4000, 4992, 5008, 9000):
            assert self._refused(blob, base[:1] * size)

    def test_any_damage_is_refused_or_gives_as_many_bytes(self) -> None:
        dice = random.Random(11)
        base = dice.randbytes(3000)
        data = bytes((b + dice.choice([0, 0, 0, 1, 100])) % 256 for b in base)
        blob = self._encoded(data, base)
        for _ in range(300):
            wrong = bytearray(blob)
            for _ in range(dice.randrange(1, 4)):
                wrong[dice.randrange(len(wrong))] = dice.randrange(256)
            try:
                assert len(self._decoded(bytes(wrong), base)) == len(data)
            except CorruptFrameError as error:
                assert self.make().name in str(error)  # noqa: PT017 (either is right)

    def test_no_blob_takes_more_memory_than_its_answer(self) -> None:
        base = bytes(4096)
        bombs = [
            self._encoded(bytes(CHUNK_BYTES), bytes(CHUNK_BYTES), "matches"),
            struct.pack("<BII", 0, 0xFFFFFFFF, 0xFFFFFFFF) + bytes(100),
            struct.pack("<BII", 1, 20, 4096) + _endless_frame(),
            struct.pack("<BII", 1, 20, 1 << 31) + _endless_frame(),
        ]
        for bomb in bombs:
            tracemalloc.start()
            try:
                assert self._refused(bomb, base)
                assert tracemalloc.get_traced_memory()[1] < _MEMORY * len(base) + (1 << 17)
            finally:
                tracemalloc.stop()

    def _refused(self, blob: bytes, base: bytes) -> bool:
        try:
            self._decoded(blob, base)
        except CorruptFrameError:
            return True
        return False


def _endless_frame() -> bytes:
    """A zstd frame that says it is 2**62 bytes long."""
    return b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x03\0\0" + bytes(4)
