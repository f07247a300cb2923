"""What an engine has borrowed: slabs, and leases on the tensors in them."""

import itertools
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.errors import LeaseClosedError
from tensor_dedup.memory_manager.protocol.messages import DigestSpan, Extent, SlabRef

_Item = TypeVar("_Item")


class WeakBag(Generic[_Item]):
    """Objects that it does not keep alive. Unlike a WeakSet it may be filled while it is listed.

    Takes no lock: objects die in any thread, and a fork may happen in any moment.
    """

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self._items: dict[int, weakref.ref[_Item]] = {}
        self._numbers = itertools.count()
        for item in items:
            self.add(item)

    def add(self, item: _Item) -> None:
        """Add an object; it leaves when it dies."""
        items, number = self._items, next(self._numbers)
        items[number] = weakref.ref(item, lambda _: items.pop(number, None))

    def living(self) -> list[_Item]:
        """Return the objects that are alive; the list keeps them so."""
        return [item for each in list(self._items.values()) if (item := each()) is not None]


class SharedSlab:
    """A sealed slab of the manager: bytes that never change. Safe from any thread, after fork too.

    Its descriptor is this object's and is closed with it; every lease refers to its slab. Map it
    MAP_PRIVATE: reads are shared, writes are one's own. A mapping outlives the descriptor.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        self.leases: WeakBag[Lease] = WeakBag()
        weakref.finalize(self, os.close, fd).atexit = False

    def spans(self) -> list[DigestSpan]:
        """Return what is leased in it now, to be offered to a manager that knows nothing of it."""
        leases = self.leases.living()
        found = {each.offset: DigestSpan(each.offset, each.nbytes, each.digest) for each in leases}
        return [found[offset] for offset in sorted(found)]


class Lease:
    """The right to use one tensor: bytes `offset` to `offset + nbytes` of `slab`.

    It ends with `close`, or when nothing refers to it any more: whatever maps the bytes must hold
    it, and have unmapped them by then. After a fork the child's copy holds the memory, not the
    right: the manager knows only the parent.
    """

    __slots__ = ("__weakref__", "_end", "digest", "nbytes", "offset", "slab")

    def __init__(
        self, slab: SharedSlab, extent: tuple[int, int, str], number: int, connection: Connection
    ) -> None:
        self.slab: Final = slab
        self.offset, self.nbytes, self.digest = extent
        self._end = _finalizer(self, connection, number)
        slab.leases.add(self)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._end.alive

    def close(self) -> None:
        """Give it back. A second time does nothing."""
        self._end()

    def renew(self, number: int, connection: Connection) -> None:
        """Become the lease of this number, of the manager that has taken the slab back.

        Raises:
            LeaseClosedError: It was closed meanwhile.
        """
        if self._end.detach() is None:
            raise LeaseClosedError("this lease was closed; look the tensor up again")
        self._end = _finalizer(self, connection, number)


def _finalizer(
    lease: Lease, connection: Connection, number: int
) -> "weakref.finalize[[int], Lease]":
    finalizer = weakref.finalize(lease, connection.release, number)
    finalizer.atexit = False
    return finalizer


class SlabTable:
    """The slabs of one connection, one descriptor each, by the manager's number of them.

    Numbers of one manager mean nothing to another: every connection has a table of its own.
    """

    def __init__(self, older: Iterable[SharedSlab] = ()) -> None:
        """`older`: slabs of an earlier connection, which keep no number here."""
        self._slabs: weakref.WeakValueDictionary[int, SharedSlab] = weakref.WeakValueDictionary()
        self._all: WeakBag[SharedSlab] = WeakBag(older)

    def enter(self, refs: Sequence[SlabRef], descriptors: Sequence[int]) -> list[SharedSlab]:
        """Return the slabs of a reply; close the descriptors of those that are known already."""
        found = []
        for ref, fd in zip(refs, descriptors, strict=True):
            slab = self._slabs.get(ref.slab)
            if slab is None:
                slab = self._slabs[ref.slab] = SharedSlab(fd, ref.nbytes)
                self._all.add(slab)
            else:
                os.close(fd)
            found.append(slab)
        return found

    def living(self) -> list[SharedSlab]:
        """Return every slab that is still used in this process."""
        return self._all.living()


def lease_of(
    extent: Extent | None, slabs: Sequence[SharedSlab], connection: Connection
) -> Lease | None:
    """Return the lease that an extent of a reply speaks of."""
    if extent is None:
        return None
    place = (extent.offset, extent.nbytes, extent.digest)
    return Lease(slabs[extent.slab], place, extent.lease, connection)
