"""Tensors go to a GPU and back through a ring of buffers, and are hashed on the way.

Over the fake driver, whose copies are made as late as CUDA allows. Without the wait for an event
before a buffer is filled again, or the fence before a slab is unmapped, these tests fail.
"""

import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gpu_runs import gpus
from gpu_runs.fake_driver import FakeDriver, RefusingDriver
from tensor_dedup.digest import LEAF_BYTES, digest, leaf_digests
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.cuda.gpu import Gpu
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.transfers import (
    BUFFER_BYTES,
    HostContent,
    Ring,
    Transfers,
    UploadPart,
    file_part,
    memory_part,
)
from tensor_dedup.memory_manager.backends.vmm import VmmAllocation, VmmBackend
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, Result, current, refused
from tensor_dedup.memory_manager.errors import BackendError, ManagerGoneError

ROOM = 12 * LEAF_BYTES


def pattern(nbytes: int, first: int = 0) -> bytes:
    return random.Random(first).randbytes(1009) * (nbytes // 1009 + 1)


class Place:
    """A slab of a fake GPU, a small ring, and what is read from the slab by another mapping."""

    def __init__(self, driver: FakeDriver, most: int = 2) -> None:
        self.driver = driver
        self.gpu = Gpu(driver, "0")
        self.ring = Ring(most)
        self.transfers = Transfers(driver, 0, self.ring)
        self.slab: VmmAllocation = VmmBackend(FakeDriver(), "0").reserve(ROOM)
        self.extent = MappedExtent(self.slab.fileno, self.slab.nbytes, 1)

    def upload(self, at: int, nbytes: int, *parts: UploadPart, hashed: bool = True) -> str:
        """Copy a tensor to a byte of the slab; its digest."""
        writable = self.gpu.writable([[self.extent]], self.gpu.vmm(), self.transfers.fence)
        with writable as [address]:
            made = self.transfers.upload(address + at, nbytes, parts, hashed=hashed)
            made.wait()
        self.content = made.content
        self.hashed = made.content.bytes_hashed
        return made.digest if hashed else ""

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        return gpus.read(self.extent.fileno, ROOM, at + nbytes)[at:]


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place(FakeDriver(late=True))
    yield made
    assert made.gpu.reap(wait=True) == 0
    assert made.driver.left() == {}


def poisoned(part: UploadPart) -> UploadPart:
    """A part that overwrites the buffer before it fills it."""

    def fill(into: memoryview, offset: int) -> bytes | None:
        into[:] = b"\xaa" * len(into)
        return part.fill(into, offset)

    return part._replace(fill=fill)


@pytest.mark.parametrize("nbytes", [0, 1, LEAF_BYTES, LEAF_BYTES + 1, 11 * LEAF_BYTES - 3])
def test_a_file_arrives_and_its_digest_is_known(place: Place, tmp_path: Path, nbytes: int) -> None:
    data = pattern(nbytes)[:nbytes]
    file = tmp_path / "weights"
    file.write_bytes(b"header" + data + b"more")
    with file.open("rb") as opened:
        part = poisoned(file_part(opened.fileno(), len(b"header"), nbytes))
        assert place.upload(512, nbytes, part) == digest(data)
    assert place.bytes_at(512, nbytes) == data
    assert place.driver.traffic["copy_in"] == place.hashed == nbytes
    assert place.driver.traffic["synchronize"] == 0


def test_a_tensor_larger_than_the_ring_arrives(place: Place) -> None:
    """Each buffer is filled again and again, and only after the copy from it has been made."""
    tensor = torch.frombuffer(bytearray(pattern(ROOM)[:ROOM]), dtype=torch.uint8)
    place.upload(0, ROOM, poisoned(memory_part(tensor)), hashed=False)
    assert place.ring.nbytes == 2 * BUFFER_BYTES < ROOM
    assert place.driver.traffic["page_lock"] == place.ring.nbytes
    assert place.bytes_at(0, ROOM) == tensor.numpy().tobytes()
    assert place.hashed == 0


@pytest.mark.parametrize("most", [2, 8])
@pytest.mark.parametrize(
    "sizes",
    [
        [3 * LEAF_BYTES, LEAF_BYTES // 2, LEAF_BYTES // 2],
        [LEAF_BYTES + 7, 3 * LEAF_BYTES, 5, 2 * LEAF_BYTES - 12, 4 * LEAF_BYTES],
        [1, 2, 3, 4],
        [LEAF_BYTES - 1, 9 * LEAF_BYTES],
    ],
)
def test_parts_have_their_leaves_and_the_tensor_has_its_own(most: int, sizes: list[int]) -> None:
    place = Place(FakeDriver(late=True), most)
    starts = [*accumulate([0, *sizes])]
    datas = [pattern(size, number)[:size] for number, size in enumerate(sizes)]
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in datas]
    parts = [
        poisoned(memory_part(tensor))._replace(start=start, has_leaves=True)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
    whole = b"".join(datas)
    found = place.upload(64, len(whole), *random.Random(most).sample(parts, len(parts)))
    assert place.bytes_at(64, len(whole)) == whole
    assert found == digest(whole)
    assert [place.content.part_leaves(part) for part in parts] == [*map(leaf_digests, datas)]
    twice = 0
    for start, size in zip(starts, sizes, strict=False):
        # The leaves of a part are those of the tensor where both begin and end together.
        rest = size % LEAF_BYTES if start + size < len(whole) else 0
        twice += size if start % LEAF_BYTES else rest
    assert place.hashed == len(whole) + twice
    assert twice


def test_a_tensor_is_copied_in_ranges_of_which_each_ends_within_a_part(place: Place) -> None:
    """As a tensor in blocks is: its parts have their digests when the last range has come."""
    sizes = [3 * LEAF_BYTES + 5, 7 * LEAF_BYTES - 8]
    datas = [pattern(size, size)[:size] for size in sizes]
    whole = b"".join(datas)
    parts = [
        UploadPart(start, size, memory_part(tensor).fill, has_leaves=True)
        for start, size, tensor in zip(
            (0, sizes[0]),
            sizes,
            [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in datas],
            strict=True,
        )
    ]
    content = HostContent(len(whole), parts)
    for start in (4 * LEAF_BYTES, 0, 8 * LEAF_BYTES):
        end = min(start + 4 * LEAF_BYTES, len(whole))
        writable = place.gpu.writable([[place.extent]], place.gpu.vmm(), place.transfers.fence)
        with writable as [address]:
            place.transfers.upload_range(address + start, content, start, end).wait()
        assert content.leaves_of(start, end) == leaf_digests(whole[start:end])
    assert content.digest == digest(whole)
    assert [content.part_leaves(part) for part in parts] == [*map(leaf_digests, datas)]
    assert place.bytes_at(0, len(whole)) == whole
    assert place.driver.traffic["copy_in"] == len(whole)


def test_a_leaf_whose_digest_the_source_knows_is_not_hashed(place: Place) -> None:
    data = pattern(3 * LEAF_BYTES)[: 3 * LEAF_BYTES]
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def fill(into: memoryview, offset: int) -> bytes | None:
        memory_part(tensor).fill(into, offset)
        return leaf_digests(into)[0] if offset == LEAF_BYTES else None

    part = UploadPart(0, tensor.nbytes, fill, has_leaves=True)
    assert place.upload(0, tensor.nbytes, part) == digest(data)
    assert place.hashed == 2 * LEAF_BYTES
    assert place.content.part_leaves(part) == leaf_digests(data)
    known = HostContent(tensor.nbytes, [part], leaves=leaf_digests(data))
    with place.gpu.writable([[place.extent]], place.gpu.vmm(), place.transfers.fence) as [address]:
        place.transfers.upload_range(address, known).wait()
    assert (known.bytes_hashed, known.digest) == (0, digest(data))


def test_an_empty_part_is_nowhere(place: Place) -> None:
    """Whichever of two parts that begin together is given first."""
    data = pattern(2 * BUFFER_BYTES)[: 2 * BUFFER_BYTES]
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    halves = [
        memory_part(tensor[at : at + BUFFER_BYTES])._replace(start=at) for at in (0, BUFFER_BYTES)
    ]
    empty = [memory_part(tensor[:0])._replace(start=at) for at in (0, BUFFER_BYTES, len(data))]
    for parts in ([*halves, *empty], [*empty, *halves]):
        assert place.upload(0, len(data), *parts) == digest(data)
        assert place.bytes_at(0, len(data)) == data


def test_what_changes_between_two_uploads_is_noticed(place: Place, tmp_path: Path) -> None:
    """As a file may while a slab is filled that the manager then does not take."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(3 * LEAF_BYTES))
    with file.open("r+b", buffering=0) as opened:
        content = HostContent(3 * LEAF_BYTES, [file_part(opened.fileno(), 0, 3 * LEAF_BYTES)])

        def upload() -> None:
            writable = place.gpu.writable([[place.extent]], place.gpu.vmm(), place.transfers.fence)
            with writable as [address]:
                place.transfers.upload_range(address, content).wait()

        upload()
        upload()
        assert content.digest == digest(bytes(3 * LEAF_BYTES))
        opened.seek(LEAF_BYTES)
        opened.write(b"other")
        with pytest.raises(BackendError, match=f"leaf 1 of {3 * LEAF_BYTES} bytes has changed"):
            upload()


def test_a_copy_that_is_interrupted_twice_goes_on_nowhere(place: Place) -> None:
    """No thread may copy to an address that is unmapped, and soon another mapping's."""
    go = threading.Event()
    done: list[int] = []

    def fill(into: memoryview, offset: int) -> None:
        if offset:
            go.wait(30)
        done.append(offset)

    def interrupt() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        go.set()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            place.upload(0, ROOM, UploadPart(0, ROOM, fill))
        found = list(done)
        assert go.is_set()
    finally:
        go.set()
        timer.join()
        signal.signal(signal.SIGINT, handler)
    time.sleep(0.1)
    assert done == found


def test_after_an_error_of_progress_no_thread_works_on_a_transfer(place: Place) -> None:
    go = threading.Event()

    def fill(into: memoryview, offset: int) -> None:
        if offset >= 8 * LEAF_BYTES:  # which is another task
            go.wait(30)

    def gone() -> None:
        threading.Timer(0.1, go.set).start()
        raise ManagerGoneError("no manager")

    with place.gpu.writable([[place.extent]], place.gpu.vmm(), place.transfers.fence) as [address]:
        made = place.transfers.upload(address, ROOM, [UploadPart(0, ROOM, fill)])
        with pytest.raises(ManagerGoneError):
            made.wait(gone)
        assert go.is_set()
        assert all(each.done() for each in made.tasks)


def test_a_fence_that_fails_unmaps_nothing_to_which_the_gpu_copies(place: Place) -> None:
    part = memory_part(torch.ones(LEAF_BYTES, dtype=torch.uint8))

    def fence() -> None:
        raise refused("cuEventRecord", Result.STREAM_CAPTURE_UNSUPPORTED)

    def captured() -> None:
        place.driver.capturing = True
        fence()

    with (
        pytest.raises(BackendError, match="cuEventRecord"),
        place.gpu.writable([[place.extent]], place.gpu.vmm(), fence) as [address],
    ):
        place.transfers.upload(address, LEAF_BYTES, [part]).wait()
    assert place.driver.left() == {"events": 1}  # of the buffer
    # A GPU that cannot be waited for keeps what it may write to.
    with (
        pytest.raises(BackendError, match="cuEventRecord"),
        place.gpu.writable([[place.extent]], place.gpu.vmm(), captured) as [address],
    ):
        place.transfers.upload(address, LEAF_BYTES, [part]).wait()
    assert place.driver.access(address) == Access.READ_WRITE
    place.driver.capturing = False
    place.transfers.fence()
    place.gpu.vmm().close(address, [place.extent])


class Cramped(FakeDriver):
    """A driver that page-locks one buffer."""

    calls = count()

    def page_lock(self, nbytes: int) -> int:
        if next(self.calls):
            raise refused("cuMemHostAlloc", Result.OUT_OF_MEMORY, nbytes)
        return super().page_lock(nbytes)


def test_where_no_more_memory_is_page_locked_the_ring_is_as_large_as_it_was() -> None:
    place = Place(Cramped(late=True), 8)
    tensor = torch.arange(ROOM // 8)
    place.upload(0, ROOM, poisoned(memory_part(tensor)))
    assert place.bytes_at(0, ROOM) == tensor.numpy().tobytes()
    assert place.ring.nbytes == BUFFER_BYTES


def test_nobody_unmaps_a_slab_to_which_the_gpu_still_copies(place: Place) -> None:
    part = memory_part(torch.ones(LEAF_BYTES, dtype=torch.uint8))

    def without_fence() -> None:
        nothing = place.gpu.writable([[place.extent]], place.gpu.vmm(), lambda: None)
        with nothing as [address]:
            place.transfers.upload(address, LEAF_BYTES, [part]).wait()

    with pytest.raises(BackendError, match="cuMemUnmap"):
        without_fence()
    place.transfers.fence()
    place.driver._space.unmap(*next(iter(place.driver._space.reserved.items())))
    place.driver._space.free(*next(iter(place.driver._space.reserved.items())))


def test_a_file_that_is_too_short_is_said_after_all_copies(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(9 * LEAF_BYTES + 100))
    nbytes = 10 * LEAF_BYTES
    with file.open("rb") as opened, pytest.raises(ChangedFileError, match=str(file.stat().st_size)):
        place.upload(0, nbytes, file_part(opened.fileno(), 0, nbytes))
    # Nothing is left of it, and the ring has all its buffers.
    tensor = torch.arange(ROOM // 8)
    place.upload(0, ROOM, memory_part(tensor))
    assert place.bytes_at(0, ROOM) == tensor.numpy().tobytes()


def test_a_tensor_comes_back_in_pieces_and_is_hashed(place: Place) -> None:
    tensor = torch.arange(ROOM // 8 - 8)
    place.upload(64, tensor.nbytes, memory_part(tensor))
    copied = place.driver.traffic["copy_out"]
    back = bytearray(tensor.nbytes)

    def write(piece: memoryview, at: int) -> None:
        back[at : at + len(piece)] = piece
        piece[:] = b"\xaa" * len(piece)

    mapping = place.gpu.map([place.extent], place.gpu.vmm(), place.slab)
    plain = place.transfers.download(mapping.address + 64, tensor.nbytes, write)
    plain.wait()
    assert back == tensor.numpy().tobytes()
    hashed = place.transfers.download(mapping.address + 64, tensor.nbytes, hashed=True)
    hashed.wait()
    assert hashed.digest == digest(back)
    assert place.driver.traffic["copy_out"] - copied == 2 * tensor.nbytes
    assert (plain.content.bytes_hashed, hashed.content.bytes_hashed) == (0, tensor.nbytes)
    assert place.ring.nbytes == 2 * BUFFER_BYTES


def test_what_writes_elsewhere_fails_and_is_said(place: Place) -> None:
    def write(piece: memoryview, at: int) -> None:
        raise OSError(28, f"no room for {len(piece)} bytes at {at}")

    mapping = place.gpu.map([place.extent], place.gpu.vmm(), place.slab)
    with pytest.raises(OSError, match="no room"):
        place.transfers.download(mapping.address, ROOM, write).wait()
    del mapping
    gc.collect()


def test_a_refusal_of_each_call_leaves_a_ring_that_works() -> None:
    tensor = torch.arange(ROOM // 8)
    number, refused = 0, 0
    while refused == number:
        number += 1
        fake = FakeDriver(late=True)
        driver = RefusingDriver(fake, number, Result.INVALID_HANDLE)
        ring = Ring(2)
        transfers = Transfers(cast("Driver", driver), 0, ring)
        gpu, slab = Gpu(fake, "0"), VmmBackend(FakeDriver(), "0").reserve(ROOM)
        extent = MappedExtent(slab.fileno, ROOM, 1)
        with gpu.writable([[extent]], gpu.vmm()) as [address]:
            try:
                transfers.upload(address, ROOM, [memory_part(tensor)]).wait()
                transfers.fence()
            except BackendError:
                refused += 1
            calls = set(driver.calls)
            driver.again()
            transfers.upload(address, ROOM, [memory_part(tensor)]).wait()
            transfers.fence()
        assert gpus.read(slab.fileno, ROOM, ROOM) == tensor.numpy().tobytes()
    assert {"page_lock", "begin_copy_in", "record", "wait", "stream"} <= calls
    assert number > 20


class Mortal:
    """A driver of which every call fails once it is `dead`."""

    def __init__(self, inner: FakeDriver) -> None:
        self._inner = inner
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise refused(name, Result.ILLEGAL_ADDRESS)
        return getattr(self._inner, name)


@pytest.mark.parametrize("most", [2, 8])
def test_a_gpu_that_fails_does_not_stop_the_copies_of_another(most: int) -> None:
    """Its buffers are not filled again, for they may still be read."""
    tensor = torch.arange(ROOM // 8)
    place = Place(FakeDriver(late=True), most)
    fake = FakeDriver(late=True)
    mortal = Mortal(fake)
    failing = Transfers(cast("Driver", mortal), 0, place.ring)
    gpu, slab = Gpu(fake, "0"), VmmBackend(FakeDriver(), "0").reserve(ROOM)
    with gpu.writable([[MappedExtent(slab.fileno, ROOM, 1)]], gpu.vmm()) as [address]:
        failing.upload(address, 2 * BUFFER_BYTES, [memory_part(tensor[: BUFFER_BYTES // 4])]).wait()
        mortal.dead = True
        with pytest.raises(BackendError):
            failing.fence()
        place.upload(0, ROOM, memory_part(tensor))
        assert place.bytes_at(0, ROOM) == tensor.numpy().tobytes()
    assert gpus.read(slab.fileno, ROOM, BUFFER_BYTES) == tensor.numpy().tobytes()[:BUFFER_BYTES]


def test_a_forked_child_cannot_copy(place: Place) -> None:
    tensor = torch.ones(LEAF_BYTES, dtype=torch.uint8)
    place.upload(0, LEAF_BYTES, memory_part(tensor))

    def child() -> None:
        with pytest.raises(BackendError):
            Transfers(place.driver, 0).upload(0, LEAF_BYTES, [memory_part(tensor)])
        os.kill(os.getpid(), signal.SIGKILL)

    assert gpus.ends_by_signal(child)


def test_memory_is_page_locked_for_the_whole_process(place: Place) -> None:
    other = FakeDriver(late=True)
    other.init()
    with current(place.driver, 0):
        address = place.driver.page_lock(LEAF_BYTES)
    ctypes.memset(address, 7, LEAF_BYTES)
    with current(other, 0):
        stream, target = other.stream(), other.allocate(LEAF_BYTES)
        other.begin_copy_in(target, address, LEAF_BYTES, stream)
        assert gpus.get(other, target, 1) == b"\0"
        other.wait(event := other.record(stream))
        other.forget(event)
        assert gpus.get(other, target, 1) == b"\x07"
        other.deallocate(target)
        other.page_unlock(address)
        with pytest.raises(BackendError):
            other.page_unlock(address)
