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
from bisect import bisect_right
from collections import deque
from concurrent.futures import wait as wait_for_tasks
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from tensor_dedup.digest import LEAF_BYTES, combine, on_pool, task_ranges
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.loader.residents.slab import bytes_at
from tensor_dedup.memory_manager.cuda.driver import Driver, current
from tensor_dedup.memory_manager.errors import BackendError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
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

    `fill(into, offset)` fills the buffer `into`, which has at most 2 MiB, with the bytes from
    `offset` on, counted from the beginning of the part. It is called by several threads at once.
    `into` is a whole leaf of the part if the part begins at a leaf of the tensor. `fill` may then
    return the digest of the leaf, which is not computed.

    `has_leaves` says that the leaf digests of the part by itself are wanted, too.
    """

    start: int
    nbytes: int
    fill: Fill
    has_leaves: bool = False


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


class _Fragment(NamedTuple):
    """Bytes of one part in one leaf of the tensor, and their leaf digest where `fill` knew it."""

    part: int
    offset: int
    view: memoryview
    known: bytes | None


class HostContent:
    """The bytes of a tensor in files or host memory, and the digests that their upload gives.

    The tensor can be uploaded in ranges that begin at leaves. Safe from any thread.
    """

    def __init__(
        self,
        nbytes: int,
        parts: Sequence[UploadPart],
        *,
        leaves: Sequence[bytes] = (),
        hashed: bool = True,
    ) -> None:
        """Describe a tensor of `nbytes` bytes, which `parts` fill without gap or overlap.

        `leaves` are the tensor's leaf digests if they are known. Without `hashed`, or if they are
        known, nothing is hashed.
        """
        self.nbytes: Final = nbytes
        # Of parts that begin together, an empty one comes first: `fill` looks for the last of them.
        self.parts: Final = sorted(parts, key=lambda part: (part.start, part.nbytes))
        self.hashed: Final = hashed and not leaves
        self._starts: Final = [part.start for part in self.parts]
        self._leaves: dict[int, bytes] = dict(enumerate(leaves))
        self._joined: Final = [
            JoinedLeaves(part.nbytes) if part.has_leaves and self.hashed else None
            for part in self.parts
        ]
        self._lock = threading.Lock()
        self._bytes_hashed = 0

    @property
    def leaves(self) -> list[bytes]:
        """The leaf digests of the tensor. They are known when all of it was uploaded."""
        return self.leaves_of(0, self.nbytes)

    def leaves_of(self, start: int, end: int) -> list[bytes]:
        """Return the leaf digests of the bytes `start` to `end`, which were uploaded."""
        numbers = range(start // LEAF_BYTES, -(-end // LEAF_BYTES))
        return [self._leaves[number] for number in numbers]

    def know(self, start: int, leaves: Sequence[bytes]) -> None:
        """Enter the leaf digests of a range that is not uploaded; `start` is its first byte."""
        self._leaves.update(enumerate(leaves, start // LEAF_BYTES))

    @property
    def digest(self) -> str:
        """The digest of the tensor. It is known when all of it was uploaded."""
        return combine(self.nbytes, self.leaves)

    def part_leaves(self, part: UploadPart) -> list[bytes]:
        """Return the leaf digests of `part` by itself, when all of the tensor was uploaded.

        `part` is one of the content's parts, and has `has_leaves`.
        """
        joined = self._joined[self.parts.index(part)]
        assert joined is not None
        return joined.leaves()

    @property
    def bytes_hashed(self) -> int:
        """The number of bytes that were hashed.

        A part whose leaves are wanted and that does not begin at a leaf of the tensor is hashed
        twice: for its own leaf digests and for those of the tensor.
        """
        joined = sum(each.bytes_hashed for each in self._joined if each is not None)
        return self._bytes_hashed + joined

    def fill(self, view: memoryview, at: int) -> list[_Fragment]:
        """Fill `view` with the bytes of the tensor from `at` on, a multiple of LEAF_BYTES.

        Pass the result to `hash`.
        """
        found = []
        number = max(bisect_right(self._starts, at) - 1, 0)
        begin = 0
        while begin < len(view):
            part = self.parts[number]
            offset = at + begin - part.start
            if offset == part.nbytes:
                number += 1
                continue
            to_leaf = LEAF_BYTES - begin % LEAF_BYTES
            size = min(part.nbytes - offset, to_leaf, len(view) - begin)
            piece = view[begin : begin + size]
            found.append(_Fragment(number, offset, piece, part.fill(piece, offset)))
            begin += size
        return found

    def hash(self, view: memoryview, at: int, fragments: Sequence[_Fragment]) -> None:
        """Hash the leaves in `view`, which `fill` has filled from byte `at` of the tensor on.

        Raises:
            BackendError: The tensor is uploaded again, and has changed since it was hashed.
        """
        waiting = deque(fragments)
        for begin in range(0, len(view), LEAF_BYTES):
            leaf = view[begin : begin + LEAF_BYTES]
            mine, size = [], 0
            while size < len(leaf):
                mine.append(waiting.popleft())
                size += len(mine[-1].view)
            number = (at + begin) // LEAF_BYTES
            alone = mine[0] if len(mine) == 1 else None
            digest = (alone.known if alone else None) or self._hashed(leaf)
            if (before := self._leaves.get(number)) is not None:
                # A file may change between two uploads, and others trust the digest of the first.
                if digest != before:
                    raise BackendError(
                        f"leaf {number} of {self.nbytes} bytes has changed since it was hashed; "
                        "load the tensor privately"
                    )
                continue
            for each in mine:
                joined = self._joined[each.part]
                if joined is not None:
                    joined.add(each.offset, each.view, digest if alone else None)
            self._leaves[number] = digest

    def _hashed(self, leaf: memoryview) -> bytes:
        with self._lock:
            self._bytes_hashed += len(leaf)
        return blake3(leaf).digest()


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

        `parts` fill the tensor. With `hashed`, its leaf digests are computed on the way.
        `upload_range` says what to do next.
        """
        return self.upload_range(address, HostContent(nbytes, parts, hashed=hashed))

    def upload_range(
        self, address: int, content: HostContent, start: int = 0, end: int | None = None
    ) -> DeviceTransfer:
        """Begin to copy the bytes `start` to `end` of `content` to the GPU address `address`.

        `start` is a multiple of LEAF_BYTES, as is `end` unless it is the tensor's end, which is the
        default. Wait for the result, also after an error of another transfer. The GPU may still be
        copying then: call `fence` before anybody uses the bytes, and before the address is
        unmapped.
        """
        end = content.nbytes if end is None else end
        stream = self._opened()
        made = DeviceTransfer(content)
        made.begin(
            partial(self._send, made, address + first, start + first, start + last, stream)
            for first, last in task_ranges(end - start)
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
        whole = UploadPart(0, nbytes, lambda into, offset: None)
        made = DeviceTransfer(HostContent(nbytes, [whole], hashed=hashed))
        made.begin(
            partial(self._receive, made, address, write, start, stop, stream)
            for start, stop in task_ranges(nbytes)
        )
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
        self._ring.collect(self._driver, self._stream)

    def _opened(self) -> int:
        with self._lock:
            if self._stream is None:
                with current(self._driver, self._device):
                    self._stream = self._driver.stream()
            return self._stream

    def _send(self, made: DeviceTransfer, address: int, start: int, stop: int, stream: int) -> None:
        content = made.content
        with current(self._driver, self._device), made.failing():
            for at in range(start, stop, BUFFER_BYTES):
                if made.failed:
                    break  # what is left of it is of no use
                nbytes = min(BUFFER_BYTES, stop - at)
                with self._ring.buffer(self._driver, stream) as buffer:
                    view = buffer.view[:nbytes]
                    fragments = content.fill(view, at)
                    target = address + at - start
                    buffer.begin(self._driver.begin_copy_in, target, buffer.address, nbytes)
                    if content.hashed:  # and the copy goes on meanwhile
                        content.hash(view, at, fragments)

    def _receive(
        self,
        made: DeviceTransfer,
        address: int,
        write: Callable[[memoryview, int], object] | None,
        start: int,
        stop: int,
        stream: int,
    ) -> None:
        content = made.content
        with current(self._driver, self._device), made.failing():
            for at in range(start, stop, BUFFER_BYTES):
                if made.failed:
                    break
                nbytes = min(BUFFER_BYTES, stop - at)
                with self._ring.buffer(self._driver, stream) as buffer:
                    source = address + at
                    buffer.begin(self._driver.begin_copy_out, buffer.address, source, nbytes)
                    buffer.wait()
                    view = buffer.view[:nbytes]
                    if content.hashed:
                        content.hash(view, at, content.fill(view, at))
                    if write is not None:
                        write(view, at)


class DeviceTransfer:
    """Bytes that are being copied to or from a GPU. For one thread, that which began it.

    `content` is the tensor, with its digests when `wait` has returned.
    """

    def __init__(self, content: HostContent) -> None:
        self.content: Final = content
        self.failed = False
        self.tasks: Final[list[Future[None]]] = []

    def begin(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Hand the tasks to the thread pool. After an error, no thread works on any of them."""
        try:
            for task in tasks:
                self.tasks.append(on_pool(task))
        except BaseException:
            self._end()
            raise

    def wait(self, progress: Callable[[], object] | None = None) -> None:
        """Wait until no thread works on the transfer any more, and raise the first error.

        The GPU may still be copying to its memory. `progress` is called now and then. If it raises
        an error, or the wait is interrupted, the transfer ends early, and no thread works on it.
        """
        try:
            for task in self.tasks:
                task.exception()
                if progress is not None:
                    progress()
        except BaseException:
            self._end()
            raise
        for task in self.tasks:
            task.result()

    def _end(self) -> None:
        self.failed = True
        _wait_for_all(self.tasks)

    @property
    def digest(self) -> str:
        """The digest of the tensor, if all of it was copied and hashed. Call `wait` first."""
        return self.content.digest

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager for a task: if it fails, the other tasks of the transfer end early."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise


@contextmanager
def awaited(progress: Callable[[], object] | None = None) -> Iterator[list[DeviceTransfer]]:
    """Context manager that yields a list, and waits for the transfers that were added to it.

    The first error of a transfer is raised. After an error, also of the block or of `progress`, the
    other transfers end early. In any case no thread works on them any more when this returns.
    """
    begun: list[DeviceTransfer] = []
    try:
        yield begun
        for each in begun:
            each.wait(progress)
    except BaseException:
        for each in begun:
            each.failed = True
        _wait_for_all([task for each in begun for task in each.tasks])
        raise


def _wait_for_all(tasks: Sequence[Future[None]]) -> None:
    """Wait until all tasks have ended. An interruption is raised then, and not before."""
    interrupted: KeyboardInterrupt | None = None
    while not all(task.done() for task in tasks):
        try:
            wait_for_tasks(tasks)
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


@dataclass(slots=True)
class _OpenLeaf:
    """A leaf of which a piece has come: the bytes so far, and those that came too early."""

    hasher: blake3 = field(default_factory=blake3)
    done: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class JoinedLeaves:
    """The leaf digests of a tensor, from pieces of it that may begin anywhere.

    Safe from any thread.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes: Final = nbytes
        self._leaves: dict[int, bytes] = {}
        self._open: dict[int, _OpenLeaf] = {}
        self._lock = threading.Lock()
        self.bytes_hashed = 0

    def add(self, at: int, piece: memoryview, digest: bytes | None) -> None:
        """Add a piece of at most LEAF_BYTES, which begins at byte `at` of the tensor.

        `digest` is the leaf digest of the piece if it is known. It is used if the piece is a leaf.
        Each byte of the tensor must be added once.
        """
        hashed, begin = 0, 0
        while begin < len(piece):
            number, inside = divmod(at + begin, LEAF_BYTES)
            leaf_bytes = min(LEAF_BYTES, self._nbytes - number * LEAF_BYTES)
            size = min(leaf_bytes - inside, len(piece) - begin)
            if digest is not None and size == leaf_bytes == len(piece):
                self._leaves[number] = digest
            else:
                self._join(number, inside, piece[begin : begin + size], leaf_bytes)
                hashed += size
            begin += size
        with self._lock:
            self.bytes_hashed += hashed

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

    def is_of(self, driver: Driver, stream: int) -> bool:
        """Return whether its last copy was begun on that stream."""
        return self._driver is driver and self._stream == stream

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

    There are at most `most`, or as many as the system allows. They are allocated when no other is
    free, and never freed.
    """

    def __init__(self, most: int = MOST_BUFFERS) -> None:
        self._most = most
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
        buffer = self._taken(driver, stream)
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

    def collect(self, driver: Driver, stream: int) -> None:
        """Free the buffers whose copies have ended, and their events.

        Raises:
            BackendError: The driver refuses to say whether a copy on `stream` has ended.
        """
        with self._changed:
            while self._has_passed(driver, stream):
                self._free.append(self._sent.popleft())
            self._changed.notify_all()

    def _has_passed(self, driver: Driver, stream: int) -> bool:
        """Return whether the copy of the oldest buffer that was sent has ended."""
        while self._sent:
            try:
                return self._sent[0].passed()
            except BackendError as error:
                if self._sent[0].is_of(driver, stream):
                    raise
                self._lose(error)
                self._sent.popleft()
        return False

    def _lose(self, error: BaseException) -> None:
        """Do without a buffer that was not allocated, or whose copy is not known to have ended.

        Such a buffer is never filled again, and never freed. Copies of other GPUs go on.
        """
        self._made -= 1
        self._changed.notify()
        _log.debug("a page-locked buffer less: %s", str(error))

    def _taken(self, driver: Driver, stream: int) -> _Buffer:
        while True:
            with self._changed:
                oldest = self._free.pop() if self._free else self._next_sent(driver, stream)
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
            except BaseException as error:
                with self._changed:
                    self._lose(error)
                    if oldest is None and isinstance(error, NoMemoryError) and self._made:
                        self._most = self._made  # the others must do
                        continue
                of_another = oldest is not None and not oldest.is_of(driver, stream)
                if of_another and isinstance(error, BackendError):
                    continue
                raise
            return oldest

    def _next_sent(self, driver: Driver, stream: int) -> _Buffer | None:
        """Return the oldest buffer that was sent: if its copy has ended, or the ring is full."""
        if self._sent and (self._made == self._most or self._has_passed(driver, stream)):
            return self._sent.popleft()
        return None


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
