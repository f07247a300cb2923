"""One GPU of this process, and the lifetime of the mappings of its shared memory.

A *slab* is a piece of GPU memory that holds shared tensors; a mapping makes slabs visible at an
address. A mapping ends in two steps:

1. When nothing refers to the mapping any more, its finalizer marks it as retired. The finalizer
   does nothing else, because it may run anywhere, even while a CUDA graph is captured, where driver
   calls are not allowed.
2. `Gpu.reap`, which runs before every new mapping, records an event after all work of the context,
   and unmaps retired mappings whose event has passed.

Until a mapping is unmapped its leases are held, and the memory manager counts the memory as used.
"""

import logging
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.loader.cuda.openers import MappedExtent, Opener, VmmOpener, total
from tensor_dedup.loader.cuda.transfers import Transfers
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS, MappingSpan, SlabRange
from tensor_dedup.memory_manager.cuda.driver import (
    Access,
    Driver,
    GpuInfo,
    Undo,
    current,
    find_device,
)
from tensor_dedup.memory_manager.errors import BackendError, NoMemoryError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _PendingUnmap(NamedTuple):
    address: int
    extents: tuple[MappedExtent, ...]
    opener: Opener
    owners: dict[int, object]  # held until the memory is unmapped, by their ids
    mapped: bool = True  # or only the addresses are kept


class _State:
    """What a mapping maps now, for its finalizer."""

    __slots__ = ("now",)

    def __init__(self, now: _PendingUnmap) -> None:
        self.now = now


