"""The memory that an engine has borrowed: slabs, and leases on the tensors in them."""

import itertools
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.errors import LeaseClosedError, ProtocolError
from tensor_dedup.memory_manager.protocol.messages import DigestSpan, Extent, SlabRef

_Item = TypeVar("_Item")


class WeakBag(Generic[_Item]):
    """A collection of weak references. Unlike a WeakSet it may change while it is listed.

    It takes no lock, because objects are finalized in any thread, and a fork may happen at any
    moment.
    """

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self._items: dict[int, weakref.ref[_Item]] = {}
        self._numbers = itertools.count()
        for item in items:
            self.add(item)

    def add(self, item: _Item) -> None:
        """Add an object; it is removed when it is garbage-collected."""
        items, number = self._items, next(self._numbers)
        items[number] = weakref.ref(item, lambda _: items.pop(number, None))

    def living(self) -> list[_Item]:
        """Return strong references to the objects that are alive."""
        return [item for each in list(self._items.values()) if (item := each()) is not None]


class SharedSlab:
    """A sealed slab of the manager: immutable bytes. Safe from any thread, after a fork too.

    It owns its descriptor, which is closed with it; every lease references its slab. Map it
    MAP_PRIVATE: reads are shared, writes are private. A mapping outlives the descriptor.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        self.leases: WeakBag[Lease] = WeakBag()
        weakref.finalize(self, os.close, fd).atexit = False

    def spans(self) -> list[DigestSpan]:
        """Return what is currently leased in it, in order to offer it to another manager."""
        leases = self.leases.living()
        found = {each.offset: DigestSpan(each.offset, each.nbytes, each.digest) for each in leases}
        return [found[offset] for offset in sorted(found)]


class Lease:
    """The right to use one tensor: bytes `offset` to `offset + nbytes` of `slab`.

    It ends with `close`, or with the last reference to it: code that maps the bytes must hold it
    until it has unmapped them. After a fork the child's copy keeps the memory but is not a lease:
    the manager knows only the parent.
    """

    __slots__ = ("__weakref__", "_end", "digest", "nbytes", "number", "offset", "slab")

    def __init__(
        self, slab: SharedSlab, extent: tuple[int, int, str], number: int, connection: Connection
    ) -> None:
        self.slab: Final = slab
        self.offset, self.nbytes, self.digest = extent
        self.number = number  # to the manager that is connected
        self._end = _finalizer(self, connection, number)
        slab.leases.add(self)

    @property
    def closed(self) -> bool:
        """Whether the lease has ended."""
        return not self._end.alive

    def close(self) -> None:
        """Give the lease back. Closing twice has no effect."""
        self._end()

    def renew(self, number: int, connection: Connection) -> None:
        """Continue as the lease of this number, of the manager that accepted the slab.

        Raises:
            LeaseClosedError: It was closed meanwhile.
        """
        if self._end.detach() is None:
            raise LeaseClosedError("this lease was closed; look the tensor up again")
        self.number = number
        self._end = _finalizer(self, connection, number)


def _finalizer(
    lease: Lease, connection: Connection, number: int
) -> "weakref.finalize[[int], Lease]":
    finalizer = weakref.finalize(lease, connection.release, number)
    finalizer.atexit = False
    return finalizer


class SlabTable:
    """The slabs of one connection by the manager's numbers, with one descriptor each.

    Numbers of one manager mean nothing to another: every connection has a table of its own.
    """

    def __init__(self, older: Iterable[SharedSlab] = ()) -> None:
        """`older` has the slabs of an earlier connection, which have no number here."""
        self._slabs: weakref.WeakValueDictionary[int, SharedSlab] = weakref.WeakValueDictionary()
        self._all: WeakBag[SharedSlab] = WeakBag(older)

    def enter(self, refs: Sequence[SlabRef], descriptors: Sequence[int]) -> list[SharedSlab]:
        """Return the slabs of a reply; close the descriptors of those already known."""
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
        """Return every slab that is still in use in this process."""
        return self._all.living()


def lease_of(
    extent: Extent | None, slabs: Sequence[SharedSlab], connection: Connection
) -> Lease | None:
    """Return the lease for an extent in a reply, or None if there is none.

    Raises:
        ProtocolError: It lies in none of the reply's slabs.
    """
    if extent is None:
        return None
    if extent.slab >= len(slabs):
        raise ProtocolError(f"a tensor in slab {extent.slab} of a reply with {len(slabs)}")
    place = (extent.offset, extent.nbytes, extent.digest)
    return Lease(slabs[extent.slab], place, extent.lease, connection)
