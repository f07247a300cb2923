"""Decoding of stored pieces, and verification against their leaf digests."""

from collections.abc import Callable
from dataclasses import dataclass

from tensor_dedup.digest import LEAF_BYTES, combine, leaf_digests, submit
from tensor_dedup.store.codecs.interface import LEAVES, PARTS
from tensor_dedup.store.codecs.leaves import AS_IT_IS, unwrap
from tensor_dedup.store.codecs.records import Chunk, chunks, head_bytes
from tensor_dedup.store.errors import CorruptFrameError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.tables import DIGEST_BYTES, PLAIN, Record


@dataclass(frozen=True, slots=True)
class Base:
    """What gives an encoded piece the leaves of other pieces: of its base, or its parts.

    Both functions fill memory with a whole leaf, whose offset is that in the encoded piece. They
    are called from several threads.

    `read(start, view)` compares the leaf with its digest, and returns that. It raises a
    CorruptFrameError if the other piece has no leaf of that size there.

    `peek(start, view)` returns whether it has filled the memory, with bytes that are not compared
    with anything. What is decoded against them is, and if that is wrong, it is decoded again.
    """

    read: Callable[[int, memoryview], bytes]
    peek: Callable[[int, memoryview], bool] = lambda _start, _view: False


def base_of(
    record: Record,
    read_leaf: Callable[[bytes, int, memoryview], bytes],
    peek_leaf: Callable[[bytes, int, memoryview], bool] = lambda _digest, _start, _view: False,
) -> Base:
    """Return what reads the leaves of other pieces that the piece of `record` needs.

    `read_leaf` and `peek_leaf` are like the functions of a `Base`. But they are called with the
    digest of the other piece, and with the offset in that piece.
    """

    def read(start: int, view: memoryview) -> bytes:
        digest, at = record.leaf_in(start)
        return read_leaf(digest, at, view)

    def peek(start: int, view: memoryview) -> bool:
        digest, at = record.leaf_in(start)
        return peek_leaf(digest, at, view)

    return Base(read, peek)


def fill_leaves(
    files: Files, handle: Handle, record: Record, start: int, view: memoryview, base: Base
) -> bool:
    """Fill `view` with whole leaves of a piece; return whether they are intact.

    The leaves begin at offset `start` of the piece. `record` says where and how the piece is stored
    in the file `handle`. `base` reads leaves of other pieces that are needed for decoding (see
    `base_of`). A CorruptFrameError of `base` counts as damage; its other errors propagate.

    Raises:
        OSError: The file cannot be read.
    """
    if record.codec != PLAIN:
        return _decode(files, handle, record, start, view, base)
    if files.pread(handle, view, record.offset + start) != view.nbytes:
        return False
    return b"".join(leaf_digests(view)) == leaves_of(record, start, view.nbytes)


def are_leaves(nbytes: int, start: int, stop: int) -> bool:
    """Return whether the range from `start` to `stop` is whole leaves of a piece of `nbytes`."""
    inside = 0 <= start < stop <= nbytes
    return inside and not start % LEAF_BYTES and (not stop % LEAF_BYTES or stop == nbytes)


