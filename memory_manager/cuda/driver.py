"""The interface of the CUDA driver: the about forty calls that this package uses.

The docstring of each method names the calls of the driver that it makes. Handles, addresses and
events are integers; sizes are in bytes. A failed call raises NoMemoryError if the GPU is full, and
DeviceError otherwise.
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from tensor_dedup.memory_manager.errors import BackendError, DeviceError, NoMemoryError

_log = logging.getLogger(__name__)
IPC_HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


class Result(IntEnum):
    """The CUresult codes that this package returns or tests for."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    MAP_FAILED = 205
    ALREADY_MAPPED = 208
    INVALID_HANDLE = 400
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900


class Access(IntEnum):
    """The access rights to mapped memory (CUmemAccess_flags)."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class GpuInfo(NamedTuple):
    """One GPU as this process sees it. CUDA_VISIBLE_DEVICES changes ordinals, never UUIDs."""

    ordinal: int
    uuid: str
    nbytes: int
    descriptors: bool  # whether its memory can be handed on as a file descriptor


class Driver(Protocol):
    """The calls of the CUDA driver. Safe from any thread; in a forked child every call fails."""

    def init(self) -> None:
        """Initialise the driver (cuInit); a second call has no effect.

        Raises:
            DeviceError: There is no driver, or it has no device.
        """

    def devices(self) -> list[GpuInfo]:
        """Return the visible GPUs (cuDeviceGetCount, cuDeviceGetUuid, cuDeviceTotalMem)."""

    # Memory without addresses. None of these calls needs a context.

    def granularity(self, device: int) -> int:
        """Return the unit of sizes and addresses (cuMemGetAllocationGranularity), in bytes."""

    def create(self, device: int, nbytes: int) -> int:
        """Return a handle of newly allocated memory that can be exported (cuMemCreate)."""

    def release(self, handle: int) -> None:
        """Release a handle; mappings and descriptors of its memory stay (cuMemRelease)."""

    def export(self, handle: int) -> int:
        """Return a new file descriptor of a handle's memory (cuMemExportToShareableHandle).

        The caller owns the descriptor.
        """

    def import_(self, fd: int) -> int:
        """Return a handle of the memory that `fd` refers to (cuMemImportFromShareableHandle)."""

    def device_of(self, handle: int) -> int:
        """Return the ordinal of a handle's GPU (cuMemGetAllocationPropertiesFromHandle)."""

    # Addresses.

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve a range of addresses, without memory (cuMemAddressReserve).

        Return its first address.
        """

    def free(self, address: int, nbytes: int) -> None:
        """Free a whole range of addresses from `reserve` (cuMemAddressFree)."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the whole memory of a handle at an address (cuMemMap).

        Call `allow` next, which makes the mapping accessible to a GPU.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap one or more whole mappings (cuMemUnmap)."""

    def allow(self, address: int, nbytes: int, device: int, access: Access) -> None:
        """Allow a GPU to access a range of mapped addresses, as `access` says (cuMemSetAccess)."""

    # With a context: of the device that is `entered` in this thread.

    def enter(self, device: int) -> None:
        """Make the GPU's primary context current (cuDevicePrimaryCtxRetain, cuCtxPushCurrent)."""

    def leave(self) -> None:
        """Undo the last `enter` of this thread (cuCtxPopCurrent). The context stays."""

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Copy from host to device; complete after `synchronize` (cuMemcpyHtoD)."""

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Copy from device to host (cuMemcpyDtoH)."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy from device to device; complete after `synchronize` (cuMemcpyDtoD)."""

    def synchronize(self) -> None:
        """Wait for all work of the context (cuCtxSynchronize)."""

    # Copies in the background. A stream does what is begun on it in order, and waits for no other.

    def stream(self) -> int:
        """Return a new stream of the context (cuStreamCreate, CU_STREAM_NON_BLOCKING)."""

    def begin_copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy from page-locked host memory to the device (cuMemcpyHtoDAsync).

        Keep the bytes at `source` unchanged until an event that was recorded afterwards has passed.
        """

    def begin_copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin a copy from the device to page-locked host memory (cuMemcpyDtoHAsync)."""

    def record(self, stream: int) -> int:
        """Return an event that marks the end of what was begun on `stream` so far.

        The driver's calls are cuEventCreate and cuEventRecord.
        """

    def page_lock(self, nbytes: int) -> int:
        """Allocate page-locked host memory for all contexts of this process (cuMemHostAlloc).

        Return its address. A GPU copies from such memory at the full speed of its bus. The memory
        is slow to allocate (about a second for a GB on an H200's machine).
        """

    def page_unlock(self, address: int) -> None:
        """Free memory from `page_lock` (cuMemFreeHost)."""

    def mark(self) -> int:
        """Return an event that marks the end of the work queued so far.

        The driver's calls are cuEventCreate and cuCtxRecordEvent. They invalidate a CUDA graph
        capture in progress, so finalizers must not call this method.
        """

    def done(self, event: int) -> bool:
        """Return whether the work before an event has finished (cuEventQuery)."""

    def wait(self, event: int) -> None:
        """Wait until the work before an event has finished (cuEventSynchronize)."""

    def forget(self, event: int) -> None:
        """Destroy an event (cuEventDestroy)."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that `ipc_handle` accepts, and return its address (cuMemAlloc)."""

    def deallocate(self, address: int) -> None:
        """Free memory from `allocate` (cuMemFree)."""

    def ipc_handle(self, address: int) -> bytes:
        """Return the handle by which another process can map the memory (cuIpcGetMemHandle).

        `address` comes from `allocate`. The handle has IPC_HANDLE_BYTES bytes.
        """

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's memory, and return the address (cuIpcOpenMemHandle).

        Opening a handle again returns the same address; every `ipc_open` needs an `ipc_close`.
        """

    def ipc_close(self, address: int) -> None:
        """Undo one `ipc_open` (cuIpcCloseMemHandle)."""


def refused(call: str, code: int, nbytes: int = 0) -> BackendError:
    """Return the error to raise for the result code of a failed call.

    `nbytes` is the size that was requested, for the message of a NoMemoryError.
    """
    try:
        name = f"CUDA_ERROR_{Result(code).name}"
    except ValueError:
        name = f"CUresult {code}"
    if code == Result.OUT_OF_MEMORY:
        return NoMemoryError(
            f"{call}: the GPU has no {nbytes} bytes left; free memory there, or lower the "
            "manager's --budget",
            call=call,
            nbytes=nbytes,
        )
    return DeviceError(
        f"{call}: {name}; load privately, and look at nvidia-smi and the kernel's log",
        call=call,
        code=code,
    )


def device_uuid(raw: bytes) -> str:
    """Return a GPU's UUID, given as 16 bytes, in the notation of nvidia-smi and NVML."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


