"""Encode the tensors of a step in the save itself, as far as that is quick.

A save stores most new tensors by the speed of the disk, which is many times the speed of encoding.
With `defer`, it therefore encodes only small tensors, a limited amount of large ones, and tensors
in which few numbers change according to samples. It stores all other tensors unencoded and leaves
them to `BackgroundEncoder`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.writing.containers import Fresh
from tensor_dedup.store.writing.deltas import (
    Anchor,
    EncodedWriter,
    LeafSharing,
    own_bytes,
    plan_of,
)
from tensor_dedup.store.writing.encoder import ENCODE_FROM
from tensor_dedup.training.encoding.decisions import Decisions
from tensor_dedup.training.encoding.first_base import FirstStep

# So much of large tensors is encoded by the save itself: that takes no longer than its syncs.
_AT_ONCE = 4 << 20
# A disk writes about eight times as fast as a processor encodes.
_FEW = 1 / 8


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


class LeafEncoding:
    """Encodes nothing, but stores no leaf of a tensor that its anchor has at the same offset.

    Use it for one save, from one thread, and call `close` afterwards. Nothing is `left` to encode.
    """

    def __init__(self, decisions: Decisions, sharing: LeafSharing) -> None:
        self._decisions, self._sharing = decisions, sharing
        self.left: list[LeftTensor] = []
        self.first: FirstStep | None = None

    def encode(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> list[Fresh]:
        """Store those pieces in `fresh` of which most is stored already, with `writer`.

        Returns the other pieces, which are still to be stored.
        """
        decisions, sharing, others = self._decisions, self._sharing, []
        alike = sharing.find(((piece.hashed, piece.nbytes) for piece in fresh), parts=True)
        for piece in fresh:
            anchor = alike.get(piece.hashed.digest)
            plan = None if anchor is None else decisions.plan_by_leaf(piece, anchor, sharing)
            if plan is None:
                others.append(piece)
            else:
                decisions.stored(piece, plan, writer.put_by_leaf(piece, plan))
        return others

    def close(self) -> None:
        """Close what was opened for reading."""
        self._sharing.close()


class CodecEncoding:
    """Encodes the tensors of one save by codecs, against their anchors and by leaf.

    Use it from one thread, and call `close` afterwards.

    `before` returns the digests of the tensors in the previous step, by name. If there is no
    previous step, `first` finds a base in another checkpoint. With `defer`, tensors that would take
    long to encode are only recorded in `left`, to be encoded in the background.
    """

    def __init__(
        self,
        objects: Objects,
        index: StoreIndex,
        decisions: Decisions,
        before: Callable[[], Mapping[str, bytes]],
        first: FirstStep,
        sharing: LeafSharing,
        *,
        defer: bool,
    ) -> None:
        self._objects, self._index, self._sharing = objects, index, sharing
        self._decisions, self._defer = decisions, defer
        self._before, self._first = cache(before), first
        self._bases: Mapping[str, bytes] | None = None
        self._budget = _AT_ONCE
        self._pieces: StoredPieces | None = None
        self.left: list[LeftTensor] = []
        decisions.begin()

    @property
    def first(self) -> FirstStep | None:
        """How to find a base if the run has no earlier step; otherwise None."""
        return None if self._before() else self._first

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
        decisions = self._decisions
        now = [piece for piece in fit if decisions.pays(piece.name) or self._few(piece, alike)]
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
        if self._decisions.ended(piece.name):
            return False  # all of it is stored, by the disk's speed, and is the next anchor
        anchor = alike.get(piece.hashed.digest)
        plan = plan_of(None, anchor, piece.nbytes, piece.leaves, self._sharing)
        if plan is None:
            return False
        new = own_bytes(plan, piece.nbytes)
        if new > self._budget:
            return new <= piece.nbytes * _FEW or self._decisions.leaves_alone(piece.name)
        self._budget -= new
        return True

    def _left(self, piece: Fresh) -> LeftTensor:
        before = self._before().get(piece.name)
        return LeftTensor(piece.name, piece.dtype or "", piece.hashed.digest, before)

    def _encode_small(self, writer: EncodedWriter, fresh: Sequence[Fresh]) -> set[bytes]:
        done = set()
        for piece, plan in self._decisions.small.plans(fresh):
            stored = writer.encode_small(piece, plan)
            self._decisions.small.stored(piece, stored)
            if stored is not None:
                done.add(piece.change_hash)
        return done

    def _encode_large(
        self, writer: EncodedWriter, fit: Sequence[Fresh], alike: Mapping[bytes, Anchor]
    ) -> set[bytes]:
        decisions, bases, planned, done = self._decisions, self._found_bases(fit), [], set()
        pieces = self._opened(bases)
        for piece in fit:
            near = alike.get(piece.hashed.digest)
            anchor = decisions.anchor(piece, bases.get(piece.name), pieces, near)
            plan = decisions.plan(piece, anchor, self._sharing)
            if plan is not None:
                planned.append((piece, plan))
        for (piece, plan), stored in zip(planned, writer.encode_all(planned), strict=True):
            decisions.stored(piece, plan, stored)
            if stored is not None:
                done.add(piece.change_hash)
        return done

    def _found_bases(self, fit: Sequence[Fresh]) -> Mapping[str, bytes]:
        """The tensors that others of their names may be like; looked for once for all of a save."""
        if self._bases is None:
            first = self.first
            found = {} if first is None else first.bases(self._objects, self._index, fit)
            self._bases = found or self._before()
        return self._bases

    def _opened(self, bases: Mapping[str, bytes]) -> StoredPieces:
        """What there may be to store something against; opened once for all of a save."""
        if self._pieces is None:
            self._pieces = StoredPieces(self._objects, self._index, {*bases.values()})
        return self._pieces

    def close(self) -> None:
        """Close what was opened for reading."""
        with closing(self._sharing):
            if self._pieces is not None:
                self._pieces.close()


StepEncoding: TypeAlias = LeafEncoding | CodecEncoding
"""The encoding of one save, without codecs or with them."""
