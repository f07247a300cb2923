"""The progress and the result of a push or a pull."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from tensor_dedup.store.format.names import marked_by
from tensor_dedup.store.hashing import ProgressListener, SilentListener


class TransferListener(ProgressListener, Protocol):
    """A listener that is told the progress of a push or a pull, in bytes."""

    def saved(self, nbytes: int) -> None:
        """Take note that `nbytes` bytes of the checkpoint need not be transferred."""


class SilentTransfer(SilentListener):
    """A TransferListener that does nothing."""

    def saved(self, nbytes: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a push or a pull. Sizes are in bytes.

    * `names` are the checkpoints. Marks, which are transferred with their steps, are left out.
    * `pieces` is the number of pieces in the checkpoints, and `nbytes` the size of the checkpoints.
    * `moved_pieces` of these pieces were missing and were transferred. `moved_bytes` is the stored
      size of all transferred pieces.
    * `anchor_pieces` is the number of further pieces that were transferred because missing pieces
      are stored as differences from them. They do not belong to the checkpoints.
    * `wire_bytes` is the size of everything that was sent and received, in `requests` requests.
    * `unchanged` is True if the other side had everything under these names already.
    * `done` is False for a dry run: nothing was written, and the pieces are counted that would have
      been transferred, at their size before any encoding.
    """

    url: str
    names: tuple[str, ...]
    pieces: int
    nbytes: int
    moved_pieces: int
    moved_bytes: int
    wire_bytes: int
    requests: int
    seconds: float
    unchanged: bool
    anchor_pieces: int = 0
    done: bool = True

    @property
    def saved_bytes(self) -> int:
        """How many bytes of the checkpoints did not have to be transferred."""
        return max(0, self.nbytes - self.moved_bytes)

    def to_dict(self) -> dict[str, object]:
        """Return the result as a dict that can be written as JSON."""
        return {**asdict(self), "names": [*self.names], "saved_bytes": self.saved_bytes}


def together(results: Sequence[TransferResult]) -> TransferResult:
    """Return the sum of several results, which must be for the same remote.

    The marks of kept steps are not counted as checkpoints, and are left out of `names`.
    """
    first = results[0]
    counted = [each for each in results if any(marked_by(name) is None for name in each.names)]
    return TransferResult(
        url=first.url,
        names=tuple(name for each in counted for name in each.names),
        pieces=sum(each.pieces for each in counted),
        nbytes=sum(each.nbytes for each in counted),
        moved_pieces=sum(each.moved_pieces for each in results),
        moved_bytes=sum(each.moved_bytes for each in results),
        wire_bytes=sum(each.wire_bytes for each in results),
        requests=sum(each.requests for each in results),
        seconds=sum(each.seconds for each in results),
        unchanged=all(each.unchanged for each in results),
        anchor_pieces=sum(each.anchor_pieces for each in results),
        done=all(each.done for each in results),
    )
