"""Capture a step: tensors that may change are copied, unless the store already has their content.

    capture = StepCapture(step, context)  in the training thread: copies small pieces
    capture.guard()                       captures large arrays, whose changes go unnoticed
    capture.work()                        captures other large pieces, in any number of threads
    capture.hold()                        returns when the model may be changed
    capture.arriving()                    in the background: yields large pieces when captured
    capture.snapshot()                    in the background: returns the whole step

Chunks are processed in their provider's order, and each chunk before the next one is made. Small
tensors are copied into a common buffer, and those on a device are copied there asynchronously.
Frozen chunks in host memory are not copied. Chunks with `make` are made in the background if they
are frozen.

A large tensor in host memory is handled in one of two ways. If the tensor had not changed at the
previous save, it is hashed in place, and is copied only if the store does not have these bytes.
Otherwise it is copied at once, and hashed in the background. Either way, only the content decides
whether the tensor is stored. A tensor that is not in C order is rearranged while it is copied or,
if it is not copied, while it is read.

Copies are made in a pool of limited size (`host_pool`). Copies from a device run on a separate
stream while the device continues to compute (`devices`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from tensor_dedup.store.gathered import FlatBytes, copy_flat, flat_bytes, place_of
from tensor_dedup.store.hashing import change_hash
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.writing.containers import PACK_BELOW, Want, changed_in_memory
from tensor_dedup.store.writing.run_cache import StoredPiece
from tensor_dedup.training.devices import DeviceSnapshot, SnapshotDevice
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.snapshot import ExtractedStep, StepSnapshot
from tensor_dedup.training.state import (
    NamedValue,
    StateChunk,
    in_groups,
    is_tensor,
    tensor_fault,
)

if TYPE_CHECKING:
    from tensor_dedup.store.errors import ChangedModelError

# Small tensors of a device are packed into blocks of this size, each where any dtype may begin.
_PACKED: Final = 1 << 20
_ALIGNED: Final = 64
_NOT_YET: Final = NamedValue("", "U8", (0,), b"")


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What a capture needs from the CheckpointStore and from the step saved before.

    * `known` maps change hashes (fast hashes of the content) to pieces of the previous step.
    * `changing` has the names of large tensors that had changed at the previous save.
    * `make_room()` waits until an earlier save has returned its memory to the pool. It returns
      False if there is no earlier save.
    * `committed()` releases `known`.
    """

    pool: HostPool
    devices: Sequence[SnapshotDevice]
    changing: set[str]
    known: Mapping[bytes, StoredPiece]
    make_room: Callable[[], bool] = lambda: False
    committed: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Large:
    """A large piece in memory that belongs to the model, and its indices in the snapshot."""

    name: str
    view: FlatBytes
    written: Callable[[], bool]
    places: list[int]

    @property
    def counted(self) -> bool:
        """Whether a write to it will be noticed."""
        return self.written is not _never


@dataclass(slots=True)
class _Copy:
    """A copy in the pool of one large piece or of small ones, and its indices in the snapshot.

    `waits` wait until it is made, where a device makes it. `key` is its change hash when that is
    known; `known` means that the store has these bytes.
    """

    block: memoryview
    nbytes: int
    page_locked: bool
    places: list[int]
    small: bool = False
    waits: list[Callable[[], None]] = field(default_factory=list)
    key: bytes | None = None
    known: bool = False


