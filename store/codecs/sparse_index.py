"""A few places among many elements, as streams: before each, how many elements are none."""

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.store.codecs.elements import UNSIGNED, join, split
from tensor_dedup.store.codecs.streams import Bytes, Reader

Places = NDArray[np.int64]
_WIDTH = 4


def streams_of(places: Places) -> list[Bytes]:
    """The planes of the gaps before ascending places."""
    return split(np.diff(places, prepend=-1).astype(UNSIGNED[_WIDTH]) - np.uint32(1))


def read_places(reader: Reader, count: int) -> Places:
    """Ascending places below `count`."""
    first = reader.take_up_to(count)
    gaps = np.empty(len(first), UNSIGNED[_WIDTH])
    join([first, *(reader.take(len(first)) for _ in range(_WIDTH - 1))], gaps)
    places = np.cumsum(gaps, dtype=np.int64) + np.arange(len(gaps))
    if len(places) and places[-1] >= count:
        raise reader.bad(f"a place behind the last of {count} elements")
    return places
