"""The bytes of arrays that lie otherwise in memory than in a file: in other strides, or big-endian.

They are gathered a part at a time, so that nobody needs a copy of a whole array.
"""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tensor_dedup.store.buffers import address
from tensor_dedup.store.buffers import copy as copy_bytes

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    Array: TypeAlias = "np.ndarray[Any, Any]"

# Elements that are copied together, which a cache holds, and columns that are.
_AT_ONCE: Final = 1 << 19
_STRIP: Final = 16
# Of fewer rows, the lines stay in a cache as they are.
_ROWS: Final = 64


class Gathered:
    """The bytes of an array in C order and little-endian; a slice of it is a copy of them.

    Any thread may read it. What somebody writes to the array meanwhile is in some slices only.
    """

    __slots__ = ("_array", "_dtype", "nbytes")

    def __init__(self, array: "Array") -> None:
        self._array, self._dtype = array, array.dtype.newbyteorder("<")
        self.nbytes = int(array.nbytes)

    def __getitem__(self, part: slice) -> memoryview:
        import numpy as np

        start, stop, _ = part.indices(self.nbytes)
        width = self._dtype.itemsize
        first = start // width
        flat = np.empty(max(-(-stop // width) - first, 0), self._dtype)
        self._gather(flat, first)
        return flat.view(np.uint8).data[start - first * width : stop - first * width]

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    @property
    def place(self) -> Hashable:
        """Where the array lies, and how: equal for two that are the same bytes."""
        array = self._array
        start = array.__array_interface__["data"][0]
        return start, array.shape, array.strides, array.dtype.str

    def copy_into(self, memory: memoryview) -> None:
        """Copy all bytes into memory of their size, with the GIL released."""
        import numpy as np

        flat = np.frombuffer(memory, self._dtype)
        for first in range(0, flat.size, _AT_ONCE):
            self._gather(flat[first : first + _AT_ONCE], first)

    def _gather(self, flat: "Array", first: int) -> None:
        """Fill an array of one dimension with the elements from number `first` on."""
        import numpy as np

        at = 0
        for part in _parts(self._array, first, first + flat.size):
            into = flat[at : at + part.size].reshape(part.shape)
            for strip in _strips(part):
                np.copyto(into[strip], part[strip])
            at += part.size


FlatBytes: TypeAlias = memoryview | Gathered
"""Flat bytes of which slices are memoryviews: of memory, or copies."""


def flat_bytes(data: "Buffer | Gathered") -> FlatBytes:
    """Return bytes so that they can be sliced. Nothing is copied."""
    if isinstance(data, Gathered):
        return data
    view = memoryview(data)
    # What has no bytes may have a form that cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def place_of(data: FlatBytes) -> Hashable:
    """Return what is equal for the same bytes of memory."""
    return data.place if isinstance(data, Gathered) else (address(data), data.nbytes)


def copy_flat(data: FlatBytes, into: memoryview) -> None:
    """Copy bytes into memory of their size, with the GIL released."""
    if isinstance(data, Gathered):
        data.copy_into(into)
    else:
        copy_bytes(data, into)


def _parts(array: "Array", start: int, stop: int) -> "Iterator[Array]":
    """Yield parts of an array that together have the elements from `start` to `stop`, in C order"""
    if start >= stop:
        return
    if (start, stop) == (0, array.size):
        yield array
        return
    if array.ndim == 1:
        yield array[start:stop]
        return
    within = array.size // len(array)
    first, last = -(-start // within), stop // within  # the rows that are in it as a whole
    if first > last:
        yield from _parts(array[last], start - last * within, stop - last * within)
        return
    if start < first * within:
        yield from _parts(array[first - 1], start - (first - 1) * within, within)
    if first < last:
        yield array[first:last]
    if last * within < stop:
        yield from _parts(array[last], 0, stop - last * within)


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
