"""A save in the background that fails is told of once, and loses nothing saved before."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gates import Gate, gated
from steps import assert_same, copied, handle, network, shares, train
from tensor_dedup.store.checkpoints import CheckpointStore, PendingSave
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.testing import NEEDS_SPACE, Faults, FaultyFiles

FULL = Faults(full_from=0)


def faulty(tmp_path: Path) -> FaultyFiles:
    (tmp_path / "limbo").mkdir()
    return FaultyFiles(tmp_path / "limbo")


def allocated(run: CheckpointStore) -> int:
    return run._saves._pool.allocated


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
