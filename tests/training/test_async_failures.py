"""A save in the background that fails is told of once, and loses nothing saved before."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from store_runs.disk_faults import NEEDS_SPACE, Faults, FaultyFiles
from store_runs.stores import (
    Arrays,
    Gate,
    Model,
    assert_same,
    copied,
    gated,
    handle,
    network,
    open_store,
    shares,
    train,
)
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import ChangedModelError, NoSpaceError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.gathered import FlatBytes, copy_flat
from tensor_dedup.training import CheckpointStore, PendingSave, background, capture
from tensor_dedup.training.adapters import StateChunk
from tensor_dedup.training.errors import BrokenSaveError, NestedSaveError

FULL = Faults(full_from=0)


def faulty(tmp_path: Path) -> FaultyFiles:
    (tmp_path / "limbo").mkdir()
    return FaultyFiles(tmp_path / "limbo")


def allocated(run: CheckpointStore) -> int:
    return run._saves._pool.allocated


def in_a_process(name: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Call a function of this module in a process of its own."""
    script = f"import sys; from test_async_failures import {name}; {name}(sys.argv[1])"
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", script, str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([paths, str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


CALLS: dict[str, Callable[[CheckpointStore, PendingSave], object]] = {
    "save": lambda run, _: run.save(network(2), 7),
    "save_async": lambda run, _: run.save_async(network(2), 7),
    "before_update": lambda run, _: run.before_update(),
    "close": lambda run, _: run.close(),
    "wait": lambda _, pending: pending.wait(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_full_disk_is_raised_by_the_next_call_once(tmp_path: Path, name: str) -> None:
    files = faulty(tmp_path)
    run, model = handle(tmp_path / "store", files=files), network(1)
    run.save(model, 0)
    kept = copied(model)
    train(model, 1, "layer0.weight")
    files._faults = FULL
    pending = run.save_async(model, 1)
    pending.finish()
    with pytest.raises(NoSpaceError, match="gc"):
        CALLS[name](run, pending)
    files._faults = Faults()
    assert run.steps() == [0]  # nothing else was begun either
    for call in (run.before_update, run.close):
        call()
    assert allocated(run) == 0
    saved = run.save_async(model, 1).wait()
    assert shares(run)
    assert saved.new_tensors == 1
    assert_same(run.load(0), kept)
    assert_same(run.load(1), model)
    with pytest.raises(NoSpaceError):  # it was never saved
        pending.wait()
    assert run.store.verify(full=True).faults == []


def test_a_step_after_one_that_failed_is_whole(tmp_path: Path) -> None:
    gate = _Failing()
    run, model = gated(tmp_path, gate, in_flight=2), network(1)
    run.save(model, 0)
    train(model, 1, "layer0.weight")
    gate.fails = True
    first = run.save_async(model, 1)
    assert gate.waiting.wait(60)
    train(model, 2, "layer1.bias")
    second = run.save_async(model, 2)  # it knows the step 0, and that is all it has of most
    gate.opened.set()
    first.finish()
    assert second.wait().step == 2
    assert shares(run)
    assert run.steps() == [0, 2]
    assert_same(run.load(2), model)
    with pytest.raises(NoSpaceError):
        run.close()
    run.close()


class _Failing(Gate):
    """A disk that is full at the first thing it is asked to make durable, once it is opened."""

    fails = False

    def fsync(self, handle: Handle) -> None:
        if self.fails:
            self.waiting.set()
            assert self.opened.wait(60)
            self.fails = False
            raise OSError(28, "No space left on device")
        RealFiles.fsync(self, handle)


@pytest.mark.parametrize("started", [0, 1])
def test_a_save_goes_on_where_the_system_has_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    begin, names = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        names.append(thread.name)
        if names.count("tensor-dedup-capture") > started:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(background, "_HELPED_BYTES", 1)
    run = handle(tmp_path)
    run._saves._helpers = 3
    monkeypatch.setattr(threading.Thread, "start", start)
    model = {name: torch.from_numpy(each) for name, each in network(1).items()}
    expected = {name: each.clone() for name, each in model.items()}
    pending = run.save_async(model, 0, lazy=True)
    run.before_update()
    for each in model.values():
        each.fill_(7)
    assert pending.wait().step == 0
    assert names.count("tensor-dedup-capture") == started + 1
    assert all(torch.equal(torch.as_tensor(run.load(0)[n]), each) for n, each in expected.items())
    run.close()
    assert allocated(run) == 0


def test_a_save_that_does_not_start_gives_back_what_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = handle(tmp_path), network(1)
    failing = [True]

    def copy(data: FlatBytes, into: memoryview) -> None:
        if run._saves._pool.allocated > 200_000 and failing:  # there is a large copy by now
            failing.clear()
            raise MemoryError
        copy_flat(data, into)

    monkeypatch.setattr(capture, "copy_flat", copy)
    with pytest.raises(MemoryError):
        run.save_async(model, 0)
    assert not failing
    run._saves._pool.clear()
    assert allocated(run) == 0
    assert run.save_async(model, 0).wait().step == 0
    assert_same(run.load(0), model)


def test_an_interrupt_while_a_save_starts_leaves_no_thread_and_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begin, begun = handle(tmp_path), threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        begin(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for owner, name, instead in (
        (threading.Thread, "start", start),
        (PendingSave, "run", property(interrupt)),  # when it is in the list of those that run
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, instead)
            with pytest.raises(KeyboardInterrupt):
                run.save_async(network(1), 0)
    begun[0].join(60)
    assert not begun[0].is_alive()
    run.close()
    assert allocated(run) == 0
    assert run.steps() == []
    assert run.save_async(network(1), 0).wait().step == 0


class _Interrupting(RealFiles):
    """A disk at which, once, a signal handler runs where a file is made durable."""

    def __init__(self) -> None:
        self.handler: Callable[[], object] | None = None

    def fsync(self, handle: Handle) -> None:
        if self.handler is not None and threading.current_thread() is threading.main_thread():
            handler, self.handler = self.handler, None
            handler()
        super().fsync(handle)


def test_a_signal_handler_that_saves_in_the_middle_of_a_save_is_told(tmp_path: Path) -> None:
    handle(tmp_path).close()
    files, told = _Interrupting(), list[str]()
    run, model = handle(tmp_path, files=files), network(1)

    def handler() -> None:
        with pytest.raises(NestedSaveError, match="when the call has returned") as caught:
            run.save(model, 7)
        told.append(str(caught.value))

    files.handler = handler
    run.save(model, 0)
    assert len(told) == 1
    assert run.steps() == [0]
    assert_same(run.load(0), model)


def waiting_in_saves(root: str) -> None:
    """Waits for saves, and for what waits for them, when a signal comes in the middle of a save."""
    second = open_store(Path(root) / "second")
    handle(Path(root) / "fast", drain=second).close()
    files, told, model = _Interrupting(), list[str](), network(1)
    run = handle(Path(root) / "fast", files=files, drain=second)

    def handler() -> None:
        calls: dict[str, Callable[[], object]] = {
            "save_async": lambda: run.save_async(network(2), 7).wait(),
            "append": lambda: run.append(network(2)),
            "commit": lambda: run.commit(run.snapshot(network(2), 7)),
            "update": run.before_update,
            "drain": run.drain,
            "gc": run.gc,
            "close": run.close,
        }
        for name, call in calls.items():
            if name == "update":  # there is nothing that it could wait for
                call()
                continue
            with pytest.raises(NestedSaveError, match="when the call has returned"):
                call()
            told.append(name)

    for step in range(2):
        train(model, step, "layer0.weight")
        files.handler = handler
        run.save(model, step)
    assert len(told) == 12
    pending = run.save_async(model, 2)  # nothing is left of what was refused
    run.close()
    assert pending.done()
    sys.stdout.write(str(run.steps()))


def test_a_signal_handler_that_waits_in_the_middle_of_a_save_is_told(tmp_path: Path) -> None:
    assert in_a_process("waiting_in_saves", tmp_path).stdout == "[0, 1, 2]"


def test_a_model_that_saves_while_it_is_taken_apart_is_told(tmp_path: Path) -> None:
    class Saving(Arrays):
        def extract(self, model: Model) -> Model:
            run.save_async(model, 7)
            return model

    run = CheckpointStore(tmp_path, "run", Saving())
    with pytest.raises(NestedSaveError):
        run.save_async(network(1), 0)
    run.close()
    assert run.steps() == []


def saving_in_captures(root: str) -> None:
    """Saves, and waits for saves, when a signal comes in the middle of a copy."""
    run, main, copying = handle(Path(root)), threading.get_ident(), threading.Event()
    begun, told = list[PendingSave](), list[str]()

    def handler(*_: object) -> None:
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: run.save(network(2), 7),
            "append": lambda: run.append(network(2)),
            "save_async": lambda: run.save_async(network(2), 7),
            "commit": lambda: run.commit(run.snapshot(network(2), 7)),
            "gc": run.gc,
            "close": run.close,
        }
        if begun:
            calls |= {"update": run.before_update, "wait": begun[0].wait, "end": begun[0].finish}
        for name, call in calls.items():
            with pytest.raises(NestedSaveError, match="when the call has returned"):
                call()
            told.append(name)

    def copy(data: FlatBytes, into: memoryview) -> None:
        if threading.get_ident() != main:
            assert copying.wait(60)
        else:
            signal.raise_signal(signal.SIGUSR1)
            copying.set()
        copy_flat(data, into)

    pytest.MonkeyPatch().setattr(capture, "copy_flat", copy)
    signal.signal(signal.SIGUSR1, handler)
    model = {name: torch.from_numpy(each) for name, each in network(1).items()}
    begun.append(run.save_async(model, 0, lazy=True))
    run.before_update()
    begun.pop().wait()
    assert len({*told}) == 9
    told.clear()
    for each in model.values():
        each.add_(1)
    run.save_async(model, 1).wait()
    assert len({*told}) == 6
    run.save(model, 2)
    run.close()
    sys.stdout.write(str(run.steps()))


def test_a_signal_handler_that_saves_in_the_middle_of_a_copy_is_told(tmp_path: Path) -> None:
    assert in_a_process("saving_in_captures", tmp_path).stdout == "[0, 1, 2]"


@pytest.mark.parametrize("lazy", [False, True])
def test_an_interrupt_in_the_middle_of_a_copy_leaves_nothing_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    run, main, raised = handle(tmp_path), threading.get_ident(), threading.Event()

    def copy(data: FlatBytes, into: memoryview) -> None:
        if threading.get_ident() != main:
            assert raised.wait(60)
        elif not raised.is_set():
            raised.set()
            raise KeyboardInterrupt
        copy_flat(data, into)

    monkeypatch.setattr(capture, "copy_flat", copy)
    model = {name: torch.from_numpy(each) for name, each in network(1).items()}

    def begin() -> None:
        run.save_async(model, 0, lazy=lazy)
        run.before_update()

    with pytest.raises(KeyboardInterrupt):
        begin()
    run.save(model, 1)
    run.save_async(model, 2).wait()
    assert run.steps() == [0, 1, 2][not lazy :]
    run.close()


def test_other_threads_wait_for_a_save_while_it_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, main, copying = handle(tmp_path), threading.get_ident(), threading.Event()
    waiting, steps = list[threading.Thread](), list[int]()

    def copy(data: FlatBytes, into: memoryview) -> None:
        if threading.get_ident() != main:
            assert copying.wait(60)
        elif not waiting:
            waiting.append(threading.Thread(target=lambda: steps.append(pending.wait().step)))
            waiting[0].start()
            waiting[0].join(0.1)
            assert waiting[0].is_alive()
            copying.set()
        copy_flat(data, into)

    monkeypatch.setattr(capture, "copy_flat", copy)
    model = {name: torch.from_numpy(each) for name, each in network(1).items()}
    pending = run.save_async(model, 0, lazy=True)
    run.before_update()
    waiting[0].join(60)
    assert steps == [0]
    run.close()


def test_what_a_part_of_the_model_raises_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def make() -> bytes:
        raise ValueError("mine")

    run = CheckpointStore(tmp_path, "run")
    pending = run.save_async({"a": StateChunk(make=make, frozen=True)}, 0)
    with pytest.raises(BrokenSaveError, match="none of the store's") as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    run.close()


def test_what_raises_in_a_block_is_not_covered_by_what_failed(tmp_path: Path) -> None:
    handle(tmp_path / "store").close()
    files = faulty(tmp_path)
    files._faults = FULL

    def use(error: type[BaseException] | None) -> None:
        with handle(tmp_path / "store", files=files) as run:
            run.save_async(network(1), 0)
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        use(KeyError)
    with pytest.raises(NoSpaceError):
        use(None)


def test_a_disk_that_is_full_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    first, second = network(1), network(2)
    second["layer0.weight"] = first["layer0.weight"]
    handle(tmp_path / "template").save(first, 0)

    def saved(folder: Path, full_from: int | None) -> tuple[CheckpointStore, FaultyFiles, int]:
        shutil.copytree(tmp_path / "template", folder / "store")
        files = faulty(folder)
        run = handle(folder / "store", files=files)
        begin = len(files.log)
        if full_from is not None:
            files._faults = Faults(full_from=begin + full_from)
        run.save_async(second, 1).finish()
        return run, files, begin

    run, files, begin = saved(tmp_path / "undisturbed", None)
    numbers = [n for n, kind in enumerate(files.log[begin:]) if kind in NEEDS_SPACE]
    assert shares(run)
    assert len(numbers) >= 8
    for number in numbers:
        run, files, _ = saved(tmp_path / str(number), number)
        with pytest.raises(NoSpaceError, match="gc"):
            run.before_update()
        files._faults = Faults()
        assert run.steps() == [0]
        assert_same(run.load(0), first)
        assert run.save_async(second, 1).wait().step == 1
        assert_same(run.load(1), second)
        assert run.store.verify(full=True).faults == []


def failing(root: str) -> None:
    """Ends without a word to a handle whose save has failed."""
    files = faulty(Path(root))
    run = handle(Path(root, "store"), files=files)
    files._faults = FULL
    run.save_async(network(1), 1).finish()


def test_what_nobody_was_told_of_is_said_at_the_end(tmp_path: Path) -> None:
    said = in_a_process("failing", tmp_path).stderr
    assert said.count("run@1 was not saved") == 1
    assert "no space" in said.lower()


def test_what_failed_in_a_block_is_a_note_on_what_it_raises(tmp_path: Path) -> None:
    handle(tmp_path / "store").close()
    files = faulty(tmp_path)
    files._faults = FULL

    def use() -> None:
        with handle(tmp_path / "store", files=files) as run:
            run.save_async(network(1), 4)
            raise KeyError

    with pytest.raises(KeyError) as raised:
        use()
    assert any("run@4" in note for note in raised.value.__notes__)


class _FailingAlways(Gate):
    """A disk that is full, which is found when it is opened."""

    def fsync(self, handle: Handle) -> None:
        assert self.opened.wait(60)
        raise OSError(28, "No space left on device")


def test_all_that_failed_is_told_of_together(tmp_path: Path) -> None:
    gate = _FailingAlways()
    run = gated(tmp_path, gate, in_flight=3)
    begun = [run.save_async(network(step), step) for step in range(3)]
    gate.opened.set()
    for pending in begun:
        pending.finish()
    with pytest.raises(NoSpaceError) as raised:
        run.close()
    notes = raised.value.__notes__
    assert all(any(f"run@{step}" in note for note in notes) for step in range(3))
    run.close()


class _FailingFirst(Gate):
    """A disk that is full the first time, and then waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.failed = threading.Event(), False

    def fsync(self, handle: Handle) -> None:
        if not self.failed:
            assert self.begun.wait(60)
            self.failed = True
            raise OSError(28, "No space left on device")
        super().fsync(handle)


def test_the_model_may_be_changed_when_an_error_is_raised(tmp_path: Path) -> None:
    gate = _FailingFirst()
    run, model = gated(tmp_path, gate, in_flight=2, pool_bytes=0), {"w": torch.ones(200, 200)}
    first = run.save_async(model, 0, lazy=True)
    second = run.save_async(model, 1, lazy=True)  # without room, it is written from the model
    gate.begun.set()
    first.finish()
    raised: list[StoreError] = []

    def update() -> None:
        try:
            run.before_update()
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.opened.set()
    thread.join()
    assert (second.done(), [type(error) for error in raised]) == (True, [NoSpaceError])
    run.close()
    assert run.steps() == [1]


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
def test_a_write_to_what_there_was_no_room_for_is_told_of(tmp_path: Path, pool_bytes: int) -> None:
    """A forward pass writes to a buffer while it is stored from where it lies."""
    gate = Gate()
    run = gated(tmp_path, gate, pool_bytes=pool_bytes, compress=None)
    model = {"buffer": torch.ones(600, 600), "weight": torch.ones(700, 700)}
    pending = run.save_async(model, 0, lazy=True)
    assert gate.waiting.wait(60)
    model["buffer"].add_(1)
    gate.opened.set()
    pending.finish()
    with pytest.raises(ChangedModelError, match="'buffer'"):
        run.before_update()
    assert run.steps() == []
    run.save_async(model, 0).wait()
    assert_same(run.load(0), {name: each.numpy() for name, each in model.items()})
    run.close()
