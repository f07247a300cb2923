"""Several processes at one store: forked ones, stopped ones, and many at once."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from store_runs.stores import Model, assert_same, forest, handle, network, shares, train
from tensor_dedup import Store
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.training import CheckpointStore

_FORK = multiprocessing.get_context("fork")


def start(act: Callable[..., None], *arguments: object) -> BaseProcess:
    process = _FORK.Process(target=act, args=arguments)
    process.start()
    return process


def model_of(seed: int, step: int) -> Model:
    """What all runs begin with, of which a part moves, and trees that come one by one."""
    model = network(1)
    train(model, 100 * seed + step, "layer0.weight", "layer1.bias")
    return {**model, **forest(20 + step)}


def test_a_forked_child_uses_its_parents_handle(tmp_path: Path) -> None:
    run = handle(tmp_path)
    run.save(model_of(0, 0), 0)

    def child() -> None:
        run.save(model_of(0, 1), 1)
        assert_same(run.load(0), model_of(0, 0))

    for _ in range(2):
        process = start(child)
        process.join()
        assert process.exitcode == 0
        run.save(model_of(0, 2), 2)
    assert shares(run)
    for step in range(3):
        assert_same(run.load(step), model_of(0, step))
    assert run.store.verify(full=True).faults == []


class Stopping(RealFiles):
    """Stops the process when it is about to make its first file durable."""

    stopped = False

    def fsync(self, handle: Handle) -> None:
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        super().fsync(handle)


def test_a_stopped_save_keeps_what_it_relies_on(tmp_path: Path) -> None:
    """It found most of its tensors in a step that is deleted, and collected, meanwhile."""
    run = handle(tmp_path)
    run.save(model_of(0, 0), 0)

    def child() -> None:
        with Store.open(tmp_path, files=Stopping(), worker_count=1) as store:
            CheckpointStore(store, "other", run._options.adapter).save(model_of(0, 1), 0)

    process = start(child)
    assert process.pid is not None
    os.waitpid(process.pid, os.WUNTRACED)
    run.delete(0)
    with pytest.raises(StoreBusyError):
        run.store.gc(0, wait_s=0.1)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    run.store.gc(0)
    assert_same(handle(tmp_path, "other").load(0), model_of(0, 1))
    run.save(model_of(0, 0), 0)
    assert run.store.stats().dedup_ratio < 1
    assert run.store.verify(full=True).faults == []


def trainer(root: Path, seed: int, until: float) -> None:
    dice, step = random.Random(seed), 0
    run = handle(root, f"run{seed % 3}", keep_last=4)
    while time.monotonic() < until:
        # Two processes save to each run, the one odd steps, the other even ones.
        run.save(model_of(seed % 3, step), 2 * step + seed // 3)
        step += 1
        if dice.random() < 0.2:
            run.close()


def reader(root: Path, until: float) -> None:
    dice = random.Random(0)
    while time.monotonic() < until:
        seed = dice.randrange(3)
        run = handle(root, f"run{seed}")
        for step in run.steps()[-2:]:
            with contextlib.suppress(UnknownStepError):
                assert_same(run.load(step), model_of(seed, step // 2))


def collector(root: Path, until: float) -> None:
    store = Store.open(root)
    while time.monotonic() < until:
        with contextlib.suppress(StoreBusyError):
            store.gc(0, wait_s=0.5)
        time.sleep(0.05)


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.long)])
def test_trainings_readers_and_a_gc_at_once(tmp_path: Path, seconds: int) -> None:
    Store.open(tmp_path)
    until = time.monotonic() + seconds
    processes = [start(trainer, tmp_path, seed, until) for seed in range(6)]
    processes += [start(reader, tmp_path, until), start(collector, tmp_path, until)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    store = Store.open(tmp_path)
    assert store.verify(full=True).faults == []
    for seed in range(3):
        run = handle(tmp_path, f"run{seed}")
        assert shares(run)
        for step in run.steps():
            assert_same(run.load(step), model_of(seed, step // 2))
    store.gc(0)
    assert store.verify(full=True).faults == []
