"""Tensors that are copied into a slab first, and hashed there while the next are copied.

What is hashed is what the slab holds. So no second hash is needed to know that a file was not
changed between being hashed and being copied. One thread copies: those that write to one memory
file take turns, and would be kept from hashing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tensor_dedup.digest import stream
from tensor_dedup.loader.memory import ALIGNMENT, SlabWriter, capacity_for
from tensor_dedup.loader.residents import Resident, resident_key, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Future

    import torch

# Handing less to other threads takes longer than hashing it.
POUR_FROM: Final = 128 << 10


class Pouring:
    """One slab for the tensors of one batch. One thread; its pool's threads do the work.

    Each is as far from a multiple of 64 bytes as it is now, because sums of products may be rounded
    by it. Of those that are poured and not wanted in the end the place stays unused.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], poured: Collection[int]) -> None:
        """`poured`: the numbers of those that are copied at once. OutOfMemoryError."""
        self._tensors = tensors
        self._poured = sorted(poured)
        rest = (number for number in range(len(tensors)) if number not in poured)
        sizes = [tensors[n].nbytes + self._beyond(n) for n in (*self._poured, *rest)]
        self._writer = SlabWriter(capacity_for(sizes))
        self._starts: dict[int, int] = {}

    def _beyond(self, number: int) -> int:
        return self._tensors[number].data_ptr() % ALIGNMENT

    def begin(self) -> dict[int, Future[str]]:
        """Copy, and start hashing (BLAKE3). OutOfMemoryError.

        Nothing may be done with this before all futures have ended.
        """
        return {number: self._begin(number) for number in self._poured}

    def _begin(self, number: int) -> Future[str]:
        beyond, data = self._beyond(number), tensor_bytes(self._tensors[number])
        start = self._starts[number] = self._writer.write(data, beyond)
        return stream(data.nbytes, lambda piece, offset: self._writer.get(piece, start + offset))

    def seal(self, digests: dict[int, str]) -> dict[int, Resident]:
        """Residents of those that are wanted, by number. What was not poured is copied now.

        OutOfMemoryError.
        """
        for number in digests:
            if number not in self._starts:
                data, beyond = tensor_bytes(self._tensors[number]), self._beyond(number)
                self._starts[number] = self._writer.write(data, beyond)
        slab = self._writer.seal()
        return {
            number: Resident(
                resident_key(self._tensors[number], digest),
                slab,
                self._starts[number],
                self._tensors[number].nbytes,
            )
            for number, digest in digests.items()
        }
