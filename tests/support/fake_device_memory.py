"""Addresses of the fake GPU: reservations, mappings and protections of this very process."""

import mmap
import os
from dataclasses import dataclass, replace
from typing import Final

from tensor_dedup import libc
from tensor_dedup.memory_manager.cuda.driver import Access
from tensor_dedup.memory_manager.errors import NoMemoryError

_NOTHING: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE
_PROTECTION: Final = {
    Access.NONE: 0,
    Access.READ: mmap.PROT_READ,
    Access.READ_WRITE: mmap.PROT_READ | mmap.PROT_WRITE,
}


@dataclass(frozen=True, slots=True)
class FakeMapping:
    """A whole memory file at an address. The descriptor is the mapping's own."""

    nbytes: int
    fd: int
    access: Access


class DeviceAddressMap:
    """What is reserved and what is mapped, by address. Answers False to what cannot be done."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, FakeMapping] = {}

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Take a range of addresses."""
        start = _map(0, nbytes + alignment, 0, _NOTHING, -1)
        address = -(-start // alignment) * alignment
        # What was taken only to align the rest goes back.
        _cut(start, address - start)
        _cut(address + nbytes, start + alignment - address)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> bool:
        """Give a whole range back in which nothing is mapped."""
        if self.reserved.get(address) != nbytes or self.overlaps(address, nbytes):
            return False
        del self.reserved[address]
        _cut(address, nbytes)
        return True

    def reserves(self, address: int, nbytes: int) -> bool:
        """Return whether a range lies in one reservation."""
        return any(
            start <= address and address + nbytes <= start + size
            for start, size in self.reserved.items()
        )

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Return whether anything is mapped in a range."""
        return any(
            start < address + nbytes and address < start + each.nbytes
            for start, each in self.mapped.items()
        )

    def map(self, address: int, mapped: FakeMapping) -> None:
        """Put a file there."""
        _map(address, mapped.nbytes, 0, mmap.MAP_SHARED | libc.MAP_FIXED, mapped.fd)
        self.mapped[address] = mapped

    def _whole(self, address: int, nbytes: int) -> list[int]:
        """The mappings that a range consists of, without a gap and without a rest."""
        starts, at = [], address
        while at < address + nbytes and at in self.mapped:
            starts.append(at)
            at += self.mapped[at].nbytes
        return starts if at == address + nbytes else []

    def unmap(self, address: int, nbytes: int) -> bool:
        """Take whole mappings away; the range stays reserved."""
        starts = self._whole(address, nbytes)
        for start in starts:
            gone = self.mapped.pop(start)
            _map(start, gone.nbytes, 0, _NOTHING | libc.MAP_FIXED, -1)
            os.close(gone.fd)
        return bool(starts)

    def allow(self, address: int, nbytes: int, access: Access) -> bool:
        """Protect whole mappings."""
        starts = self._whole(address, nbytes)
        for start in starts:
            self.mapped[start] = replace(self.mapped[start], access=access)
            libc.mprotect(start, self.mapped[start].nbytes, _PROTECTION[access])
        return bool(starts)

    def at(self, address: int) -> FakeMapping | None:
        """The mapping that an address lies in."""
        for start, each in self.mapped.items():
            if start <= address < start + each.nbytes:
                return each
        return None

    def allows(self, address: int, nbytes: int, access: Access) -> bool:
        """Return whether all of a range may be used so."""
        at = address
        while at < address + nbytes:
            start = next((s for s, each in self.mapped.items() if s <= at < s + each.nbytes), None)
            if start is None or self.mapped[start].access < access:
                return False
            at = start + self.mapped[start].nbytes
        return True


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    try:
        return libc.mmap(address, nbytes, protection, flags, fd)
    except OSError as error:
        raise NoMemoryError(f"mmap of {nbytes} bytes: {error.strerror}") from error


def _cut(address: int, nbytes: int) -> None:
    if nbytes:
        libc.munmap(address, nbytes)
