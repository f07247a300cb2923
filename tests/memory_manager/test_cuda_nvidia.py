"""The real driver's calls, over a double of NVIDIA's bindings: what goes in, what comes of it.

The double keeps the bindings' manners (every call returns a tuple that begins with a CUresult, and
takes numbers for handles and addresses), which were read in cuda-bindings 13.5.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensor_dedup.memory_manager.cuda import nvidia
from tensor_dedup.memory_manager.cuda.driver import Access, GpuInfo, Result, current
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.errors import DeviceError, NoMemoryError

MODULE = "cuda.bindings.driver"
UUID = bytes(range(16))


class Handle:
    """A CUipcMemHandle: 64 bytes behind a pointer."""

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(b"token", 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.bytes)


class Bindings:
    """What the driver module has, with a log of the calls. `refuse`: calls that fail, with what."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUipcMemHandle = Handle

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.refuse: dict[str, int] = {}
        self.fd = 0
        self.answers: dict[str, Any] = {
            "cuDeviceGetCount": 1,
            "cuDeviceGetUuid": SimpleNamespace(bytes=UUID),
            "cuDeviceTotalMem": 80 << 30,
            "cuDeviceGetAttribute": 1,
            "cuMemGetAllocationGranularity": 2 << 20,
            "cuMemGetAllocationPropertiesFromHandle": SimpleNamespace(
                location=SimpleNamespace(id=3)
            ),
            "cuIpcGetMemHandle": Handle(),
        }

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def CUmemAccess_flags(self, value: int) -> int:
        return value

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            code = self.refuse.get(name, 0)
            if name in _WITHOUT_VALUE:
                return (code,)
            return code, self.answers.get(name, 42)

        return call


_WITHOUT_VALUE = {
    "cuInit", "cuMemRelease", "cuMemAddressFree", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
    "cuCtxPushCurrent", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuCtxSynchronize",
    "cuCtxRecordEvent", "cuEventQuery", "cuEventSynchronize", "cuEventDestroy", "cuMemFree",
    "cuIpcCloseMemHandle",
}  # fmt: skip


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


@pytest.fixture
def driver(bindings: Bindings) -> NvidiaDriver:
    made = NvidiaDriver()
    made.init()
    made.init()
    assert bindings.log == [("cuInit", 0)]
    bindings.log.clear()
    return made


@pytest.mark.parametrize("driver", [True, False])
def test_without_bindings_it_is_said_what_to_install(
    driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.setattr(nvidia, "_DRIVERS", (tmp_path if driver else tmp_path / "none",))
    with pytest.raises(DeviceError, match=r"pip install '\.\[cuda\]'") as caught:
        NvidiaDriver().init()
    assert ("this machine has no NVIDIA driver" in str(caught.value)) == (not driver)
    assert caught.value.facts["kind"] == "no_driver"


def test_without_a_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> tuple[int]:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(cuInit=no_library))
    with pytest.raises(DeviceError, match="NVIDIA driver") as caught:
        NvidiaDriver().init()
    assert caught.value.facts["kind"] == "no_driver"


def test_a_driver_that_has_no_device_says_so(bindings: Bindings) -> None:
    bindings.refuse["cuInit"] = Result.NO_DEVICE
    with pytest.raises(DeviceError, match="NO_DEVICE"):
        NvidiaDriver().init()