def find_device(driver: Driver, name: str) -> GpuInfo:
    """Return the GPU with this UUID or ordinal, which `name` gives as text.

    Of a UUID, a beginning is enough that no other GPU has.

    Raises:
        DeviceError: No such GPU is visible to this process, or several are.
    """
    found = driver.devices()
    for device in found:
        if name in (device.uuid, str(device.ordinal)):
            return device
    begun = [each for each in found if name.startswith("GPU-") and each.uuid.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise DeviceError(
            f"{name} may be {' or '.join(each.uuid for each in begun)}; give more of the UUID",
            device=name,
        )
    raise DeviceError(
        f"no GPU {name} here, only {', '.join(each.uuid for each in found) or 'none'}; "
        "look at CUDA_VISIBLE_DEVICES",
        device=name,
    )


@contextmanager
def current(driver: Driver, device: int) -> Iterator[None]:
    """Context manager: while it is active, the GPU's context is current in this thread."""
    driver.enter(device)
    try:
        yield
    finally:
        driver.leave()


class Undo:
    """A context manager that calls functions ("steps") at its end to undo earlier actions.

    The step that was added last is called first. `keep` discards all steps. If a step raises
    BackendError, the other steps are still called. Its error is added as a note to the error that
    ended the block, or logged if there is none. Use the object in one thread only.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Add `step`, a function that undoes the action that was just taken."""
        self._steps.append(step)

    def keep(self) -> None:
        """Discard all steps, so that nothing is undone."""
        self._steps.clear()

    def run(self) -> list[BackendError]:
        """Undo all steps now; return the errors of those that failed."""
        failed: list[BackendError] = []
        while self._steps:
            try:
                self._steps.pop()()
            except BackendError as error:
                failed.append(error)
        return failed

    def __enter__(self) -> "Undo":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for other in self.run():
            if error is not None:
                error.add_note(f"and it could not be undone: {other}")
            else:
                _log.warning("something of a GPU could not be given back: %s", other)
