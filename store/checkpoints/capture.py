"""Capturing a step: what may change before it is saved is copied, unless the store already has it.

    capture = StepCapture(values, context)  in the training thread: small pieces are copied here
    capture.guard()                         and large ones whose writes nobody counts
    capture.work()                          large ones, one by one, in any number of threads
    capture.hold()                          returns when the model may change
    capture.snapshot(...)                   in the background

A large tensor on the host costs one of two things. If it was unchanged when it was last looked at,
it is hashed where it lies, which reads it once, and nothing is copied when the store has these
bytes. Otherwise it is copied at once and hashed in the background. The tensor's content decides in
the end; its history only says what is tried first.

Copies go into a pool of bounded size, used again from step to step: writing to fresh memory takes
three times as long as writing to memory that held the step before. Copies from a device run on a
stream of their own while the device goes on computing, and it is the device that waits for them,
not the host: the kernels of the optimizer start when the copies are done, and Python goes on at
once.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
import os
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from tensor_dedup.store.buffers import PAGE, allocate
from tensor_dedup.store.checkpoints.commit import StepSnapshot
from tensor_dedup.store.checkpoints.memory_writer import changed
from tensor_dedup.store.checkpoints.notes import Notes
from tensor_dedup.store.checkpoints.run_cache import StoredPiece
from tensor_dedup.store.checkpoints.state import (
    NamedValue,
    is_array,
    is_tensor,
    pieces,
    tensor_fault,
)
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.hashing import change_hash

if TYPE_CHECKING:
    from tensor_dedup.store.checkpoints.errors import ChangedModelError
    from tensor_dedup.store.checkpoints.state import Value


# More than this share of a block is not left unused.
_SLACK: Final = 8


def default_bytes() -> int:
    """A quarter of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class HostPool:
    """Blocks of host memory, `capacity` bytes of them at most. Any thread.

    Pinned blocks are page-locked by CUDA: copies from a device go into them by themselves.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """As new, in a forked child: its parent's threads hold the lock and the blocks."""
        self._lock = threading.Lock()
        # By whether they are pinned; in order of their sizes, for a model may have thousands.
        self._free: dict[bool, list[memoryview]] = {False: [], True: []}
        self._allocated = 0

    @property
    def allocated(self) -> int:
        """Bytes of all blocks, those that nobody has with them."""
        return self._allocated

    def take(self, nbytes: int, *, pinned: bool = False) -> memoryview | None:
        """A block of at least `nbytes`, until `give`; None: there is no room now."""
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            free = self._free[pinned]
            at = bisect_left(free, size, key=_size)
            if at < len(free) and _size(free[at]) <= size + size // _SLACK:
                return free.pop(at)
            self._shrink(self.capacity - size)
            if self._allocated + size > self.capacity:
                return None
            block = _allocate(size, pinned)
            self._allocated += block.nbytes if block is not None else 0
            return block

    def _shrink(self, most: int) -> None:
        """Let go of blocks nobody has, until there are at most so many bytes."""
        for free in self._free.values():
            while free and self._allocated > most:
                self._allocated -= free.pop().nbytes

    def give(self, block: memoryview, *, pinned: bool = False) -> None:
        """Give back what `take` gave."""
        with self._lock:
            insort(self._free[pinned], block, key=_size)

    def clear(self) -> None:
        """Let go of all blocks nobody has."""
        with self._lock:
            self._shrink(0)


def _size(block: memoryview) -> int:
    return block.nbytes


def _allocate(nbytes: int, pinned: bool) -> memoryview | None:
    try:
        if not pinned:
            return allocate(nbytes, huge=True)
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    except (OSError, MemoryError, RuntimeError):  # the last is torch's way to say the same
        return None


class DeviceSnapshot(Protocol):
    """The copies of one save from one device."""

    def copy(self, tensor: "torch.Tensor", into: memoryview) -> "torch.Tensor":
        """Begin to copy a tensor; where its elements will be, in C order: memory of `into`."""
        ...

    def hold(self) -> None:
        """What the device is told from now on begins after the copies that were begun."""
        ...

    def wait(self) -> None:
        """Until all copies are done. Any thread."""
        ...


