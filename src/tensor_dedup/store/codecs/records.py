"""The layout of an encoded tensor in its container: a head, then a chunk for each leaf.

    head  = for each leaf: u32 size of its chunk, first 12 bytes of the chunk's BLAKE3
    chunk = what the codec made of the leaf, and of the same leaf of the base where there is one

So reading a range decodes only its leaves, and a damaged chunk is recognised without its base. No
I/O.
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
    """The place of a chunk, counted from the start of its record, and its checksum."""

    offset: int
    size: int
    check: bytes

    def holds(self, blob: memoryview) -> bool:
        """Return whether `blob` has the checksum of this chunk."""
        return len(blob) == self.size and _check(blob) == self.check


def head_bytes(nbytes: int) -> int:
    """Return the size of the head of a record that decodes to `nbytes`."""
    return -(-nbytes // CHUNK_BYTES) * _ENTRY.size


def entry(chunk: bytes) -> bytes:
    """Return the entry of a chunk in the head."""
    return _ENTRY.pack(len(chunk), _check(memoryview(chunk)))


def chunks(head: bytes, stored: int) -> list[Chunk]:
    """Return the places of the chunks of a record.

    Raises:
        CorruptFrameError: the chunks do not add up to `stored` bytes.
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
