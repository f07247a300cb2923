"""Sequences of compressed byte streams, and the split of words into byte planes.

    stream = u8 how, u32 stored, u32 plain, `stored` bytes
    how    = 0: the bytes are not compressed; 1: they are one zstd frame

`stored` is the compressed size, and `plain` is the uncompressed size. All numbers are
little-endian. A zstd frame states the size of its content. If that size is not `plain`, the frame
is refused before memory is allocated.

A word is an element of a tensor as an unsigned integer of 1, 2, 4 or 8 bytes. The first plane has
the lowest byte of every word, the second plane the next byte, and so on.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.errors import CorruptFrameError

Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[Any]  # of one of UNSIGNED
UNSIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
SIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}
_HEAD = struct.Struct("<BII")
_PLAIN, _ZSTD = 0, 1
# Below this saving a stream is kept as it is: decoding it would cost more than it gives.
_WORTH = 0.97
_MAX_WINDOW = 8 << 20
# The bytes of weights hardly repeat, but some occur more often than others: what pays is Huffman
# coding. A search for matches this shallow finds runs and nothing else, so literals stay literals:
# smaller *and* faster than level 1 (67.0 % at 1.1 GB/s instead of 68.4 % at 0.5, MiniLM in bf16).
_ENTROPY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_checksum=False,
)
_MATCHES = zstandard.ZstdCompressionParameters.from_level(3, write_checksum=False)


class _Local(threading.local):
    """The objects of zstandard that only one thread may use at a time."""

    def __init__(self) -> None:
        self.compressors = {
            "entropy": zstandard.ZstdCompressor(compression_params=_ENTROPY),
            "matches": zstandard.ZstdCompressor(compression_params=_MATCHES),
        }
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


_LOCAL = _Local()


def pack(streams: Sequence[Bytes], effort: Effort) -> bytes:
    """Return `streams` as one byte string, each stream compressed if that saves 3 %."""
    parts: list[bytes | memoryview] = []
    for stream in streams:
        plain = np.ascontiguousarray(stream).data
        packed = _LOCAL.compressors[effort].compress(plain) if plain.nbytes else b""
        pays = len(packed) < plain.nbytes * _WORTH
        how, chosen = (_ZSTD, packed) if pays else (_PLAIN, plain)
        parts += [_HEAD.pack(how, len(chosen), plain.nbytes), chosen]
    return b"".join(parts)


class Reader:
    """A reader of the streams in `blob`, which may be malformed. Errors name `codec`.

    Raises:
        CorruptFrameError: A method found that `blob` is malformed.
    """

    def __init__(self, blob: memoryview, codec: str) -> None:
        self._blob = blob
        self._at = 0
        self._codec = codec

    def take(self, nbytes: int) -> Bytes:
        """Read and return the next stream, which has exactly `nbytes` when uncompressed.

        The result is read-only and may share the memory of the blob.
        """
        how, stored, plain = self._head()
        if plain != nbytes:
            raise self.bad(f"a stream of {plain} bytes, {nbytes} expected")
        return self._content(how, stored, plain)

    def take_up_to(self, most: int) -> Bytes:
        """Read and return the next stream, which has at most `most` bytes when uncompressed.

        The result is read-only and may share the memory of the blob.
        """
        how, stored, plain = self._head()
        if plain > most:
            raise self.bad(f"a stream of {plain} bytes, at most {most} expected")
        return self._content(how, stored, plain)

    def take_planes(self, count: int, width: int) -> list[Bytes]:
        """Read and return the `width` byte planes of `count` words, lowest first.

        The highest planes of small numbers are often 0; these are left out, all but the lowest.
        """
        planes = [self.take(count) for _ in range(width)]
        while len(planes) > 1 and not planes[-1].any():
            planes.pop()
        return planes

    def end(self) -> None:
        """Check that no bytes follow the last stream, and raise CorruptFrameError otherwise."""
        if self._at != len(self._blob):
            raise self.bad(f"{len(self._blob) - self._at} bytes behind its end")

    def bad(self, what: str) -> CorruptFrameError:
        """Return a CorruptFrameError for the caller to raise; `what` describes the fault."""
        return CorruptFrameError.at(f"codec {self._codec}", what, codec=self._codec)

    def _head(self) -> tuple[int, int, int]:
        start = self._at + _HEAD.size
        if start > len(self._blob):
            raise self.bad("it ends within the head of a stream")
        how, stored, plain = _HEAD.unpack_from(self._blob, self._at)
        if stored > len(self._blob) - start:
            raise self.bad(f"a stream of {stored} bytes, {len(self._blob) - start} are left")
        self._at = start
        return how, stored, plain

    def _content(self, how: int, stored: int, plain: int) -> Bytes:
        data = self._blob[self._at : self._at + stored]
        self._at += stored
        if how == _PLAIN and stored == plain:
            return np.frombuffer(data, np.uint8)
        if how != _ZSTD:
            raise self.bad(f"a stream kept in way {how}, {stored} bytes for {plain}")
        return np.frombuffer(self._decompressed(data, plain), np.uint8)

    def _decompressed(self, data: memoryview, plain: int) -> bytes:
        try:
            said = zstandard.get_frame_parameters(data)
            if said.content_size != plain or said.window_size > _MAX_WINDOW or said.dict_id:
                raise self.bad(f"a frame that says {said.content_size} bytes, not {plain}")
            content = _LOCAL.decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self.bad(f"no zstd frame ({error})") from error
        if len(content) != plain:
            raise self.bad(f"a frame of {len(content)} bytes, not {plain}")
        return content


def words(data: memoryview, width: int) -> tuple[Words, Bytes]:
    """Return `data` as words of `width` bytes, and the bytes after the last whole word.

    Both results share the memory of `data`.
    """
    flat = np.frombuffer(data, np.uint8)
    body = len(flat) - len(flat) % width
    return flat[:body].view(UNSIGNED[width]), flat[body:]


def split(values: Words) -> list[Bytes]:
    """Return the byte planes of the words in `values`, beginning with the lowest byte."""
    return [
        np.right_shift(values, values.dtype.type(8 * n)).astype(np.uint8)
        for n in range(values.dtype.itemsize)
    ]


def join(planes: Sequence[Bytes], out: Words) -> None:
    """Interleave the byte planes in `planes` into the words `out`; the inverse of `split`.

    There may be fewer planes than a word has bytes. The other bytes are then 0.
    """
    if len(planes) == 1:
        out[:] = planes[0]
        return
    # All words at once: in blocks that stay in a processor's cache, the calls take longer than the
    # memory. The halves are joined first, as passes over narrow words are short.
    half = 1 << (len(planes) - 1).bit_length() - 1
    low, high = (_joined(part, half) for part in (planes[:half], planes[half:]))
    out[:] = high
    np.left_shift(out, out.dtype.type(8 * half), out=out)
    np.bitwise_or(out, low, out=out)


def _joined(planes: Sequence[Bytes], width: int) -> Words:
    """Return the words of `width` bytes that have the byte planes `planes`."""
    if len(planes) == 1:
        return planes[0]
    found = np.empty(len(planes[0]), UNSIGNED[width])
    join(planes, found)
    return found


def fold(differences: Words) -> Words:
    """Map the differences 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., as zigzag encoding does."""
    width = differences.dtype.itemsize
    signs = differences.view(SIGNED[width]) >> (8 * width - 1)
    folded: Words = (differences << differences.dtype.type(1)) ^ signs.view(differences.dtype)
    return folded


def unfold(values: Words) -> None:
    """Map the results of `fold` in `values` back to the differences, in place."""
    one = values.dtype.type(1)
    signs = np.bitwise_and(values, one)
    np.negative(signs, out=signs)
    np.right_shift(values, one, out=values)
    np.bitwise_xor(values, signs, out=values)
