"""Decide which tensors of a step are encoded, by which codec, against which base, and when.

**Large tensors.** The base of a large tensor is the tensor with the same name in the previous step.
If that tensor is itself a delta, its base is used instead. So the tensors of successive steps are
deltas from a common base, called the anchor, and never from other deltas. For each name, samples of
the tensor decide how it is encoded, and the decision holds for some steps. A new anchor is stored
when a delta takes more space than the tensor has taken on average since the last anchor.

**Leaves.** Leaves that the anchor has at the same offset take no space. If no codec makes the other
leaves much smaller, each of them becomes a piece of its own (a part), which is stored once for all
steps that have the leaf. A new anchor is stored when the tensor and the anchor have no leaf in
common, or when the parts take too much space.

**Small tensors.** Small tensors, such as trees, biases and texts, are encoded one by one, without
samples. If some tensors of one type and size did not become smaller, the next ones are skipped for
a while.

**When.** A save encodes only tensors that it can encode quickly: small tensors, a limited amount of
large ones, and tensors in which few numbers change according to samples. It stores all other
tensors unencoded and leaves them to `BackgroundEncoder`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice, Sample, choose
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.store.writing.containers import PACK_BELOW, Fresh
from tensor_dedup.store.writing.deltas import (
    Anchor,
    EncodedWriter,
    LeafSharing,
    Plan,
    anchor_of,
    own_bytes,
    plan_of,
)
from tensor_dedup.store.writing.encoder import (
    ENCODE_FROM,
    element_width,
    is_mostly,
    samples_by_leaf,
)
from tensor_dedup.store.writing.run_cache import AnchorMemory, KeptAnchor
from tensor_dedup.training.encoding.first_base import Candidate, FirstStep

Compress: TypeAlias = Literal["auto", "always"] | None
"""When new tensors are encoded: while nobody waits for it, in each save, or never (None)."""

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
# So much of large tensors is encoded by the save itself: that takes no longer than its syncs.
_AT_ONCE = 4 << 20
# A disk writes about eight times as fast as a processor encodes.
_FEW = 1 / 8
# So many parts may a tensor have, from as many saves: each save has a container for them, which a
# reader opens, and a process may have 1,024 files as a rule.
_MOST_PARTS = 100


@dataclass(slots=True)
class HitRate:
    """How useful encoding was for small tensors of one type and size.

    `misses` is the number of tensors in a row that did not become smaller. `skip` is the number of
    coming tensors that are not to be encoded.
    """

    misses: int = 0
    skip: int = 0


class SmallTensorPolicy:
    """Decides which small tensors are encoded. Use it for one save at a time."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str | None, int], HitRate] = {}
        self._tried = 0

    def begin(self) -> None:
        """Begin a save, in which a limited number of tensors may be encoded."""
        self._tried = 0

    def plans(self, fresh: Iterable[Fresh]) -> Iterator[tuple[Fresh, Plan]]:
        """Yield those of the tensors in `fresh` that are worth encoding, each with its plan."""
        for piece in fresh:
            rate = self._rate_of(piece)
            fit = piece.dtype is not None and SMALLEST <= piece.view.nbytes < PACK_BELOW
            if not fit or self._tried >= _MOST:
                continue
            if rate.skip > 0:
                rate.skip -= 1
                continue
            self._tried += 1
            codec = CODECS[f"planes{element_width(piece.dtype)}"]
            yield piece, Plan(CodecChoice(codec, "matches", 1.0), None)

    def stored(self, piece: Fresh, nbytes: int | None) -> None:
        """Record the result of the plan for `piece`.

        `nbytes` is the number of stored bytes, or None if encoding did not make the tensor smaller.
        """
        rate = self._rate_of(piece)
        rate.misses = 0 if nbytes is not None else rate.misses + 1
        if rate.misses >= _MISSES:
            rate.misses, rate.skip = _MISSES - 1, _LEFT_ALONE

    def _rate_of(self, piece: Fresh) -> HitRate:
        return self._rates.setdefault((piece.dtype, piece.view.nbytes.bit_length()), HitRate())


