"""Comparing encoded records with what they should be: their own bytes first, then what they say."""

from collections.abc import Sequence
from functools import partial

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.errors import (
    CorruptFrameError,
    CorruptTensorError,
    MissingObjectError,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format.tables import Record
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.decoding import fill_leaves, read_chunk, read_head
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.hashing import Hasher, ProgressListener


class Scrubber:
    """Finds the wrong ones among the records of delta containers, in a session."""

    def __init__(
        self, objects: Objects, index: StoreIndex, hasher: Hasher, progress: ProgressListener
    ) -> None:
        self._objects, self._index = objects, index
        self._hasher, self._progress = hasher, progress

    def wrong(self, handle: Handle, records: Sequence[Record]) -> list[Record]:
        """The records whose stored bytes are not what was written, or do not give their digest.

        A delta whose base cannot be read is right as far as can be told: its chunks are.
        """
        bases = {record.base for record in records if record.base is not None}
        with StoredPieces(self._objects, self._index, bases) as pieces:
            found = self._hasher.each(partial(self._right, handle, pieces), records)
            return [r for r, right in zip(records, found, strict=True) if not right]

    def _right(self, handle: Handle, pieces: StoredPieces, record: Record) -> bool:
        try:
            return self._chunks_right(handle, record) and self._leaves_right(handle, pieces, record)
        except (CorruptTensorError, MissingObjectError):
            return True  # of the base, which is named where it is checked itself
        finally:
            self._progress.advance(record.nbytes)

    def _chunks_right(self, handle: Handle, record: Record) -> bool:
        files = self._objects.files
        try:
            return all(
                chunk.holds(read_chunk(files, handle, record, chunk))
                for chunk in read_head(files, handle, record)
            )
        except CorruptFrameError:
            return False

    def _leaves_right(self, handle: Handle, pieces: StoredPieces, record: Record) -> bool:
        def base(start: int, nbytes: int) -> bytearray:
            return pieces.read_piece(record.base or b"", start, start + nbytes, record.nbytes)

        memory = memoryview(bytearray(min(LEAF_BYTES, record.nbytes)))
        for start in range(0, record.nbytes, LEAF_BYTES):
            view = memory[: record.nbytes - start]
            if not fill_leaves(self._objects.files, handle, record, start, view, base):
                return False
        return True
