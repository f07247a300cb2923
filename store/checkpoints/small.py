"""Small tensors, encoded one by one: trees, biases, texts. Of these there may be thousands.

Trying is the measurement: where some of one type and size came out no smaller, the next are left
alone for a while.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tensor_dedup.store.checkpoints.memory_writer import Fresh
from tensor_dedup.store.codecs.choice import CodecChoice
from tensor_dedup.store.codecs.registry import CODECS
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.encoder import Plan, element_width

# Below this, what a record needs is more than what encoding saves.
SMALLEST = 256
# So many take about a quarter of a second; the rest of a first save is stored as it is.
_MOST = 4096
_MISSES = 4
_LEFT_ALONE = 256


@dataclass(slots=True)
class HitRate:
    """How encoding went for tensors of one type and size."""

    misses: int = 0
    skip: int = 0


class SmallTensorPolicy:
    """What one handle knows of small tensors. One save at a time."""

    def __init__(self) -> None:
        self._luck: dict[tuple[str | None, int], HitRate] = {}

    def plans(self, fresh: Iterable[Fresh]) -> Iterator[tuple[Fresh, Plan]]:
        """How to encode those that are worth trying."""
        tried = 0
        for piece in fresh:
            luck = self._of(piece)
            fit = piece.dtype is not None and SMALLEST <= piece.view.nbytes < PACK_BELOW
            if not fit or tried >= _MOST:
                continue
            if luck.skip > 0:
                luck.skip -= 1
                continue
            tried += 1
            codec = CODECS[f"planes{element_width(piece.dtype)}"]
            yield piece, Plan(CodecChoice(codec, "matches", 1.0), None)

    def stored(self, piece: Fresh, nbytes: int | None) -> None:
        """What came of it: how many bytes; None: it was in vain."""
        luck = self._of(piece)
        luck.misses = 0 if nbytes is not None else luck.misses + 1
        if luck.misses >= _MISSES:
            luck.misses, luck.skip = _MISSES - 1, _LEFT_ALONE

    def _of(self, piece: Fresh) -> HitRate:
        return self._luck.setdefault((piece.dtype, piece.view.nbytes.bit_length()), HitRate())
