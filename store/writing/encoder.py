"""Storing tensors encoded: the choice of tensors, codecs and bases, and the writing.

`--compress auto` decides everything by measurement on samples. Bases of tensors come from one
checkpoint: the one that the caller names, or else the stored one whose tensors differ in the fewest
bits from the largest new ones. Encoded tensors go to a container of the kind `delta`, leaf by leaf,
on all threads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.codecs.choice import WORTH, CodecChoice, Sample, choose, distance, places
from tensor_dedup.store.codecs.records import entry, head_bytes
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format.tables import DIGEST_BYTES, ENCODED, Record
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredPieces, StoredTensor
from tensor_dedup.store.writing.containers import (
    PACK_BELOW,
    ContainerWriter,
    Fresh,
    NewPiece,
    changed_in_memory,
)
from tensor_dedup.store.writing.hashing import Hashed, Hasher, changed
from tensor_dedup.store.writing.sources import ImportFile, ImportSource, Segment

# Smaller ones share packs; all of them together are a small part of any model.
ENCODE_FROM = PACK_BELOW
# Weights that have nothing to do with each other differ in 0.37 (bf16) to 0.45 of their bits.
RELATED = 0.3
# Bounds on what is looked at to find a base: tensors of the new one, checkpoints, tensors alike.
_LARGEST, _CHECKPOINTS, _ALIKE = 4, 64, 8
_WIDTHS = {8: 1, 16: 2, 32: 4, 64: 8}


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A stored piece that is not a delta, and the reader of its bytes."""

    digest: bytes
    nbytes: int
    pieces: StoredPieces

    def read(self, start: int, stop: int) -> bytearray:
        """Return a verified range of the piece.

        Raises:
            CorruptTensorError, MissingObjectError: no intact copy of it is in the store.
        """
        return self.pieces.read_piece(self.digest, start, stop, self.nbytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to store a new piece: by which codec, and against which base."""

    choice: CodecChoice
    anchor: Anchor | None


class EncodedWriter(ContainerWriter):
    """A delta container that is being written, from files and from memory.

    Its end and its threads are those of a ContainerWriter. `tensors` and `saved_bytes` count the
    tensors encoded from files, and the bytes that this saved.
    """

    def __init__(self, objects: Objects, hasher: Hasher) -> None:
        super().__init__(objects, hasher, ENCODED)
        self.saved_bytes = 0
        self.tensors = 0

    def encode(
        self,
        source: Handle,
        piece: NewPiece,
        leaves: bytes,
        plan: Plan,
        *,
        before_leaf: Callable[[], None] = _nothing,
    ) -> int | None:
        """Encode and store a piece of an open file; return its size, or None if that saves nothing.

        Nothing is stored then. `leaves` are its concatenated leaf digests. One leaf per thread is
        in memory at a time. `before_leaf` is called by each thread before it begins one, and may
        raise to end it all.

        Raises:
            ChangedFileError: the piece no longer has its leaf digests.
        """
        if plan.anchor is not None and plan.anchor.digest == piece.digest:
            return None  # somebody else has stored it meanwhile: nothing is against itself
        codec, start = plan.choice.codec, self._reserve(0)
        limit, at = start + int(piece.nbytes * WORTH), start + head_bytes(piece.nbytes)
        handle, head = self._opened(), bytearray()

        def work(first: int) -> bytes | None:
            before_leaf()
            return encoded_leaf(self._read(source, piece, leaves, first), first, plan)

        try:
            for chunk in self._hasher.each(work, range(0, piece.nbytes, LEAF_BYTES)):
                if chunk is None or at + len(chunk) > limit:
                    self._take_back(handle, start)
                    return None
                self._objects.files.pwrite(handle, chunk, at)
                head += entry(chunk)
                at += len(chunk)
        except (CorruptTensorError, MissingObjectError):
            self._take_back(handle, start)  # the anchor is not what it should be
            return None
        self._objects.files.pwrite(handle, bytes(head), start)
        base = plan.anchor.digest if plan.anchor is not None and codec.against_base else None
        self._records.append(
            Record(piece.digest, start, at - start, piece.nbytes, codec.name, base, leaves)
        )
        self._end = at
        self.tensors += 1
        self.saved_bytes += piece.nbytes - (at - start)
        return at - start

    def encode_all(self, planned: Sequence[tuple[Fresh, Plan]]) -> Iterator[int | None]:
        """Encode and store pieces in memory on all threads; yield the size of each, or None.

        None means that encoding saved nothing. All encoded leaves of a piece are in memory at once.

        Raises:
            ChangedModelError: a piece was written to.
        """

        work = [(piece, plan, at) for piece, plan in planned for at in _leaves(piece)]
        # Waking threads for little takes longer than it saves.
        large = sum(piece.view.nbytes for piece, _ in planned) > LEAF_BYTES
        each = self._hasher.each if large else map
        chunks = iter(each(lambda one: _encoded_in_memory(*one), work))
        for piece, plan in planned:
            yield self._put_encoded(piece, plan, [next(chunks) for _ in _leaves(piece)])

    def encode_small(self, piece: Fresh, plan: Plan) -> int | None:
        """Store a piece in memory of one leaf, in this thread; as `encode_all` otherwise."""
        return self._put_encoded(piece, plan, [_encoded_in_memory(piece, plan, 0)])

    def _put_encoded(self, piece: Fresh, plan: Plan, chunks: Sequence[bytes | None]) -> int | None:
        whole = [chunk for chunk in chunks if chunk is not None]
        stored = head_bytes(piece.view.nbytes) + sum(map(len, whole))
        if len(whole) < len(chunks) or stored > piece.view.nbytes * WORTH:
            return None
        at = start = self._reserve(stored)
        for part in (b"".join(map(entry, whole)), *whole):
            self._write(part, at)
            at += len(part)
        base = None if plan.anchor is None else plan.anchor.digest
        hashed, codec = piece.hashed, plan.choice.codec.name
        self._records.append(
            Record(hashed.digest, start, stored, piece.view.nbytes, codec, base, hashed.leaves)
        )
        return stored

    def _take_back(self, handle: Handle, start: int) -> None:
        self._objects.files.truncate(handle, start)
        self._end = start

    def _read(self, source: Handle, piece: NewPiece, leaves: bytes, first: int) -> memoryview:
        data = memoryview(bytearray(min(LEAF_BYTES, piece.nbytes - first)))
        count = self._objects.files.pread(source, data, piece.start + first)
        number = first // LEAF_BYTES * DIGEST_BYTES
        if count != len(data) or leaf_digests(data) != [leaves[number : number + DIGEST_BYTES]]:
            raise changed(source, f"its bytes at {piece.start} were written while it was read")
        return data


def _leaves(piece: Fresh) -> range:
    return range(0, piece.view.nbytes, LEAF_BYTES)


def _encoded_in_memory(piece: Fresh, plan: Plan, at: int) -> bytes | None:
    data = bytes(piece.view[at : at + LEAF_BYTES])
    number = at // LEAF_BYTES * DIGEST_BYTES
    if leaf_digests(data) != [piece.hashed.leaves[number : number + DIGEST_BYTES]]:
        raise changed_in_memory(piece.name)
    try:
        return encoded_leaf(memoryview(data), at, plan)
    except (CorruptTensorError, MissingObjectError):
        return None  # the anchor is not what it should be


def encoded_leaf(data: memoryview, first: int, plan: Plan) -> bytes | None:
    """Encode a leaf; return None if it does not decode to the same bytes."""
    codec, base = plan.choice.codec, None
    if plan.anchor is not None and codec.against_base:
        base = memoryview(plan.anchor.read(first, first + len(data)))
    blob = codec.encode(data, base, plan.choice.effort)
    back = bytearray(len(data))
    codec.decode(memoryview(blob), base, memoryview(back))
    # A bytearray compares memory; two memoryviews compare number by number, and let no thread run.
    return blob if back == data else None


class Encoder:
    """The encoder of one import, used in a session; close it."""

    def __init__(self, objects: Objects, index: StoreIndex, hasher: Hasher) -> None:
        self._objects = objects
        self._index = index
        self._undo = ExitStack()
        self._base: _Base | None = None
        self.writer = EncodedWriter(objects, hasher)

    def close(self) -> None:
        """Close the base checkpoint."""
        self._undo.close()

    @property
    def base_name(self) -> str | None:
        """The name of the checkpoint that tensors are stored against, if there is one."""
        return None if self._base is None else self._base.checkpoint.name

    def open_base(self, name: str) -> None:
        """Use the tensors of this checkpoint as bases. Raises the errors of opening it."""
        self._base = _Base(self._undo.enter_context(self._opened(name)))

    def find_base(self, source: ImportSource) -> None:
        """Use the stored checkpoint most similar to the one to import as the base, if any is.

        If it is deleted at that very moment, another one is looked for.
        """
        largest = sorted(_tensors(source), key=lambda found: -found[1].nbytes)[:_LARGEST]
        if not largest:
            return
        while (best := self._most_similar(largest)) is not None:
            with suppress(StoreError):  # gone or damaged: it will not be found again
                self.open_base(best)
                return

    def _most_similar(self, largest: Sequence[tuple[ImportFile, Segment]]) -> str | None:
        best, least = None, RELATED
        for name in self._alike([part for _, part in largest]):
            with suppress(StoreError), self._opened(name) as checkpoint:
                found = self._distance(_Base(checkpoint), largest)
                if found < least:
                    best, least = name, found
        return best

    def _opened(self, name: str) -> StoredCheckpoint:
        return StoredCheckpoint(self._objects, self._index, name)

    def _alike(self, parts: Sequence[Segment]) -> list[str]:
        """Names of checkpoints with a tensor of the same dtype and shape, one for each manifest."""
        wanted = {(part.dtype, part.shape) for part in parts}
        found: dict[str, str] = {}
        for name in self._objects.names():
            with suppress(StoreError):
                manifest = self._objects.ref(name)
                pieces = self._objects.pieces(manifest, self._objects.manifest(manifest))
                if any((piece.dtype, piece.shape) in wanted for piece in pieces):
                    found.setdefault(manifest, name)
        return list(found.values())[:_CHECKPOINTS]

    def _distance(self, base: "_Base", largest: Sequence[tuple[ImportFile, Segment]]) -> float:
        """The mean share of bits in which samples differ; what has no counterpart counts 1/2."""
        shares = []
        for file, part in largest:
            handle = file.open_with(self._objects.files)
            try:
                options = list(self._sampled(base, handle, part, file.prefix))
            finally:
                self._objects.files.close(handle)
            shares.append(min((_mean(samples) for _, samples in options), default=0.5))
        return sum(shares) / len(shares)

    def plan(self, handle: Handle, part: Segment, prefix: str) -> Plan | None:
        """Return how to encode a tensor of an open file, or None to store it unencoded."""
        if part.dtype is None or part.nbytes < ENCODE_FROM:
            return None
        anchor, samples = None, self._samples(handle, part, None)
        if self._base is not None:
            options = list(self._sampled(self._base, handle, part, prefix))
            if options:
                anchor, samples = min(options, key=lambda option: _mean(option[1]))
        choice = choose(samples, element_width(part.dtype))
        return None if choice is None else Plan(choice, anchor)

    def write(self, handle: Handle, new: NewPiece, hashed: Hashed, plan: Plan) -> bool:
        """Encode and store a piece by this plan; return False if that saves nothing."""
        return self.writer.encode(handle, new, hashed.leaves, plan) is not None

    def _sampled(
        self, base: "_Base", handle: Handle, part: Segment, prefix: str
    ) -> Iterator[tuple[Anchor, list[Sample]]]:
        for anchor in base.candidates(part, prefix):
            with suppress(StoreError):  # damaged: it is not used
                yield anchor, self._samples(handle, part, anchor)

    def _samples(self, handle: Handle, part: Segment, anchor: Anchor | None) -> list[Sample]:
        found = []
        cache: dict[int, bytearray] = {}
        for start, stop in places(part.nbytes, element_width(part.dtype)):
            stop = min(stop, (start // LEAF_BYTES + 1) * LEAF_BYTES)
            data = memoryview(bytearray(stop - start))
            self._objects.files.pread(handle, data, part.start + start)
            base = None if anchor is None else _cut(anchor, start, stop, cache)
            found.append(Sample(data, base))
        return found


class _Base:
    """The tensors of an open checkpoint, by what they could be an anchor for."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._named = {tensor.name: tensor for tensor in checkpoint}
        self._shaped: dict[tuple[str, tuple[int, ...]], list[StoredTensor]] = {}
        for tensor in checkpoint:
            self._shaped.setdefault((tensor.dtype, tensor.shape), []).append(tensor)

    def candidates(self, part: Segment, prefix: str) -> Iterator[Anchor]:
        """The tensor of the same name, if it has the same form; else those of the same form."""
        named = self._named.get(f"{prefix}{part.name}")
        alike = self._shaped.get((part.dtype or "", part.shape or ()), [])
        if named is not None and (named.dtype, named.nbytes) == (part.dtype, part.nbytes):
            alike = [named]
        for tensor in alike[:_ALIKE]:
            digest = self.checkpoint.anchor(bytes.fromhex(tensor.digest))
            if digest is not None:
                yield Anchor(digest, tensor.nbytes, self.checkpoint)


def element_width(dtype: str | None) -> int:
    """Return the size of a dtype's elements in bytes; 1 if it is unknown or not whole bytes."""
    if dtype == "C64":
        return 4
    name = (dtype or "").rpartition(":")[2]
    return _WIDTHS.get(DTYPE_BITS.get(name, 8), 1)


def _tensors(source: ImportSource) -> Iterator[tuple[ImportFile, Segment]]:
    for file in source.files:
        for part in file.segments:
            if part.dtype is not None and part.nbytes >= ENCODE_FROM:
                yield file, part


def _cut(anchor: Anchor, start: int, stop: int, cache: dict[int, bytearray]) -> memoryview:
    """A range within a leaf; each leaf is read once."""
    first = start // LEAF_BYTES * LEAF_BYTES
    if first not in cache:
        cache[first] = anchor.read(first, min(first + LEAF_BYTES, anchor.nbytes))
    return memoryview(cache[first])[start - first : stop - first]


def _mean(samples: Iterable[Sample]) -> float:
    shares = [distance(sample) for sample in samples]
    return sum(shares) / len(shares)
