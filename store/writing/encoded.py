"""Writing tensors encoded: into a container of the kind delta, leaf by leaf, on all threads."""

from dataclasses import dataclass

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.store.codecs.choice import WORTH, CodecChoice
from tensor_dedup.store.codecs.records import entry, head_bytes
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format.tables import DIGEST_BYTES, ENCODED, Record
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import ContainerWriter, NewPiece
from tensor_dedup.store.writing.hashing import Hasher, changed


@dataclass(frozen=True, slots=True)
class Anchor:
    """A stored piece that is no delta, and what it is read through."""

    digest: bytes
    nbytes: int
    pieces: StoredPieces

    def read(self, start: int, stop: int) -> bytearray:
        """A range of it, verified. CorruptTensorError, MissingObjectError."""
        return self.pieces.read_piece(self.digest, start, stop, self.nbytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a new piece is to be stored: by which codec, and against what."""

    choice: CodecChoice
    anchor: Anchor | None


class EncodedWriter(ContainerWriter):
    """One delta container while it is being written. As ContainerWriter."""

    def __init__(self, objects: Objects, hasher: Hasher) -> None:
        super().__init__(objects, hasher, ENCODED)
        self.saved_bytes = 0
        self.tensors = 0

    def encode(self, source: Handle, piece: NewPiece, leaves: bytes, plan: Plan) -> bool:
        """Store a piece of an open file encoded; False, and nothing is stored, if that is in vain.

        `leaves` are its leaf digests. ChangedFileError: it has others by now.
        """
        if plan.anchor is not None and plan.anchor.digest == piece.digest:
            return False  # somebody else has stored it meanwhile: nothing is against itself
        codec, start = plan.choice.codec, self._reserve(0)
        limit, at = start + int(piece.nbytes * WORTH), start + head_bytes(piece.nbytes)
        handle, head = self._opened(), bytearray()

        def work(first: int) -> bytes | None:
            return encoded(self._read(source, piece, leaves, first), first, plan)

        try:
            for chunk in self._hasher.each(work, range(0, piece.nbytes, LEAF_BYTES)):
                if chunk is None or at + len(chunk) > limit:
                    return self._take_back(handle, start)
                self._objects.files.pwrite(handle, chunk, at)
                head += entry(chunk)
                at += len(chunk)
        except (CorruptTensorError, MissingObjectError):
            return self._take_back(handle, start)  # the anchor is not what it should be
        self._objects.files.pwrite(handle, bytes(head), start)
        base = plan.anchor.digest if plan.anchor is not None and codec.against_base else None
        self._records.append(
            Record(piece.digest, start, at - start, piece.nbytes, codec.name, base, leaves)
        )
        self._end = at
        self.tensors += 1
        self.saved_bytes += piece.nbytes - (at - start)
        return True

    def _take_back(self, handle: Handle, start: int) -> bool:
        self._objects.files.truncate(handle, start)
        self._end = start
        return False

    def _read(self, source: Handle, piece: NewPiece, leaves: bytes, first: int) -> memoryview:
        data = memoryview(bytearray(min(LEAF_BYTES, piece.nbytes - first)))
        count = self._objects.files.pread(source, data, piece.start + first)
        number = first // LEAF_BYTES * DIGEST_BYTES
        if count != len(data) or leaf_digests(data) != [leaves[number : number + DIGEST_BYTES]]:
            raise changed(source, f"its bytes at {piece.start} were written while it was read")
        return data


def encoded(data: memoryview, first: int, plan: Plan) -> bytes | None:
    """A leaf, encoded; None when it does not come back, which nobody should have to find later."""
    codec, base = plan.choice.codec, None
    if plan.anchor is not None and codec.against_base:
        base = memoryview(plan.anchor.read(first, first + len(data)))
    blob = codec.encode(data, base, plan.choice.effort)
    back = bytearray(len(data))
    codec.decode(memoryview(blob), base, memoryview(back))
    # A bytearray compares memory; two memoryviews compare number by number, and let no thread run.
    return blob if back == data else None
