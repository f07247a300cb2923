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

from tensor_dedup.store.checkpoints.errors import BadOption, BadOptionError
from tensor_dedup.store.checkpoints.memory_writer import Fresh
from tensor_dedup.store.codecs.choice import CODECS, CodecChoice
from tensor_dedup.store.writing.containers import PACK_BELOW
from tensor_dedup.store.writing.encoder import Plan, element_width

Compress: TypeAlias = Literal["auto", "always"] | None
"""When new tensors are encoded: unless a training would wait for it, always, or never (None)."""
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
    """What one handle has learnt about small tensors. One save at a time."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str | None, int], HitRate] = {}

    def plans(self, fresh: Iterable[Fresh]) -> Iterator[tuple[Fresh, Plan]]:
        """Yield how to encode those that are worth trying."""
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
        """Note the outcome of a plan: the bytes it took, or None when nothing was saved by it."""
        rate = self._rate_of(piece)
        rate.misses = 0 if nbytes is not None else rate.misses + 1
        if rate.misses >= _MISSES:
            rate.misses, rate.skip = _MISSES - 1, _LEFT_ALONE

    def _rate_of(self, piece: Fresh) -> HitRate:
        return self._rates.setdefault((piece.dtype, piece.view.nbytes.bit_length()), HitRate())


def checked_compress(compress: Compress) -> Compress:
    """Return `compress` itself.

    Raises:
        BadOptionError: it is none of the values there are.
    """
    if compress not in ("auto", "always", None):
        raise BadOptionError.of(BadOption.COMPRESS, "CheckpointStore", f"compress={compress!r}")
    return compress


def worth_waiting_for(codec: str) -> bool:
    """Return whether tensors with this codec are encoded even when a training waits."""
    return codec.startswith(_QUICK)


class Backpressure:
    """What one handle knows of whether its saves were waited for. One save at a time.

    Called, it tells whether what is not encoded yet is to be stored as it is.
    """

    def __init__(self) -> None:
        self._awaited: Callable[[], bool] | None = None
        self._tried: Callable[[], bool] | None = None
        self._holds = _FIRST
        self._left = 0
        self.from_the_start = False

    def begin(self, awaited: Callable[[], bool] | None) -> None:
        """Begin a save. `awaited` tells whether a training waits for its end by now.

        None means that the save is not in the background, and encodes everything that gets smaller.
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
        """Return whether what is not encoded yet is to be stored as it is."""
        return self.from_the_start or (self._awaited is not None and self._awaited())