def read_range(
    files: Files, handle: Handle, record: Record, start: int, stop: int, base: Base
) -> bytearray | None:
    """Return the bytes from `start` to `stop` of a piece, or None if they are damaged.

    `record` says where and how the piece is stored in the file `handle`. `base` reads leaves of
    other pieces that are needed for decoding (see `base_of`). A CorruptFrameError of `base` counts
    as damage; its other errors propagate.

    Raises:
        OSError: The file cannot be read.
    """
    first = start // LEAF_BYTES * LEAF_BYTES
    last = min(-(-stop // LEAF_BYTES) * LEAF_BYTES, record.nbytes)
    data = bytearray(last - first)
    if not fill_leaves(files, handle, record, first, memoryview(data), base):
        return None
    return data if (first, last) == (start, stop) else data[start - first : stop - first]


def read_head(files: Files, handle: Handle, record: Record) -> list[Chunk]:
    """Read the head of an encoded piece; return the chunk (place and checksum) of each leaf.

    Raises:
        CorruptFrameError: The head is malformed.
    """
    head = bytearray(head_bytes(record.nbytes))
    files.pread(handle, memoryview(head), record.offset)
    return chunks(bytes(head), record.stored)


def read_chunk(files: Files, handle: Handle, record: Record, chunk: Chunk) -> memoryview:
    """Return the encoded bytes of a leaf, which are stored as `chunk`. They are not verified."""
    blob = memoryview(bytearray(chunk.size))
    files.pread(handle, blob, record.offset + chunk.offset)
    return blob


def decode_leaf(
    codec: str, chunk: memoryview, start: int, view: memoryview, base: Base
) -> bytes | None:
    """Decode `chunk`, the encoded leaf at offset `start` of a piece, into `view`.

    If the leaf was copied from another piece, it is verified, and the result is its digest.
    Otherwise the leaf is not verified, and the result is None.

    Raises:
        CorruptFrameError: The chunk is malformed.
    """
    if codec.startswith(PARTS):
        if chunk:
            raise CorruptFrameError.at(
                f"codec {PARTS}", f"{len(chunk)} bytes of a leaf", codec=codec
            )
        return base.read(start, view)
    if codec == LEAVES and not chunk:
        return base.read(start, view)
    if codec == LEAVES:
        codec, chunk = unwrap(chunk)
    if codec == AS_IT_IS:
        if len(chunk) != len(view):
            what = f"{len(chunk)} bytes for a leaf of {len(view)}"
            raise CorruptFrameError.at(f"codec {LEAVES}", what, codec=LEAVES)
        view[:] = chunk
        return None
    from tensor_dedup.store.codecs.choice import CODECS  # and with it numpy

    under = None
    if CODECS[codec].against_base:
        under = memoryview(bytearray(len(view)))
        if not base.peek(start, under):
            base.read(start, under)
    CODECS[codec].decode(chunk, under, view)
    return None


def _decode(
    files: Files, handle: Handle, record: Record, start: int, view: memoryview, base: Base
) -> bool:
    try:
        found = read_head(files, handle, record)
    except CorruptFrameError:
        return False
    if _decode_chunks(files, handle, record, found, start, view, base):
        return True
    # Perhaps the base is what is wrong. Where it can be told, it is read from elsewhere.
    compared = Base(base.read)
    return record.base is not None and _decode_chunks(
        files, handle, record, found, start, view, compared
    )


def _decode_chunks(
    files: Files,
    handle: Handle,
    record: Record,
    found: list[Chunk],
    start: int,
    view: memoryview,
    base: Base,
) -> bool:
    refused: list[str] = []
    failed: list[tuple[int | None, str | None]] = []

    def fill(piece: memoryview, offset: int) -> bytes | None:
        at = start + offset
        # Neither is raised: it would hold on to the caller's memory.
        try:
            chunk = read_chunk(files, handle, record, found[at // LEAF_BYTES])
        except OSError as error:
            failed.append((error.errno, error.strerror))
            return None
        try:
            return decode_leaf(record.codec, chunk, at, piece, base)
        except CorruptFrameError as error:
            refused.append(str(error))
        return None

    leaves = leaves_of(record, start, view.nbytes)
    try:
        if view.nbytes <= LEAF_BYTES:
            # No thread of the pool would do it sooner, and none should wait for the disk.
            right = (fill(view, 0) or leaf_digests(view)[0]) == leaves
        else:
            parts = [leaves[at : at + DIGEST_BYTES] for at in range(0, len(leaves), DIGEST_BYTES)]
            right = submit(view, fill=fill).result() == combine(view.nbytes, parts)
    except CorruptFrameError:
        return False
    if failed:
        raise OSError(*failed[0], str(handle.path))
    return right and not refused


def leaves_of(record: Record, start: int, nbytes: int) -> bytes:
    """Return the concatenated digests of the leaves in a range of the piece of `record`.

    The range has `nbytes` and begins at `start`, which must be the offset of a leaf.
    """
    first = start // LEAF_BYTES
    count = -(-nbytes // LEAF_BYTES)
    return record.leaves[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
