"""The vocabulary of this package: a tensor of a checkpoint with its identity, and sets of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tensor_dedup.types import Fingerprint

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class AnalyzedTensor:
    """One named tensor of a checkpoint; `nbytes` is its size in the file.

    `leaves` has the digests of its leaves (2 MiB) where it has several and they are known.
    """

    name: str
    fingerprint: Fingerprint
    nbytes: int
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One checkpoint: `tensors` are those large enough to count, `small` the others."""

    path: str
    tensors: Sequence[AnalyzedTensor]
    small: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Residents:
    """The tensors in memory after loading in order, where a model never shares with itself.

    Equal tensors of one model stay separate: the n-th one shares with the n-th of another model.
    """

    def __init__(self) -> None:
        self._held: Counter[object] = Counter()

    def take(self, wanted: Iterable[Key]) -> Counter[Key]:
        """Return how many of each key are in memory already; then add all of `wanted`."""
        counts = Counter(wanted)
        found = Counter({key: min(n, self._held[key]) for key, n in counts.items()})
        for key, n in counts.items():
            self._held[key] = max(self._held[key], n)
        return +found