class DeviceMapping:
    """A read-only mapping of slabs side by side. It ends when this object is garbage-collected.

    `make_private` replaces the slabs by a private, writable copy at the same address, so tensors
    and captured graphs stay valid. `sleep` unmaps the slabs, and `wake` maps slabs with the same
    bytes at the same address again. No kernel may use the address range during these calls, or
    while the mapping sleeps.
    """

    def __init__(self, gpu: "Gpu", pending: _PendingUnmap) -> None:
        self.gpu: Final = gpu
        self.address: Final = pending.address
        self.private = False
        # One finalizer, and one assignment for a change: an exception may arrive at any moment.
        self._state: Final = _State(pending)
        self._end: Final = weakref.finalize(self, _retire, gpu.retired, os.getpid(), self._state)
        self._end.atexit = False

    @property
    def extents(self) -> tuple[MappedExtent, ...]:
        """The slabs that are mapped, or were before the mapping fell asleep."""
        return self._state.now.extents

    @property
    def asleep(self) -> bool:
        """Whether the slabs may be unmapped. If a call is interrupted, they may be mapped, too."""
        return not self._state.now.mapped

    @property
    def nbytes(self) -> int:
        """The size of the address range in bytes."""
        return total(self.extents)

    def hold(self, owner: object) -> None:
        """Keep `owner`, for example a lease, alive until the slabs are unmapped.

        Does nothing if the mapping is private.
        """
        if not self.private:
            self._state.now.owners[id(owner)] = owner

    @property
    def serials(self) -> tuple[int, ...]:
        """The serial numbers of the slabs, in order."""
        return tuple(each.serial for each in self.extents)

    @property
    def opener(self) -> Opener:
        """The opener that maps the slabs."""
        return self._state.now.opener

    def owners(self) -> list[object]:
        """Return the objects kept alive until the slabs are unmapped, for example leases."""
        return list(self._state.now.owners.values())

    def sleep(self, *, waited: bool = False) -> None:
        """Unmap the slabs, but keep their address range reserved. Waits for all kernels.

        With `waited`, the caller has waited for all work of the GPU that uses the range.

        Objects that were kept alive for the slabs, for example leases, are released. If a kernel
        accesses the range before `wake`, it fails, and this process can no longer use the GPU. Does
        nothing if the mapping sleeps already.

        After an error, `asleep` is True if the slabs were unmapped nevertheless.

        Raises:
            BackendError: The driver refused.
            UnsupportedError: The memory is private, or the backend cannot reserve the address.
        """
        if self.asleep:
            return
        if self.private:
            raise UnsupportedError(f"{self.nbytes} bytes are this model's alone; copy them")
        with self.gpu.entered():
            if not waited:
                self.gpu.driver.synchronize()
            before = self._state.now
            # Before it is unmapped, because something may arrive meanwhile.
            self._state.now = before._replace(mapped=False)
            try:
                before.opener.unmap(self.address, self.extents)
            except TensorDedupError:  # and it is mapped again
                self._state.now = before
                raise
            # Before the context is left, which may fail, too.
            _forget(self.address, self.extents)
            self._state.now = before._replace(mapped=False, owners={})

    def clear(self) -> None:
        """Unmap all that is mapped, shared or private, as far as the driver does.

        This is for what an interrupted `sleep` or `wake` may have left mapped, and for memory with
        which nobody may compute any more. The mapping is asleep afterwards. May be done again.

        Raises:
            BackendError: The context cannot be entered.
            UnsupportedError: The backend cannot keep the addresses.
        """
        self._state.now = self._state.now._replace(mapped=False)
        with self.gpu.entered():
            self.opener.clear(self.address, self.extents)
        _forget(self.address, self.extents)

    def wake(self, extents: Sequence[MappedExtent], opener: Opener, *owners: object) -> None:
        """Map the slabs `extents` read-only at the address range that `sleep` kept reserved.

        The slabs must have the same sizes and bytes as those that `sleep` unmapped.
        `opener.remap` maps them, and `owners` are kept alive until they are unmapped. Does nothing
        if the mapping is not asleep.

        After an error, `asleep` is False if the slabs were mapped nevertheless.

        Raises:
            BackendError: The slabs have other sizes, or the driver refused.
        """
        if not self.asleep:
            return
        if [each.nbytes for each in extents] != [each.nbytes for each in self.extents]:
            raise BackendError(
                f"{total(extents)} bytes where {self.nbytes} slept; look the tensors up again"
            )
        with self.gpu.entered():
            self.gpu.with_room(lambda: opener.remap(self.address, extents))
            _enter(self.address, extents)
            held = {id(owner): owner for owner in owners}
            self._state.now = _PendingUnmap(self.address, tuple(extents), opener, held)

    def make_private(self) -> None:
        """Replace the slabs by a private, writable copy of their bytes at the same address.

        Does nothing if the mapping is private already. After an error, the mapping is unchanged.

        Raises:
            BackendError: The mapping sleeps, or the driver refused.
            UnsupportedError: The backend cannot put other memory at this address.
        """
        if self.private:
            return
        if self.asleep:
            raise BackendError(f"{self.nbytes} bytes of it sleep; wake the model up first")
        place = self.address, self.extents
        self.gpu.with_room(partial(self.opener.make_private, *place))
        self.private = True
        _forget(self.address, self.extents)
        self._state.now = self._state.now._replace(owners={})


def _retire(retired: "deque[_PendingUnmap]", pid: int, state: _State) -> None:
    if os.getpid() == pid:  # a forked child has the object and not the mapping
        pending = state.now
        _forget(pending.address, pending.extents)
        retired.append(pending)


def _enter(address: int, extents: Sequence[MappedExtent]) -> None:
    for extent in extents:
        pieces = (SlabRange(extent.serial, 0, extent.nbytes),)
        DEVICE_MAPPINGS.add(address, MappingSpan(extent.nbytes, pieces))
        address += extent.nbytes


def _forget(address: int, extents: Sequence[MappedExtent]) -> None:
    for extent in extents:
        DEVICE_MAPPINGS.forget(address)
        address += extent.nbytes


