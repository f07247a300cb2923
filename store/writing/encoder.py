"""`--compress auto`: which new tensors are stored encoded, by which codec, and against what.

Everything is decided by measurement on samples. What it might be against comes from one checkpoint,
the base: the one that is named, else the one among those in the store whose tensors differ in the
fewest bits from the largest new ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.codecs.choice import Sample, choose, distance, places
from tensor_dedup.store.files import Handle
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredTensor
from tensor_dedup.store.writing.containers import PACK_BELOW, NewPiece
from tensor_dedup.store.writing.encoded import Anchor, EncodedWriter, Plan
from tensor_dedup.store.writing.hashing import Hashed, Hasher
from tensor_dedup.store.writing.sources import ImportFile, ImportSource, Segment

# Smaller ones share packs; all of them together are a small part of any model.
ENCODE_FROM = PACK_BELOW
# Weights that have nothing to do with each other differ in 0.37 (bf16) to 0.45 of their bits.
_RELATED = 0.3
# Bounds on what is looked at to find a base: tensors of the new one, checkpoints, tensors alike.
_LARGEST, _CHECKPOINTS, _ALIKE = 4, 64, 8
_WIDTHS = {8: 1, 16: 2, 32: 4, 64: 8}


class Encoder:
    """What one import needs to encode. In a session; close it."""

    def __init__(self, objects: Objects, index: StoreIndex, hasher: Hasher) -> None:
        self._objects = objects
        self._index = index
        self._undo = ExitStack()
        self._base: _Base | None = None
        self.writer = EncodedWriter(objects, hasher)

    def close(self) -> None:
        """Let the base's containers go."""
        self._undo.close()

    @property
    def base_name(self) -> str | None:
        """The checkpoint that tensors are stored against, if there is one."""
        return None if self._base is None else self._base.checkpoint.name

    def open_base(self, name: str) -> None:
        """Use the tensors of this checkpoint. UnknownNameError, and what reading it raises."""
        self._base = _Base(self._undo.enter_context(self._opened(name)))

    def find_base(self, source: ImportSource) -> None:
        """Use the stored checkpoint that is most like what is to be imported, if one is."""
        largest = sorted(_tensors(source), key=lambda found: -found[1].nbytes)[:_LARGEST]
        if not largest:
            return
        best, least = None, _RELATED
        for name in self._alike([part for _, part in largest]):
            with suppress(StoreError), self._opened(name) as checkpoint:
                found = self._distance(_Base(checkpoint), largest)
                if found < least:
                    best, least = name, found
        if best is not None:
            self.open_base(best)

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
            handle = self._objects.files.open(file.path, "read")
            try:
                options = list(self._sampled(base, handle, part, file.prefix))
            finally:
                self._objects.files.close(handle)
            shares.append(min((_mean(samples) for _, samples in options), default=0.5))
        return sum(shares) / len(shares)

    def plan(self, handle: Handle, part: Segment, prefix: str) -> Plan | None:
        """How to encode a tensor of an open file; None: it is to be stored as it is."""
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
        """Store it so; False: that was in vain."""
        return self.writer.encode(handle, new, hashed.leaves, plan)

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
    """Bytes of the numbers a tensor is made of; 1 where they are not whole bytes, or unknown."""
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
