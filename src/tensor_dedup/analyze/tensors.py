"""The data that `tensor_dedup.analyze` works on: checkpoints, and their tensors with digests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tensor_dedup.formats.left_out import LeftOut, NotIndexed
from tensor_dedup.formats.markers import Marker
from tensor_dedup.types import Fingerprint

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class AnalyzedTensor:
    """A tensor of a checkpoint with its fingerprint; `nbytes` is its size in the file.

    `leaves` are the digests of its leaves (2 MiB each). It is empty if the tensor is a single leaf,
    or if the digests of its leaves are not known.
    """

    name: str
    fingerprint: Fingerprint
    nbytes: int
    leaves: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return self.fingerprint.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.fingerprint.shape


@dataclass(frozen=True, slots=True)
class Measured:
    """A checkpoint whose digests are known.

    `tensors` are the tensors of at least the minimum size. `small` has the names of all smaller
    ones, which are not compared, and `small_bytes` is their size. `others` is the number of entries
    that were left out because they are no tensors. `markers` are the checkpoint's claims that
    tensors come from another checkpoint. `left_out` has the files of its folder that are not part
    of it, and `not_indexed` the copies of tensors that the index does not name. `name` is what
    another tool calls it in whose store it is, or "".
    """

    path: str
    tensors: Sequence[AnalyzedTensor]
    small: Sequence[str] = ()
    markers: Sequence[Marker] = ()
    left_out: Sequence[LeftOut] = ()
    not_indexed: Sequence[NotIndexed] = ()
    name: str = ""
    small_bytes: int = 0
    others: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_whole(self) -> bool:
        """Whether all of the checkpoint is compared."""
        return not (self.small or self.others)


class Residents:
    """A count of the tensors in memory while checkpoints are loaded one after another.

    Equal tensors are shared between models, but stay separate within a model. Of several equal
    tensors, the first is shared with the first in another model, and so on.
    """

    def __init__(self) -> None:
        self._held: Counter[object] = Counter()

    def take(self, wanted: Iterable[Key]) -> Counter[Key]:
        """Add the tensors of a model, and return how many of them were in memory before, by key.

        `wanted` has one key for each tensor; equal tensors have equal keys.
        """
        counts = Counter(wanted)
        found = Counter({key: min(n, self._held[key]) for key, n in counts.items()})
        for key, n in counts.items():
            self._held[key] = max(self._held[key], n)
        return +found
