"""Encoding of imported tensors: the choice of tensors, codecs and bases (`--compress auto`).

The choices are made by measurement on samples. A base is a stored tensor that a new tensor is
encoded against. It is the first of these that exists:

1. a stored tensor that shares at least half of the leaves of the new tensor
2. a tensor of the same dtype and size in the base checkpoint
3. a stored tensor that shares fewer leaves

The caller can name the base checkpoint. Otherwise, it is the most similar checkpoint in the store,
if one is similar enough.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.markers import Marker, content_digest
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.store.codecs.choice import SAMPLE_BYTES, Sample, choose, distance, places
from tensor_dedup.store.files import Handle
from tensor_dedup.store.hashing import Hashed
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint, StoredTensor
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.deltas import Anchor, Plan, anchor_of, plan_of
from tensor_dedup.store.writing.sources import ImportFile, ImportSource, Segment

# Smaller ones share packs; all of them together are a small part of any model.
ENCODE_FROM = PACK_BELOW
# Weights that have nothing to do with each other differ in 0.37 (bf16) to 0.45 of their bits.
RELATED = 0.3
# Bounds on what is looked at to find a base: tensors of the new one, checkpoints, tensors alike.
_LARGEST, _CHECKPOINTS, _ALIKE = 4, 64, 8
_WIDTHS = {8: 1, 16: 2, 32: 4, 64: 8}
_WIDEST = 8


class Encoder:
    """A chooser of the encodings for the tensors in an import.

    Use it inside `with locks.session(...):`. Close it afterwards.
    """

    def __init__(self, objects: Objects, index: StoreIndex) -> None:
        self._objects = objects
        self._index = index
        self._undo = ExitStack()
        self._base: _Base | None = None
        self._marked: set[str] = set()

    def close(self) -> None:
        """Close the base checkpoint, if one is open."""
        self._undo.close()

    @property
    def base_name(self) -> str | None:
        """The name of the checkpoint whose tensors serve as bases, or None if there is none."""
        return None if self._base is None else self._base.checkpoint.name

    def open_base(self, name: str) -> None:
        """Open the checkpoint `name` and use its tensors as bases.

        Raises the errors of opening a checkpoint.
        """
        self._base = _Base(self._undo.enter_context(self._opened(name)))

    def find_base(self, source: ImportSource, markers: Sequence[Marker] = ()) -> None:
        """Find the stored checkpoint that is most similar to `source`, and use it as the base.

        If no checkpoint is similar enough, there is no base. `markers` name checkpoints that are
        worth comparing first; wrong markers do no harm. Checkpoints that cannot be opened are
        skipped.
        """
        self._marked = {marker.digest for marker in markers}
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
        if len(found) <= _CHECKPOINTS or not self._marked:
            return list(found.values())[:_CHECKPOINTS]
        named = [name for name in found.values() if self._content(name) in self._marked]
        return list(dict.fromkeys([*named[:1], *found.values()]))[: _CHECKPOINTS + 1]

    def _content(self, name: str) -> str | None:
        """What identifies a checkpoint in markers, from its manifest."""
        with suppress(StoreError), self._opened(name) as checkpoint:
            return content_digest((t.name, t.digest) for t in checkpoint if t.alias_of is None)
        return None

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

    def plan(
        self, handle: Handle, part: Segment, prefix: str, hashed: Hashed, alike: Anchor | None
    ) -> Plan | None:
        """Return a plan for encoding a tensor of an open file, or None to store it unencoded.

        `part` is the place of the tensor in the file, and `hashed` has its hashes. The tensor's
        name in the checkpoint is `prefix` followed by its name in the file. `alike` is a stored
        piece that shares leaves with the tensor, if one was found.
        """
        if part.dtype is None or part.nbytes < ENCODE_FROM:
            return None
        width, anchor = element_width(part.dtype), alike
        samples = self._samples(handle, part, None)
        if self._base is not None and (alike is None or not is_mostly(alike, hashed.leaves)):
            options = list(self._sampled(self._base, handle, part, prefix))
            if options:
                anchor, samples = min(options, key=lambda option: _mean(option[1]))
        if anchor is not None and any(anchor.in_common(hashed.leaves)):
            with suppress(StoreError):  # damaged: it will be found so again, and not used
                samples = samples_by_leaf(
                    lambda start, stop: self._read(handle, part, start, stop),
                    part.nbytes,
                    hashed.leaves,
                    anchor,
                    SAMPLE_BYTES,
                )
        return plan_of(choose(samples, width), anchor, part.nbytes, hashed.leaves)

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
            base = None if anchor is None else _cut(anchor, start, stop, cache)
            found.append(Sample(self._read(handle, part, start, stop), base))
        return found

    def _read(self, handle: Handle, part: Segment, start: int, stop: int) -> memoryview:
        data = memoryview(bytearray(stop - start))
        self._objects.files.pread(handle, data, part.start + start)
        return data


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
            anchor = anchor_of(self.checkpoint, bytes.fromhex(tensor.digest))
            if anchor is not None and anchor.nbytes == part.nbytes:
                yield anchor


def samples_by_leaf(
    read: Callable[[int, int], memoryview], nbytes: int, leaves: bytes, anchor: Anchor, size: int
) -> list[Sample]:
    """Return samples of the leaves of a piece that differ from the leaves of `anchor`.

    `read(start, stop)` returns bytes of the piece. `nbytes` is the size of the piece, and `leaves`
    are its concatenated leaf digests. `size` is the size of a sample in bytes.

    If possible, leaves are chosen for which the anchor has a leaf of the same size and offset. The
    `base` of each sample then has the anchor's bytes at the same place. Otherwise, `base` is None.
    """
    own = [at * LEAF_BYTES for at, common in enumerate(anchor.in_common(leaves)) if not common]
    beside = [at for at in own if anchor.has_leaf(at, min(LEAF_BYTES, nbytes - at))]
    chosen = beside or own
    found = []
    for first in sorted({*chosen[:1], *chosen[len(chosen) // 2 :][:1], *chosen[-1:]}):
        stop = min(first + LEAF_BYTES, nbytes)
        start = first + max(0, stop - first - size) // 2 // _WIDEST * _WIDEST
        under = memoryview(anchor.read(first, stop)) if beside else None
        base = None if under is None else under[start - first : start - first + size]
        found.append(Sample(read(start, min(start + size, stop)), base))
    return found


def element_width(dtype: str | None) -> int:
    """Return the size in bytes of the numbers to encode in a tensor of type `dtype`.

    For complex numbers (C64), it is the size of one component. If the size is unknown or not a
    whole number of bytes, the result is 1.
    """
    if dtype == "C64":
        return 4
    name = (dtype or "").rpartition(":")[2]
    return _WIDTHS.get(DTYPE_BITS.get(name, 8), 1)


def is_mostly(anchor: Anchor, leaves: bytes) -> bool:
    """Return whether `anchor` has at least half of the leaves of a piece, at the same offsets.

    `leaves` has the concatenated leaf digests of the piece.
    """
    common = anchor.in_common(leaves)
    return 2 * sum(common) >= len(common)


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