def checked_compress(compress: Compress) -> Compress:
    """Return `compress` if it is "auto", "always" or None.

    Raises:
        BadOptionError: `compress` is another value.
    """
    if compress not in ("auto", "always", None):
        raise BadOptionError.of(BadOption.COMPRESS, "CheckpointStore", f"compress={compress!r}")
    return compress


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """A tensor that a save has stored unencoded, and that is to be encoded in the background.

    `before` is the digest of the tensor with the same name in the previous step, or None.
    """

    name: str
    dtype: str
    digest: bytes
    before: bytes | None

    def against(self, before: bytes | None) -> "LeftTensor":
        """Return a copy with another `before`: the digest of a similar tensor, or None."""
        return replace(self, before=before)


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
    in_parts: bool = False


class Deltas:
    """Decides how large tensors are encoded, and remembers the decision for each tensor name.

    A save and the background encoding of an earlier save may use the object at the same time. If a
    decision is overwritten, no harm is done: it is only a guess that later samples correct.
    """

    def __init__(self) -> None:
        """Create the object without any decisions."""
        self.small = SmallTensorPolicy()
        self.anchors = AnchorMemory()
        self._decisions: dict[str, _Decision] = {}

    def plan(
        self,
        piece: Candidate,
        anchor: Anchor | None,
        anchor_bytes: int,
        sharing: LeafSharing | None = None,
    ) -> Plan | None:
        """Return a plan for encoding the tensor `piece`, or None to store it unencoded.

        `anchor` is a stored tensor, or None. The plan may be to store only the differences from it.
        `anchor_bytes` is the size that the anchor takes on disk. With `sharing`, leaves of the
        tensor may be stored as separate pieces.
        """
        made = self._decisions.get(piece.name)
        against = anchor.digest if anchor is not None else None
        begin = made is not None and made.left < 0
        if made is None or made.left <= 0 or made.anchored != (against is not None):
            made = self._decide(piece, anchor, made)
        made.left -= 1
        on = None if begin else anchor
        plan = plan_of(made.choice, on, piece.nbytes, piece.leaves, sharing)
        if plan is not None and plan.anchor is not None and made.anchor != against:
            made.anchor, made.spent, made.steps = against, anchor_bytes, 1
        return plan

    def plan_by_leaf(self, piece: Candidate, anchor: Anchor, sharing: LeafSharing) -> Plan | None:
        """Return a plan for storing only those leaves of `piece` that `anchor` lacks.

        Returns None if all leaves are to be stored. No codec is used in either case.
        """
        made = self._decisions.get(piece.name)
        if made is not None and made.left < 0:
            del self._decisions[piece.name]  # another anchor begins
            return None
        plan = plan_of(None, anchor, piece.nbytes, piece.leaves, sharing)
        if plan is not None and (made is None or made.anchor != anchor.digest):
            made = _Decision(None, 1, 1, True, anchor.digest, anchor.nbytes, 1)
            self._decisions[piece.name] = made
        return plan

    def anchor(
        self,
        piece: Candidate,
        digest: bytes,
        before: bytes | None,
        pieces: StoredPieces,
        alike: Anchor | None,
    ) -> tuple[Anchor | None, int]:
        """Return the anchor, a stored tensor to encode `piece` against, and its size on disk.

        The first of these is returned:

        1. `alike`, if it has at least half of the leaves of `piece`, at the same offsets.
        2. The anchor of the tensor with the digest `before`, if that anchor is as large as `piece`.
        3. `alike`, if it is given.
        4. None, with a size of 0.

        `digest` is the digest of `piece`. A tensor with this digest is not used in case 2.
        """
        found = None if before is None else anchor_of(pieces, before)
        # Somebody else may have saved the same since it was looked up: nothing is against itself.
        if found is not None and (found.digest == digest or found.nbytes != piece.nbytes):
            found = None
        if alike is not None and (found is None or is_mostly(alike, piece.leaves)):
            found = alike
        if found is None or found.pieces is None:
            return None, 0
        records = [each for each in found.pieces.records(found.digest) if each.base is None]
        stored = min((record.stored for record in records), default=found.nbytes)
        kept = KeptAnchor(found.digest, found.nbytes, found.leaves, found.pieces, self.anchors)
        return kept, stored

    def pays(self, name: str) -> bool:
        """Return whether a quick codec is known to make tensors of this name smaller."""
        made = self._decisions.get(name)
        choice = None if made is None else made.choice
        return choice is not None and _quick(choice)

    def ended(self, name: str) -> bool:
        """Return whether the tensor of this name is stored in parts and needs a new anchor.

        "In parts" means that its changed leaves are separate pieces. If the result is True, the
        method deletes the remembered decision for this name.
        """
        made = self._decisions.get(name)
        if made is None or made.left >= 0 or not made.in_parts:
            return False
        del self._decisions[name]
        return True

    def leaves_alone(self, name: str) -> bool:
        """Return whether samples have shown that no codec makes tensors of this name smaller."""
        made = self._decisions.get(name)
        return made is not None and made.choice is None

    def _decide(self, piece: Candidate, anchor: Anchor | None, old: _Decision | None) -> _Decision:
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

    def stored(self, piece: Candidate, plan: Plan, nbytes: int | None) -> None:
        """Record the result of the plan for `piece`.

        `nbytes` is the number of stored bytes, or None if encoding did not make the tensor smaller.
        """
        made = self._decisions[piece.name]
        if nbytes is None:
            made.choice = None
        elif plan.anchor is not None:
            made.spent += nbytes
            made.steps += 1
            made.in_parts = plan.in_parts
            if plan.in_parts:
                # None is stored twice. But the anchor and what was stored with any of them stay.
                count = len(plan.own)
                mostly = 2 * count > len(plan.common)
                ends = mostly and made.spent + nbytes > 2 * piece.nbytes
                ends |= min(count, made.steps) > _MOST_PARTS
            else:
                ends = nbytes * made.steps > made.spent
            if ends:
                made.left = -1


