"""Which addresses of this process are which slab's memory: how sharing is told on a GPU."""

from bisect import bisect_right
from typing import Final, NamedTuple


class DeviceRange(NamedTuple):
    """Bytes of a slab."""

    serial: int
    offset: int
    nbytes: int


class PlaceTable:
    """Mappings of slabs by address, without those that have become private.

    Takes no lock: every step is one operation on a dict, and finalizers may run inside any.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}  # address -> bytes, serial

    def add(self, address: int, nbytes: int, serial: int) -> None:
        """Remember a mapping of a whole slab."""
        self._found[address] = nbytes, serial

    def forget(self, address: int) -> None:
        """Forget the mapping that begins there."""
        self._found.pop(address, None)

    def of(self, address: int, nbytes: int) -> list[DeviceRange]:
        """What lies behind a range, in order; nothing when any of it is no slab's."""
        found, starts, end = [], sorted(self._found), address + nbytes
        while address < end:
            index = bisect_right(starts, address) - 1
            size, serial = self._found.get(starts[index], (0, 0)) if index >= 0 else (0, 0)
            inside = address - starts[index] if index >= 0 else 0
            if inside >= size:
                return []
            taken = min(size - inside, end - address)
            found.append(DeviceRange(serial, inside, taken))
            address += taken
        return found

    def holds(self, address: int) -> bool:
        """Is this the address of a slab's memory?"""
        return bool(self._found) and bool(self.of(address, 1))

    def same(self, first: int, second: int, nbytes: int) -> bool:
        """Are two ranges the same memory, wherever they are mapped?"""
        places = self.of(first, nbytes) if self._found else []
        return bool(places) and places == self.of(second, nbytes)

    def __len__(self) -> int:
        return len(self._found)


PLACES: Final = PlaceTable()
