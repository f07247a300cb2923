"""A backend for GPU memory, which it lends as file descriptors and never maps.

One backend serves one GPU. The memory is made by cuMemCreate and exported by
cuMemExportToShareableHandle. Then cuMemRelease releases the handle, and only the descriptor keeps
the memory. None of these calls needs a CUDA context, so the manager takes no GPU memory of its own.

Without a mapping, the manager cannot zero, seal or hash the memory. It trusts the writer to send
the right digests, and to have unmapped the memory. After a restart, clients can offer slabs back.
The manager then checks only that a slab is memory of this GPU. Readers map the memory read-only,
and the hardware refuses their writes.
"""

import os
import weakref
from typing import Final

from tensor_dedup.memory_manager.backends.base import Capabilities, Memory, Spans
from tensor_dedup.memory_manager.cuda.driver import Driver, GpuInfo, find_device
from tensor_dedup.memory_manager.errors import BackendError, DeviceError, NotSealedError
from tensor_dedup.memory_manager.protocol.layout import SlabLayout

ALIGNMENT: Final = 512  # what torch's own allocator gives, and more than any kernel asks for


class VmmAllocation:
    """A slab of GPU memory. Its descriptor is closed when this object is garbage-collected."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.fileno: Final = fd
        weakref.finalize(self, os.close, fd).atexit = False


class VmmBackend:
    """The `vmm` backend for one GPU, which lends memory as file descriptors."""

    def __init__(self, driver: Driver, device: str, handle: int = 0) -> None:
        """Open a GPU by its UUID or ordinal.

        Sizes of slabs are multiples of `handle` bytes; 0 stands for the smallest that the driver
        allows.

        Raises:
            DeviceError: There is no such GPU or no driver, the GPU's memory cannot be passed on as
                file descriptors, or `handle` is not a multiple of what the driver allows.
        """
        driver.init()
        self._driver = driver
        self.device: Final[GpuInfo] = find_device(driver, device)
        if not self.device.descriptors:
            raise DeviceError(
                f"{self.device.uuid} cannot hand memory on as file descriptors; ask for the "
                "backend `ipc`",
                device=self.device.uuid,
            )
        granule = driver.granularity(self.device.ordinal)
        if handle % granule:
            raise DeviceError(
                f"handles of {handle} bytes: {self.device.uuid} has them in multiples of {granule}",
                device=self.device.uuid,
                handle=handle,
            )
        self._granule: Final = granule
        self.capabilities: Final = Capabilities(
            "vmm",
            hardware_readonly=True,
            hashes_itself=False,
            zeroed=False,
            device=self.device.uuid,
            device_bytes=self.device.nbytes,
            layout=SlabLayout(handle or granule, ALIGNMENT),
        )

    def reserve(self, nbytes: int) -> VmmAllocation:
        """Return a new slab of GPU memory.

        Raises:
            NoMemoryError: The GPU has no memory left.
            DeviceError: The driver failed.
        """
        handle = self._driver.create(self.device.ordinal, nbytes)
        try:
            return VmmAllocation(self._driver.export(handle), nbytes)
        finally:
            # The descriptor holds the memory; a handle would hold it after all descriptors.
            self._driver.release(handle)

    def commit(self, memory: Memory, offset: int, nbytes: int) -> None:
        """Do nothing, because `reserve` has allocated the memory already."""

    def seal(self, memory: Memory) -> None:
        """Do nothing, because this memory cannot be sealed.

        The writer is trusted to have unmapped it.
        """

    def leaves(self, memory: Memory, spans: Spans) -> list[list[bytes]]:
        """Raise BackendError, because the manager cannot read this memory."""
        raise BackendError("the manager does not hash the memory of a GPU")

    def reclaim(self, fd: int, nbytes: int) -> VmmAllocation:
        """Return the slab of an earlier manager that `fd` refers to, and take ownership of `fd`.

        If this method raises, the caller still owns `fd`.

        Raises:
            NotSealedError: `fd` is not memory of this GPU, or `nbytes` is not a multiple of the
                driver's granularity.
        """
        try:
            handle = self._driver.import_(fd)
        except BackendError as error:
            raise NotSealedError(f"the descriptor is no memory of a GPU: {error}") from error
        try:
            found = self._driver.device_of(handle)
        except BackendError as error:
            raise NotSealedError(f"whose memory this is cannot be told: {error}") from error
        finally:
            self._driver.release(handle)
        # An earlier manager may have had larger handles.
        if found != self.device.ordinal or nbytes % self._granule:
            raise NotSealedError(
                f"{nbytes} bytes of GPU {found}; this manager has {self.device.uuid}, in units of "
                f"{self._granule}"
            )
        return VmmAllocation(fd, nbytes)
