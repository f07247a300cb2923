"""Decide how the tensors of a step are encoded: by which codec, and against which base.

**Large tensors.** The base of a large tensor is the tensor with the same name in the previous step.
If that tensor is itself a delta, its base is used instead. So the tensors of successive steps are
deltas from a common base, called the anchor, and never from other deltas. For each name, samples of
the tensor decide how it is encoded, and the decision holds for some steps. A new anchor is stored
when a delta takes more space than the tensor has taken on average since the last anchor.

**Leaves.** Leaves that the anchor has at the same offset take no space. If no codec makes the other
leaves much smaller, each of them becomes a piece of its own (a part), which is stored once for all
steps that have the leaf. A new anchor is stored when the tensor and the anchor have no leaf in
common, or when the parts take too much space.

Small tensors have rules of their own (`small_tensors`). What is encoded in the save and what after
it: `in_save`.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tensor_dedup.digest import LEAF_BYTES
from tensor_dedup.store.codecs.choice import CodecChoice, Sample, choose
from tensor_dedup.store.errors import CorruptTensorError, MissingObjectError
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.store.writing.deltas import Anchor, LeafSharing, Plan, anchor_of, plan_of
from tensor_dedup.store.writing.encoder import element_width, is_mostly, samples_by_leaf
from tensor_dedup.training.encoding.anchors import AnchorMemory, KeptAnchor
from tensor_dedup.training.encoding.first_base import Candidate
from tensor_dedup.training.encoding.small_tensors import SmallTensorPolicy

Compress: TypeAlias = Literal["auto", "always"] | None
"""When new tensors are encoded: while nobody waits for it, in each save, or never (None)."""

_SAMPLE_BYTES = 32 << 10
# Of differences: in a smaller sample, the heads of chunks would hide which codec saves more.
_SAMPLE_BYTES_OF_DELTAS = 128 << 10
# For how many saves of a tensor a decision holds; one against encoding for longer and longer.
_HOLDS = 16
_HOLDS_AT_MOST = 128
# Codecs that are used in any case. They are chosen where few numbers have changed, and save more
# than a gigabyte for each second of a processor, as fast as disks write; others save a tenth to a
# third of that.
_QUICK = "sparse"
# So many parts may a tensor have, from as many saves: each save has a container for them, which a
# reader opens, and a process may have 1,024 files as a rule.
_MOST_PARTS = 100


def checked_compress(compress: Compress) -> Compress:
    """Return `compress` if it is "auto", "always" or None.

    Raises:
        BadOptionError: `compress` is another value.
    """
    if compress not in ("auto", "always", None):
        raise BadOptionError.of(BadOption.COMPRESS, "CheckpointStore", f"compress={compress!r}")
    return compress


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


class Decisions:
    """Decides how large tensors are encoded, and remembers the decision for each tensor name.

    `small` decides for small tensors. `anchors` keeps the decoded leaves of anchors.

    A save and the background encoding of an earlier save may use the object at the same time. If a
    decision is overwritten, no harm is done: it is only a guess that later samples correct.
    """

    def __init__(self) -> None:
        """Create the object without any decisions."""
        self.small = SmallTensorPolicy()
        self.anchors = AnchorMemory()
        self._decisions: dict[str, _Decision] = {}

    def begin(self) -> None:
        """Begin a save, in which a limited number of small tensors may be encoded."""
        self.small.begin()
        self.anchors.begin()

    def plan(
        self,
        piece: Candidate,
        anchor: KeptAnchor | None,
        sharing: LeafSharing | None = None,
    ) -> Plan | None:
        """Return a plan for encoding the tensor `piece`, or None to store it unencoded.

        `anchor` is a stored tensor, or None. The plan may be to store only the differences from it.
        With `sharing`, leaves of the tensor may be stored as separate pieces.
        """
        made = self._decisions.get(piece.name)
        begin = made is not None and made.left < 0
        if made is None or made.left <= 0 or made.anchored != (anchor is not None):
            made = self._decide(piece, anchor, made)
        made.left -= 1
        on = None if begin else anchor
        plan = plan_of(made.choice, on, piece.nbytes, piece.hashed.leaves, sharing)
        if on is not None and plan is not None and plan.base not in (None, made.anchor):
            made.anchor, made.spent, made.steps = on.digest, on.stored, 1
        return plan

    def plan_by_leaf(self, piece: Candidate, anchor: Anchor, sharing: LeafSharing) -> Plan | None:
        """Return a plan for storing only those leaves of `piece` that `anchor` lacks.

        Returns None if all leaves are to be stored. No codec is used in either case.
        """
        made = self._decisions.get(piece.name)
        if made is not None and made.left < 0:
            del self._decisions[piece.name]  # another anchor begins
            return None
        plan = plan_of(None, anchor, piece.nbytes, piece.hashed.leaves, sharing)
        if plan is not None and (made is None or made.anchor != anchor.digest):
            made = _Decision(None, 1, 1, True, anchor.digest, anchor.nbytes, 1)
            self._decisions[piece.name] = made
        return plan

    def anchor(
        self,
        piece: Candidate,
        before: bytes | None,
        pieces: StoredPieces,
        alike: Anchor | None,
    ) -> KeptAnchor | None:
        """Return the anchor, a stored tensor to encode `piece` against.

        The first of these is returned:

        1. `alike`, if it has at least half of the leaves of `piece`, at the same offsets.
        2. The anchor of the tensor with the digest `before`, if that anchor is as large as `piece`.
        3. `alike`, if it is given.
        4. None.
        """
        found = None if before is None else anchor_of(pieces, before)
        # Somebody else may have saved the same since it was looked up: nothing is against itself.
        own = piece.hashed.digest
        if found is not None and (found.digest == own or found.nbytes != piece.nbytes):
            found = None
        if alike is not None and (found is None or is_mostly(alike, piece.hashed.leaves)):
            found = alike
        if found is None or found.pieces is None:
            return None
        records = [each for each in found.pieces.records(found.digest) if each.base is None]
        stored = min((record.stored for record in records), default=found.nbytes)
        return KeptAnchor(
            found.digest,
            found.nbytes,
            found.leaves,
            found.pieces,
            memory=self.anchors,
            stored=stored,
        )

    def pays(self, name: str) -> bool:
        """Return whether a quick codec is known to make tensors of this name smaller."""
        made = self._decisions.get(name)
        choice = None if made is None else made.choice
        return choice is not None and choice.codec.name.startswith(_QUICK)

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


def _samples(piece: Candidate, anchor: Anchor | None) -> Iterator[Sample]:
    """Two samples of the leaf in the middle: only one leaf of the anchor has to be read.

    Where leaves are the anchor's, the samples are of others.
    """
    leaves = piece.hashed.leaves
    if anchor is not None and any(anchor.in_common(leaves)):
        with suppress(CorruptTensorError, MissingObjectError):

            def read(start: int, stop: int) -> memoryview:
                return memoryview(bytes(piece.read(start, stop)))

            size = _SAMPLE_BYTES_OF_DELTAS
            yield from samples_by_leaf(read, piece.nbytes, leaves, anchor, size)
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
    size = min(_SAMPLE_BYTES if under is None else _SAMPLE_BYTES_OF_DELTAS, last - first)
    for start in sorted({first, (first + (last - first - size)) // width * width}):
        base = None if under is None else under[start - first : start - first + size]
        yield Sample(memoryview(bytes(piece.read(start, start + size))), base)
