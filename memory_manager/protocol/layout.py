"""The places of tensors in a slab. Only arithmetic; all numbers are in bytes.

A slab is one block of memory that holds one or more tensors.
"""

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
    """The alignment rules of slabs, in bytes.

    The size of a slab is a multiple of `unit`; tensors begin at multiples of `alignment`.
    """

    unit: int = PAGE  # of slabs
    alignment: int = ALIGNMENT  # of tensors


MEMORY: Final = SlabLayout()


def next_offset(end: int, nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the offset of the next tensor in a slab that is filled up to `end`.

    Tensors of 64 KiB and more begin at a page boundary, smaller ones at a multiple of `alignment`.
    """
    return round_up(end, PAGE if nbytes >= PAGE_ALIGNED_FROM else alignment)


def offsets_of(sizes: Iterable[int], layout: SlabLayout = MEMORY) -> tuple[tuple[int, ...], int]:
    """Return the offset of each tensor of these sizes, and the size of the slab they need."""
    offsets, end = [], 0
    for nbytes in sizes:
        start = next_offset(end, nbytes, layout.alignment)
        offsets.append(start)
        end = start + nbytes
    return tuple(offsets), round_up(end, layout.unit)
