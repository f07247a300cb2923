"""Arrays and tensors whose memory layout differs from a file's, presented as flat bytes.

They may be strided, big-endian, on a device, or lazily conjugated or negated. Their bytes are
gathered in parts, so no copy of a whole array is needed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from tensor_dedup.store.buffers import address
from tensor_dedup.store.buffers import copy as copy_bytes

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    Array: TypeAlias = "np.ndarray[Any, Any]"

# Bytes that are copied together, which a cache holds, and columns that are.
_AT_ONCE: Final = 2 << 20
_STRIP: Final = 16
# Of fewer rows, the lines stay in a cache as they are.
_ROWS: Final = 64


class Gathered(ABC):
    """The bytes of an array in the order in which a file stores them.

    A slice is a copy of the requested bytes. Any thread may read. If the array is modified during a
    read, the slice may be inconsistent.
    """

    __slots__ = ("_width", "nbytes")

    def __init__(self, count: int, width: int) -> None:
        """Describe an array of `count` elements of `width` bytes."""
        self._width, self.nbytes = width, count * width

    def __getitem__(self, part: slice) -> memoryview:
        import numpy as np

        start, stop, _ = part.indices(self.nbytes)
        first, last = start // self._width, -(-stop // self._width)
        memory = np.empty(max(last - first, 0) * self._width, np.uint8).data
        if memory.nbytes:
            self._gather(memory, first)
        return memory[start - first * self._width : stop - first * self._width]

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    @property
    @abstractmethod
    def place(self) -> Hashable:
        """A key for the array's memory and its layout.

        Two objects with equal keys read the same bytes of memory in the same order.
        """

    def copy_into(self, memory: memoryview) -> None:
        """Copy all bytes into `memory` with the GIL released. `memory` has the same size."""
        count = max(_AT_ONCE // self._width, 1)
        for first in range(0, self.nbytes // self._width, count):
            start = first * self._width
            self._gather(memory[start : start + count * self._width], first)

    @abstractmethod
    def _gather(self, memory: memoryview, first: int) -> None:
        """Fill memory with the elements from number `first` on."""


class GatheredArray(Gathered):
    """The bytes of a numpy array in C order and little-endian.

    `gaps` are ranges of padding in each row, as (start, stop) in bytes. They are read as zeros.
    """

    __slots__ = ("_array", "_dtype", "_gaps")

    def __init__(self, array: "Array", gaps: Sequence[tuple[int, int]] = ()) -> None:
        """Describe the bytes of `array`.

        With `gaps`, the elements of the array are bytes, and a row is its last dimension.
        """
        self._array, self._dtype = array, array.dtype.newbyteorder("<")
        self._gaps = tuple(gaps)
        super().__init__(array.size, self._dtype.itemsize)

    @property
    def place(self) -> Hashable:
        # docstring inherited
        array = self._array
        start = array.__array_interface__["data"][0]
        return start, array.shape, array.strides, array.dtype.str, self._gaps

    def _gather(self, memory: memoryview, first: int) -> None:
        # docstring inherited
        import numpy as np

        flat = np.frombuffer(memory, self._dtype)
        at = 0
        for part in parts_in_order(self._array, first, first + flat.size):
            into = flat[at : at + part.size].reshape(part.shape)
            for strip in _strips(part):
                np.copyto(into[strip], part[strip])
            at += part.size
        for start, stop in self._gaps:
            row = self._array.shape[-1]
            for byte in range(start, stop):
                flat[(byte - first) % row :: row] = 0


FlatBytes: TypeAlias = memoryview | Gathered
"""Flat bytes of which slices are memoryviews: of memory, or copies."""


def flat_bytes(data: "Buffer | Gathered") -> FlatBytes:
    """Return `data` as flat bytes that can be sliced. `data` itself is not copied."""
    if isinstance(data, Gathered):
        return data
    view = memoryview(data)
    # What has no bytes may have a form that cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def place_of(data: FlatBytes) -> Hashable:
    """Return a key for the memory of `data`.

    Two objects with equal keys read the same bytes of memory in the same order.
    """
    return data.place if isinstance(data, Gathered) else (address(data), data.nbytes)


def copy_flat(data: FlatBytes, into: memoryview) -> None:
    """Copy all bytes of `data` into `into` with the GIL released. Both have the same size."""
    if isinstance(data, Gathered):
        data.copy_into(into)
    else:
        copy_bytes(data, into)


class _Sliced(Protocol):
    """What an array and a tensor have in common."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


_Some = TypeVar("_Some", bound=_Sliced)


def parts_in_order(array: _Some, start: int, stop: int) -> Iterator[_Some]:
    """Yield views of `array` that together are `array.reshape(-1)[start:stop]`, in order.

    Nothing is copied, also if `array` is not contiguous.
    """
    if start >= stop:
        return
    size = math.prod(array.shape)
    if (start, stop) == (0, size):
        yield array
        return
    if len(array.shape) == 1:
        yield array[start:stop]
        return
    within = size // array.shape[0]
    first, last = -(-start // within), stop // within  # the rows that are in it as a whole
    if first > last:
        yield from parts_in_order(array[last], start - last * within, stop - last * within)
        return
    if start < first * within:
        yield from parts_in_order(array[first - 1], start - (first - 1) * within, within)
    if first < last:
        yield array[first:last]
    if last * within < stop:
        yield from parts_in_order(array[last], 0, stop - last * within)


def _strips(array: "Array") -> Iterator[Any]:
    """Yield indices that together are all of an array, copied one after the other.

    Where neighbours in a row lie apart, and those in a column together, a whole row would touch
    more lines than a cache has: each would be read again for the next row.
    """
    apart = [
        abs(stride) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1
    ]
    few = array.ndim < 2 or array.size < _ROWS * array.shape[-1]  # whose lines a cache has
    if few or abs(array.strides[-1]) <= min(apart, default=0):
        yield ...
        return
    for at in range(0, array.shape[-1], _STRIP):
        yield ..., slice(at, at + _STRIP)
