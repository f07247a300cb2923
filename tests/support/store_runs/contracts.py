"""Contract suites: what every kind of memory (`BackendTests`) and every codec (`CodecTests`) keeps.

A test module subclasses a suite for each implementation.
"""

import fcntl
import gc
import mmap
import os
import random
import struct
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

from tensor_dedup.digest import combine, digest
from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.errors import (
    BackendError,
    NotSealedError,
    StillWritableError,
)
from tensor_dedup.store.codecs.interface import CHUNK_BYTES, Codec, Effort
from tensor_dedup.store.errors import CorruptFrameError


def _only_where(promised: bool, what: str) -> None:
    """Skip this test, and say so, where the backend does not promise it."""
    if not promised:
        # As pytest takes it too: whoever imports the manager need not have pytest.
        raise SkipTest(f"not promised by this backend: {what}")


def _descriptors() -> set[tuple[int, int, int]]:
    """Those that are open, with what they lead to; what earlier tests left as garbage is not."""
    gc.collect()
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing
            status = link.stat()
            found.add((int(link.name), status.st_dev, status.st_ino))
    return found


def committed(backend: Backend, nbytes: int) -> Memory:
    """A slab that may be written to."""
    memory = backend.reserve(nbytes)
    backend.commit(memory, 0, nbytes)
    return memory