class Gpu:
    """One GPU and its mappings. Safe from any thread; every method may raise BackendError."""

    def __init__(
        self, driver: Driver, device: str, let_go: Callable[[], bool] = lambda: False
    ) -> None:
        """Open the GPU `device`, given by its UUID or its ordinal among the visible ones.

        `let_go()` makes other allocators of this process release GPU memory that they cache, and
        returns whether there was any.
        """
        driver.init()
        self.driver: Final = driver
        self.device: Final[GpuInfo] = find_device(driver, device)
        self.transfers: Final = Transfers(driver, self.device.ordinal)
        self.retired: Final[deque[_PendingUnmap]] = deque()
        self.stuck: Final[list[_PendingUnmap]] = []
        self._alive: Final[weakref.WeakSet[DeviceMapping]] = weakref.WeakSet()
        self._marked: list[tuple[int, list[_PendingUnmap]]] = []
        self._let_go = let_go
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of retired mappings: nothing refers to them, but they are still mapped."""
        return len(self.retired) + sum(len(batch) for _, batch in self._marked)

    def vmm(self) -> Opener:
        """Return the opener that maps cuMemCreate memory of this GPU."""
        return VmmOpener(self.driver, self.device)

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager in which this GPU's CUDA context is current.

        This applies only to the thread that enters it.
        """
        return current(self.driver, self.device.ordinal)

    def map(self, extents: Sequence[MappedExtent], opener: Opener, owner: object) -> DeviceMapping:
        """Map the slabs `extents` side by side, read-only, by `opener.open`; return the mapping.

        `owner` is kept alive until the slabs are unmapped.
        """
        self._try_to_reap()
        with Undo() as undo:
            # No call of these is documented to need a context. One that does finds it.
            with self.entered():
                address = self.with_room(lambda: opener.open(extents, Access.READ))
                undo.add(partial(opener.close, address, extents))
            undo.keep()
        _enter(address, extents)
        made = DeviceMapping(
            self, _PendingUnmap(address, tuple(extents), opener, {id(owner): owner})
        )
        self._alive.add(made)
        return made

    def mapped(self) -> set[int]:
        """Return the serial numbers of the slabs that this process has mapped.

        Mappings that sleep or are private are not counted.
        """
        return {
            extent.serial
            for mapping in list(self._alive)
            if not mapping.asleep and not mapping.private
            for extent in mapping.extents
        }

    def mapping_at(self, address: int) -> DeviceMapping | None:
        """Return the shared or private mapping that contains `address`, or None."""
        return next(
            (m for m in list(self._alive) if m.address <= address < m.address + m.nbytes), None
        )

    def mappings_at(self, addresses: Sequence[int]) -> list[DeviceMapping | None]:
        """Return, for each address, the shared or private mapping that contains it, or None."""
        alive = sorted(self._alive, key=lambda each: each.address)
        starts = [each.address for each in alive]
        found: list[DeviceMapping | None] = []
        for address in addresses:
            last = alive[at - 1] if (at := bisect_right(starts, address)) else None
            inside = last is not None and address < last.address + last.nbytes
            found.append(last if inside else None)
        return found

    @contextmanager
    def writable(
        self,
        slabs: Sequence[Sequence[MappedExtent]],
        opener: Opener,
        fence: Callable[[], None] | None = None,
    ) -> Iterator[list[int]]:
        """Context manager: while it is active, slabs are mapped writable, and can be filled.

        Each item of `slabs` lists slabs that `opener.open` maps side by side. The context manager
        yields the address of each item. The GPU's context is current meanwhile. At the end, also
        after an error, `fence()` is called before the slabs are unmapped. It must wait until the
        GPU no longer writes to them. The default waits for all work of the GPU. If `fence` fails,
        all work of the GPU is waited for. If that fails, too, the slabs stay mapped.

        Raises:
            BackendError: The driver refuses. If it cannot unmap the slabs, do not publish them.
        """
        self._try_to_reap()
        with self.entered(), Undo() as undo:
            addresses = []
            for extents in slabs:
                open_ = partial(opener.open, extents, Access.READ_WRITE)
                address = self.with_room(open_)
                undo.add(partial(opener.close, address, extents))
                addresses.append(address)
            try:
                yield addresses
            finally:
                # Also after a failure: what was begun must not meet an unmapped page.
                try:
                    (fence or self.driver.synchronize)()
                except BaseException:
                    self._wait_or_keep(undo)
                    raise
            # Not left to the end of the block: who cannot unmap must not say that all is written.
            for error in undo.run():
                raise error

    def _wait_or_keep(self, undo: Undo) -> None:
        """Wait for all work of the GPU; if that fails, discard the steps that unmap memory.

        The addresses would be another mapping's while the GPU still writes to them.
        """
        try:
            self.driver.synchronize()
        except BackendError as error:
            undo.keep()
            _log.warning("memory that was written stays mapped: %s", str(error))

    def fill(self, extent: MappedExtent, opener: Opener, write: Callable[[int], object]) -> None:
        """Fill the slab `extent`: map it by `opener.open`, call `write(address)`, and unmap it.

        The GPU's context is current while `write` runs. This waits for all work of the GPU before
        it unmaps the slab, also if `write` fails. Errors of `write` are passed on.
        """
        with self.writable([[extent]], opener) as [address]:
            write(address)

    def with_room(self, do: Callable[[], _T], short: type[BaseException] = NoMemoryError) -> _T:
        """Call `do`, which allocates memory, and return its result.

        If `do` raises `short`, `make_room` frees unused memory, and `do` is called once more. If
        there was no unused memory, the error is passed on.
        """
        try:
            return do()
        except short:
            if not self.make_room():
                raise
        return do()

    def make_room(self) -> bool:
        """Free unused memory of this GPU, and return whether there was any.

        Retired mappings, which nothing refers to any more, are unmapped, and torch releases cached
        memory. Waits for all kernels that may use a retired mapping.
        """
        before = self.waiting
        try:
            self.reap(wait=True)
        except BackendError as error:
            _log.debug("nothing was unmapped now: %s", str(error))
        let_go = self._let_go()
        return let_go or self.waiting < before

    def _try_to_reap(self) -> None:
        try:
            self.reap()
        except BackendError as error:
            _log.debug("nothing was unmapped now: %s", str(error))

    def reap(self, *, wait: bool = False) -> int:
        """Unmap retired mappings that no kernel can use any more; return how many are left.

        A mapping is retired when nothing refers to it any more. With `wait`, this first waits for
        the kernels that may use retired mappings, which is not allowed while a CUDA graph is
        captured.
        """
        with self._lock:
            if not self.waiting:
                return 0
            with self.entered():
                self._mark()
                for event, batch in list(self._marked):
                    if self._passed(event, wait):
                        self._unmap_batch(event, batch)
            return self.waiting

    def _mark(self) -> None:
        batch = []
        while self.retired:
            batch.append(self.retired.popleft())
        if not batch:
            return
        try:
            self._marked.append((self.driver.mark(), batch))
        except BaseException:
            self.retired.extend(batch)
            raise

    def _passed(self, event: int, wait: bool) -> bool:
        if wait:
            self.driver.wait(event)
            return True
        return self.driver.done(event)

    def _unmap_batch(self, event: int, batch: list[_PendingUnmap]) -> None:
        # Each is struck off before it is touched: whatever fails, none is ever unmapped twice,
        # because its addresses may be another mapping's by then.
        while batch:
            self._unmap(batch.pop())
        self._marked.remove((event, batch))
        try:
            self.driver.forget(event)
        except BackendError as error:
            _log.warning("an event is lost: %s", str(error))

    def _unmap(self, pending: _PendingUnmap) -> None:
        end = pending.opener.close if pending.mapped else pending.opener.free
        try:
            end(pending.address, pending.extents)
        except BaseException as error:
            # Its memory stays in use, so its lease is kept, too.
            self.stuck.append(pending)
            if not isinstance(error, BackendError):
                raise
            _log.warning("%d bytes stay mapped: %s", total(pending.extents), str(error))