class SnapshotDevice(Protocol):
    """Where some tensors are, and a way to copy them to the host."""

    def takes(self, tensor: "torch.Tensor") -> bool:
        """Whether it is there."""
        ...

    def begin(self, tensor: "torch.Tensor") -> DeviceSnapshot:
        """Copies of this tensor and others beside it, as they are after what was asked so far."""
        ...


class CudaDevice:
    """CUDA devices, each with one stream for copies."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def takes(self, tensor: "torch.Tensor") -> bool:
        # docstring inherited
        return tensor.is_cuda

    def begin(self, tensor: "torch.Tensor") -> "DeviceSnapshot":
        # docstring inherited
        import torch

        number = tensor.device.index
        if number not in self._streams:
            stream: Any = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._streams[number] = stream
        return _CudaCopies(tensor.device, self._streams[number])


class _CudaCopies:
    def __init__(self, device: "torch.device", stream: Any) -> None:
        import torch

        self._device, self._stream = device, stream
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, tensor: "torch.Tensor", into: memoryview) -> "torch.Tensor":
        # docstring inherited
        import torch

        host = host_tensor(tensor, into)
        with torch.cuda.stream(self._stream):
            # Resolved here, not on the stream of the model: this one would not wait for that.
            host.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
            # Recorded each time: the last one counts, and nobody has to say which that is.
            self._event.record(self._stream)
        # Its memory is not given to others before the copy is done, even if the model lets go.
        tensor.record_stream(self._stream)
        return host

    def hold(self) -> None:
        # docstring inherited
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        # docstring inherited
        self._event.synchronize()


def host_tensor(tensor: "torch.Tensor", memory: memoryview) -> "torch.Tensor":
    """An empty contiguous tensor on the host, of this one's dtype and shape, in this memory."""
    import torch

    nbytes = tensor.numel() * tensor.element_size()
    flat = torch.frombuffer(memory[:nbytes], dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class Context:
    """What the pinnings of one handle have in common.

    `known` is what the store has, by fast hash; `moving` the names of large tensors that were not
    what they had been when they were last looked at.
    """

    pool: HostPool
    devices: Sequence[SnapshotDevice]
    moving: set[str]
    known: Mapping[bytes, StoredPiece]


@dataclass(slots=True)
class _Large:
    """A large piece in memory that is not ours, and its places in the snapshot."""

    name: str
    view: memoryview
    written: Callable[[], bool]
    places: list[int]

    @property
    def counted(self) -> bool:
        """Whether a write to it will be noticed."""
        return self.written is not _never


@dataclass(slots=True)
class _Copy:
    """A copy in the pool, and its places in the snapshot."""

    block: memoryview
    nbytes: int
    pinned: bool
    places: list[int]


class StepCapture:
    """One step while it is pinned down. Made in the thread that trains; all else in any thread.

    StateError, when it is made: something has no form in a checkpoint.
    """

    def __init__(self, values: "Mapping[str, Value]", context: Context) -> None:
        self._context = context
        self._hashes: dict[str, bytes] = {}
        self._same: dict[str, StoredPiece] = {}
        self._copied: list[_Copy] = []
        self._streams: dict[Any, DeviceSnapshot] = {}
        self._written: list[tuple[str, Callable[[], bool]]] = []  # of what is on devices
        self._held = False
        self._lock = threading.Lock()
        self._late: list[_Large] = []
        self._error: ChangedModelError | None = None
        try:
            self._pieces = self._taken(values)
        except BaseException:
            self.release()
            raise
        large = self._own(values)
        self.large_bytes = sum(each.view.nbytes for each in large)
        # What must not wait comes first; then the largest, so that threads end together.
        order = sorted(large, key=lambda each: (each.counted, -each.view.nbytes))
        self._waiting = deque(order)
        self._left = len(large)
        self._settled = threading.Event()
        if not large:
            self._settled.set()

    def _taken(self, values: "Mapping[str, Value]") -> list[NamedValue]:
        staged = self._staged(values)
        rest = iter(pieces({name: held for name, held in values.items() if name not in staged}))
        found: list[NamedValue] = []
        for place, (name, value) in enumerate(values.items()):
            if name not in staged:
                found.append(next(rest))
                continue
            host, copy = staged[name]
            copy.places.append(place)
            if copy.nbytes >= PACK_BELOW:
                self._written.append((name, _writes_of(value)))
            found += pieces({name: host})
        return found

    def _staged(self, values: "Mapping[str, Value]") -> dict[str, tuple[Any, _Copy]]:
        """Begin to copy what is on devices, as far as there is room.

        What is small comes first, and the device waits for it at once: forward passes change it;
        and so does what is large when nobody would notice a write to it.
        """
        found = [(name, value) for name, value in values.items() if self._device(value)]
        first = {name for name, value in found if _must_not_wait(value)}
        begun = [(name, self._stage(value)) for name, value in found if name in first]
        for copies in self._streams.values():
            copies.hold()
        begun += [(name, self._stage(value)) for name, value in found if name not in first]
        return {name: copied for name, copied in begun if copied is not None}

    def _device(self, value: Any) -> SnapshotDevice | None:
        """Where a tensor that has bytes is, if it is on a device."""
        if not is_tensor(value):
            return None
        device = next((each for each in self._context.devices if each.takes(value)), None)
        return None if device is None or tensor_fault(value) or not value.numel() else device

    def _stage(self, tensor: Any) -> tuple[Any, _Copy] | None:
        """Begin to copy a tensor from its device; None: there is no room."""
        device = self._device(tensor)
        block = self._context.pool.take(tensor.nbytes, pinned=True)
        if block is None or device is None:
            return None
        if tensor.device not in self._streams:
            self._streams[tensor.device] = device.begin(tensor)
        host = self._streams[tensor.device].copy(tensor.detach(), block)
        self._copied.append(_Copy(block, tensor.nbytes, True, []))
        return host, self._copied[-1]

    def _own(self, values: "Mapping[str, Value]") -> list[_Large]:
        """Copy what is small and not ours; what is large and not ours, each memory once."""
        found: dict[tuple[int, int], _Large] = {}
        staged = {place for copy in self._copied for place in copy.places}
        for place, (piece, value) in enumerate(zip(self._pieces, values.values(), strict=True)):
            view = memoryview(piece.data)
            if type(view.obj) is bytes or place in staged:
                continue
            if view.nbytes < PACK_BELOW:
                self._pieces[place] = NamedValue(piece.name, piece.dtype, piece.shape, bytes(view))
            elif not _was_copied(value):
                view = view.cast("B")
                new = _Large(piece.name, view, _writes_of(value), [])
                found.setdefault((_address(view), view.nbytes), new).places.append(place)
        return list(found.values())

    def crowded(self) -> bool:
        """Whether there was no room for something, which lies where it lay. Waits for all."""
        self._settled.wait()
        return bool(self._late)

    def guard(self) -> bool:
        """Pin down what nobody counts the writes to, alone; False: there was no room for all."""
        self._work(lambda large: not large.counted)
        with self._lock:
            return all(large.counted for large in self._late)

    def work(self) -> None:
        """Pin down what is waiting, until nothing is. Several threads may."""
        self._work(lambda _: True)

    def _work(self, wanted: Callable[[_Large], bool]) -> None:
        while True:
            with self._lock:
                if not self._waiting or not wanted(self._waiting[0]):
                    return
                large = self._waiting.popleft()
            pinned = False
            try:
                pinned = self._pin(large)
            finally:
                with self._lock:
                    self._left -= 1
                    if not pinned:
                        self._late.append(large)
                    if not self._left:
                        self._settled.set()

    def again(self) -> None:
        """Try once more what there was no room for."""
        self._settled.wait()
        with self._lock:
            self._late = [large for large in self._late if not self._pin(large)]

    def _pin(self, large: _Large) -> bool:
        """Find a piece known, or copy it; False: there is no room."""
        if large.name not in self._context.moving:
            key = change_hash(large.view)
            if key in self._context.known:
                self._check(large)
                self._found(large.places, key)
                return True
            self._context.moving.add(large.name)
        block = self._context.pool.take(large.view.nbytes)
        if block is None:
            return False
        nbytes = large.view.nbytes
        _copy(large.view, block[:nbytes])
        self._copied.append(_Copy(block, nbytes, False, large.places))
        self._check(large)
        for place in large.places:
            self._pieces[place] = replace(self._pieces[place], data=block[:nbytes])
        return True

    def _check(self, large: _Large) -> None:
        if large.written():
            self._error = changed(large.name)

    def _found(self, places: Sequence[int], key: bytes) -> None:
        """The store has these pieces: their bytes are not needed."""
        for place in places:
            piece = self._pieces[place]
            self._hashes[piece.name], self._same[piece.name] = key, self._context.known[key]
            self._pieces[place] = replace(piece, data=b"")

    def hold(self) -> None:
        """Return when the model may be changed, apart from what there was no room for.

        On a device what is asked from now on begins after the copies. The thread that trains.
        """
        self.work()
        self._settled.wait()
        self._hold()
        for copies in self._streams.values():
            copies.hold()

    def _hold(self) -> None:
        """Note what was written to on devices before anybody was told to wait."""
        with self._lock:
            written = [name for name, was_written in self._written if was_written()]
            if written and not self._held:
                self._error = changed(written[0])
            self._held = True

    def snapshot(self, notes: Notes, files: Mapping[str, bytes]) -> StepSnapshot:
        """The step, once, when all is copied. ChangedModelError: something was changed before."""
        self._settled.wait()
        for copies in self._streams.values():
            copies.wait()
        self._hold()
        if self._error is not None:
            raise self._error
        for copy in self._copied:
            self._look_at(copy)
        return StepSnapshot(notes, self._pieces, files, self._hashes, self._same)

    def _look_at(self, copy: _Copy) -> None:
        """Hash a copy; one that the store has after all is not written."""
        first = self._pieces[copy.places[0]]
        if copy.nbytes < PACK_BELOW:
            return
        key = change_hash(copy.block[: copy.nbytes])
        if key in self._context.known:
            self._context.moving.discard(first.name)
            self._found(copy.places, key)
            return
        for place in copy.places:
            self._hashes[self._pieces[place].name] = key

    def release(self) -> None:
        """Give the copies back: nobody reads the snapshot any more."""
        self._pieces, self._written, self._late = [], [], []
        copied, self._copied = self._copied, []
        for copy in copied:
            self._context.pool.give(copy.block, pinned=copy.pinned)


def _address(view: memoryview) -> int:
    import numpy as np

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _copy(view: memoryview, into: memoryview) -> None:
    """Other threads run meanwhile, which an assignment to a slice does not allow."""
    import numpy as np

    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(view, np.uint8))


def _was_copied(value: Any) -> bool:
    """Whether a piece of this has memory of its own: it was elsewhere, or not in order."""
    if is_tensor(value):
        return value.device.type != "cpu" or not value.is_contiguous()
    return is_array(value) and not value.flags.c_contiguous


def _writes_of(value: Any) -> Callable[[], bool]:
    """Tells whether torch has written to a tensor since; nobody counts what others write."""
    if not is_tensor(value) or value.is_inference():
        return _never
    version = value._version
    return lambda: value._version != version


def _must_not_wait(tensor: Any) -> bool:
    """Whether the device waits at once: it is small, or nobody would notice a write to it."""
    small: bool = tensor.nbytes < PACK_BELOW
    return small or _writes_of(tensor) is _never


def _never() -> bool:
    return False