def reclaimed(backend: Backend, fd: int, nbytes: int) -> Memory:
    """The slab behind a descriptor, which is closed where it leads to none."""
    try:
        return backend.reclaim(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


class BackendTests(ABC):
    """What the manager relies on. Subclass it, say how to make yours, and let pytest collect it.

    What only some promise (see Capabilities) is tested where it is promised. Where descriptors
    cannot be read as files, say how to `read` and `write`; `size` is that of all slabs.
    """

    size = 1 << 20

    @abstractmethod
    def make(self, folder: Path) -> Backend:
        """A new backend; the folder is this test's own."""

    def write(self, memory: Memory, data: bytes) -> None:
        """Put bytes at its beginning, as a writer does, with nothing mapped afterwards."""
        assert os.pwrite(memory.fileno, data, 0) == len(data)

    def read(self, memory: Memory, nbytes: int) -> bytes:
        """The first bytes, as a reader sees them."""
        return os.pread(memory.fileno, nbytes, 0)

    def _written(self, backend: Backend, data: bytes) -> Memory:
        memory = committed(backend, self.size)
        self.write(memory, data)
        return memory

    def _sealed(self, backend: Backend, data: bytes) -> Memory:
        memory = self._written(backend, data)
        backend.seal(memory)
        return memory

    def test_a_slab_has_its_size_and_is_zeroed(self, tmp_path: Path) -> None:
        """What nobody has written is zero, not another model's weights; where it is promised."""
        backend = self.make(tmp_path)
        memory = committed(backend, self.size)
        assert memory.nbytes == self.size
        assert len(self.read(memory, self.size)) == self.size
        if backend.capabilities.zeroed:
            assert self.read(memory, self.size) == bytes(self.size)

    def test_its_memory_exists_when_it_is_handed_out(self, tmp_path: Path) -> None:
        """A writer never meets SIGBUS: every page is there (where the system tells)."""
        backend = self.make(tmp_path)
        _only_where(backend.capabilities.seals, "files that say what they occupy")
        memory = committed(backend, self.size)
        assert os.fstat(memory.fileno).st_blocks * 512 >= self.size

    def test_two_slabs_are_two(self, tmp_path: Path) -> None:
        """Writing one changes no other."""
        backend = self.make(tmp_path)
        first, second = self._written(backend, b"first"), self._written(backend, b"other")
        assert self.read(second, 5) == b"other"
        assert self.read(first, 5) == b"first"

    def test_sealed_bytes_are_what_was_written(self, tmp_path: Path) -> None:
        """Sealing changes nothing, and sealing twice is sealing."""
        backend = self.make(tmp_path)
        memory = self._sealed(backend, b"weights")
        backend.seal(memory)
        assert self.read(memory, 7) == b"weights"

    def test_readers_map_it_and_have_their_own_copies_of_what_they_write(
        self, tmp_path: Path
    ) -> None:
        """Copy-on-write: nobody else sees it. Of the machine's memory; GPUs have no such thing."""
        backend = self.make(tmp_path)
        _only_where(not backend.capabilities.device, "memory of the machine itself")
        memory = self._sealed(backend, b"weights")
        with mmap.mmap(memory.fileno, self.size, flags=mmap.MAP_PRIVATE) as mine:
            assert mine[:7] == b"weights"
            mine[:7] = b"changed"
            assert os.pread(memory.fileno, 7, 0) == b"weights"

    def test_hardware_keeps_everybody_from_writing(self, tmp_path: Path) -> None:
        """Not the writer's descriptor, no size, no new mapping; where it is promised."""
        backend = self.make(tmp_path)
        _only_where(backend.capabilities.seals, "seals")
        memory = self._sealed(backend, b"weights")
        for attempt in (
            lambda: os.pwrite(memory.fileno, b"x", 0),
            lambda: os.ftruncate(memory.fileno, 0),
            lambda: os.ftruncate(memory.fileno, 2 * self.size),
            lambda: mmap.mmap(memory.fileno, self.size),
            lambda: fcntl.fcntl(memory.fileno, fcntl.F_ADD_SEALS, 0),
        ):
            refused = False
            try:
                attempt()
            except PermissionError:
                refused = True
            assert refused
        assert os.pread(memory.fileno, 7, 0) == b"weights"

    def test_it_is_not_sealed_while_somebody_can_write(self, tmp_path: Path) -> None:
        """Refused, and afterwards as it was; where it is promised."""
        backend = self.make(tmp_path)
        _only_where(backend.capabilities.seals, "seals")
        memory = committed(backend, self.size)
        with mmap.mmap(memory.fileno, self.size) as view:
            refused = False
            try:
                backend.seal(memory)
            except StillWritableError:
                refused = True
            assert refused
            view[:3] = b"yes"
        backend.seal(memory)
        assert os.pread(memory.fileno, 3, 0) == b"yes"

    def test_digests_are_those_of_the_bytes(self, tmp_path: Path) -> None:
        """Span by span, in order, wherever they lie; where it hashes."""
        backend = self.make(tmp_path)
        _only_where(backend.capabilities.hashes_itself, "a backend that hashes")
        data = bytes(range(256)) * 1024
        memory = self._sealed(backend, data)
        spans = [(0, len(data)), (64, 1), (4096, 100_000)]
        right = [digest(data[offset : offset + nbytes]) for offset, nbytes in spans]
        leaves = backend.leaves(memory, spans)
        assert [combine(n, each) for (_, n), each in zip(spans, leaves, strict=True)] == right
        assert backend.leaves(memory, spans[1:]) == leaves[1:]

    def test_a_backend_that_cannot_hash_says_so(self, tmp_path: Path) -> None:
        """And does not answer with what somebody told it."""
        backend = self.make(tmp_path)
        _only_where(not backend.capabilities.hashes_itself, "a backend that does not hash")
        memory = self._sealed(backend, b"weights")
        refused = False
        try:
            backend.leaves(memory, [(0, 7)])
        except BackendError:
            refused = True
        assert refused

    def test_nothing_stays_mapped_after_hashing(self, tmp_path: Path) -> None:
        """Or its bytes would count for the manager, too. A GPU's are not mapped by mmap at all."""
        backend = self.make(tmp_path)
        _only_where(backend.capabilities.hashes_itself, "a backend that hashes")
        memory = self._sealed(backend, b"weights")
        inode = os.fstat(memory.fileno).st_ino
        backend.leaves(memory, [(0, 7)])
        lines = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in lines if f" {inode} " in line]

    def test_a_sealed_slab_is_adopted_and_an_open_one_is_not(self, tmp_path: Path) -> None:
        """A manager takes back only what nobody can change any more, and of the size it is told."""
        backend = self.make(tmp_path)
        sealed, unsealed = self._sealed(backend, b"weights"), self._written(backend, b"weights")
        _only_where(backend.capabilities.outlives, "memory that outlives its manager")
        reclaimed = self.make(tmp_path).reclaim(os.dup(sealed.fileno), self.size)
        assert self.read(reclaimed, 7) == b"weights"
        for memory, nbytes in ((unsealed, self.size), (sealed, 2 * self.size)):
            if backend.capabilities.seals or not backend.capabilities.device:
                assert self._refuses(backend, os.dup(memory.fileno), nbytes)

    def test_any_other_file_is_not_adopted(self, tmp_path: Path) -> None:
        """Whatever its size."""
        backend = self.make(tmp_path)
        other = tmp_path / "other"
        other.write_bytes(bytes(self.size))
        assert self._refuses(backend, os.open(other, os.O_RDWR), self.size)
        assert self._refuses(backend, os.open(os.devnull, os.O_RDWR), self.size)

    def _refuses(self, backend: Backend, fd: int, nbytes: int) -> bool:
        try:
            reclaimed(backend, fd, nbytes)
        except NotSealedError:
            return True
        return False

    def test_the_descriptor_goes_with_the_object(self, tmp_path: Path) -> None:
        """After a refusal it is the caller's still: nothing is leaked, and nothing closed twice."""
        backend = self.make(tmp_path)
        before = _descriptors()
        memory = self._written(backend, b"weights")
        with suppress(BackendError):
            reclaimed(backend, os.dup(memory.fileno), self.size)
        del memory
        assert not _descriptors() - before


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
