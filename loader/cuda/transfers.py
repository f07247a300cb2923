"""Copies between a GPU and host memory or files, through page-locked buffers, hashed on the way.

A GPU copies from *page-locked* host memory at the full speed of its bus, but such memory is slow to
allocate. So all copies of a process pass through one ring of buffers, which are allocated when they
are first needed and kept. A thread of the hash pool fills a buffer, begins the copy to the GPU, and
hashes the bytes while they are in its cache. The buffer is filled again after the copy has ended.

Nothing waits for the GPU but a thread that needs a buffer, and `Transfers.fence`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from tensor_dedup.digest import LEAF_BYTES, combine, on_pool, task_ranges
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.residents.slab import bytes_at
from tensor_dedup.memory_manager.cuda.driver import Driver, current
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import torch

    from tensor_dedup.digest import Fill

_log = logging.getLogger(__name__)
# Two leaves: a copy takes 76 microseconds on an H200, to fill and hash them 1.6 ms of one core.
BUFFER_BYTES: Final = 2 * LEAF_BYTES
# 256 MiB. A ring grows to about one buffer for each thread of the hash pool and two more.
MOST_BUFFERS: Final = 64


class UploadPart(NamedTuple):
    """A part of a tensor, and a function that reads it: `nbytes` bytes from byte `start` on.

    `fill(into, offset)` fills the buffer `into`, a leaf (2 MiB) or what is left of the part, with
    the bytes from `offset` on, counted from the beginning of the part. It is called by several
    threads at once. It may return the digest of that leaf, which is then not computed.
    """

    start: int
    nbytes: int
    fill: Fill


def file_part(fd: int, start: int, nbytes: int) -> UploadPart:
    """Return the part that consists of a range of the open file `fd`: a whole tensor.

    Its `fill` raises ChangedFileError if the file is too short, and OSError if it cannot be read.
    """
    return UploadPart(0, nbytes, partial(_read, fd, start))


def memory_part(tensor: torch.Tensor) -> UploadPart:
    """Return the part that consists of `tensor`, which has no gaps and lies in host memory."""

    def fill(into: memoryview, offset: int) -> None:
        # Unlike an assignment to a slice, this lets other threads run.
        ctypes.memmove(_address_of(into), tensor.data_ptr() + offset, len(into))

    return UploadPart(0, tensor.nbytes, fill)


class Transfers:
    """Copies between one GPU and host memory or files. Safe from any thread.

    A BackendError says that the driver refuses. In a forked child, every call fails.
    """

    def __init__(self, driver: Driver, device: int, ring: Ring | None = None) -> None:
        """Copy to and from the GPU with the ordinal `device`, through the ring of the process.

        `ring` is another ring to use instead.
        """
        self._driver: Final = driver
        self._device: Final = device
        self._ring: Final = RING if ring is None else ring
        self._stream: int | None = None
        self._lock = threading.Lock()

    def upload(
        self, address: int, nbytes: int, parts: Sequence[UploadPart], *, hashed: bool = True
    ) -> DeviceTransfer:
        """Begin to copy a tensor of `nbytes` bytes to the GPU address `address`.

        `parts` fill the tensor, in any order. With `hashed`, the leaf digests of each part and of
        the tensor are computed on the way. Wait for the result, also after an error of another
        transfer. The GPU may still be copying then: call `fence` before anybody uses the bytes, and
        before the address is unmapped.
        """
        stream = self._opened()
        made = DeviceTransfer(nbytes, len(parts), hashed=hashed)
        for number, part in enumerate(parts):
            for start, stop in task_ranges(part.nbytes):
                made.tasks.append(
                    (number, on_pool(partial(self._send, made, part, address, start, stop, stream)))
                )
        return made

    def download(
        self,
        address: int,
        nbytes: int,
        write: Callable[[memoryview, int], object] | None = None,
        *,
        hashed: bool = False,
    ) -> DeviceTransfer:
        """Begin to copy a tensor of `nbytes` bytes from the GPU address `address`.

        `write(piece, offset)` gets the bytes in pieces of at most 4 MiB, from several threads and
        in any order. Each piece is valid only during the call. With `hashed`, the tensor's leaf
        digests are computed. The bytes must have been written already. Wait for the result before
        the address is unmapped.
        """
        stream = self._opened()
        made = DeviceTransfer(nbytes, 1, hashed=hashed)
        for start, stop in task_ranges(nbytes):
            task = partial(self._receive, made, address, write, start, stop, stream)
            made.tasks.append((0, on_pool(task)))
        return made

    def fence(self) -> None:
        """Wait until the GPU has made all copies that were begun."""
        if self._stream is None:
            return
        with current(self._driver, self._device):
            event = self._driver.record(self._stream)
            try:
                self._driver.wait(event)
            finally:
                self._driver.forget(event)
        self._ring.collect()

    def _opened(self) -> int:
        with self._lock:
            if self._stream is None:
                with current(self._driver, self._device):
                    self._stream = self._driver.stream()
            return self._stream

    def _send(
        self,
        made: DeviceTransfer,
        part: UploadPart,
        address: int,
        start: int,
        stop: int,
        stream: int,
    ) -> list[bytes]:
        leaves: list[bytes] = []
        with current(self._driver, self._device), made.failing():
            for at in range(start, stop, BUFFER_BYTES):
                if made.failed:
                    break  # what is left of it is of no use
                nbytes = min(BUFFER_BYTES, stop - at)
                with self._ring.buffer(self._driver, stream) as buffer:
                    views = [*_leaves_in(buffer.view, nbytes)]
                    known = [part.fill(view, at + n * LEAF_BYTES) for n, view in enumerate(views)]
                    target = address + part.start + at
                    buffer.begin(self._driver.begin_copy_in, target, buffer.address, nbytes)
                    if made.hashed:  # and the copy goes on meanwhile
                        leaves += made.hash(views, known, part.start + at)
        return leaves

    def _receive(
        self,
        made: DeviceTransfer,
        address: int,
        write: Callable[[memoryview, int], object] | None,
        start: int,
        stop: int,
        stream: int,
    ) -> list[bytes]:
        leaves: list[bytes] = []
        with current(self._driver, self._device), made.failing():
            for at in range(start, stop, BUFFER_BYTES):
                if made.failed:
                    break
                nbytes = min(BUFFER_BYTES, stop - at)
                with self._ring.buffer(self._driver, stream) as buffer:
                    source = address + at
                    buffer.begin(self._driver.begin_copy_out, buffer.address, source, nbytes)
                    buffer.wait()
                    if write is not None:
                        write(buffer.view[:nbytes], at)
                    if made.hashed:
                        views = [*_leaves_in(buffer.view, nbytes)]
                        leaves += made.hash(views, [None] * len(views), at)
        return leaves


class DeviceTransfer:
    """A tensor that is being copied to or from a GPU. For one thread, that which began it."""

    def __init__(self, nbytes: int, parts: int, *, hashed: bool) -> None:
        """Describe a tensor of `nbytes` bytes that consists of so many `parts`."""
        self.nbytes: Final = nbytes
        self.hashed: Final = hashed
        self.failed = False
        self.tasks: Final[list[tuple[int, Future[list[bytes]]]]] = []
        self._parts: Final = parts
        self._joined: Final = JoinedLeaves(nbytes)

    def wait(self, progress: Callable[[], None] | None = None) -> None:
        """Wait until no thread works on the transfer any more, and raise the first error.

        The GPU may still be copying to its memory. `progress` is called now and then.
        """
        errors = []
        for _, task in self.tasks:
            errors.append(task.exception())
            if progress is not None:
                progress()
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            raise failed

    @property
    def leaves(self) -> list[bytes]:
        """The leaf digests of the tensor. Call `wait` first."""
        return self._joined.leaves()

    @property
    def digest(self) -> str:
        """The digest of the tensor. Call `wait` first."""
        return combine(self.nbytes, self.leaves)

    @property
    def bytes_hashed(self) -> int:
        """The number of bytes that were hashed.

        Parts that do not begin at a leaf of the tensor are hashed twice: for their own leaf digests
        and for those of the tensor.
        """
        return self._joined.bytes_hashed

    def part_leaves(self, number: int) -> list[bytes]:
        """Return the leaf digests of the part `number`, hashed as if it were a tensor.

        Call `wait` first.
        """
        return [leaf for part, task in self.tasks if part == number for leaf in task.result()]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager for a task: if it fails, the other tasks of the transfer end early."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def hash(
        self, views: Sequence[memoryview], known: Sequence[bytes | None], at: int
    ) -> list[bytes]:
        """Hash leaves of a part, which begin at byte `at` of the tensor; return their digests.

        `known` has those digests that are known already. Safe from any thread.
        """
        found = []
        for view, digest in zip(views, known, strict=True):
            found.append(digest or blake3(view).digest())
            self._joined.add(at, view, found[-1], hashed=not digest)
            at += len(view)
        return found


def _leaves_in(view: memoryview, nbytes: int) -> Iterator[memoryview]:
    for first in range(0, nbytes, LEAF_BYTES):
        yield view[first : min(first + LEAF_BYTES, nbytes)]


@dataclass(slots=True)
class _OpenLeaf:
    """A leaf in which parts meet: the bytes so far, and those that came before their turn."""

    hasher: blake3 = field(default_factory=blake3)
    done: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class JoinedLeaves:
    """The leaf digests of a tensor, from those of parts that may begin anywhere in it.

    A part that begins at a leaf of the tensor has the tensor's leaves; from other parts the leaves
    of the tensor are hashed once more. Safe from any thread.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes: Final = nbytes
        self._leaves: dict[int, bytes] = {}
        self._open: dict[int, _OpenLeaf] = {}
        self._counted = threading.Lock()
        self.bytes_hashed = 0  # by `add`, and by whoever computed the digests that it got

    def add(self, at: int, piece: memoryview, digest: bytes, *, hashed: bool = True) -> None:
        """Add a piece of at most LEAF_BYTES, which begins at byte `at` of the tensor.

        `digest` is the piece's leaf digest, and `hashed` says that it was computed just now. Each
        byte of the tensor must be added once.
        """
        more, begin = 0, 0
        while begin < len(piece):
            number, inside = divmod(at + begin, LEAF_BYTES)
            leaf_bytes = min(LEAF_BYTES, self._nbytes - number * LEAF_BYTES)
            size = min(leaf_bytes - inside, len(piece) - begin)
            if size == leaf_bytes == len(piece):
                self._leaves[number] = digest
            else:
                self._join(number, inside, piece[begin : begin + size], leaf_bytes)
                more += size
            begin += size
        with self._counted:
            self.bytes_hashed += more + (len(piece) if hashed else 0)

    def _join(self, number: int, inside: int, piece: memoryview, leaf_bytes: int) -> None:
        leaf = self._open.setdefault(number, _OpenLeaf())
        with leaf.lock:
            if inside != leaf.done:  # the buffer is needed for other bytes
                leaf.early[inside] = bytes(piece)
                return
            data: memoryview | bytes | None = piece
            while data is not None:
                leaf.hasher.update(data)
                leaf.done += len(data)
                data = leaf.early.pop(leaf.done, None)
            if leaf.done == leaf_bytes:
                self._leaves[number] = leaf.hasher.digest()
                del self._open[number]

    def leaves(self) -> list[bytes]:
        """Return the digests of all leaves, in order. All bytes must have been added."""
        return [self._leaves[number] for number in range(-(-self._nbytes // LEAF_BYTES))]


class _Buffer:
    """Page-locked host memory of BUFFER_BYTES, and the copy that was begun from or to it."""

    def __init__(self, address: int) -> None:
        self.address: Final = address
        self.view: Final = memoryview(bytes_at(address, BUFFER_BYTES, None)).cast("B")
        self._driver: Driver | None = None
        self._stream = 0
        self._event: int | None = None
        self.busy = False

    def lend(self, driver: Driver, stream: int) -> None:
        """Prepare for a copy on a stream."""
        self._driver, self._stream = driver, stream

    def begin(
        self, copy: Callable[[int, int, int, int], None], target: int, source: int, nbytes: int
    ) -> None:
        """Begin a copy on the stream. The buffer is `busy` until `wait` has returned."""
        assert self._driver is not None
        self.busy = True
        copy(target, source, nbytes, self._stream)
        self._event = self._driver.record(self._stream)

    @property
    def lost(self) -> bool:
        """Whether it will never be known that the copy has ended, because the driver failed.

        Such a buffer must not be filled again, nor freed.
        """
        return self.busy and self._event is None

    def passed(self) -> bool:
        """Return whether the copy has ended."""
        if self._event is None or self._driver is None or not self._driver.done(self._event):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until the copy has ended."""
        assert self._driver is not None
        assert self._event is not None
        self._driver.wait(self._event)
        event, self._event, self.busy = self._event, None, False
        try:
            self._driver.forget(event)
        except BackendError as error:
            _log.warning("an event is lost: %s", str(error))


class Ring:
    """The page-locked buffers of this process. Safe from any thread.

    There are at most `most`. They are allocated when no other is free, and never freed.
    """

    def __init__(self, most: int = MOST_BUFFERS) -> None:
        self._most: Final = most
        self.reset()

    def reset(self) -> None:
        """Forget all buffers, as a forked child must: its parent's driver still uses them."""
        self._free: list[_Buffer] = []
        self._sent: deque[_Buffer] = deque()  # and perhaps still read by a copy, oldest first
        self._made = 0
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """The size of the buffers that were allocated, in bytes."""
        return self._made * BUFFER_BYTES

    @contextmanager
    def buffer(self, driver: Driver, stream: int) -> Iterator[_Buffer]:
        """Context manager: a buffer for one copy on `stream`, a stream of the current context.

        This waits for one if all are in use. At the end of the block the copy may go on.

        Raises:
            BackendError: The driver refuses.
        """
        buffer = self._taken(driver)
        buffer.lend(driver, stream)
        try:
            yield buffer
        finally:
            with self._changed:
                if buffer.lost:
                    self._made -= 1
                else:
                    (self._sent if buffer.busy else self._free).append(buffer)
                self._changed.notify()

    def collect(self) -> None:
        """Free the buffers whose copies have ended, and their events."""
        with self._changed:
            while self._sent and self._sent[0].passed():
                self._free.append(self._sent.popleft())
            self._changed.notify_all()

    def _taken(self, driver: Driver) -> _Buffer:
        while True:
            with self._changed:
                oldest = self._free.pop() if self._free else self._next_sent()
                if oldest is None and self._made == self._most:
                    self._changed.wait()
                    continue
                if oldest is None:
                    self._made += 1
            try:
                if oldest is None:
                    return _Buffer(driver.page_lock(BUFFER_BYTES))
                if oldest.busy:
                    oldest.wait()
            except BaseException:
                # One that is not known to have ended is never filled again, and never freed.
                with self._changed:
                    self._made -= 1
                    self._changed.notify()
                raise
            return oldest

    def _next_sent(self) -> _Buffer | None:
        """Return the oldest buffer that was sent: if its copy has ended, or the ring is full."""
        if not self._sent or not (self._made == self._most or self._sent[0].passed()):
            return None
        return self._sent.popleft()


RING: Final = Ring()
os.register_at_fork(after_in_child=RING.reset)


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _read(fd: int, start: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], start + offset + done)
        if not count:
            raise ChangedFileError(
                f"the file ends at byte {start + offset + done}; it was changed, load again",
                offset=start + offset + done,
            )
        done += count
