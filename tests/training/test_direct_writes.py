"""Large tensors are written past the page cache, from a copy that nobody else can write to."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_runs.disk_faults import Crash, Faults, FaultyFiles, Loss, some_changes
from store_runs.stores import Model, assert_same
from tensor_dedup import Store
from tensor_dedup.store.buffers import address
from tensor_dedup.store.errors import ChangedModelError, NoSpaceError, StoreIOError
from tensor_dedup.store.files import PAGE, Handle, Mode, RealFiles
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.host_pool import HostPool

# What begins or ends in the middle of a page, and what is too small to be written so.
LESS: list[Loss] = ["bytes", "nothing"]
SIZES = {"odd": (5 << 20) + 3, "whole": 4 << 20, "small": 900_001, "page": (1 << 20) + PAGE}


def model_of(step: int) -> Model:
    """Tensors of which all bytes differ from those of every other step."""
    dice = np.random.default_rng(step)
    return {name: dice.integers(0, 256, size, np.uint8) for name, size in SIZES.items()}


class Direct(RealFiles):
    """Counts direct writes; with a code, they fail when a file is opened or written so.

    Where the file system of the tests has none, they are ordinary ones that are checked alike.
    """

    def __init__(self, *, on_open: int = 0, on_write: int = 0) -> None:
        self._on_open, self._on_write = on_open, on_write
        self._lock = threading.Lock()
        self._direct: set[int] = set()
        self.written = 0

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode != "modify direct":
            return super().open(path, mode)
        if self._on_open:
            raise OSError(self._on_open, "refused", str(path))
        try:
            handle = super().open(path, mode)
        except OSError:
            handle = super().open(path, "modify")
        self._direct.add(id(handle))
        return handle

    def close(self, handle: Handle) -> None:
        self._direct.discard(id(handle))
        super().close(handle)

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        if id(handle) in self._direct:
            if self._on_write:
                raise OSError(self._on_write, "failed", str(handle.path))
            assert (len(data) % PAGE, offset % PAGE, address(memoryview(data)) % PAGE) == (0, 0, 0)
            with self._lock:
                self.written += len(data)
        super().pwrite(handle, data, offset)


def run_on(folder: Path, files: Any, *, workers: int = 2, **more: Any) -> CheckpointStore:
    store = Store.open(folder / "store", files=files, worker_count=workers)
    return CheckpointStore(store, "run", **{"compress": None, **more})


def save(run: CheckpointStore, step: int, *, asynchronous: bool) -> None:
    model = model_of(step)
    if asynchronous:
        run.save_async(model, step).wait()
    else:
        run.save(model, step)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_bytes_are_what_was_saved(tmp_path: Path, asynchronous: bool, workers: int) -> None:
    files = Direct()
    with run_on(tmp_path, files, workers=workers) as run:
        for step in range(3):
            save(run, step, asynchronous=asynchronous)
        large = sum(size // PAGE * PAGE for size in SIZES.values() if size >= 1 << 20)
        assert files.written == 3 * large
        assert run.store.verify(full=True).faults == []
        for step in range(3):
            assert_same(run.load(step), model_of(step))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("refusing", [{"on_open": errno.EINVAL}, {"on_write": errno.EINVAL}])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, refusing: dict[str, int], asynchronous: bool
) -> None:
    files = Direct(**refusing)
    with run_on(tmp_path, files) as run:
        save(run, 0, asynchronous=asynchronous)
        assert files.written == 0
        assert run.store.verify(full=True).faults == []
        assert_same(run.load(0), model_of(0))


class Growing(Direct):
    """Notes how files were extended ahead of their writes, and what is written beside those."""

    def __init__(self) -> None:
        super().__init__()
        self.grown: list[int] = []
        self.under_way = 0
        self.ends: list[int] = []

    def grow(self, handle: Handle, size: int) -> None:
        super().grow(handle, size)
        self.grown.append(size)

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        direct = id(handle) in self._direct
        if len(data) < PAGE and handle.path.parent.name == "tmp":
            self.ends.append(self.under_way)
        with self._lock:
            self.under_way += direct
        try:
            super().pwrite(handle, data, offset)
        finally:
            with self._lock:
                self.under_way -= direct


def test_a_file_is_extended_ahead_of_its_writes_and_cut_in_the_end(tmp_path: Path) -> None:
    files = Growing()
    with run_on(tmp_path, files, workers=3) as run:
        run.save(model_of(0), 0)
        assert files.grown
        assert files.ends, "no tensor ends within a page"
        assert set(files.ends) == {0}, "each would have waited for a direct write"
        slabs = list((tmp_path / "store" / "containers").rglob("*.slab"))
        assert slabs
        # Each piece begins a page; the table takes less than one.
        most = sum(-(-size // PAGE) * PAGE for size in SIZES.values()) + PAGE
        assert max(files.grown) > most
        assert all(slab.stat().st_size < most for slab in slabs)
        assert run.store.verify(full=True).faults == []
        assert_same(run.load(0), model_of(0))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with run_on(tmp_path, Direct(on_write=errno.ENOSPC)) as run:
        with pytest.raises(NoSpaceError):
            run.save(model_of(0), 0)
        with pytest.raises(NoSpaceError):
            run.save_async(model_of(1), 1).wait()
        assert run.steps() == []
        assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_no_write_goes_on_when_a_save_has_failed(tmp_path: Path) -> None:
    class Slow(Direct):
        running = failed = 0

        def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
            if id(handle) not in self._direct:
                super().pwrite(handle, data, offset)
                return
            with self._lock:
                self.running += 1
                first, self.failed = not self.failed, 1
            try:
                if first:
                    raise OSError(errno.EIO, "failed", str(handle.path))
                time.sleep(0.2)
                super().pwrite(handle, data, offset)
            finally:
                with self._lock:
                    self.running -= 1

    files = Slow()
    with run_on(tmp_path, files, workers=4) as run:
        with pytest.raises(StoreIOError):
            run.save_async(model_of(0), 0).wait()
        assert files.running == 0
        save(run, 1, asynchronous=True)
        assert_same(run.load(1), model_of(1))


def test_a_write_to_the_model_while_it_is_written_is_noticed(tmp_path: Path) -> None:
    model = model_of(0)

    class Meddling(Direct):
        def open(self, path: Path, mode: Mode) -> Handle:
            if mode == "modify direct":  # hashed, and not copied yet
                model["whole"][:] ^= 1
            return super().open(path, mode)

    with run_on(tmp_path, Meddling()) as run:
        with pytest.raises(ChangedModelError):
            run.save(model, 0)
        assert run.steps() == []


def test_copies_stay_as_they_are_until_they_are_written(tmp_path: Path) -> None:
    # The pool has room for one step: the next one waits until the memory is free.
    room = sum(-(-size // PAGE) * PAGE for size in SIZES.values() if size >= 64 << 10)
    with run_on(tmp_path, Direct(), pool_bytes=room, in_flight=2) as run:
        model = model_of(0)
        for step in range(4):
            for name, array in model_of(step).items():
                model[name][:] = array
            run.save_async(model, step)
        run.close()
        assert isinstance(run._saves._pool, HostPool)
        assert run._saves._pool.capacity == room
        for step in range(4):
            assert_same(run.load(step), model_of(step))


@pytest.mark.parametrize(
    ("loss", "one_in"),
    [
        ("everything", 3),
        *(pytest.param(each, 1, marks=pytest.mark.long) for each in ("everything", *LESS)),
    ],
)
def test_dying_at_every_change_of_a_direct_write(tmp_path: Path, loss: Loss, one_in: int) -> None:
    disk = Direct()

    def made(name: str, faults: Faults | None = None) -> tuple[FaultyFiles, CheckpointStore]:
        folder = tmp_path / name
        (folder / "limbo").mkdir(parents=True)
        files = FaultyFiles(folder / "limbo", faults, inner=disk)
        return files, run_on(folder, files, workers=1)

    files, run = made("undisturbed")
    run.save(model_of(0), 0)
    began, written = len(files.log), disk.written
    run.save(model_of(1), 1)
    points = sorted(some_changes(enumerate(files.log[began:], began), one_in))
    assert disk.written > written
    run.close()
    for point in points:
        files, run = made(f"{point}", Faults(stop_at=point, torn=True))
        run.save(model_of(0), 0)
        with pytest.raises(Crash):
            run.save(model_of(1), 1)
        files.lose(loss)
        after = CheckpointStore(tmp_path / f"{point}" / "store", "run")
        assert set(after.steps()) in ({0}, {0, 1})
        for step in after.steps():
            assert_same(after.load(step), model_of(step))
        assert after.store.verify(full=True).faults == []
