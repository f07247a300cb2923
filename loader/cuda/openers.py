"""Map GPU memory that was received as file descriptors into this process, and unmap it again.

Only whole handles are mapped, because CUDA cannot map a part of a handle. If a step fails, the
earlier steps are undone, so a process that cannot map the memory can still load its weights
privately.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Protocol

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.memory_manager.backends.ipc import read_ticket
from tensor_dedup.memory_manager.cuda.driver import Access, Driver, GpuInfo, Undo, current
from tensor_dedup.memory_manager.errors import BackendError, NotSealedError


class MappedExtent(NamedTuple):
    """A slab to map: the descriptor of its GPU memory, and its size in bytes.

    `serial` identifies the slab within this process.
    """

    fileno: int
    nbytes: int
    serial: int


class Opener(Protocol):
    """An interface for mapping slabs.

    A method that raises BackendError has undone the steps that it had taken.
    """

    @property
    def whole_only(self) -> str | None:
        """The reason why every tensor must lie in a single slab, or None.

        None means that several slabs can be mapped side by side.
        """

    def open(self, extents: Sequence[MappedExtent], access: Access) -> int:
        """Map the slabs `extents` side by side, in order; return the address of the first."""

    def close(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap the slabs that `open` mapped at `address`, and free the address range.

        No kernel may use the range any more.
        """

    def make_private(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Replace the slabs by private, writable memory with the same bytes at the same address.

        Waits for all work of the GPU's context. Start no other work meanwhile. `close` frees the
        private memory.

        Raises:
            UnsupportedError: The backend cannot put other memory at this address.
        """

    def unmap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap slabs that `open` mapped read-only, but keep the address range reserved.

        No kernel may use the range. `remap` maps slabs there again, and `free` releases the range.

        Raises:
            UnsupportedError: The backend cannot keep the addresses.
        """

    def clear(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap what is mapped of slabs of these sizes, and keep the address range reserved.

        Also what cannot be unmapped is no error. No kernel may use the range.

        Raises:
            UnsupportedError: The backend cannot keep the addresses.
        """

    def remap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Map the slabs `extents` read-only at an address range that `unmap` kept.

        Their total size must be that of the range.
        """

    def free(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Release an address range that `unmap` kept."""


def total(extents: Sequence[MappedExtent]) -> int:
    """Return the total size of `extents` in bytes."""
    return sum(extent.nbytes for extent in extents)


class VmmOpener:
    """The opener for memory that was allocated with cuMemCreate and exported as a descriptor."""

    whole_only: Final = None

    def __init__(self, driver: Driver, device: GpuInfo) -> None:
        self._driver = driver
        self._device: Final = device.ordinal
        self._unit: Final = driver.granularity(device.ordinal)

    def open(self, extents: Sequence[MappedExtent], access: Access) -> int:
        """Map the extents side by side; return the address of the first."""
        with Undo() as undo:
            address = self._reserve(undo, total(extents))
            self._map_all(undo, address, extents, access)
            undo.keep()
        return address

    def _map_all(
        self, undo: Undo, address: int, extents: Sequence[MappedExtent], access: Access
    ) -> None:
        at = address
        for extent in extents:
            with Undo() as always:
                handle = self._held(always, self._driver.import_(extent.fileno))
                self._map(undo, at, extent.nbytes, handle)
            at += extent.nbytes
        self._driver.allow(address, at - address, self._device, access)

    def _reserve(self, undo: Undo, nbytes: int) -> int:
        address = self._driver.reserve(nbytes, self._unit)
        undo.add(partial(self._driver.free, address, nbytes))
        return address

    def _map(self, undo: Undo, at: int, nbytes: int, handle: int) -> None:
        self._driver.map(at, nbytes, handle)
        undo.add(partial(self._driver.unmap, at, nbytes))

    def close(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap the extents, one by one, and free their address range."""
        # One by one, as they were mapped: that several may go at once is written nowhere.
        for at, nbytes in _places(address, extents):
            self._driver.unmap(at, nbytes)
        self._driver.free(address, total(extents))

    def unmap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap the extents and keep their address range reserved."""
        with Undo() as always:
            # Held to the end, for the way back.
            handles = [self._held(always, self._driver.import_(each.fileno)) for each in extents]
            with Undo() as back:
                back.add(
                    partial(self._driver.allow, address, total(extents), self._device, Access.READ)
                )
                for (at, nbytes), handle in zip(_places(address, extents), handles, strict=True):
                    self._driver.unmap(at, nbytes)
                    back.add(partial(self._driver.map, at, nbytes, handle))
                back.keep()

    def clear(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap those of the extents that are mapped, and keep their address range reserved."""
        for at, nbytes in _places(address, extents):
            with suppress(BackendError):  # it is not mapped
                self._driver.unmap(at, nbytes)

    def remap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Map extents read-only at an address range that `unmap` kept."""
        with Undo() as undo:
            self._map_all(undo, address, extents, Access.READ)
            undo.keep()

    def free(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Release an address range that `unmap` kept."""
        self._driver.free(address, total(extents))

    def make_private(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Replace the extents by private, writable memory with the same bytes and address."""
        with Undo() as always, current(self._driver, self._device):
            # The handles of both sides are held to the end: the shared ones for the way back.
            shared = [self._held(always, self._driver.import_(each.fileno)) for each in extents]
            self._driver.synchronize()
            private = [self._copy(always, *place) for place in _places(address, extents)]
            self._swap(address, extents, shared, private)

    def _held(self, always: Undo, handle: int) -> int:
        always.add(partial(self._driver.release, handle))
        return handle

    def _copy(self, always: Undo, source: int, nbytes: int) -> int:
        """Return a handle of new memory with the bytes of a mapping."""
        handle = self._held(always, self._driver.create(self._device, nbytes))
        with Undo() as mapping:
            target = self._reserve(mapping, nbytes)
            self._map(mapping, target, nbytes, handle)
            self._driver.allow(target, nbytes, self._device, Access.READ_WRITE)
            self._driver.copy(target, source, nbytes)
            self._driver.synchronize()
        return handle

    def _swap(
        self, address: int, extents: Sequence[MappedExtent], old: Sequence[int], new: Sequence[int]
    ) -> None:
        nbytes = total(extents)
        with Undo() as back:
            back.add(partial(self._driver.allow, address, nbytes, self._device, Access.READ))
            for (at, size), before, after in zip(_places(address, extents), old, new, strict=True):
                self._driver.unmap(at, size)
                back.add(partial(self._driver.map, at, size, before))
                self._map(back, at, size, after)
            self._driver.allow(address, nbytes, self._device, Access.READ_WRITE)
            back.keep()


def _places(address: int, extents: Sequence[MappedExtent]) -> list[tuple[int, int]]:
    places = []
    for extent in extents:
        places.append((address, extent.nbytes))
        address += extent.nbytes
    return places


class IpcOpener:
    """The opener for the backend `ipc` (CUDA IPC), whose memory is always mapped writable."""

    whole_only: Final = (
        "with the backend `ipc` the driver chooses addresses, so leaves of others cannot lie "
        "beside a tensor's own; tensors are shared whole"
    )

    def __init__(self, driver: Driver, device: GpuInfo) -> None:
        self._driver = driver
        self._device: Final = device.ordinal

    def open(self, extents: Sequence[MappedExtent], access: Access) -> int:
        """Map a single extent and return its address.

        The extent's descriptor is that of an IPC ticket, a file with the handle and the size of the
        memory. `access` is ignored. Several extents cannot lie side by side, because the driver
        chooses the addresses.

        Raises:
            UnsupportedError: There are several extents.
            NotSealedError: The ticket is for less memory than the extent.
        """
        if len(extents) != 1:
            raise UnsupportedError(
                f"{len(extents)} extents cannot lie side by side with the backend `ipc`; use `vmm`"
            )
        handle, nbytes = read_ticket(extents[0].fileno)
        if nbytes < extents[0].nbytes:
            raise NotSealedError(f"a ticket for {nbytes} bytes, not for {extents[0].nbytes}")
        with current(self._driver, self._device):
            return self._driver.ipc_open(handle)

    def close(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Unmap the memory that `open` mapped."""
        with current(self._driver, self._device):
            self._driver.ipc_close(address)

    def make_private(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Raise UnsupportedError, because CUDA IPC cannot map memory at a given address.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "memory of the backend `ipc` cannot be replaced at its address; copy the tensors, or "
            "use the backend `vmm`"
        )

    def unmap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Raise UnsupportedError, because CUDA IPC cannot map memory at its old address again.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "memory of the backend `ipc` cannot come back to its address; use the backend `vmm`"
        )

    def clear(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Raise UnsupportedError, because CUDA IPC keeps no address range.

        Raises:
            UnsupportedError: Always.
        """
        self.unmap(address, extents)

    def remap(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Raise UnsupportedError, because CUDA IPC cannot map memory at its old address again.

        Raises:
            UnsupportedError: Always.
        """
        self.unmap(address, extents)

    def free(self, address: int, extents: Sequence[MappedExtent]) -> None:
        """Raise UnsupportedError, because `unmap` keeps no address range that could be released.

        Raises:
            UnsupportedError: Always.
        """
        self.unmap(address, extents)


def opener_for(backend: str, driver: Driver, device: GpuInfo) -> Opener:
    """Return the opener for the memory of a manager whose `backend` is `vmm` or `ipc`.

    Raises:
        UnsupportedError: `backend` is another one. Other backends lend no GPU memory.
    """
    if backend == "vmm":
        return VmmOpener(driver, device)
    if backend == "ipc":
        return IpcOpener(driver, device)
    raise UnsupportedError(f"the backend {backend!r} lends no memory of a GPU", backend=backend)
