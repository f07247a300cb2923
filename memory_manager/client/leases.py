"""The memory that an engine has borrowed from the manager: slabs, and leases on tensors in them.

A slab is one sealed block of memory. A lease is the right to use one tensor in a slab.
"""

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
    """A collection of weak references that may change while it is iterated, unlike a WeakSet.

    It takes no lock, because a finalizer or a forked child might wait for that lock for ever.
    """

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self._items: dict[int, weakref.ref[_Item]] = {}
        self._numbers = itertools.count()
        for item in items:
            self.add(item)

    def add(self, item: _Item) -> None:
        """Add an object. It is removed when it is garbage-collected."""
        items, number = self._items, next(self._numbers)
        items[number] = weakref.ref(item, lambda _: items.pop(number, None))

    def living(self) -> list[_Item]:
        """Return strong references to the objects that are alive."""
        return [item for each in list(self._items.values()) if (item := each()) is not None]


class SharedSlab:
    """A sealed slab (block of memory) of the manager, whose bytes never change.

    It is safe from any thread, and after a fork. Its descriptor is closed when this object is
    garbage-collected; mappings stay valid after that. Each lease holds a reference to its slab. Map
    a slab of host memory with MAP_PRIVATE. Reads then use the shared pages, and a write gives the
    process its own copy of the page.
    """

    def __init__(self, fd: int, nbytes: int, number: int = 0) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        self.number: Final = number  # to the manager from which it came
        self.leases: WeakBag[Lease] = WeakBag()
        weakref.finalize(self, os.close, fd).atexit = False

    def spans(self) -> list[DigestSpan]:
        """Return the offset, size and digest of each tensor that is leased in this slab.

        The result is what `Offer` sends to a new manager.
        """
        leases = self.leases.living()
        found = {each.offset: DigestSpan(each.offset, each.nbytes, each.digest) for each in leases}
        return [found[offset] for offset in sorted(found)]


class Lease:
    """The right to use one tensor: `nbytes` bytes of `slab` from `offset`.

    The lease ends with `close`, or when this object is garbage-collected. Keep it until the bytes
    are unmapped. In a forked child the memory stays usable, but the manager knows only the parent's
    lease and does not count the child.
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
        """Make this object the lease `number` of another manager, which has accepted the slab.

        Raises:
            LeaseClosedError: The lease has been closed.
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
    """The slabs that came over one connection, by number.

    The table has one descriptor for each slab. Each manager numbers its slabs anew, so every
    connection has a table of its own.
    """

    def __init__(self, older: Iterable[SharedSlab] = ()) -> None:
        """Create a table.

        `older` are slabs that came over an earlier connection. They have no number in this table.
        """
        self._slabs: weakref.WeakValueDictionary[int, SharedSlab] = weakref.WeakValueDictionary()
        self._all: WeakBag[SharedSlab] = WeakBag(older)

    def enter(self, refs: Sequence[SlabRef], descriptors: Sequence[int]) -> list[SharedSlab]:
        """Return the slabs that a reply lists in `refs`, and add those that are new.

        `descriptors` are the descriptors of these slabs, in the same order. The descriptors of
        slabs that the table has already are closed.
        """
        found = []
        for ref, fd in zip(refs, descriptors, strict=True):
            slab = self._slabs.get(ref.slab)
            if slab is None:
                slab = self._slabs[ref.slab] = SharedSlab(fd, ref.nbytes, ref.slab)
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
    """Make a Lease from `extent`, which describes a leased tensor in a reply.

    `slabs` are the slabs that the reply lists. The result is None if `extent` is None.

    Raises:
        ProtocolError: The extent names a slab that the reply does not list.
    """
    if extent is None:
        return None
    if extent.slab >= len(slabs):
        raise ProtocolError(f"a tensor in slab {extent.slab} of a reply with {len(slabs)}")
    place = (extent.offset, extent.nbytes, extent.digest)
    return Lease(slabs[extent.slab], place, extent.lease, connection)
