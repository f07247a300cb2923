"""Convert arrays whose dtype or memory order cannot be stored directly as a piece."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.store.gathered import GatheredArray
from tensor_dedup.training.adapters.plain import Wire, dtype_of, dtype_wire
from tensor_dedup.training.errors import DamagedStateError, UnsupportedArrayError
from tensor_dedup.training.state import NUMPY_CODES, NamedValue

if TYPE_CHECKING:
    import numpy as np

_CODES: Final = frozenset(NUMPY_CODES.values())


def storable(array: "np.ndarray[Any, Any]") -> "tuple[np.ndarray[Any, Any] | NamedValue, Wire]":
    """Return `array` in a form that can be stored, and its encoded dtype.

    If the array can be stored unchanged, the encoded dtype is None. Times become 64-bit integers.
    Strings and records become bytes, with one more dimension. The elements are not copied. Padding
    between the fields of a record is read as zeros.

    Raises:
        UnsupportedArrayError: The dtype depends on the machine or holds Python objects, or the
            array is of a subclass of numpy.ndarray.
    """
    import numpy as np

    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedArrayError.at("", f"a {type(array).__qualname__}")
    dtype = array.dtype
    if dtype.str in _CODES:
        return array, None
    try:
        little = dtype.newbyteorder("<")
    except TypeError as error:  # a type of numpy's newer kind, such as texts of any length
        raise UnsupportedArrayError.at("", f"an array of dtype {dtype}") from error
    if little.str in _CODES:
        return array, dtype_wire(dtype)  # the piece has the order of this format
    if dtype.kind in "mM":
        return array.view(np.dtype(np.int64).newbyteorder(dtype.byteorder)), dtype.str
    if dtype.kind not in "USV" or dtype.hasobject:
        raise UnsupportedArrayError.at("", f"an array of dtype {dtype}")
    try:
        return _as_bytes(array), dtype_wire(dtype)
    except ValueError as error:
        raise UnsupportedArrayError.at("", f"an array of dtype {dtype}: {error}") from error


def restored(stored: Any, wire: Wire) -> Any:
    """Return the original array for `stored` and `wire`, which `storable` has returned.

    Raises:
        DamagedStateError: The dtype and the shape are not a result of `storable`.
    """
    import numpy as np

    dtype = dtype_of(wire)
    if dtype.newbyteorder("<").str in _CODES:
        return stored.astype(dtype)
    if dtype.kind in "mM":
        return stored.view(dtype.newbyteorder("<")).astype(dtype)
    if stored.dtype != np.uint8 or stored.shape[-1:] != (dtype.itemsize,):
        raise DamagedStateError.at("#structure", f"no array of {dtype}: {stored.shape}")
    if not stored.size:
        return np.zeros(stored.shape[:-1], dtype)
    return np.ndarray(stored.shape[:-1], dtype, stored.data)


def blank_gaps(rows: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]") -> None:
    """Set the padding bytes between the fields of records to zero.

    Each row of `rows` has the bytes of one record with the dtype `dtype`.
    """
    for start, stop in _gaps(dtype):
        rows[..., start:stop] = 0


def order_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> list[int] | None:
    """Return the order in which the dimensions of an array lie in memory, outermost first.

    Returns None if the array is in C order, or has gaps between its elements.
    """
    large = [number for number, size in enumerate(shape) if size != 1]
    if 0 in shape or len(large) < 2:
        return None
    order = sorted(range(len(shape)), key=lambda number: -strides[number])
    expected = itemsize
    for number in reversed(order):
        if shape[number] != 1 and strides[number] != expected:
            return None
        expected *= shape[number]
    kept = [number for number in order if number in large]
    return None if kept == large else order


def ordered(array: "np.ndarray[Any, Any]", order: Sequence[int]) -> "np.ndarray[Any, Any]":
    """Return a copy of `array` whose dimensions lie in memory in the order `order`.

    `order` begins with the outermost dimension. The copy has the same shape and elements.

    Raises:
        DamagedStateError: `order` is not a permutation of the dimensions.
    """
    import numpy as np

    if sorted(order) != list(range(array.ndim)):
        raise DamagedStateError.at("#structure", f"{order} is no order of {array.ndim} dimensions")
    held = np.empty([array.shape[number] for number in order], array.dtype)
    result = held.transpose([order.index(number) for number in range(array.ndim)])
    result[...] = array
    return result


def _as_bytes(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any] | NamedValue":
    import numpy as np

    shape = (*array.shape, array.dtype.itemsize)
    if not array.size or not array.dtype.itemsize:
        return np.zeros(shape, np.uint8)
    rows = array[..., np.newaxis].view(np.uint8)
    gaps = _gaps(array.dtype)
    return NamedValue("", "U8", shape, GatheredArray(rows, gaps)) if gaps else rows


def _gaps(dtype: "np.dtype[Any]") -> "list[tuple[int, int]]":
    if dtype.fields is None:
        return []
    spans = sorted((field[1], field[1] + field[0].itemsize) for field in dtype.fields.values())
    ends = [0, *(stop for _, stop in spans)]
    starts = [*(start for start, _ in spans), dtype.itemsize]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
