"""The policy of encoding: which tensors of a step, by which codec, against what, and when.

The base of a large tensor is the tensor of its name in the previous step, or that tensor's own
base: the steps of a run are stars around an anchor, never chains. Samples decide for each name, and
the decision holds for some steps. An anchor is replaced when a delta takes more than the steps
around it took on average: a new one is cheaper in the long run.

Small tensors (trees, biases, texts; an ensemble has thousands) are encoded one by one. Trying is
the measurement: if some of one type and size did not get smaller, the next ones are skipped for a
while.

A background save competes with the training for processors. While steps come more slowly than they
are saved, encoding hardly delays anything. When the next step comes before the last one is saved,
the training waits: what is not encoded by then is stored unencoded, the next saves encode nothing,
and after some of them encoding is tried again, later each time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.checkpoints.errors import BadOption, BadOptionError
from tensor_dedup.store.checkpoints.run_cache import AnchorMemory, KeptAnchor
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice, Sample, choose
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import PACK_BELOW, Fresh
from tensor_dedup.store.writing.encoder import (
    ENCODE_FROM,
    Anchor,
    EncodedWriter,
    Plan,
    element_width,
)

Compress: TypeAlias = Literal["auto", "always"] | None
"""When new tensors are encoded: unless a training would wait for it, always, or never (None)."""

# Large tensors.
_SAMPLE_BYTES = 32 << 10
# For how many saves of a tensor a decision holds; one against encoding for longer and longer.
_HOLDS = 16
_HOLDS_AT_MOST = 128

# Small ones. Below this, what a record needs is more than what encoding saves.
SMALLEST = 256
# So many take about a quarter of a second; the rest of a first save is stored as it is.
_MOST = 4096
_MISSES = 4
_LEFT_ALONE = 256
# Codecs that are used in any case. They are chosen where few numbers have changed, and save more
# than a gigabyte for each second of a processor, as fast as disks write; others save a tenth to a
# third of that.
_QUICK = "sparse"
_FIRST = 2
_LONGEST = 64


@dataclass(slots=True)
class HitRate:
    """The success of encoding for tensors of one type and size."""

    misses: int = 0
    skip: int = 0


class SmallTensorPolicy:
    """The decisions of one handle about small tensors. One save at a time."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str | None, int], HitRate] = {}

    def plans(self, fresh: Iterable[Fresh]) -> Iterator[tuple[Fresh, Plan]]:
        """Yield the pieces that are worth trying to encode, with their plans."""
        tried = 0
        for piece in fresh:
            rate = self._rate_of(piece)
            fit = piece.dtype is not None and SMALLEST <= piece.view.nbytes < PACK_BELOW
            if not fit or tried >= _MOST:
                continue
            if rate.skip > 0:
                rate.skip -= 1
                continue
            tried += 1
            codec = CODECS[f"planes{element_width(piece.dtype)}"]
            yield piece, Plan(CodecChoice(codec, "matches", 1.0), None)

    def stored(self, piece: Fresh, nbytes: int | None) -> None:
        """Record the outcome of a plan: the bytes taken, or None if encoding saved nothing."""
        rate = self._rate_of(piece)
        rate.misses = 0 if nbytes is not None else rate.misses + 1
        if rate.misses >= _MISSES:
            rate.misses, rate.skip = _MISSES - 1, _LEFT_ALONE

    def _rate_of(self, piece: Fresh) -> HitRate:
        return self._rates.setdefault((piece.dtype, piece.view.nbytes.bit_length()), HitRate())


def checked_compress(compress: Compress) -> Compress:
    """Return `compress` if it is valid.

    Raises:
        BadOptionError: it is not a valid value.
    """
    if compress not in ("auto", "always", None):
        raise BadOptionError.of(BadOption.COMPRESS, "CheckpointStore", f"compress={compress!r}")
    return compress


def worth_waiting_for(codec: str) -> bool:
    """Return whether tensors with this codec are encoded even while a training waits."""
    return codec.startswith(_QUICK)


