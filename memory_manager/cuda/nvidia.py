"""The CUDA driver, called through NVIDIA's cuda-python (the extra `cuda`).

`cuda.bindings` is imported when the driver is first used, so a manager of host memory never loads
it.
"""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tensor_dedup.memory_manager.cuda.driver import (
    IPC_HANDLE_BYTES,
    Access,
    GpuInfo,
    Result,
    device_uuid,
    refused,
)
from tensor_dedup.memory_manager.errors import DeviceError, NoBindingsError
from tensor_dedup.suggestions import install_hint

_MODULE: Final = "cuda.bindings.driver"
# Where the kernel shows the driver: on Linux, and in WSL.
_DRIVERS: Final = (Path("/proc/driver/nvidia"), Path("/dev/dxg"))


def has_driver() -> bool:
    """Return whether the machine seems to have an NVIDIA driver; no package is needed for that."""
    return any(path.exists() for path in _DRIVERS)


class NvidiaDriver:
    """The installed CUDA driver, called through NVIDIA's Python bindings.

    `Driver` says what each method does.
    """

    def __init__(self) -> None:
        self._api: Any = None
        self._lock = threading.Lock()
        self._entered = threading.local()
        self._contexts: dict[int, Any] = {}

    def init(self) -> None:
        """Call cuInit."""
        with self._lock:
            if self._api is None:
                api = _bindings()
                try:
                    (result,) = api.cuInit(0)
                except (ImportError, OSError, RuntimeError) as error:
                    # How the bindings say that there is no libcuda changes with their version.
                    raise DeviceError(
                        f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, or "
                        "in a container ask for its GPUs",
                        kind="no_driver",
                    ) from error
                _check("cuInit", result)
                self._api = api

    def _ask(self, name: str, *arguments: Any, nbytes: int = 0) -> Any:
        """Call the driver; the value it returned beside CUDA_SUCCESS, if any."""
        if self._api is None:
            raise refused(name, Result.NOT_INITIALIZED)
        result, *values = getattr(self._api, name)(*arguments)
        _check(name, result, nbytes)
        return values[0] if values else None

    def devices(self) -> list[GpuInfo]:
        """Call cuDeviceGetCount, cuDeviceGetUuid and cuDeviceTotalMem."""
        return [self._device(ordinal) for ordinal in range(self._ask("cuDeviceGetCount"))]

    def _device(self, ordinal: int) -> GpuInfo:
        device = self._ask("cuDeviceGet", ordinal)
        names = self._api.CUdevice_attribute
        can = [
            self._ask("cuDeviceGetAttribute", name, device)
            for name in (
                names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
        ]
        raw = bytes(self._ask("cuDeviceGetUuid", device).bytes)
        total = int(self._ask("cuDeviceTotalMem", device))
        return GpuInfo(ordinal, device_uuid(raw), total, all(can))

    def _descriptor_kind(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _place(self, target: Any, device: int) -> None:
        target.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        target.location.id = device

    def _properties(self, device: int) -> Any:
        found = self._api.CUmemAllocationProp()
        found.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.requestedHandleTypes = self._descriptor_kind()
        self._place(found, device)
        return found

    def granularity(self, device: int) -> int:
        """Call cuMemGetAllocationGranularity."""
        self._require()
        option = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._ask("cuMemGetAllocationGranularity", self._properties(device), option))

    def _require(self) -> None:
        if self._api is None:
            raise refused("cuInit", Result.NOT_INITIALIZED)

    def create(self, device: int, nbytes: int) -> int:
        """Call cuMemCreate."""
        self._require()
        return int(self._ask("cuMemCreate", nbytes, self._properties(device), 0, nbytes=nbytes))

    def release(self, handle: int) -> None:
        """Call cuMemRelease."""
        self._ask("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """Call cuMemExportToShareableHandle."""
        self._require()
        fd = int(self._ask("cuMemExportToShareableHandle", handle, self._descriptor_kind(), 0))
        os.set_inheritable(fd, False)
        return fd

    def import_(self, fd: int) -> int:
        """Call cuMemImportFromShareableHandle."""
        self._require()
        return int(self._ask("cuMemImportFromShareableHandle", fd, self._descriptor_kind()))

    def device_of(self, handle: int) -> int:
        """Call cuMemGetAllocationPropertiesFromHandle."""
        return int(self._ask("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Call cuMemAddressReserve."""
        return int(self._ask("cuMemAddressReserve", nbytes, alignment, 0, 0, nbytes=nbytes))

    def free(self, address: int, nbytes: int) -> None:
        """Call cuMemAddressFree."""
        self._ask("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Call cuMemMap."""
        self._ask("cuMemMap", address, nbytes, 0, handle, 0, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Call cuMemUnmap."""
        self._ask("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int, device: int, access: Access) -> None:
        """Call cuMemSetAccess."""
        self._require()
        wish = self._api.CUmemAccessDesc()
        self._place(wish, device)
        wish.flags = self._api.CUmemAccess_flags(int(access))
        self._ask("cuMemSetAccess", address, nbytes, [wish], 1)

    def enter(self, device: int) -> None:
        """Call cuDevicePrimaryCtxRetain and cuCtxPushCurrent."""
        context = self._context(device)
        self._ask("cuCtxPushCurrent", context)
        self._stack().append(context)

    def _context(self, device: int) -> Any:
        # Kept for good: were it the only one who holds the context, events and memory would go.
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self._ask("cuDevicePrimaryCtxRetain", device)
            return self._contexts[device]

    def leave(self) -> None:
        """Call cuCtxPopCurrent."""
        self._stack().pop()
        self._ask("cuCtxPopCurrent")

    def _stack(self) -> list[Any]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        found: list[Any] = self._entered.stack
        return found

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Call cuMemcpyHtoD."""
        self._ask("cuMemcpyHtoD", target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Call cuMemcpyDtoH."""
        self._ask("cuMemcpyDtoH", target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Call cuMemcpyDtoD."""
        self._ask("cuMemcpyDtoD", target, source, nbytes)

    def synchronize(self) -> None:
        """Call cuCtxSynchronize."""
        self._ask("cuCtxSynchronize")

    def stream(self) -> int:
        """Call cuStreamCreate."""
        self._require()
        flag = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._ask("cuStreamCreate", int(flag)))

    def begin_copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Call cuMemcpyHtoDAsync."""
        self._ask("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    def begin_copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Call cuMemcpyDtoHAsync."""
        self._ask("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def record(self, stream: int) -> int:
        """Call cuEventCreate and cuEventRecord."""
        return self._event(lambda event: self._ask("cuEventRecord", event, stream))

    def _event(self, record: Callable[[Any], object]) -> int:
        self._require()
        flag = self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        event = self._ask("cuEventCreate", int(flag))
        try:
            record(event)
        except BaseException:
            self._ask("cuEventDestroy", event)
            raise
        return int(event)

    def page_lock(self, nbytes: int) -> int:
        """Call cuMemHostAlloc."""
        self._require()
        portable = self._api.CU_MEMHOSTALLOC_PORTABLE
        return int(self._ask("cuMemHostAlloc", nbytes, int(portable), nbytes=nbytes))

    def page_unlock(self, address: int) -> None:
        """Call cuMemFreeHost."""
        self._ask("cuMemFreeHost", address)

    def mark(self) -> int:
        """Call cuEventCreate and cuCtxRecordEvent."""
        if not self._stack():
            raise refused("cuEventCreate", Result.INVALID_CONTEXT)
        context = self._stack()[-1]
        return self._event(lambda event: self._ask("cuCtxRecordEvent", context, event))

    def done(self, event: int) -> bool:
        """Call cuEventQuery."""
        self._require()
        (result,) = self._api.cuEventQuery(event)
        if int(result) == Result.NOT_READY:
            return False
        _check("cuEventQuery", result)
        return True

    def wait(self, event: int) -> None:
        """Call cuEventSynchronize."""
        self._ask("cuEventSynchronize", event)

    def forget(self, event: int) -> None:
        """Call cuEventDestroy."""
        self._ask("cuEventDestroy", event)

    def allocate(self, nbytes: int) -> int:
        """Call cuMemAlloc."""
        return int(self._ask("cuMemAlloc", nbytes, nbytes=nbytes))

    def deallocate(self, address: int) -> None:
        """Call cuMemFree."""
        self._ask("cuMemFree", address)

    def ipc_handle(self, address: int) -> bytes:
        """Call cuIpcGetMemHandle."""
        found = self._ask("cuIpcGetMemHandle", address)
        return ctypes.string_at(found.getPtr(), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Call cuIpcOpenMemHandle."""
        self._require()
        given = self._api.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, IPC_HANDLE_BYTES)
        flag = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._ask("cuIpcOpenMemHandle", given, int(flag)))

    def ipc_close(self, address: int) -> None:
        """Call cuIpcCloseMemHandle."""
        self._ask("cuIpcCloseMemHandle", address)


def _bindings() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        what = f"a GPU's memory needs cuda-bindings, which cannot be imported ({error})"
        if not has_driver():
            what += ", and this machine has no NVIDIA driver"
        said = f"{what}; {install_hint('cuda')}"
        raise NoBindingsError(said, kind="no_driver", module=_MODULE) from error


def _check(call: str, result: Any, nbytes: int = 0) -> None:
    if int(result) != Result.SUCCESS:
        raise refused(call, int(result), nbytes)
