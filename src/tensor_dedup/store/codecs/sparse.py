"""The codec `sparse`: the few elements that differ from a base, as positions and differences."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.codecs.streams import (
    UNSIGNED,
    Bytes,
    Reader,
    Words,
    fold,
    join,
    pack,
    split,
    unfold,
    words,
)

Places = NDArray[np.int64]
_MOST = 255


def stream_of(places: Places) -> Bytes:
    """Return the ascending positions in `places` as their distances, in a byte or more each.

    A distance is a byte from 1 to 255, after a byte 0 for each 255 elements more. So one Huffman
    code is for all of a distance. Where 1 % of the elements differ, byte planes take 8 % more.
    """
    distances = np.diff(places, prepend=-1).astype(UNSIGNED[4])
    skips = (distances - np.uint32(1)) // np.uint32(_MOST)
    ends = np.cumsum(skips, dtype=np.int64)
    ends += np.arange(len(places))
    stream = np.zeros(ends[-1] + 1 if len(ends) else 0, np.uint8)
    stream[ends] = distances - skips * np.uint32(_MOST)
    return stream


def read_places(reader: Reader, count: int) -> Places:
    """Read and return the ascending positions that `stream_of` encoded.

    Raises:
        CorruptFrameError: The stream is malformed, or a position is not below `count`.
    """
    stream = reader.take_up_to(count)
    skips = stream == 0
    places = np.cumsum(np.where(skips, np.uint8(_MOST), stream), dtype=np.int64)
    if skips.any():
        places = places[~skips]
    np.subtract(places, 1, out=places)
    if len(places) and places[-1] >= count:
        raise reader.bad(f"a place behind the last of {count} elements")
    return places


def _differing(values: Words, under: Words) -> Places:
    """Return the ascending positions at which two arrays of words differ.

    Eight are looked at together, as few differ. It is quick for truth values only: numpy finds
    numbers that are not 0 four times as slowly.
    """
    differs = np.zeros(-(-len(values) // 8) * 8, np.bool_)
    np.not_equal(values, under, out=differs[: len(values)])
    eights = differs.view(np.uint64)
    first = np.flatnonzero(eights != 0)
    within = np.flatnonzero(eights.take(first).view(np.bool_))
    found: Places = first.take(within >> 3) << 3
    found |= within & 7
    return found


@dataclass(frozen=True, slots=True)
class Sparse:
    """The `sparse` codecs, one for each element size in bytes (`sparse1` to `sparse8`)."""

    name: str
    width: int
    against_base: bool = True

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        # docstring inherited
        values, rest = words(data, self.width)
        under = words(base, self.width)[0] if base is not None else np.zeros_like(values)
        where = _differing(values, under)
        changes = fold(values.take(where) - under.take(where)) - values.dtype.type(1)
        count = np.array([len(values)], UNSIGNED[4]).view(np.uint8)
        # zstd takes half as much again for signs in bytes, and 20 times as long: it finds matches.
        signs = np.packbits(changes.astype(np.uint8) & np.uint8(1), bitorder="little")
        sizes = split(changes >> values.dtype.type(1))
        return pack([count, stream_of(where), signs, *sizes, rest], effort)

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        # docstring inherited
        values, rest = words(out, self.width)
        values[:] = words(base, self.width)[0] if base is not None else 0
        reader = Reader(blob, self.name)
        if reader.take(4).view(UNSIGNED[4])[0] != len(values):
            raise reader.bad(f"it is not that of {len(values)} words")
        where = read_places(reader, len(values))
        signs = reader.take(-(-len(where) // 8))
        changes = np.empty(len(where), values.dtype)
        join(reader.take_planes(len(where), self.width), changes)
        rest[:] = reader.take(len(rest))
        reader.end()
        np.left_shift(changes, values.dtype.type(1), out=changes)
        changes += np.unpackbits(signs, count=len(where), bitorder="little")
        np.add(changes, values.dtype.type(1), out=changes)
        unfold(changes)
        np.add(changes, values.take(where), out=changes)
        values[where] = changes
