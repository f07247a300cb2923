"""Decide which small tensors are encoded: trees, biases, texts, thousands of them in a step.

They are encoded one by one, without samples. If some tensors of one type and size did not become
smaller, the next ones are skipped for a while.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tensor_dedup.store.codecs.choice import CODECS, CodecChoice
from tensor_dedup.store.writing.containers import PACK_BELOW, Fresh
from tensor_dedup.store.writing.deltas import Plan
from tensor_dedup.store.writing.encoder import element_width

# Below this, what a record needs is more than what encoding saves.
SMALLEST = 256
# So many take about a quarter of a second; the rest of a first save is stored as it is.
_MOST = 4096
_MISSES = 4
_LEFT_ALONE = 256


@dataclass(slots=True)
class _HitRate:
    """How useful encoding was for small tensors of one type and size.

    `misses` is the number of tensors in a row that did not become smaller. `skip` is the number of
    coming tensors that are not to be encoded.
    """

    misses: int = 0
    skip: int = 0


class SmallTensorPolicy:
    """Decides which small tensors are encoded. Use it for one save at a time."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str | None, int], _HitRate] = {}
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

    def _rate_of(self, piece: Fresh) -> _HitRate:
        return self._rates.setdefault((piece.dtype, piece.view.nbytes.bit_length()), _HitRate())
