"""The CUDA driver as this package uses it: some thirty calls behind one protocol.

Every method is one call of the driver, which its docstring names. The results of all drivers, that
of the tests included, become errors here: NoMemoryError when the device is full, DeviceError for
all others.
Handles, addresses and events are numbers; sizes are bytes.
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from tensor_dedup.memory_manager.errors import BackendError, DeviceError, NoMemoryError

log = logging.getLogger("tensor_dedup.memory_manager.cuda")
IPC_HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


class Result(IntEnum):
    """The CUresults that this package returns or decides by."""

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
    """CUmemAccess_flags."""

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
    """Safe from any thread. Useless in a forked child, as CUDA is: every call then fails."""

    def init(self) -> None:
        """Make the driver ready (cuInit); once more does nothing.

        Raises:
            DeviceError: There is no driver, or it has no device.
        """

    def devices(self) -> list[GpuInfo]:
        """What this process may use (cuDeviceGetCount, cuDeviceGetUuid, cuDeviceTotalMem)."""

    # Memory without addresses. None of these calls needs a context.

    def granularity(self, device: int) -> int:
        """What sizes and addresses are multiples of (cuMemGetAllocationGranularity, minimum)."""

    def create(self, device: int, nbytes: int) -> int:
        """A handle of new memory that can be exported (cuMemCreate)."""

    def release(self, handle: int) -> None:
        """Forget a handle; mappings and descriptors of its memory stay (cuMemRelease)."""

    def export(self, handle: int) -> int:
        """A new descriptor of the memory, the caller's (cuMemExportToShareableHandle)."""

    def import_(self, fd: int) -> int:
        """A handle of a descriptor's memory (cuMemImportFromShareableHandle). It stays open."""

    def device_of(self, handle: int) -> int:
        """The ordinal of a handle's GPU (cuMemGetAllocationPropertiesFromHandle)."""

    # Addresses.

    def reserve(self, nbytes: int, alignment: int) -> int:
        """A range of addresses with nothing behind it (cuMemAddressReserve)."""

    def free(self, address: int, nbytes: int) -> None:
        """Give a range back, as it was reserved (cuMemAddressFree)."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put a whole handle there; nobody may touch it yet (cuMemMap)."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take one or more whole mappings away (cuMemUnmap)."""

    def allow(self, address: int, nbytes: int, device: int, access: Access) -> None:
        """Say what a GPU may do there (cuMemSetAccess)."""

    # With a context: of the device that is `entered` in this thread.

    def enter(self, device: int) -> None:
        """Make the primary context current (cuDevicePrimaryCtxRetain, cuCtxPushCurrent)."""

    def leave(self) -> None:
        """Undo the last `enter` of this thread (cuCtxPopCurrent). The context stays."""

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """From host to device; done when this returns and `synchronize` has (cuMemcpyHtoD)."""

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """From device to host (cuMemcpyDtoH)."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """From device to device; done after `synchronize` (cuMemcpyDtoD)."""

    def synchronize(self) -> None:
        """Wait for all work of the context (cuCtxSynchronize)."""

    def mark(self) -> int:
        """An event after all work of the context so far (cuEventCreate, cuCtxRecordEvent).

        It ends a capture of a graph that is under way: not from a finalizer.
        """

    def done(self, event: int) -> bool:
        """Return whether that work has ended (cuEventQuery)."""

    def wait(self, event: int) -> None:
        """Wait until it has (cuEventSynchronize)."""

    def forget(self, event: int) -> None:
        """Destroy an event (cuEventDestroy)."""

    def allocate(self, nbytes: int) -> int:
        """Memory of the old kind, mapped (cuMemAlloc): what `ipc_handle` takes."""

    def deallocate(self, address: int) -> None:
        """Free it (cuMemFree)."""

    def ipc_handle(self, address: int) -> bytes:
        """What another process opens it by: IPC_HANDLE_BYTES (cuIpcGetMemHandle)."""

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's memory, or count once more (cuIpcOpenMemHandle)."""

    def ipc_close(self, address: int) -> None:
        """Undo one `ipc_open` (cuIpcCloseMemHandle)."""


def refused(call: str, code: int, nbytes: int = 0) -> BackendError:
    """Return the error for what a call returned."""
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
    """Return a UUID as nvidia-smi and NVML write it."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


def find_device(driver: Driver, name: str) -> GpuInfo:
    """Return the GPU with this UUID or, for people, this ordinal.

    Raises:
        DeviceError: No such GPU is visible to this process.
    """
    found = driver.devices()
    for device in found:
        if name in (device.uuid, str(device.ordinal)):
            return device
    raise DeviceError(
        f"no GPU {name} here, only {', '.join(each.uuid for each in found) or 'none'}; "
        "look at CUDA_VISIBLE_DEVICES",
        device=name,
    )


@contextmanager
def current(driver: Driver, device: int) -> Iterator[None]:
    """Make the context of a GPU current in this thread, and afterwards the one that was."""
    driver.enter(device)
    try:
        yield
    finally:
        driver.leave()


class Undo:
    """Steps that are taken back, last first, unless all went well. One thread.

    A step that cannot be taken back does not keep the others from it; its error goes into the notes
    of the one that is raised, or into the log.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """What takes the last thing back."""
        self._steps.append(step)

    def keep(self) -> None:
        """All went well: nothing is taken back."""
        self._steps.clear()

    def run(self) -> list[BackendError]:
        """Take everything back; what could not be."""
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
                log.warning("something of a GPU could not be given back: %s", other)
