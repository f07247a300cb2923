"""The addresses at which this process has mapped slabs, and whether their pages were written to.

A slab is a piece of shared memory. It is mapped copy-on-write, so a write copies the memory page.
`residents.process_mappings` asks the kernel about other mappings. Imports no torch.
"""

import errno
import fcntl
import struct
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from itertools import groupby
from mmap import PAGESIZE
from typing import Final, NamedTuple, Self

from tensor_dedup import libc
from tensor_dedup.errors import UnsupportedError

_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_CHUNK: Final = 1 << 20
# The top bits of a pagemap entry: present (63), swapped out (62), a page of the file (61).
_FLAGS_SHIFT: Final = 61
_COPIED: Final = frozenset({0b100, 0b010, 0b110})
_COPIED_PAGE: Final = (0b100 << _FLAGS_SHIFT).to_bytes(_ENTRY_BYTES, sys.byteorder)
# Of the mappings that the kernel allows a process; the rest is for whatever else runs in it.
_USABLE: Final = 0.75
_RECOUNT_S: Final = 1.0


class SlabRange(NamedTuple):
    """A range of bytes of a slab; `slab` is the slab's serial number in this process."""

    slab: int
    offset: int
    nbytes: int


class MappingSpan(NamedTuple):
    """A mapping of `length` bytes, and the slab ranges that are mapped there side by side.

    `pieces` are these ranges, in order. `writable` is False if the mapping is read-only.
    """

    length: int
    pieces: tuple[SlabRange, ...]
    writable: bool = True


def _cut(pieces: Iterable[SlabRange], start: int, nbytes: int) -> Iterator[SlabRange]:
    """Yield what `nbytes` bytes from `start` on are, of pieces that lie side by side."""
    at, end = 0, start + nbytes
    for slab, offset, length in pieces:
        first, last = max(at, start), min(at + length, end)
        if first < last:
            yield SlabRange(slab, offset + first - at, last - first)
        at += length


class SlabMappings:
    """A table of slab mappings by address, without those that have become private.

    Safe from any thread, in finalizers and in forked children: there is no lock, and every change
    is one operation on a dict.
    """

    def __init__(self) -> None:
        self._spans: dict[int, MappingSpan] = {}
        self._change = object()
        self._sorted: tuple[object, list[int]] = (self._change, [])

    def add(self, address: int, span: MappingSpan) -> None:
        """Add the mapping `span`, which starts at `address`."""
        self._spans[address] = span
        self._change = object()

    def forget(self, address: int) -> None:
        """Remove the mapping that starts at `address`, if there is one."""
        self._spans.pop(address, None)
        self._change = object()

    def around(self, address: int, nbytes: int) -> tuple[int, MappingSpan] | None:
        """Return the mapping that contains all `nbytes` bytes at `address`, or None.

        The result is (start address, span).
        """
        start, span = self._last_before(address)
        if span is None or address + nbytes > start + span.length:
            return None
        return start, span

    def ranges(self, address: int, nbytes: int) -> list[SlabRange]:
        """Return the slab ranges that are mapped in the `nbytes` bytes at `address`, in order.

        The list is empty if any of these bytes is not mapped from a slab.
        """
        found: list[SlabRange] = []
        end = address + nbytes
        while address < end:
            start, span = self._last_before(address)
            if span is None or address >= start + span.length:
                return []
            taken = min(start + span.length, end) - address
            if len(span.pieces) == 1:
                slab, offset, _ = span.pieces[0]
                found.append(SlabRange(slab, offset + address - start, taken))
            else:
                found += _cut(span.pieces, address - start, taken)
            address += taken
        return found

    def same(self, first: int, second: int, nbytes: int) -> bool:
        """Return whether two address ranges are mappings of the same ranges of slabs.

        The ranges start at `first` and `second` and have `nbytes` bytes each. Returns False if one
        of them is not mapped from slabs.
        """
        ranges = self.ranges(first, nbytes) if self._spans else []
        return bool(ranges) and ranges == self.ranges(second, nbytes)

    def holds(self, address: int) -> bool:
        """Return whether `address` lies in a mapping of a slab."""
        return bool(self._spans) and self.around(address, 1) is not None

    def is_read_only(self, address: int) -> bool:
        """Return whether `address` lies in a read-only mapping of a slab."""
        found = self.around(address, 1)
        return found is not None and not found[1].writable

    def _last_before(self, address: int) -> tuple[int, MappingSpan | None]:
        """Return the last mapping that starts at or before this address."""
        change = self._change
        if self._sorted[0] is not change:
            self._sorted = (change, sorted(self._spans))
        starts = self._sorted[1]
        index = bisect_right(starts, address) - 1
        return (starts[index], self._spans.get(starts[index])) if index >= 0 else (0, None)

    def __len__(self) -> int:
        return len(self._spans)


MAPPINGS: Final = SlabMappings()  # of host memory
DEVICE_MAPPINGS: Final = SlabMappings()  # of GPUs: addresses are unique among them and the host


def any_page_copied(address: int, nbytes: int) -> bool:
    """Return whether a page in a range of a private mapping was written to, and so copied.

    The range is `nbytes` bytes at `address`. The function reads 8 bytes per page from
    /proc/self/pagemap, which needs no privilege.

    Raises:
        UnsupportedError: /proc/self/pagemap cannot be read.
    """
    return any(_has_copied(piece) for piece in _pages(address, nbytes))


