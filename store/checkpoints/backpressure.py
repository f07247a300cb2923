"""Whether there is time to encode: a training that waits for a save is not made to wait for that.

A save in the background takes what it needs from the processors a training runs on. While steps
come more slowly than they are saved, encoding costs little that anybody notices. When the next step
is there before, the training stands still, and what is not encoded yet is stored as it is; the next
saves encode nothing, and after some of them it is tried again, later each time.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

from tensor_dedup.store.checkpoints.errors import BadCompressError

Compress: TypeAlias = Literal["auto", "always"] | None
"""When what is new is stored encoded: as above; however long it takes; never."""

# Codecs that are used in any case. They are chosen where few numbers have changed, and save more
# than a gigabyte for each second of a processor, as fast as disks write; others save a tenth to a
# third of that.
_QUICK = "sparse"
_FIRST = 2
_LONGEST = 64


def known(compress: Compress) -> Compress:
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
