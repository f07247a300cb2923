"""The fake driver refuses what the documentation of the real one forbids."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from gpu_runs import gpus
from gpu_runs.fake_driver import GRANULARITY, FakeDriver, fake_uuid
from tensor_dedup.memory_manager.cuda.driver import Access, Result, Undo, current, refused
from tensor_dedup.memory_manager.errors import BackendError, DeviceError

UNIT = GRANULARITY


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver(visible=(0, 1))
    made.init()
    yield made
    assert made.left() == {}


def code(call: Callable[[], object]) -> int:
    with pytest.raises(DeviceError) as caught:
        call()
    return int(str(caught.value.facts["code"]))


def test_nothing_works_before_init() -> None:
    driver = FakeDriver()
    assert code(driver.devices) == Result.NOT_INITIALIZED
    assert code(lambda: driver.create(0, UNIT)) == Result.NOT_INITIALIZED


def test_nothing_works_in_a_forked_child(driver: FakeDriver) -> None:
    def child() -> None:
        if code(lambda: driver.create(0, UNIT)) == Result.NOT_INITIALIZED == code(driver.init):
            os.kill(os.getpid(), signal.SIGKILL)

    assert gpus.ends_by_signal(child)


def test_sizes_and_devices(driver: FakeDriver) -> None:
    assert [device.uuid for device in driver.devices()] == [fake_uuid(0), fake_uuid(1)]
    assert code(lambda: driver.create(0, UNIT - 1)) == Result.INVALID_VALUE
    assert code(lambda: driver.create(2, UNIT)) == Result.INVALID_DEVICE
    assert code(lambda: driver.reserve(100, 0)) == Result.INVALID_VALUE
    assert code(lambda: driver.reserve(UNIT, 3)) == Result.INVALID_VALUE


def test_a_handle_is_released_once(driver: FakeDriver) -> None:
    handle = driver.create(1, UNIT)
    assert driver.device_of(handle) == 1
    driver.release(handle)
    for use in (driver.release, driver.export, driver.device_of):
        assert code(lambda use=use: use(handle)) == Result.INVALID_VALUE  # type: ignore[misc]


def test_only_device_memory_is_imported(driver: FakeDriver) -> None:
    fd = os.memfd_create("anything")
    assert code(lambda: driver.import_(fd)) == Result.INVALID_VALUE
    os.close(fd)
    assert code(lambda: driver.import_(fd)) == Result.INVALID_VALUE


def test_whole_handles_in_reserved_addresses_once(driver: FakeDriver) -> None:
    handle, address = driver.create(0, 2 * UNIT), driver.reserve(4 * UNIT, 0)
    assert code(lambda: driver.map(address, UNIT, handle)) == Result.INVALID_VALUE
    assert code(lambda: driver.map(address + 4096, 2 * UNIT, handle)) == Result.INVALID_VALUE
    assert code(lambda: driver.map(address + 3 * UNIT, 2 * UNIT, handle)) == Result.INVALID_VALUE
    assert code(lambda: driver.allow(address, 2 * UNIT, 0, Access.READ)) == Result.INVALID_VALUE
    driver.map(address, 2 * UNIT, handle)
    assert code(lambda: driver.map(address, 2 * UNIT, handle)) == Result.ALREADY_MAPPED
    driver.map(address + 2 * UNIT, 2 * UNIT, handle)
    driver.release(handle)  # mappings need it no longer
    assert code(lambda: driver.unmap(address, UNIT)) == Result.INVALID_VALUE
    assert code(lambda: driver.free(address, 4 * UNIT)) == Result.INVALID_VALUE
    driver.allow(address, 4 * UNIT, 0, Access.READ_WRITE)  # several at once
    driver.unmap(address, 4 * UNIT)
    assert code(lambda: driver.unmap(address, 4 * UNIT)) == Result.INVALID_VALUE
    assert code(lambda: driver.free(address, UNIT)) == Result.INVALID_VALUE
    driver.free(address, 4 * UNIT)


def test_a_mapping_starts_without_any_access(driver: FakeDriver) -> None:
    handle, address = driver.create(0, UNIT), driver.reserve(UNIT, 1 << 20)
    assert address % (1 << 20) == 0
    driver.map(address, UNIT, handle)
    assert gpus.ends_by_signal(lambda: ctypes.string_at(address, 1))
    driver.allow(address, UNIT, 0, Access.READ)
    assert not gpus.ends_by_signal(lambda: ctypes.string_at(address, 1))
    assert gpus.ends_by_signal(lambda: ctypes.memset(address, 1, 1))
    driver.allow(address, UNIT, 0, Access.READ_WRITE)
    assert not gpus.ends_by_signal(lambda: ctypes.memset(address, 1, 1))
    driver.unmap(address, UNIT)
    assert gpus.ends_by_signal(lambda: ctypes.string_at(address, 1))
    driver.free(address, UNIT)
    driver.release(handle)


def test_copies_and_events_need_a_context(driver: FakeDriver) -> None:
    for call in (driver.synchronize, driver.mark, driver.leave, lambda: driver.allocate(UNIT)):
        assert code(call) == Result.INVALID_CONTEXT
    assert code(lambda: driver.copy_in(0, 0, 1)) == Result.INVALID_CONTEXT


def test_events_wait_for_what_was_begun_before(driver: FakeDriver) -> None:
    driver.begin(7)
    with current(driver, 0):
        event = driver.mark()
        driver.begin(8)
        assert not driver.done(event)
        driver.end(7)
        assert driver.done(event)
        driver.forget(event)
        assert code(lambda: driver.done(event)) == Result.INVALID_HANDLE
        driver.capturing = True
        assert code(driver.mark) == Result.STREAM_CAPTURE_UNSUPPORTED


def test_old_memory_is_opened_by_another_process_only(driver: FakeDriver) -> None:
    with current(driver, 0):
        address = driver.allocate(100)
        gpus.put(driver, address, b"weights")
        handle = driver.ipc_handle(address)
        assert len(handle) == 64
        assert code(lambda: driver.ipc_open(handle)) == Result.INVALID_CONTEXT
        assert code(lambda: driver.ipc_handle(address + 1)) == Result.INVALID_VALUE
        assert gpus.ends_by_signal(lambda: _opens(handle))
        driver.deallocate(address)
        assert code(lambda: driver.deallocate(address)) == Result.INVALID_VALUE
        assert not gpus.ends_by_signal(lambda: _opens(handle))


def _opens(handle: bytes) -> None:
    """Ends this process when another's memory can be opened, twice, read, and closed as often."""
    driver = FakeDriver()
    driver.init()
    with current(driver, 0):
        address = driver.ipc_open(handle)
        same = driver.ipc_open(handle) == address
        right = gpus.get(driver, address, 7) == b"weights"
        driver.ipc_close(address)
        driver.ipc_close(address)
        if same and right and driver.left() == {"contexts": 1}:
            os.kill(os.getpid(), signal.SIGKILL)


def test_errors_name_the_call_and_the_result() -> None:
    assert "CUDA_ERROR_MAP_FAILED" in str(refused("cuIpcOpenMemHandle", 205))
    assert "CUresult 12345" in str(refused("cuMemMap", 12345))


def test_what_was_done_is_undone_last_first() -> None:
    done: list[str] = []

    def fails() -> None:
        raise refused("cuMemUnmap", Result.INVALID_VALUE)

    def steps() -> None:
        with Undo() as undo:
            undo.add(lambda: done.append("first"))
            undo.add(fails)
            undo.add(lambda: done.append("last"))
            raise refused("cuMemMap", Result.INVALID_VALUE)

    with pytest.raises(BackendError, match="cuMemMap") as caught:
        steps()
    assert done == ["last", "first"]
    assert any("cuMemUnmap" in note for note in caught.value.__notes__)
