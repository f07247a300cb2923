"""A step is written while it is captured, and none of that is seen before all of it is there."""

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from store_runs.disk_faults import CHANGES, Faults, FaultyFiles, Loss
from store_runs.stores import (
    Arrays,
    Model,
    PageablePool,
    assert_same,
    copied,
    forest,
    handle,
    network,
    shares,
    train,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import ChangedModelError, NoSpaceError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.training import CheckpointStore, background, piece_writer
from tensor_dedup.training.devices import host_tensor
from tensor_dedup.training.encoding.decisions import Compress

ROWS = 1024


class Held:
    """A device that copies tensors at once, and says so when the test lets it."""

    def __init__(self) -> None:
        self.ready: dict[int, threading.Event] = {}  # by the number of columns

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2

    def begin(self, tensor: torch.Tensor) -> "Held":
        return self

    def copy(
        self, tensor: torch.Tensor, into: memoryview
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        host = host_tensor(tensor, into)
        host.copy_(tensor)
        ready = self.ready.setdefault(tensor.shape[1], threading.Event())
        return host, lambda: self._wait(ready)

    def _wait(self, ready: threading.Event) -> None:
        assert ready.wait(60)

    def hold(self) -> None:
        """The copies are there already."""


class Watched(RealFiles):
    """A disk that tells when a container has grown by a whole tensor, and that can be full."""

    def __init__(self) -> None:
        self.wrote = threading.Event()
        self.full = False
        self._nbytes = 0

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().pwrite(handle, data, offset)
        self._nbytes += len(data)
        if self._nbytes >= ROWS * 400 * 4:
            self.wrote.set()


def held_run(path: Path, files: Watched) -> tuple[CheckpointStore, Held]:
    device = Held()
    run = CheckpointStore(Store.open(path, files=files), "run", compress=None)
    run._saves._devices, run._saves._pool = [device], PageablePool(1 << 24)
    return run, device


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are streamed too, piece by piece."""
    monkeypatch.setattr(background, "_HELPED_BYTES", 1)
    monkeypatch.setattr(piece_writer, "_BATCH", 1)


def test_what_is_captured_is_written_before_the_rest_is(tmp_path: Path) -> None:
    files = Watched()
    run, device = held_run(tmp_path, files)
    model = {"first": torch.randn(ROWS, 400), "second": torch.randn(ROWS, 300)}
    expected = {name: each.clone() for name, each in model.items()}
    pending = run.save_async(model, 0)
    for each in model.values():
        each.fill_(7)
    device.ready[400].set()
    assert files.wrote.wait(60)
    assert not pending.done()
    assert run.steps() == []
    device.ready[300].set()
    assert pending.wait().new_tensors >= 2
    assert all(torch.equal(run.load(0)[name], each) for name, each in expected.items())
    assert run.store.verify(full=True).faults == []


def test_a_write_to_the_model_is_found_when_some_of_it_is_written(tmp_path: Path) -> None:
    files = Watched()
    run, device = held_run(tmp_path, files)
    model = {"first": torch.randn(ROWS, 400), "second": torch.randn(ROWS, 300)}
    pending = run.save_async(model, 0, lazy=True)
    device.ready[400].set()
    assert files.wrote.wait(60)
    model["second"].add_(1)  # and nobody has waited
    device.ready[300].set()
    with pytest.raises(ChangedModelError, match="'second'"):
        pending.wait()
    assert run.steps() == []
    assert list((tmp_path / "tmp").iterdir()) == []
    run.close()
    assert run._saves._pool.allocated == 0
    assert run.save_async(model, 0).wait().new_tensors >= 2


def test_a_disk_that_becomes_full_meanwhile_loses_nothing(tmp_path: Path) -> None:
    files = Watched()
    run, device = held_run(tmp_path, files)
    model = {"first": torch.randn(ROWS, 400), "second": torch.randn(ROWS, 300)}
    pending = run.save_async(model, 0)
    device.ready[400].set()
    assert files.wrote.wait(60)
    files.full = True
    device.ready[300].set()
    with pytest.raises(NoSpaceError):
        pending.wait()
    files.full = False
    assert run.steps() == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert run.save_async(model, 1).wait().new_tensors >= 2
    assert run.store.verify(full=True).faults == []


@pytest.mark.parametrize("compress", [None, "auto", "always"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("pool_bytes", [None, 160 * 200 * 4, 0])
def test_steps_that_other_threads_capture(
    tmp_path: Path, pool_bytes: int | None, lazy: bool, compress: Compress
) -> None:
    store = Store.open(tmp_path, worker_count=4)
    run = CheckpointStore(store, "run", Arrays(), pool_bytes=pool_bytes, compress=compress)
    model, kept, streamed = {**network(1, layers=9), **forest(40)}, {}, []
    for step in range(6):
        kept[step] = copied(model)
        pending = run.save_async(model, step, {"loss": float(step)}, lazy=lazy)
        streamed.append(pending.streams)
        if lazy:
            run.before_update()
        train(model, step, "layer2.weight", "layer2.bias", f"layer{step % 9}.weight")
        model["layer8.weight"] = model["layer2.weight"].copy()  # two of the same bytes
    run.close()
    assert all(streamed)
    assert run._saves._pool.allocated == 0
    assert shares(run)
    for step, expected in kept.items():
        assert_same(run.load(step), expected)
    assert run.metrics()[3] == {"loss": 3.0}
    assert run.store.verify(full=True).faults == []


def test_saves_that_wait_for_each_other_are_committed_in_order(tmp_path: Path) -> None:
    store = Store.open(tmp_path, worker_count=4)
    run = CheckpointStore(store, "run", Arrays(), in_flight=4, pool_bytes=12 * 160 * 200 * 4)
    model, kept = network(1, layers=6), {}
    for step in range(8):
        kept[step] = copied(model)
        run.save_async(model, step)
        train(model, step, *model)
    run.close()
    assert run.latest() == 7
    for step, expected in kept.items():
        assert_same(run.load(step), expected)
    assert run.store.verify(full=True).faults == []


@pytest.mark.parametrize(
    "loss",
    ["everything", *(pytest.param(each, marks=pytest.mark.long) for each in ("bytes", "nothing"))],
)
def test_dying_while_threads_capture_hash_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Loss
) -> None:
    """The threads of a save, as they are, and a training that goes on beside them.

    Operations come in another order each time: whichever is the last, the step is whole or absent.
    """
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # they die of the crash
    # One is written past the page cache.
    model, later = (
        {**network(1, layers=5), "past": np.full((700, 900), n, np.float32)} for n in (1, 2)
    )
    train(later, 1, *(name for name in later if name != "layer0.weight"))
    with CheckpointStore(tmp_path / "template", "run", Arrays()) as before:
        before.save(model, 0)

    def play(faults: Faults) -> tuple[FaultyFiles, bool, int]:
        shutil.copytree(tmp_path / "template", tmp_path / "store")
        (tmp_path / "limbo").mkdir()
        files = FaultyFiles(tmp_path / "limbo", faults)
        store = Store.open(tmp_path / "store", files=files, worker_count=3)
        run = CheckpointStore(store, "run", Arrays(), compress=None)
        moving, began, saved = copied(later), len(files.log), False
        with suppress(StoreError):
            pending = run.save_async(moving, 1, lazy=True)
            assert pending.streams
            run.before_update()
            train(moving, 2, *moving)
            pending.wait()
            saved = True
        return files, saved, began

    def check() -> set[int]:
        run = handle(tmp_path / "store")
        steps: dict[int, Model] = {0: model, 1: later}
        for step in run.steps():
            assert_same(run.load(step), steps[step])
        assert run.store.verify(full=True).faults == []
        found = set(run.steps())
        run.save(later, 2)
        assert shares(run)
        assert_same(run.load(2), later)
        run.close()
        for folder in ("store", "limbo"):
            shutil.rmtree(tmp_path / folder)
        return found

    files, saved, began = play(Faults())
    count = len(files.log)
    assert saved
    changes = [number for number in range(began, count) if files.log[number] in CHANGES]
    assert len(changes) > 20
    files.lose(loss)
    assert check() == {0, 1}
    seen, unsaved = set[int](), 0
    for number in changes:
        files, saved, _ = play(Faults(stop_at=number, torn=number % 2 > 0))
        files.lose(loss)
        found = check()
        assert found in ({0}, {0, 1})
        assert 1 in found or not saved
        seen |= found
        unsaved += not saved
    assert unsaved > len(changes) // 2  # there may be fewer operations than in the first one
    assert 0 in seen
