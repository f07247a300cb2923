"""The addresses of this process that are mappings of slabs, and which of their pages were copied.

Imports no torch. Other mappings are looked up in the kernel: `residents.process_mappings`.
"""

from array import array
from bisect import bisect_right
from io import FileIO
from mmap import PAGESIZE
from pathlib import Path
from typing import Final, NamedTuple

from tensor_dedup.errors import UnsupportedError

_PAGEMAP: Final = Path("/proc/self/pagemap")
_ENTRY_BYTES: Final = 8
_CHUNK: Final = 1 << 20
# The top bits of a pagemap entry: present (63), swapped out (62), a page of the file (61).
_FLAGS_SHIFT: Final = 61
_COPIED: Final = frozenset({0b100, 0b010, 0b110})


class MappingSpan(NamedTuple):
    """One mapping: its length, and the slab and offset its first byte comes from."""

    length: int
    slab: int
    offset: int = 0
    writable: bool = True


class SlabRange(NamedTuple):
    """A range of bytes of a slab."""

    slab: int
    offset: int
    nbytes: int


class SlabMappings:
    """Mappings of slabs by address, except those that have become private.

    Takes no lock: finalizers remove entries, and may run inside any allocation of any thread, even
    one that is in here, and in a forked child whose other threads are gone. Every step is one
    operation on a dict; the sorted copy is rebuilt if the dict has changed since.
    """

    def __init__(self) -> None:
        self._spans: dict[int, MappingSpan] = {}
        self._change = object()
        self._sorted: tuple[object, list[int]] = (self._change, [])

    def add(self, address: int, span: MappingSpan) -> None:
        """Add a mapping."""
        self._spans[address] = span
        self._change = object()

    def forget(self, address: int) -> None:
        """Remove the mapping that starts at this address, if there is one."""
        self._spans.pop(address, None)
        self._change = object()

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return slab and offset of a memory range, or None unless one mapping holds all of it."""
        found = self.around(address, nbytes)
        if found is None:
            return None
        start, span = found
        return span.slab, span.offset + address - start

    def around(self, address: int, nbytes: int) -> tuple[int, MappingSpan] | None:
        """Return the start and the span of the mapping that holds all of a range, or None."""
        start, span = self._last_before(address)
        if span is None or address + nbytes > start + span.length:
            return None
        return start, span

    def ranges(self, address: int, nbytes: int) -> list[SlabRange]:
        """Return the slab ranges behind a range of memory, in order, mapping by mapping.

        The list is empty if any part of the range is not mapped from a slab.
        """
        found, end = [], address + nbytes
        while address < end:
            start, span = self._last_before(address)
            if span is None or address >= start + span.length:
                return []
            inside = address - start
            taken = min(span.length - inside, end - address)
            found.append(SlabRange(span.slab, span.offset + inside, taken))
            address += taken
        return found

    def same(self, first: int, second: int, nbytes: int) -> bool:
        """Return whether two ranges are the same memory of slabs, wherever they are mapped."""
        ranges = self.ranges(first, nbytes) if self._spans else []
        return bool(ranges) and ranges == self.ranges(second, nbytes)

    def holds(self, address: int) -> bool:
        """Return whether an address lies in a mapping of a slab."""
        return bool(self._spans) and self.around(address, 1) is not None

    def is_read_only(self, address: int) -> bool:
        """Return whether an address lies in a mapping of a slab that must not be written."""
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
    """Return whether a page of this range of a private mapping was written, and so copied.

    Pages that nobody has touched yet are not copied. Reads 8 bytes per page from the kernel, which
    needs no privilege.

    Raises:
        UnsupportedError: /proc/self/pagemap cannot be read.
    """
    first, last = address // PAGESIZE, -(-(address + nbytes) // PAGESIZE)
    try:
        with _PAGEMAP.open("rb", buffering=0) as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            return _any_copied(pagemap, (last - first) * _ENTRY_BYTES)
    except OSError as error:
        raise UnsupportedError(
            f"{_PAGEMAP}: {error.strerror}; whether memory is shared cannot be told here, "
            "mount /proc to ask",
            errno=error.errno,
        ) from error


def is_as_mapped(address: int, nbytes: int) -> bool:
    """Return whether every page of this range is still the file's; False if that is unknown."""
    try:
        return not any_page_copied(address, nbytes)
    except UnsupportedError:
        return False


def _any_copied(pagemap: FileIO, left: int) -> bool:
    while left > 0:
        piece = pagemap.read(min(left, _CHUNK))
        if not piece or _has_copied(piece):
            return True  # past the end of memory: not known to be shared
        left -= len(piece)
    return False


def _has_copied(entries: bytes) -> bool:
    return any(entry >> _FLAGS_SHIFT in _COPIED for entry in set(array("Q", entries)))