class Backpressure:
    """Tracks whether a training waits for the saves of one handle. One save at a time.

    Calling it returns whether the rest of the save is to be stored unencoded.
    """

    def __init__(self) -> None:
        self._awaited: Callable[[], bool] | None = None
        self._tried: Callable[[], bool] | None = None
        self._holds = _FIRST
        self._left = 0
        self.from_the_start = False

    def begin(self, awaited: Callable[[], bool] | None) -> None:
        """Begin a save. `awaited` returns whether a training is waiting for its end.

        None means that the save encodes everything that gets smaller, whoever waits.
        """
        self._awaited, self.from_the_start = awaited, False
        if awaited is None:
            return
        if self._tried is not None:
            waited = self._tried()
            self._left = self._holds if waited else 0
            longer = min(2 * self._holds, _LONGEST)
            self._holds = longer if waited else max(self._holds // 2, _FIRST)
        self.from_the_start = self._left > 0
        self._left -= self.from_the_start
        self._tried = None if self.from_the_start else awaited

    def __call__(self) -> bool:
        """Return whether what is not encoded yet is to be stored unencoded."""
        return self.from_the_start or (self._awaited is not None and self._awaited())


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
    """The decisions of one handle about large tensors. One save at a time."""

    def __init__(self) -> None:
        self.small = SmallTensorPolicy()
        self.anchors = AnchorMemory()
        self.backpressure = Backpressure()
        self._decisions: dict[str, _Decision] = {}

    def plan(self, piece: Fresh, anchor: Anchor | None, anchor_bytes: int) -> Plan | None:
        """Return how to encode a tensor, or None; `anchor_bytes` is the stored anchor's size."""
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
        """Return whether encoding a tensor of this name is known to be worth a wait."""
        made = self._decisions.get(piece.name)
        return made is not None and made.choice is not None and _quick(made.choice)

    def _decide(self, piece: Fresh, anchor: Anchor | None, old: _Decision | None) -> _Decision:
        # A delta that costs more than the average of its star is the sign to begin another.
        begin = old is not None and old.left < 0
        base = None if begin else anchor
        choice = choose(list(_samples(piece, base)), element_width(piece.dtype))
        holds = _HOLDS
        if choice is None and old is not None and old.choice is None:
            holds = min(2 * old.holds, _HOLDS_AT_MOST)
        made = _Decision(choice, 1 if begin else holds, holds, anchor is not None)
        if old is not None and not begin:
            made.anchor, made.spent, made.steps = old.anchor, old.spent, old.steps
        self._decisions[piece.name] = made
        return made

    def stored(self, piece: Fresh, plan: Plan, nbytes: int | None) -> None:
        """Record the outcome of a plan: the bytes taken, or None if encoding saved nothing."""
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


class Encoding:
    """The encoder of one save. `before` returns the digests of the previous step, by name."""

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        deltas: Deltas,
        before: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self._objects, self._index = objects, index
        self._deltas, self._before = deltas, before

    def encode(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> list[Fresh]:
        """Encode and store the pieces that get smaller; return the others."""
        done = self._encode_small(writer, fresh)
        fit = [p for p in fresh if p.dtype is not None and p.view.nbytes >= ENCODE_FROM]
        self._deltas.anchors.begin()
        if self._deltas.backpressure():
            fit = [piece for piece in fit if self._deltas.pays(piece)]
        if fit:
            before = self._before()
            bases = {piece.change_hash: before[piece.name] for piece in fit if piece.name in before}
            with closing(StoredPieces(self._objects, self._index, set(bases.values()))) as pieces:
                done |= self._encode_large(writer, fit, bases, pieces)
        return [piece for piece in fresh if piece.change_hash not in done]

    def _encode_small(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> set[bytes]:
        done = set()
        for piece, plan in self._deltas.small.plans(fresh):
            stored = writer.encode_small(piece, plan)
            self._deltas.small.stored(piece, stored)
            if stored is not None:
                done.add(piece.change_hash)
        return done

    def _encode_large(
        self,
        writer: EncodedWriter,
        fit: Sequence[Fresh],
        bases: Mapping[bytes, bytes],
        pieces: StoredPieces,
    ) -> set[bytes]:
        backpressure = self._deltas.backpressure
        planned = []
        for piece in fit:
            anchor, nbytes = self._anchor(piece, bases.get(piece.change_hash, b""), pieces)
            plan = self._deltas.plan(piece, anchor, nbytes)
            if plan is not None:
                planned.append((piece, plan))

        def give_up(plan: Plan) -> bool:
            return backpressure() and not _quick(plan.choice)

        done = set()
        for (piece, plan), stored in zip(planned, writer.encode_all(planned, give_up), strict=True):
            if stored is not None or not backpressure():  # or nothing was learnt
                self._deltas.stored(piece, plan, stored)
            if stored is not None:
                done.add(piece.change_hash)
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
