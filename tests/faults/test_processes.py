"""Real processes: killed at any moment, and many at once, on a real disk."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from store_runs.clocks import JUMPS, ClockedFiles, SetClock
from store_runs.stores import (
    KIB,
    Content,
    assert_clean,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
)
from store_runs.stores import write as write_folder
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import NameTakenError, StoreBusyError, UnknownNameError

# A fresh interpreter for each would take longer than what it does.
_FORK = multiprocessing.get_context("fork")
_SHARED = noise(100, 300 * KIB)
_NEAR = weights(101, 300 * KIB)


@pytest.fixture(params=["short", pytest.param("long", marks=pytest.mark.long)])
def long(request: pytest.FixtureRequest) -> bool:
    return str(request.param) == "long"


def checkpoint(root: Path, number: int) -> Path:
    """A checkpoint that has one tensor in common with all others, some of its own, and one that is
    the others' but for small steps.
    """
    own, near = noise(number, 200 * KIB), tuned(_NEAR, number)
    tensors = u8(shared=_SHARED, own=own, small=noise(-number, 999), near=near)
    big = u8(large=noise(number + 50, 1100 * KIB))
    files = {"a.safetensors": safetensors(tensors), "b.safetensors": safetensors(big)}
    return write_folder(root / f"m{number}", {**files, "config.json": b"%d" % number})


def start(act: Callable[..., None], *arguments: object) -> BaseProcess:
    process = _FORK.Process(target=act, args=arguments)
    process.start()
    return process


def work(root: Path, paths: Mapping[str, Path], seed: int) -> None:
    """Imports, replaces, deletes and collects until it is killed; every other one's clock jumps."""
    dice = random.Random(seed)
    disk = ClockedFiles(SetClock(jumps=JUMPS[seed % 5 :])) if seed % 2 else None
    store = Store.open(root, files=disk)
    while True:
        name = dice.choice(list(paths))
        with contextlib.suppress(NameTakenError, UnknownNameError, StoreBusyError):
            dice.choice([_import, _import, _import, _delete, _collect])(store, paths[name], name)


def _import(store: Store, path: Path, name: str) -> None:
    # Some as they are, some encoded: alone, or against whichever there is then.
    store.import_(path, name, replace=True, compress="auto" if name != "m1" else None)


def _delete(store: Store, path: Path, name: str) -> None:
    store.delete(name)


def _collect(store: Store, path: Path, name: str) -> None:
    store.gc(0, wait_s=0.2)


def test_kill_9_at_any_moment(tmp_path: Path, long: bool) -> None:
    paths = {f"m{n}": checkpoint(tmp_path, n) for n in range(1, 4)}
    expected = {name: content(path) for name, path in paths.items()}
    dice, kills = random.Random(1), 200 if long else 12
    store = open_store(tmp_path / "store")
    for number in range(kills):
        process = start(work, tmp_path / "store", paths, number)
        time.sleep(dice.uniform(0.02, 0.5))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        names = [listed.name for listed in store.list()]
        assert {name: stored(store, name) for name in names} == {n: expected[n] for n in names}
        assert store.verify(full=True).faults == []
    assert_clean(store, {n: expected[n] for n in (listed.name for listed in store.list())})


def importer(root: Path, paths: Mapping[str, Path], seed: int, until: float) -> None:
    dice, store = random.Random(seed), Store.open(root)
    while time.monotonic() < until:
        name = dice.choice(list(paths))
        with contextlib.suppress(UnknownNameError):
            (_delete if dice.random() < 0.3 else _import)(store, paths[name], name)


def reader(root: Path, expected: Mapping[str, Content], seed: int, until: float) -> None:
    dice, store = random.Random(seed), Store.open(root)
    while time.monotonic() < until:
        name = dice.choice(list(expected))
        with contextlib.suppress(UnknownNameError):
            assert stored(store, name) == expected[name]
        assert {listed.name for listed in store.list()} <= set(expected)
        assert store.stats().damaged_files == 0
        assert store.verify().faults == []


def collector(root: Path, until: float) -> None:
    store = Store.open(root)
    while time.monotonic() < until:
        with contextlib.suppress(StoreBusyError):
            store.gc(0, wait_s=0.5)
        time.sleep(0.05)


def test_importers_readers_and_a_gc_at_once(tmp_path: Path, long: bool) -> None:
    paths = {f"m{n}": checkpoint(tmp_path, n) for n in range(1, 5)}
    expected = {name: content(path) for name, path in paths.items()}
    root = tmp_path / "store"
    Store.open(root)
    until = time.monotonic() + (60 if long else 4)
    processes = [
        *(start(importer, root, paths, seed, until) for seed in range(3)),
        *(start(reader, root, expected, seed, until) for seed in range(2)),
        start(collector, root, until),
    ]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    store = open_store(root)
    assert_clean(store, {n: expected[n] for n in (listed.name for listed in store.list())})


def test_a_stopped_writer_keeps_its_hits(tmp_path: Path) -> None:
    """Stopped in the middle of an import, while what it found there is deleted and collected."""
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    root = tmp_path / "store"
    store = open_store(root)
    store.import_(first, "first")
    process = start(stopping, root, second)
    assert process.pid is not None
    os.waitpid(process.pid, os.WUNTRACED)
    store.delete("first")
    with pytest.raises(StoreBusyError):
        store.gc(0, wait_s=0.1)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert_clean(store, {"second": content(second)})


def stopping(root: Path, path: Path, base: str | None = None) -> None:
    stopped = False

    class Stops:
        def start(self, total_bytes: int) -> None:
            """Not yet."""

        def advance(self, nbytes: int) -> None:
            nonlocal stopped
            if not stopped and nbytes > 100 * KIB:
                stopped = True
                os.kill(os.getpid(), signal.SIGSTOP)

    Store.open(root, worker_count=1).import_(path, "second", progress=Stops(), base=base)


def test_a_stopped_writer_keeps_the_anchors_of_its_hits(tmp_path: Path) -> None:
    """What it found is a delta; what that is against belongs to nobody any more when it goes on."""
    base, tune = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    root = tmp_path / "store"
    store = open_store(root)
    store.import_(base, "base")
    assert store.import_(tune, "tune", base="base").encoded_tensors == 1
    tensors = u8(near=tuned(_NEAR, 2), more=noise(77, 200 * KIB), near3=tuned(_NEAR, 3))
    both = write_folder(tmp_path / "both", {"a.safetensors": safetensors(tensors)})
    process = start(stopping, root, both, "base")
    assert process.pid is not None
    os.waitpid(process.pid, os.WUNTRACED)
    store.delete("base")
    store.delete("tune")
    for grace in (0, 24):
        with pytest.raises(StoreBusyError):
            store.gc(grace, wait_s=0.1)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    with store.checkpoint("second") as opened:
        assert [opened.stored(opened[name])[2] for name in ("near", "near3")] == [
            digest(tuned(_NEAR, 1))
        ] * 2
    assert_clean(store, {"second": content(both)})


def test_two_importers_of_one_name(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path, n) for n in (1, 2)]
    root = tmp_path / "store"
    Store.open(root)
    processes = [start(import_once, root, path) for path in paths]
    for process in processes:
        process.join()
    assert sorted(process.exitcode or 0 for process in processes) == [0, 7]
    store = open_store(root)
    assert stored(store, "one") in [content(path) for path in paths]
    assert_clean(store, {"one": stored(store, "one")})


def import_once(root: Path, path: Path) -> None:
    try:
        Store.open(root).import_(path, "one")
    except StoreError as error:
        raise SystemExit(7 if isinstance(error, NameTakenError) else 1) from error