class StepCapture:
    """The capture of one step, with copies of the tensors that may change before they are stored.

    Create the object in the training thread. Afterwards it is safe from any thread. It can be
    committed while some of its large tensors are still being captured.

    Raises:
        StateError: From the constructor, if a part of the model cannot be stored.
    """

    new, background = False, True

    def __init__(self, step: ExtractedStep, context: CaptureContext) -> None:
        self.notes, self._files = step.notes, step.files
        self._context = context
        # In the order of the chunks: `place` is an index in these.
        self._pieces: list[NamedValue] = []
        self._groups: list[str] = []
        self._unmade: list[tuple[int, StateChunk]] = []
        self._large: dict[Hashable, _Large] = {}
        self._hashes: dict[str, bytes] = {}
        self._same: dict[str, StoredPiece] = {}
        self._copied: list[_Copy] = []
        self._packed: _Copy | None = None  # of small pieces of the host; there may be room in it
        self._streams: dict[Any, DeviceSnapshot] = {}
        self._written: list[tuple[str, Callable[[], bool]]] = []  # of what is on devices
        self._held = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._without_room: list[_Large] = []
        self._error: ChangedModelError | None = None
        try:
            self._take(step.chunks)
        except BaseException:
            self.release()
            raise
        large = list(self._large.values())
        self.large_bytes = sum(each.view.nbytes for each in large)
        # What must not wait comes first; then the largest, so that threads end together.
        order = sorted(large, key=lambda each: (each.counted, -each.view.nbytes))
        self._waiting = deque(order)
        self._untried = len(large)
        self._all_tried = threading.Event()
        self.ended: float | None = None
        """When the last large tensor was captured, by `time.perf_counter`; None until then."""
        if not large:
            self._end()

    @property
    def name(self) -> str:
        # docstring inherited
        return step_name(self.notes.run, self.notes.step)

    def _take(self, chunks: Iterable[StateChunk]) -> None:
        """Take the chunks in order, each before the next is made.

        Small tensors on devices are copied first, and the device waits for them at once, since
        forward passes change them; so it does for large ones when a write to them would not be
        noticed. The other ones of devices follow, as far as there is room.
        """
        small: list[tuple[int, StateChunk]] = []
        later: list[tuple[int, StateChunk]] = []
        nbytes = 0
        for place, chunk in enumerate(chunks):
            self._groups.append(chunk.group)
            held = chunk.source
            if type(held) is NamedValue and type(held.data) is bytes:  # an ensemble has thousands
                self._pieces.append(chunk.piece())
                continue
            self._pieces.append(_NOT_YET)
            if chunk.make is not None and chunk.frozen:
                self._unmade.append((place, chunk))
            elif (size := self._size_on_device(chunk)) is None:
                self._pieces[place] = self._on_host(place, chunk)
            elif size < PACK_BELOW:
                small.append((place, chunk))
                nbytes += -(-size // _ALIGNED) * _ALIGNED
                if nbytes >= _PACKED:
                    self._pack(small)
                    small, nbytes = [], 0
            elif _writes_of(chunk.source) is _never:
                self._stage(place, chunk)
            else:
                later.append((place, chunk))
        self._pack(small)
        for copies in self._streams.values():
            copies.hold()
        for place, chunk in later:
            self._stage(place, chunk)

    def _on_host(self, place: int, chunk: StateChunk) -> NamedValue:
        """Return a piece that no device copies, a small one as a copy; note a large one.

        It may be on a device that there is no room for: it is read there, part by part.
        """
        piece = chunk.piece()
        view = flat_bytes(piece.data)
        if chunk.frozen or (isinstance(view, memoryview) and type(view.obj) is bytes):
            return piece
        if view.nbytes < PACK_BELOW:
            return replace(piece, data=self._copy_small(place, view))
        written = _writes_of(chunk.source)
        large = self._large.get(place_of(view))
        if large is None:
            self._large[place_of(view)] = _Large(piece.name, view, written, [place])
        else:  # the same memory, perhaps written to by way of this one
            large.places.append(place)
            large.written = _either(large.written, written)
        return piece

    def _copy_small(self, place: int, view: FlatBytes) -> memoryview:
        """Copy a small piece of the host into a block with others.

        It may change, or make room for the next chunk, before anybody asks again. So where there is
        no room, other saves are waited for, one by one, and then the pool grows.

        The first block is small, as most models need no other.
        """
        packed, pool = self._packed, self._context.pool
        size = -(-view.nbytes // _ALIGNED) * _ALIGNED
        if packed is None or packed.nbytes + size > packed.block.nbytes:
            room = min(2 * packed.block.nbytes, _PACKED) if packed else PACK_BELOW
            while (block := pool.take(room)) is None and self._context.make_room():
                pass
            if block is None and (block := pool.take(PACK_BELOW, beyond=True)) is None:
                raise MemoryError
            packed = self._packed = _Copy(block, 0, False, [], small=True)
            self._copied.append(packed)
        copy = packed.block[packed.nbytes : packed.nbytes + view.nbytes]
        copy[:] = view[:]
        packed.nbytes += size
        packed.places.append(place)
        return copy

    def _device(self, value: Any) -> SnapshotDevice | None:
        """Return the device of a tensor that has bytes; None for what is on the host."""
        if not is_tensor(value):
            return None
        device = next((each for each in self._context.devices if each.takes(value)), None)
        return None if device is None or tensor_fault(value) or not value.numel() else device

    def _size_on_device(self, chunk: StateChunk) -> int | None:
        """Return the size of a tensor on a device in bytes; None for what is on the host."""
        return None if self._device(chunk.source) is None else chunk.nbytes

    def _pack(self, chunks: list[tuple[int, StateChunk]]) -> None:
        """Start copying small tensors of devices into one block, as far as there is room."""
        sizes = [-(-(chunk.nbytes or 0) // _ALIGNED) * _ALIGNED for _, chunk in chunks]
        block = self._context.pool.take(sum(sizes), page_locked=True) if chunks else None
        if block is None:
            for place, chunk in chunks:
                self._pieces[place] = self._on_host(place, chunk)
            return
        places = [place for place, _ in chunks]
        copy = _Copy(block, sum(sizes), True, places, small=True)
        self._copied.append(copy)
        for (place, chunk), size in zip(chunks, sizes, strict=True):
            copy.waits = [self._start(place, chunk, block[:size])]  # they are made in turn
            block = block[size:]

    def _stage(self, place: int, chunk: StateChunk) -> None:
        """Start copying a large tensor from its device, if there is room."""
        nbytes = chunk.nbytes or 0
        block = self._context.pool.take(nbytes, page_locked=True)
        if block is None:
            self._pieces[place] = self._on_host(place, chunk)
            return
        copy = _Copy(block, nbytes, True, [place])
        self._copied.append(copy)
        self._written.append((chunk.name, _writes_of(chunk.source)))
        copy.waits.append(self._start(place, chunk, block))

    def _start(self, place: int, chunk: StateChunk, block: memoryview) -> Callable[[], None]:
        """Start copying a tensor from its device; return a function that waits for the copy."""
        tensor = chunk.source
        if (device := self._device(tensor)) is not None and tensor.device not in self._streams:
            self._streams[tensor.device] = device.begin(tensor)
        host, wait = self._streams[tensor.device].copy(tensor.detach(), block)
        self._pieces[place] = StateChunk(host, chunk.name).piece()
        return wait

    def lacks_room(self) -> bool:
        """Return whether some tensors are not copied because the pool had no room for them.

        The method first waits until each tensor has been tried once.
        """
        self._all_tried.wait()
        return bool(self._without_room)

    def guard(self) -> bool:
        """Capture large values to which a later write would go unnoticed, such as NumPy arrays.

        Returns True if all of them are captured, and False if the pool had no room for one.
        """
        self._work(lambda large: not large.counted)
        with self._lock:
            return all(large.counted for large in self._without_room)

    def work(self) -> None:
        """Capture tensors until none is waiting. Several threads may call this at the same time."""
        self._work(lambda _: True)

    def _work(self, wanted: Callable[[_Large], bool]) -> None:
        while True:
            with self._lock:
                if not self._waiting or not wanted(self._waiting[0]):
                    return
                large = self._waiting.popleft()
            captured = False
            try:
                captured = self._capture(large)
            finally:
                with self._lock:
                    self._untried -= 1
                    if not captured:
                        self._without_room.append(large)
                    if not self._untried:
                        self._end()
                    self._arrived.notify_all()

    def _end(self) -> None:
        self.ended = self.ended or time.perf_counter()
        self._all_tried.set()

    def retry(self) -> None:
        """Try again to capture the tensors for which the pool had no room."""
        self._all_tried.wait()
        with self._lock:
            self._without_room = [large for large in self._without_room if not self._capture(large)]

    def _capture(self, large: _Large) -> bool:
        """Find a piece in the store, or copy it; return False when there is no room."""
        if large.name not in self._context.changing:
            # At the first step there is nothing that it could be equal to.
            key = change_hash(large.view) if self._context.known else b""
            if key in self._context.known:
                self._check(large)
                self._found(large.places, key)
                return True
            self._context.changing.add(large.name)
        block = self._context.pool.take(large.view.nbytes)
        if block is None:
            return False
        nbytes = large.view.nbytes
        try:
            copy_flat(large.view, block[:nbytes])
        except BaseException:
            self._context.pool.give(block)
            raise
        self._check(large)
        for place in large.places:
            self._pieces[place] = replace(self._pieces[place], data=block[:nbytes])
        self._copied.append(_Copy(block, nbytes, False, large.places))
        return True

    def _check(self, large: _Large) -> None:
        if large.written():
            self._error = changed_in_memory(large.name)

    def _found(self, places: Sequence[int], key: bytes) -> None:
        """Note that the store has these pieces, whose bytes are not needed any more."""
        for place in places:
            piece = self._pieces[place]
            self._hashes[piece.name], self._same[piece.name] = key, self._context.known[key]
            self._pieces[place] = replace(piece, data=b"")

    def hold(self) -> None:
        """Wait until all tensors are captured, except for those for which the pool has no room.

        Afterwards the captured tensors may be changed. Work submitted to a device from now on
        starts after the copies from the device. Call this method in the training thread.
        """
        self.work()
        self._all_tried.wait()
        self._hold()
        for copies in self._streams.values():
            copies.hold()

    def _hold(self) -> None:
        """Note what was written to on devices before anybody was told to wait."""
        with self._lock:
            written = [name for name, was_written in self._written if was_written()]
            if written and not self._held:
                self._error = changed_in_memory(written[0])
            self._held = True

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        """Yield each copied large piece, with its change hash, as soon as the copy is complete.

        A change hash is a fast hash of the content. Pieces that the store has, and tensors for
        which the pool had no room, are left out. Each call begins with the first piece again. Only
        one thread at a time may iterate. Do not iterate in a thread that captures.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
        """
        number = 0
        while (copy := self._copy(number)) is not None:
            number += 1
            if copy.small:
                continue
            self._hash_copy(copy)
            if self._error is not None:
                raise self._error
            if copy.key is not None and not copy.known:
                first = self._pieces[copy.places[0]]
                yield copy.key, Want(first.name, first.dtype, copy.block[: copy.nbytes], True)

    def _copy(self, number: int) -> _Copy | None:
        """Return a copy when it is there; None if there are not so many."""
        with self._arrived:
            self._arrived.wait_for(lambda: number < len(self._copied) or not self._untried)
            return self._copied[number] if number < len(self._copied) else None

    def whole(self) -> StepSnapshot:
        # docstring inherited
        return self.snapshot().whole()

    def snapshot(self) -> StepSnapshot:
        """Wait until all tensors are copied, and return the step. Call this method only once.

        Raises:
            ChangedModelError: A tensor was changed before it was copied.
        """
        self._all_tried.wait()
        for wait in (wait for copy in self._copied for wait in copy.waits):
            wait()
        self._hold()
        if self._error is not None:
            raise self._error
        for place, chunk in self._unmade:
            self._pieces[place] = chunk.piece()
        for copy in self._copied:
            self._hash_copy(copy)
        copied = (place for copy in self._copied for place in copy.places)
        private = {self._pieces[place].name for place in copied} - self._same.keys()
        return StepSnapshot(
            self.notes,
            in_groups(self._pieces, self._groups),
            self._files,
            self._hashes,
            self._same,
            private,
            background=True,
            again=self._again,
            check_unchanged=self._check_in_place,
            committed=self._context.committed,
        )

    def _again(self, name: str, key: bytes) -> tuple[FlatBytes, bool] | None:
        """Return the bytes of a piece that the store had, and whether they are a copy in the pool.

        None where they are in memory no more: the model may have been changed since.
        """
        for copy in self._copied:
            if copy.key == key:
                return copy.block[: copy.nbytes], True
        for large in self._large.values():
            names = {self._pieces[place].name for place in large.places}
            if name in names and change_hash(large.view) == key:
                return large.view, False
        return None

    def _check_in_place(self) -> None:
        """See that nobody wrote to what there was no room for; call it when that has been stored.

        Raises:
            ChangedModelError: Somebody did.
        """
        with self._lock:
            written = [large.name for large in self._without_room if large.written()]
        if written:
            raise changed_in_memory(written[0])

    def _hash_copy(self, copy: _Copy) -> None:
        """Hash a copy that is made; one that the store turns out to have is not written."""
        if copy.small or copy.key is not None:
            return
        for wait in copy.waits:
            wait()
        first = self._pieces[copy.places[0]]
        copy.key = key = change_hash(copy.block[: copy.nbytes])
        copy.known = key in self._context.known
        if copy.known:
            self._context.changing.discard(first.name)
            self._found(copy.places, key)
            return
        for place in copy.places:
            self._hashes[self._pieces[place].name] = key

    def settle(self) -> None:
        """Stop the capture, and wait until no thread is in the middle of capturing a tensor."""
        with self._lock:
            self._untried -= len(self._waiting)
            self._waiting.clear()
            if not self._untried:
                self._end()
        self._all_tried.wait()

    def committed(self) -> None:
        """Release the previous step, with which this step was compared.

        Call this method after the commit.
        """
        self._context.committed()

    def release(self) -> None:
        """Return the memory of the copies to the pool. The snapshot must no longer be in use."""
        self._pieces, self._written, self._without_room = [], [], []
        self._unmade, self._large, self._packed, self._files = [], {}, None, {}
        copied, self._copied = self._copied, []
        kept = self._context
        kept.committed()
        for copy in copied:
            # A device may still write to it if the save has failed. If it has failed itself, nobody
            # knows for how long.
            with suppress(RuntimeError):
                for wait in copy.waits:
                    wait()
                kept.pool.give(copy.block, page_locked=copy.page_locked)
        # The handle, which made room, is not kept: whoever drops it may still hold the save.
        self._context = CaptureContext(kept.pool, kept.devices, kept.changing, {})


def _writes_of(value: Any) -> Callable[[], bool]:
    """Return a function that tells whether torch has written to a tensor since.

    Nobody counts what others write.
    """
    if not is_tensor(value) or value.is_inference():
        return _never
    version = value._version
    return lambda: value._version != version


def _never() -> bool:
    return False


def _either(one: Callable[[], bool], other: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that tells of both writes; `_never` if nobody counts one of them."""
    if one is _never or other is _never:
        return _never
    return lambda: one() or other()
