"""The layout of tensors in a slab. Pure arithmetic, in bytes."""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PAGE: Final = mmap.PAGESIZE
ALIGNMENT: Final = 64  # a cache line, and the widest vector load
PAGE_ALIGNED_FROM: Final = 64 << 10  # from here on a neighbour's page costs less than 7 %


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The alignment rules for slabs of a kind of memory, in bytes."""

    unit: int = PAGE  # of slabs
    alignment: int = ALIGNMENT  # of tensors


MEMORY: Final = SlabLayout()


def next_offset(end: int, nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the offset of a tensor of `nbytes` in a slab that is used up to `end`."""
    return round_up(end, PAGE if nbytes >= PAGE_ALIGNED_FROM else alignment)


def offsets_of(sizes: Iterable[int], layout: SlabLayout = MEMORY) -> tuple[tuple[int, ...], int]:
    """Return offsets of tensors of these sizes, in order, and the size of a slab for them."""
    offsets, end = [], 0
    for nbytes in sizes:
        start = next_offset(end, nbytes, layout.alignment)
        offsets.append(start)
        end = start + nbytes
    return tuple(offsets), round_up(end, layout.unit)
