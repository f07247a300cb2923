"""The codec `sparse`: positions and values of the few elements that differ from a base.

A position is stored as the number of equal elements between it and the previous position.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.codecs.streams import UNSIGNED, Bytes, Reader, join, pack, split, words

Places = NDArray[np.int64]
_WIDTH = 4


def streams_of(places: Places) -> list[Bytes]:
    """Return the byte planes of the gaps between the ascending positions in `places`.

    A gap is the number of elements between two neighbouring positions.
    """
    return split(np.diff(places, prepend=-1).astype(UNSIGNED[_WIDTH]) - np.uint32(1))


def read_places(reader: Reader, count: int) -> Places:
    """Read and return the ascending positions that `streams_of` encoded.

    Raises:
        CorruptFrameError: The streams are malformed, or a position is not below `count`.
    """
    gaps = reader.take_up_to(count)
    planes = [gaps, *reader.take_planes(len(gaps), _WIDTH - 1)]
    places = np.empty(len(gaps), np.int64)
    join(planes, places.view(np.uint64))
    np.add(places, 1, out=places)
    np.cumsum(places, out=places)
    np.subtract(places, 1, out=places)
    if len(places) and places[-1] >= count:
        raise reader.bad(f"a place behind the last of {count} elements")
    return places


@dataclass(frozen=True, slots=True)
class Sparse:
    """The `sparse` codecs, one for each element size in bytes (`sparse1` to `sparse8`)."""

    name: str
    width: int
    against_base: bool = True

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        # docstring inherited
        values, rest = words(data, self.width)
        if base is not None:
            values = values ^ words(base, self.width)[0]
        where = np.flatnonzero(values)
        count = np.array([len(values)], UNSIGNED[4]).view(np.uint8)
        return pack([count, *streams_of(where), *split(values[where]), rest], effort)

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        # docstring inherited
        values, rest = words(out, self.width)
        values[:] = words(base, self.width)[0] if base is not None else 0
        reader = Reader(blob, self.name)
        if reader.take(4).view(UNSIGNED[4])[0] != len(values):
            raise reader.bad(f"it is not that of {len(values)} words")
        where = read_places(reader, len(values))
        changes = np.empty(len(where), values.dtype)
        join(reader.take_planes(len(where), self.width), changes)
        rest[:] = reader.take(len(rest))
        reader.end()
        values[where] = values.take(where) ^ changes
