"""Byte streams, one behind the other, each compressed where that pays: what every codec ends in.

    stream = u8 how, u32 stored, u32 plain, `stored` bytes     how: 0 as they are, 1 one zstd frame

Little-endian. The zstd frame says how long its content is; anything but `plain` is refused before
memory is taken, so nobody can ask for more than the reader expects.
"""

import struct
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from tensor_dedup.store.codecs.interface import Effort
from tensor_dedup.store.errors import CorruptFrameError

Bytes: TypeAlias = NDArray[np.uint8]

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
    """What zstandard lets only one thread at a time use."""

    def __init__(self) -> None:
        self.compressors = {
            "entropy": zstandard.ZstdCompressor(compression_params=_ENTROPY),
            "matches": zstandard.ZstdCompressor(compression_params=_MATCHES),
        }
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


_LOCAL = _Local()


def pack(streams: Sequence[Bytes], effort: Effort) -> bytes:
    """These streams, one behind the other."""
    parts: list[bytes | memoryview] = []
    for stream in streams:
        plain = np.ascontiguousarray(stream).data
        packed = _LOCAL.compressors[effort].compress(plain) if plain.nbytes else b""
        pays = len(packed) < plain.nbytes * _WORTH
        how, chosen = (_ZSTD, packed) if pays else (_PLAIN, plain)
        parts += [_HEAD.pack(how, len(chosen), plain.nbytes), chosen]
    return b"".join(parts)


class Reader:
    """Takes streams apart again. CorruptFrameError for anything that is not what is expected."""

    def __init__(self, blob: memoryview, codec: str) -> None:
        self._blob = blob
        self._at = 0
        self._codec = codec

    def take(self, nbytes: int) -> Bytes:
        """The next stream, which must have `nbytes`. Read-only; valid as long as the blob."""
        how, stored, plain = self._head()
        if plain != nbytes:
            raise self.bad(f"a stream of {plain} bytes, {nbytes} expected")
        return self._content(how, stored, plain)

    def take_up_to(self, most: int) -> Bytes:
        """The next stream, of any size up to `most`."""
        how, stored, plain = self._head()
        if plain > most:
            raise self.bad(f"a stream of {plain} bytes, at most {most} expected")
        return self._content(how, stored, plain)

    def end(self) -> None:
        """Nothing may follow."""
        if self._at != len(self._blob):
            raise self.bad(f"{len(self._blob) - self._at} bytes behind its end")

    def bad(self, what: str) -> CorruptFrameError:
        """The error about this data."""
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