def test_devices_have_the_uuids_that_nvidia_smi_shows(driver: NvidiaDriver) -> None:
    [device] = driver.devices()
    assert device == GpuInfo(0, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", 80 << 30, True)


def test_a_device_without_descriptors_is_known(driver: NvidiaDriver, bindings: Bindings) -> None:
    bindings.answers["cuDeviceGetAttribute"] = 0
    assert not driver.devices()[0].descriptors


def test_memory_is_pinned_to_a_device_and_can_be_exported(
    driver: NvidiaDriver, bindings: Bindings
) -> None:
    assert driver.create(3, 4 << 20) == 42
    [(name, nbytes, properties, flags)] = bindings.log
    assert (name, nbytes, flags) == ("cuMemCreate", 4 << 20, 0)
    assert (properties.type, properties.requestedHandleTypes) == (1, 1)
    assert (properties.location.type, properties.location.id) == (1, 3)
    assert driver.granularity(3) == 2 << 20
    assert driver.device_of(42) == 3


def test_addresses(driver: NvidiaDriver, bindings: Bindings) -> None:
    assert driver.reserve(100, 10) == 42
    driver.map(42, 100, 7)
    driver.allow(42, 100, 1, Access.READ)
    driver.unmap(42, 100)
    driver.free(42, 100)
    driver.release(7)
    assert bindings.log[0] == ("cuMemAddressReserve", 100, 10, 0, 0)
    assert bindings.log[1] == ("cuMemMap", 42, 100, 0, 7, 0)
    name, address, nbytes, [wish], count = bindings.log[2]
    assert (name, address, nbytes, count) == ("cuMemSetAccess", 42, 100, 1)
    assert (wish.location.type, wish.location.id, wish.flags) == (1, 1, 1)
    assert bindings.log[3:] == [
        ("cuMemUnmap", 42, 100),
        ("cuMemAddressFree", 42, 100),
        ("cuMemRelease", 7),
    ]


def test_a_context_is_kept_and_made_current(driver: NvidiaDriver, bindings: Bindings) -> None:
    for _ in range(2):
        with current(driver, 1):
            driver.copy_in(1, 2, 3)
            driver.copy_out(1, 2, 3)
            driver.copy(1, 2, 3)
            driver.synchronize()
    names = [call[0] for call in bindings.log]
    assert names.count("cuDevicePrimaryCtxRetain") == 1
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent") == 2
    assert ("cuMemcpyHtoD", 1, 2, 3) in bindings.log


def test_an_event_is_of_the_whole_context(driver: NvidiaDriver, bindings: Bindings) -> None:
    with pytest.raises(DeviceError, match="INVALID_CONTEXT"):
        driver.mark()
    bindings.answers["cuDevicePrimaryCtxRetain"] = 9
    with current(driver, 0):
        event = driver.mark()
        assert ("cuCtxRecordEvent", 9, event) in bindings.log
        assert driver.done(event)
        bindings.refuse["cuEventQuery"] = Result.NOT_READY
        assert not driver.done(event)
        bindings.refuse["cuEventQuery"] = Result.ILLEGAL_ADDRESS
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            driver.done(event)
        driver.wait(event)
        driver.forget(event)
        bindings.refuse["cuCtxRecordEvent"] = Result.STREAM_CAPTURE_UNSUPPORTED
        with pytest.raises(DeviceError, match="STREAM_CAPTURE"):
            driver.mark()
        assert bindings.log[-1][0] == "cuEventDestroy"


def test_descriptors_are_not_inherited(driver: NvidiaDriver, bindings: Bindings) -> None:
    fd = os.dup(0)
    os.set_inheritable(fd, True)
    bindings.answers["cuMemExportToShareableHandle"] = fd
    assert driver.export(7) == fd
    assert not os.get_inheritable(fd)
    assert driver.import_(fd) == 42
    assert bindings.log[-1] == ("cuMemImportFromShareableHandle", fd, 1)
    os.close(fd)


def test_the_old_kind_of_sharing(driver: NvidiaDriver, bindings: Bindings) -> None:
    assert driver.allocate(100) == 42
    handle = driver.ipc_handle(42)
    assert handle == b"token".ljust(64, b"\0")
    assert driver.ipc_open(handle) == 42
    name, given, flag = bindings.log[-1]
    assert (name, given.bytes.raw, flag) == ("cuIpcOpenMemHandle", handle, 1)
    driver.ipc_close(42)
    driver.deallocate(42)
    assert [call[0] for call in bindings.log[-2:]] == ["cuIpcCloseMemHandle", "cuMemFree"]


def test_what_the_driver_refuses_is_typed(driver: NvidiaDriver, bindings: Bindings) -> None:
    bindings.refuse.update(cuMemCreate=Result.OUT_OF_MEMORY, cuMemMap=Result.INVALID_VALUE)
    with pytest.raises(NoMemoryError, match="4096"):
        driver.create(0, 4096)
    with pytest.raises(DeviceError) as caught:
        driver.map(0, 1, 2)
    assert caught.value.facts["code"] == Result.INVALID_VALUE
