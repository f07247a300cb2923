"""Tensors that are hashed on their way into a slab, or without one, wherever they lie.

What is hashed is what the slab holds. So no second hash is needed to know that a file was not
changed between being hashed and being copied. Files are read, and not looked at through their
mappings: every page of those would have to be entered first, and a fault waits for the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tensor_dedup.digest import stream, submit
from tensor_dedup.loader.residents.resident import Resident, resident_key, tensor_bytes
from tensor_dedup.loader.residents.slab import ALIGNMENT, SlabWriter, capacity_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Future

    import torch

    from tensor_dedup.loader.post_load.mapped_files import FileRange

# Handing less to other threads takes longer than hashing it.
_APART_FROM: Final = 128 << 10


class SourceBytes:
    """The bytes of a tensor: where they lie now, and of which file they are."""

    def __init__(self, tensor: torch.Tensor, place: FileRange | None) -> None:
        self.tensor: Final = tensor
        self._place = place

    @property
    def beyond(self) -> int:
        """How far they begin from a multiple of 64: sums of products may be rounded by it."""
        return self.tensor.data_ptr() % ALIGNMENT

    def digest(self, algorithm: str) -> Future[str]:
        """Start hashing."""
        place = self._place
        if place is None or algorithm != "blake3" or self.tensor.nbytes < _APART_FROM:
            return submit(tensor_bytes(self.tensor), algorithm)
        return stream(self.tensor.nbytes, place.read)

    def pour(self, writer: SlabWriter) -> tuple[int, Future[str]]:
        """Start copying and hashing (BLAKE3); and where in the slab. OutOfMemoryError."""
        nbytes, data = self.tensor.nbytes, tensor_bytes(self.tensor)
        start = writer.take(nbytes + self.beyond) + self.beyond
        if nbytes < _APART_FROM:
            copy = memoryview(bytes(data))
            writer.put(copy, start)
            return start, submit(copy, "blake3")
        place = self._place

        def passing(piece: memoryview, offset: int) -> None:
            if place is not None:
                place.read(piece, offset)
                writer.put(piece, start + offset)
            else:  # copied by the kernel alone, and other threads go on
                writer.put(data[offset : offset + len(piece)], start + offset)
                writer.get(piece, start + offset)

        return start, stream(nbytes, passing)


class SlabFill:
    """One slab for the tensors of one batch. One thread; its pool's threads do the work.

    Of those that are poured and not wanted in the end the memory is given back.
    """

    def __init__(self, sources: Sequence[SourceBytes], poured: Collection[int]) -> None:
        """`poured`: the numbers of those that are copied at once. OutOfMemoryError."""
        self._sources = sources
        self._poured = sorted(poured)
        rest = (number for number in range(len(sources)) if number not in poured)
        order = (sources[number] for number in (*self._poured, *rest))
        self._writer = SlabWriter(capacity_for(s.tensor.nbytes + s.beyond for s in order))
        self._starts: dict[int, int] = {}

    def begin(self, begun: dict[int, Future[str]]) -> None:
        """Start copying and hashing (BLAKE3), and enter the digests by number. OutOfMemoryError.

        Nothing may be done with this before all that was entered has ended.
        """
        for number in self._poured:
            self._starts[number], begun[number] = self._sources[number].pour(self._writer)

    def seal(self, digests: dict[int, str]) -> dict[int, Resident]:
        """Residents of those that are wanted, by number. What was not poured is copied now.

        OutOfMemoryError.
        """
        for number in digests:
            if number not in self._starts:
                source = self._sources[number]
                data = tensor_bytes(source.tensor)
                self._starts[number] = self._writer.write(data, source.beyond)
        for number in set(self._poured) - digests.keys():
            self._writer.give_back(self._starts[number], self._sources[number].tensor.nbytes)
        slab = self._writer.seal()
        return {
            number: Resident(
                resident_key(self._sources[number].tensor, found),
                slab,
                self._starts[number],
                self._sources[number].tensor.nbytes,
            )
            for number, found in digests.items()
        }
