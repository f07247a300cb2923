"""What of a step is stored encoded: how small tensors are tried, and whether there is time at all.

Small tensors (trees, biases, texts; an ensemble has thousands) are encoded one by one. Trying is
the measurement: where some of one type and size came out no smaller, the next ones are left alone
for a while.

A save in the background takes its time from the processors that the training runs on. While steps
come more slowly than they are saved, encoding costs little that anybody notices. When the next step
comes before the last one is saved, the training stands still: what is not encoded by then is stored
as it is, the next saves encode nothing, and after some of them it is tried again, later each time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tensor_dedup.store.checkpoints.errors import BadCompressError
from tensor_dedup.store.checkpoints.memory_writer import Fresh
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.encoder import Plan, element_width

Compress: TypeAlias = Literal["auto", "always"] | None
"""When what is new is stored encoded: as above; however long it takes; never."""


# Below this, what a record needs is more than what encoding saves.
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


def checked_compress(compress: Compress) -> Compress:
    """The same. BadCompressError: it is none of these."""
    if compress not in ("auto", "always", None):
        raise BadCompressError.at("CheckpointStore", f"compress={compress!r}")
    return compress


def worth_waiting_for(codec: str) -> bool:
    """Whether tensors that get this codec are encoded however much haste there is."""
    return codec.startswith(_QUICK)


class Backpressure:
    """What one handle knows of its saves: were they waited for? One save at a time."""

    def __init__(self) -> None:
        self._awaited: Callable[[], bool] | None = None
        self._tried: Callable[[], bool] | None = None
        self._holds = _FIRST
        self._left = 0
        self.from_the_start = False

    def begin(self, awaited: Callable[[], bool] | None) -> None:
        """A save begins. `awaited`: does a training wait for its end by now? None: it is not in
        the background, and encodes all that gets smaller.
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
        """Is what is not encoded yet to be stored as it is?"""
        return self.from_the_start or (self._awaited is not None and self._awaited())
