"""The layout of an encoded tensor in its container: a head, then one chunk for each leaf.

    head  = for each leaf: u32 size of its chunk, first 12 bytes of the chunk's BLAKE3
    chunk = the encoded leaf; a codec with a base encodes it against the same leaf of the base

To read a range of a tensor, only the leaves in the range are decoded. The checksums reveal a
damaged chunk even if the base is missing. No I/O.
"""

import struct
from dataclasses import dataclass

from blake3 import blake3

from tensor_dedup.store.codecs.interface import CHUNK_BYTES
from tensor_dedup.store.errors import CorruptFrameError

_ENTRY = struct.Struct("<I12s")
_CHECK_BYTES = 12


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk, which is one encoded leaf: its offset, its size in bytes, and its checksum.

    The offset counts from the start of the encoded tensor.
    """

    offset: int
    size: int
    check: bytes

    def holds(self, blob: memoryview) -> bool:
        """Return whether `blob` has the size and the checksum of this chunk."""
        return len(blob) == self.size and _check(blob) == self.check


def head_bytes(nbytes: int) -> int:
    """Return the size of the head of an encoded tensor.

    `nbytes` is the size of the tensor when it is decoded.
    """
    return -(-nbytes // CHUNK_BYTES) * _ENTRY.size


def entry(chunk: bytes) -> bytes:
    """Return the entry for `chunk` in the head: its size and its checksum."""
    return _ENTRY.pack(len(chunk), _check(memoryview(chunk)))


def chunks(head: bytes, stored: int) -> list[Chunk]:
    """Parse `head`, the head of an encoded tensor; return its chunks in the order of the leaves.

    `stored` is the size of the encoded tensor in bytes, with its head.

    Raises:
        CorruptFrameError: The sizes of the head and the chunks do not add up to `stored`.
    """
    found, at = [], len(head)
    for size, check in _ENTRY.iter_unpack(head):
        found.append(Chunk(at, size, check))
        at += size
    if at != stored:
        raise CorruptFrameError.at("head of a record", f"{at} bytes of chunks, {stored} expected")
    return found


def _check(blob: memoryview) -> bytes:
    return blake3(blob).digest()[:_CHECK_BYTES]
