"""Which new tensors of a step are stored encoded, by which codec, and against what.

What a tensor may be stored against is what stood under its name in the step before, or what that is
itself stored against: the steps of a run are stars around an anchor, never chains. Samples decide
for each name, and what they said is used again for some steps. An anchor is replaced when a delta
has cost more than the steps around it cost on average: a new one is cheaper in the long run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from tensor_dedup.digest import LEAF_BYTES, leaf_digests
from tensor_dedup.store.checkpoints.memory_writer import Fresh, MemoryWriter, changed
from tensor_dedup.store.checkpoints.policy import Backpressure, SmallTensorPolicy, worth_waiting_for
from tensor_dedup.store.checkpoints.run_cache import AnchorMemory, KeptAnchor
from tensor_dedup.store.codecs.choice import WORTH, CodecChoice, Sample, choose
from tensor_dedup.store.codecs.records import entry, head_bytes
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.format.tables import DIGEST_BYTES, ENCODED, Record
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.encoder import (
    ENCODE_FROM,
    Anchor,
    Plan,
    element_width,
    encoded_leaf,
)
from tensor_dedup.store.writing.hashing import Hasher

_SAMPLE_BYTES = 32 << 10
# For how many saves of a tensor a decision holds; one against encoding for longer and longer.
_HOLDS = 16
_LONGEST = 128


@dataclass(slots=True)
class _Decision:
    """What samples said of the tensor of a name, and what its anchor and deltas have cost.

    It holds for `left` more saves, of `holds`, as long as there is an anchor or none, as there was.
    """

    choice: CodecChoice | None
    left: int
    holds: int
    anchored: bool
    anchor: bytes | None = None
    spent: int = 0
    steps: int = 0


class Deltas:
    """The decisions of one handle. One save at a time."""

    def __init__(self) -> None:
        self.small = SmallTensorPolicy()
        self.anchors = AnchorMemory()
        self.haste = Backpressure()
        self._decisions: dict[str, _Decision] = {}

    def plan(self, piece: Fresh, anchor: Anchor | None, anchor_bytes: int) -> Plan | None:
        """How to encode a tensor; None: as it is. `anchor_bytes` is what the anchor takes."""
        made = self._decisions.get(piece.name)
        against = anchor.digest if anchor is not None else None
        if made is None or made.left <= 0 or made.anchored != (against is not None):
            made = self._decide(piece, anchor, made)
        made.left -= 1
        if made.choice is None:
            return None
        if made.choice.codec.against_base and made.anchor != against:
            made.anchor, made.spent, made.steps = against, anchor_bytes, 1
        return Plan(made.choice, anchor if made.choice.codec.against_base else None)

    def pays(self, piece: Fresh) -> bool:
        """Whether it is known that encoding a tensor of this name is worth being waited for."""
        made = self._decisions.get(piece.name)
        return made is not None and made.choice is not None and _quick(made.choice)

    def _decide(self, piece: Fresh, anchor: Anchor | None, old: _Decision | None) -> _Decision:
        # A delta that costs more than the average of its star is the sign to begin another.
        begin = old is not None and old.left < 0
        base = None if begin else anchor
        choice = choose(list(_samples(piece, base)), element_width(piece.dtype))
        holds = _HOLDS
        if choice is None and old is not None and old.choice is None:
            holds = min(2 * old.holds, _LONGEST)
        made = _Decision(choice, 1 if begin else holds, holds, anchor is not None)
        if old is not None and not begin:
            made.anchor, made.spent, made.steps = old.anchor, old.spent, old.steps
        self._decisions[piece.name] = made
        return made

    def stored(self, piece: Fresh, plan: Plan, nbytes: int | None) -> None:
        """What came of a plan: how many bytes; None: it was in vain."""
        made = self._decisions[piece.name]
        if nbytes is None:
            made.choice = None
        elif plan.anchor is not None:
            made.spent += nbytes
            made.steps += 1
            if nbytes * made.steps > made.spent:
                made.left = -1


def _quick(choice: CodecChoice) -> bool:
    return worth_waiting_for(choice.codec.name)


def _samples(piece: Fresh, anchor: Anchor | None) -> Iterator[Sample]:
    """Two samples of the leaf in the middle: only one leaf of the anchor has to be read."""
    nbytes, width = piece.view.nbytes, element_width(piece.dtype)
    first = nbytes // LEAF_BYTES // 2 * LEAF_BYTES
    last = min(first + LEAF_BYTES, nbytes)
    under = None
    if anchor is not None:
        try:
            under = memoryview(anchor.read(first, last))
        except (CorruptTensorError, MissingObjectError):
            under = None  # it is not used
    size = min(_SAMPLE_BYTES, last - first)
    for start in sorted({first, (first + (last - first - size)) // width * width}):
        base = None if under is None else under[start - first : start - first + size]
        yield Sample(memoryview(bytes(piece.view[start : start + size])), base)


class DeltaWriter(MemoryWriter):
    """One delta container while it is being written. As ContainerWriter."""

    def __init__(self, objects: Objects, hasher: Hasher) -> None:
        super().__init__(objects, hasher, ENCODED)

    def encode(
        self, planned: Sequence[tuple[Fresh, Plan]], haste: Callable[[], bool]
    ) -> Iterator[int | None]:
        """Store these, on all threads; of each the bytes it took, or None: it was in vain.

        Or there was no time: `haste` is asked before each leaf. ChangedModelError: one was written
        to.
        """

        def chunk(piece: Fresh, plan: Plan, at: int) -> bytes | None:
            left = haste() and not _quick(plan.choice)
            return None if left else _chunk(piece, plan, at)

        work = [(piece, plan, at) for piece, plan in planned for at in _leaves(piece)]
        # Waking threads for little takes longer than it saves.
        large = sum(piece.view.nbytes for piece, _ in planned) > LEAF_BYTES
        each = self._hasher.each if large else map
        chunks = iter(each(lambda one: chunk(*one), work))
        for piece, plan in planned:
            yield self._record(piece, plan, [next(chunks) for _ in _leaves(piece)])

    def encode_small(self, piece: Fresh, plan: Plan) -> int | None:
        """Store a tensor of one leaf, in this thread; the bytes it took, or None. As encode."""
        return self._record(piece, plan, [_chunk(piece, plan, 0)])

    def _record(self, piece: Fresh, plan: Plan, chunks: Sequence[bytes | None]) -> int | None:
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


def _leaves(piece: Fresh) -> range:
    return range(0, piece.view.nbytes, LEAF_BYTES)


def _chunk(piece: Fresh, plan: Plan, at: int) -> bytes | None:
    data = bytes(piece.view[at : at + LEAF_BYTES])
    number = at // LEAF_BYTES * DIGEST_BYTES
    if leaf_digests(data) != [piece.hashed.leaves[number : number + DIGEST_BYTES]]:
        raise changed(piece.name)
    try:
        return encoded_leaf(memoryview(data), at, plan)
    except (CorruptTensorError, MissingObjectError):
        return None  # the anchor is not what it should be


class Encoding:
    """What one save needs to encode. `before` gives digests by name of the step before."""

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        deltas: Deltas,
        before: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self._objects, self._index = objects, index
        self._deltas, self._before = deltas, before

    def encode(self, writer: DeltaWriter, fresh: Sequence[Fresh]) -> list[Fresh]:
        """Store those that get smaller; the others."""
        done = self._encode_small(writer, fresh)
        fit = [p for p in fresh if p.dtype is not None and p.view.nbytes >= ENCODE_FROM]
        self._deltas.anchors.begin()
        if self._deltas.haste():
            fit = [piece for piece in fit if self._deltas.pays(piece)]
        if fit:
            before = self._before()
            bases = {piece.fast: before[piece.name] for piece in fit if piece.name in before}
            with closing(StoredPieces(self._objects, self._index, set(bases.values()))) as pieces:
                done |= self._encode_large(writer, fit, bases, pieces)
        return [piece for piece in fresh if piece.fast not in done]

    def _encode_small(self, writer: DeltaWriter, fresh: Sequence[Fresh]) -> set[bytes]:
        done = set()
        for piece, plan in self._deltas.small.plans(fresh):
            stored = writer.encode_small(piece, plan)
            self._deltas.small.stored(piece, stored)
            if stored is not None:
                done.add(piece.fast)
        return done

    def _encode_large(
        self,
        writer: DeltaWriter,
        fit: Sequence[Fresh],
        bases: Mapping[bytes, bytes],
        pieces: StoredPieces,
    ) -> set[bytes]:
        haste = self._deltas.haste
        planned = []
        for piece in fit:
            anchor, nbytes = self._anchor(piece, bases.get(piece.fast, b""), pieces)
            plan = self._deltas.plan(piece, anchor, nbytes)
            if plan is not None:
                planned.append((piece, plan))
        done = set()
        for (piece, plan), stored in zip(planned, writer.encode(planned, haste), strict=True):
            if stored is not None or not haste():  # or nothing was learnt
                self._deltas.stored(piece, plan, stored)
            if stored is not None:
                done.add(piece.fast)
        return done

    def _anchor(self, piece: Fresh, base: bytes, pieces: StoredPieces) -> tuple[Anchor | None, int]:
        """What a tensor may be stored against, and what that takes on disk."""
        digest = pieces.anchor(base)
        # Somebody else may have saved the same since it was looked up: nothing is against itself.
        if digest is None or digest == piece.hashed.digest:
            return None, 0
        records = [record for record in pieces.records(digest) if record.base is None]
        if not records or records[0].nbytes != piece.view.nbytes:
            return None, 0
        anchor = KeptAnchor(digest, piece.view.nbytes, pieces, self._deltas.anchors)
        return anchor, min(record.stored for record in records)