def as_mapped(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the parts of a private mapping whose pages were not written to.

    The parts lie in the range of `nbytes` bytes at `address`, and `start` is an address.

    Raises:
        UnsupportedError: /proc/self/pagemap cannot be read.
    """
    at, end = address // PAGESIZE * PAGESIZE, address + nbytes
    states = (
        entry >> _FLAGS_SHIFT in _COPIED
        for piece in _pages(address, nbytes)
        for entry in array("Q", piece)
    )
    for copied, pages in groupby(states):
        start, at = at, at + sum(1 for _ in pages) * PAGESIZE
        if not copied:
            yield max(start, address), min(at, end) - max(start, address)


def is_as_mapped(address: int, nbytes: int) -> bool:
    """Return whether a range of a private mapping is unchanged: no page was written to.

    The range is `nbytes` bytes at `address`. Returns False if this cannot be determined.
    """
    try:
        return not any_page_copied(address, nbytes)
    except UnsupportedError:
        return False


def are_as_mapped(ranges: Sequence[tuple[int, int]]) -> list[bool]:
    """Return `is_as_mapped` of each (address, nbytes) of `ranges`, for many at once.

    Where the kernel can look for copied pages by itself (Linux 6.7), it takes a fifth of the time.
    """
    scan = _PageScan.open()
    if scan is None:
        return [is_as_mapped(*each) for each in ranges]
    with scan:
        spans = [each for each in _joined(ranges) if scan.finds_copied(*each)]
        return [
            not any(address < end and start < address + nbytes for start, end in spans)
            or not scan.finds_copied(address, address + nbytes)
            for address, nbytes in ranges
        ]


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the memory that the ranges cover; those that touch are one."""
    start = end = 0
    for address, nbytes in sorted(ranges):
        if address > -(-end // PAGESIZE) * PAGESIZE:
            if end:
                yield start, end
            start = address
        end = max(end, address + nbytes)
    if end:
        yield start, end


class _PageScan:
    """The kernel's search for pages of private mappings that were copied. For one thread."""

    # _IOWR('f', 16, struct pm_scan_arg): its size, flags, start, end, walk_end, vec, vec_len,
    # max_pages, and four masks of categories of pages.
    _REQUEST: Final = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
    _ARGUMENT: Final = struct.Struct("12Q")
    _FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._found = array("Q", bytes(24))  # struct page_region, of the first that is found

    @classmethod
    def open(cls) -> Self | None:
        """Return a search, or None if this kernel has none or does not let us."""
        try:
            scan = cls(FileIO(_PAGEMAP))
        except OSError:
            return None
        try:
            scan.finds_copied(0, PAGESIZE)
        except OSError:
            scan.__exit__()
            return None
        return scan

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def finds_copied(self, start: int, end: int) -> bool:
        """Return whether a page from address `start` to `end` is in memory or swap, of no file."""
        first, last = start // PAGESIZE * PAGESIZE, -(-end // PAGESIZE) * PAGESIZE
        vector, _ = self._found.buffer_info()
        there = self._PRESENT | self._SWAPPED
        asked = (96, 0, first, last, 0, vector, 1, 1, self._FILE, self._FILE, there, there)
        found: int = fcntl.ioctl(self._file, self._REQUEST, bytearray(self._ARGUMENT.pack(*asked)))
        return found > 0


def _pages(address: int, nbytes: int) -> Iterator[bytes]:
    """Yield the kernel's entries of the pages of a range, 8 bytes each, many at a time.

    Raises:
        UnsupportedError: The kernel does not provide them.
    """
    first, last = address // PAGESIZE, -(-(address + nbytes) // PAGESIZE)
    try:
        with FileIO(_PAGEMAP) as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            yield from _read(pagemap, (last - first) * _ENTRY_BYTES)
    except OSError as error:
        short = error.errno in (errno.EMFILE, errno.ENFILE)
        raise UnsupportedError(
            f"{_PAGEMAP}: {error.strerror}; whether memory is shared cannot be told here, "
            f"{'raise ulimit -n' if short else 'mount /proc'} to ask",
            errno=error.errno,
        ) from error


def _read(pagemap: FileIO, left: int) -> Iterator[bytes]:
    while left > 0:
        # Past the end of memory nothing is known to be shared.
        piece = pagemap.read(min(left, _CHUNK)) or _COPIED_PAGE * (left // _ENTRY_BYTES)
        yield piece
        left -= len(piece)


def _has_copied(entries: bytes) -> bool:
    if not entries.strip(b"\0"):  # as after mapping: no page is there
        return False
    return any(entry >> _FLAGS_SHIFT in _COPIED for entry in set(array("Q", entries)))


class MappingBudget:
    """A limit on the number of mappings of this process. Safe from any thread.

    At the kernel's limit (vm.max_map_count) every allocation may fail. So mappings that are not
    necessary are allowed only up to three quarters of that limit.
    """

    def __init__(self) -> None:
        self._known = 0
        self._until = 0.0

    def refusal(self, mappings: int) -> str | None:
        """Return why `mappings` further mappings would be too many, or None if they are allowed."""
        if time.monotonic() >= self._until or self._refuses(mappings):
            # Reading the list takes milliseconds, so it is read again only after a while.
            self._known = libc.count_mappings()
            self._until = time.monotonic() + _RECOUNT_S
        if not self._refuses(mappings):
            return None
        return (
            f"{mappings} mappings beside the {self._known} of this process come too near to the "
            f"{libc.max_mappings()} it may have; raise sysctl vm.max_map_count to share parts of "
            "tensors"
        )

    def take(self, mappings: int) -> str | None:
        """Ask for `mappings` new mappings, and count them if they are allowed.

        Returns None if they are allowed, or the reason why they would be too many.
        """
        why_not = self.refusal(mappings)
        if why_not is None:
            self._known += mappings
        return why_not

    def _refuses(self, mappings: int) -> bool:
        return self._known + mappings > _USABLE * libc.max_mappings()


BUDGET: Final = MappingBudget()
