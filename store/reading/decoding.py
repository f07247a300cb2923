"""Decoding stored records, and verifying them against their leaf digests."""

from collections.abc import Callable
from typing import TypeAlias

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests, submit
from tensor_dedup.store.codecs.records import Chunk, chunks, head_bytes
from tensor_dedup.store.errors import CorruptFrameError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.tables import DIGEST_BYTES, PLAIN, Record

Base: TypeAlias = Callable[[int, int], bytearray]
"""Verified bytes of what a delta is against: from where, how many. Called from several threads."""


def fill_leaves(
    files: Files, handle: Handle, record: Record, start: int, view: memoryview, base: Base
) -> bool:
    """Fill `view` with whole leaves of a record from `start`; return whether they are intact.

    `base` is called for a delta only, and its errors propagate, as does the OSError of a disk that
    cannot read the record. Encoded leaves are decoded on the
    process's hashing threads, each just before it is hashed.
    """
    if record.codec != PLAIN:
        return _decode(files, handle, record, start, view, base)
    if files.pread(handle, view, record.offset + start) != view.nbytes:
        return False
    return b"".join(leaf_digests(view)) == leaves_of(record, start, view.nbytes)


def read_range(
    files: Files, handle: Handle, record: Record, start: int, stop: int, base: Base
) -> bytearray | None:
    """Return the bytes from `start` to `stop` of a record, or None if their leaves are damaged."""
    first = start // LEAF_BYTES * LEAF_BYTES
    last = min(-(-stop // LEAF_BYTES) * LEAF_BYTES, record.nbytes)
    data = bytearray(last - first)
    if not fill_leaves(files, handle, record, first, memoryview(data), base):
        return None
    return data if (first, last) == (start, stop) else data[start - first : stop - first]


def read_head(files: Files, handle: Handle, record: Record) -> list[Chunk]:
    """Return the places of the chunks of an encoded record.

    Raises:
        CorruptFrameError: no encoder wrote this head.
    """
    head = bytearray(head_bytes(record.nbytes))
    files.pread(handle, memoryview(head), record.offset)
    return chunks(bytes(head), record.stored)


def read_chunk(files: Files, handle: Handle, record: Record, chunk: Chunk) -> memoryview:
    """Read the encoded bytes of one leaf.

    A chunk is no longer than its record, which takes less than `nbytes`.
    """
    blob = memoryview(bytearray(chunk.size))
    files.pread(handle, blob, record.offset + chunk.offset)
    return blob


def _decode(
    files: Files, handle: Handle, record: Record, start: int, view: memoryview, base: Base
) -> bool:
    from tensor_dedup.store.codecs.choice import CODECS  # and with it numpy

    codec = CODECS[record.codec]
    refused: list[str] = []
    failed: list[tuple[int | None, str | None]] = []

    def fill(piece: memoryview, offset: int) -> None:
        at = start + offset
        under = None if record.base is None else memoryview(base(at, piece.nbytes))
        # Neither is raised: it would hold on to the caller's memory.
        try:
            chunk = read_chunk(files, handle, record, found[at // LEAF_BYTES])
            codec.decode(chunk, under, piece)
        except CorruptFrameError as error:
            refused.append(str(error))
        except OSError as error:
            failed.append((error.errno, error.strerror))

    try:
        found = read_head(files, handle, record)
        digest = submit(view, fill=fill).result()
    except CorruptFrameError:
        return False
    if failed:
        raise OSError(*failed[0], str(handle.path))
    if refused:
        return False
    leaves = leaves_of(record, start, view.nbytes)
    parts = [leaves[at : at + DIGEST_BYTES] for at in range(0, len(leaves), DIGEST_BYTES)]
    return digest == combine(view.nbytes, parts)


def leaves_of(record: Record, start: int, nbytes: int) -> bytes:
    first = start // LEAF_BYTES
    count = -(-nbytes // LEAF_BYTES)
    return record.leaves[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