def _quick(choice: CodecChoice) -> bool:
    return choice.codec.name.startswith(_QUICK)


def _samples(piece: Candidate, anchor: Anchor | None) -> Iterator[Sample]:
    """Two samples of the leaf in the middle: only one leaf of the anchor has to be read.

    Where leaves are the anchor's, the samples are of others.
    """
    if anchor is not None and any(anchor.in_common(piece.leaves)):
        with suppress(CorruptTensorError, MissingObjectError):

            def read(start: int, stop: int) -> memoryview:
                return memoryview(bytes(piece.read(start, stop)))

            yield from samples_by_leaf(read, piece.nbytes, piece.leaves, anchor, _SAMPLE_BYTES)
            return
    nbytes, width = piece.nbytes, element_width(piece.dtype)
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
        yield Sample(memoryview(bytes(piece.read(start, start + size))), base)


class Encoding:
    """Encodes the tensors of one save. Call `close` afterwards.

    `before` returns the digests of the tensors in the previous step, by name. If there is no
    previous step, `first` finds a base in another checkpoint. With `defer`, tensors that would take
    long to encode are only recorded in `left`, to be encoded in the background.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        deltas: Deltas,
        before: Callable[[], Mapping[str, bytes]],
        first: FirstStep,
        sharing: LeafSharing,
        *,
        defer: bool,
    ) -> None:
        self._objects, self._index, self._sharing = objects, index, sharing
        self._deltas, self._defer = deltas, defer
        self._before = cache(before)
        self.first = first
        self._bases: Mapping[str, bytes] | None = None
        self._budget = _AT_ONCE
        self._pieces: StoredPieces | None = None
        self.left: list[LeftTensor] = []
        deltas.small.begin()
        deltas.anchors.begin()

    def encode(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> list[Fresh]:
        """Encode those pieces in `fresh` that become smaller, and store them with `writer`.

        Returns the other pieces, which are still to be stored.
        """
        done = self._encode_small(writer, fresh)
        fit = [p for p in fresh if p.dtype is not None and p.nbytes >= ENCODE_FROM]
        wanted = ((piece.hashed, piece.nbytes) for piece in fit)
        alike = self._sharing.find(wanted, readable=True, parts=True)
        now = self._chosen(fit, alike) if self._defer else fit
        if now:
            done |= self._encode_large(writer, now, alike)
        later = {piece.change_hash for piece in fit} - {piece.change_hash for piece in now}
        self.left += [self._left(piece) for piece in fit if piece.change_hash in later]
        return [piece for piece in fresh if piece.change_hash not in done]

    def _chosen(self, fit: Sequence[Fresh], alike: Mapping[bytes, Anchor]) -> list[Fresh]:
        """What is encoded by the save itself."""
        now = [piece for piece in fit if self._deltas.pays(piece.name) or self._few(piece, alike)]
        others = sum(piece.nbytes for piece in fit) - sum(piece.nbytes for piece in now)
        if others > self._budget:
            self._budget = 0
            return now
        self._budget -= others
        return list(fit)

    def _few(self, piece: Fresh, alike: Mapping[bytes, Anchor]) -> bool:
        """Whether few leaves of a tensor are new; the budget is then less by these.

        They are few, whatever the budget, if it takes no longer to encode them than to store all.
        """
        if self._deltas.ended(piece.name):
            return False  # all of it is stored, by the disk's speed, and is the next anchor
        anchor = alike.get(piece.hashed.digest)
        plan = plan_of(None, anchor, piece.nbytes, piece.leaves, self._sharing)
        if plan is None:
            return False
        new = own_bytes(plan, piece.nbytes)
        if new > self._budget:
            return new <= piece.nbytes * _FEW or self._deltas.leaves_alone(piece.name)
        self._budget -= new
        return True

    @property
    def is_first(self) -> bool:
        """Whether the run has no previous step."""
        return not self._before()

    def _left(self, piece: Fresh) -> LeftTensor:
        before = self._before().get(piece.name)
        return LeftTensor(piece.name, piece.dtype or "", piece.hashed.digest, before)

    def _encode_small(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> set[bytes]:
        done = set()
        for piece, plan in self._deltas.small.plans(fresh):
            stored = writer.encode_small(piece, plan)
            self._deltas.small.stored(piece, stored)
            if stored is not None:
                done.add(piece.change_hash)
        return done

    def _encode_large(
        self, writer: EncodedWriter, fit: Sequence[Fresh], alike: Mapping[bytes, Anchor]
    ) -> set[bytes]:
        if self._bases is None:
            found = self.first.bases(self._objects, self._index, fit) if self.is_first else {}
            self._bases = found or self._before()
        pieces, planned, done = self._opened(), [], set()
        for piece in fit:
            before, digest = self._bases.get(piece.name), piece.hashed.digest
            anchor, nbytes = self._deltas.anchor(piece, digest, before, pieces, alike.get(digest))
            plan = self._deltas.plan(piece, anchor, nbytes, self._sharing)
            if plan is not None:
                planned.append((piece, plan))
        for (piece, plan), stored in zip(planned, writer.encode_all(planned), strict=True):
            self._deltas.stored(piece, plan, stored)
            if stored is not None:
                done.add(piece.change_hash)
        return done

    def _opened(self) -> StoredPieces:
        """What there may be to store something against; opened once for all of a save."""
        if self._pieces is None:
            bases = {*(self._bases or {}).values()}
            self._pieces = StoredPieces(self._objects, self._index, bases)
        return self._pieces

    def close(self) -> None:
        """Close the bases, which were opened for reading."""
        if self._pieces is not None:
            self._pieces.close()
