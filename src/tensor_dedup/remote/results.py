"""What a push or a pull tells while it runs, and what it has done."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from tensor_dedup.store.steps.runs import is_pin_among


class TransferListener(Protocol):
    """A listener to a push or a pull. `advance` is called from several threads."""

    def start(self, total_bytes: int) -> None:
        """Receive the number of bytes that will travel."""

    def advance(self, nbytes: int) -> None:
        """Receive the number of further bytes that have travelled."""

    def saved(self, nbytes: int) -> None:
        """Receive the number of bytes that need not travel."""


class SilentTransfer:
    """A TransferListener that does nothing."""

    def start(self, total_bytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""

    def saved(self, nbytes: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a push or a pull did.

    `nbytes` is the size of the checkpoints, which have so many `pieces`; `moved_pieces` of these
    were missing. `anchor_pieces` are no part of the checkpoints: they came along because missing
    pieces are stored as differences from them. `moved_bytes` are both, as they are stored, and
    `wire_bytes` everything that was sent and received, in `requests` calls. `unchanged` says that
    the other side had it all under these names. The pin of a step goes with the step, and is none
    of the `names`.
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

    @property
    def saved_bytes(self) -> int:
        """The bytes of the checkpoints that did not have to travel."""
        return max(0, self.nbytes - self.moved_bytes)

    def to_dict(self) -> dict[str, object]:
        """Return the result as a JSON object."""
        return {**asdict(self), "names": [*self.names], "saved_bytes": self.saved_bytes}


def together(results: Sequence[TransferResult]) -> TransferResult:
    """Return the sum of several results of one remote; a pin is no further checkpoint."""
    first = results[0]
    names = {name for each in results for name in each.names}
    counted = [e for e in results if not all(is_pin_among(name, names) for name in e.names)]
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
    )
