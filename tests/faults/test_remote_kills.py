"""kill -9 of a push and of a pull, at each of their requests; then the same command again."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout, push
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.store.files import RealFiles

_FORK = multiprocessing.get_context("fork")


class Deadly(FolderBucket):
    """A folder whose user is killed before the call of this number."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__(folder, RealFiles())
        self._at, self._lock, self.calls = at, threading.Lock(), 0


def _deadly(name: str) -> Callable[..., object]:
    inner = getattr(FolderBucket, name)

    def call(self: Deadly, *arguments: object) -> object:
        with self._lock:
            self.calls += 1
            if self.calls == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *arguments)

    return call


for _name in ("get", "get_range", "head", "put", "put_if"):
    setattr(Deadly, _name, _deadly(_name))


def _transfer(verb: str, store: Path, remote: Path, at: int, said: Connection) -> None:
    for module, name, value in ((layout, "CONTAINER_BYTES", 100_000), (push, "_ASKED_BYTES", 1)):
        setattr(module, name, value)
    bucket = Deadly(remote, at)
    opened = open_store(store)
    opened.push(Remote(bucket), "m") if verb == "push" else opened.pull(Remote(bucket), "m")
    said.send(bucket.calls)


def run(verb: str, store: Path, remote: Path, at: int = 0) -> int:
    """Push or pull in a process that dies at a call; how many there were, or minus the signal."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_transfer, args=(verb, store, remote, at, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        process.start()
    theirs.close()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    calls = 0 if process.exitcode else int(ours.recv())
    ours.close()
    return process.exitcode or calls


@pytest.fixture
def paths(folder: Path) -> Path:
    tensors = u8(**{f"t{n}": noise(n, 150 * KIB) for n in range(5)})
    return write(folder / "m", {"model.safetensors": safetensors(tensors), "config.json": b"{}"})


@pytest.fixture
def full(folder: Path, paths: Path) -> Store:
    store = open_store(folder / "full")
    store.import_(paths, "m")
    return store


def moments(total: int, step: int) -> range:
    assert total > 12
    return range(1, total + 1, step)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_push_that_is_killed_goes_on(folder: Path, full: Store, paths: Path, step: int) -> None:
    whole = run("push", full.path, folder / "probe")
    sizes = []
    for at in moments(whole, step):
        target = folder / f"remote-{at}"
        assert run("push", full.path, target, at) == -signal.SIGKILL
        held = [*(target / "containers").rglob("*.pack")] if target.is_dir() else []
        sizes.append(len(held))
        if (target / "refs" / "m").exists():
            assert Remote.open(target).verify(full=True).fine
        before = {path: path.stat().st_mtime_ns for path in held}
        again = run("push", full.path, target)
        assert again > 0
        assert before == {path: path.stat().st_mtime_ns for path in held}  # not sent again
        remote = Remote.open(target)
        assert remote.names() == ["m"]
        assert remote.verify(full=True).fine
    assert 0 in sizes
    assert max(sizes) >= 3  # some died in the middle
    other = open_store(folder / "other")
    other.pull(target, "m")
    assert stored(other, "m") == content(paths)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_pull_that_is_killed_goes_on(folder: Path, full: Store, paths: Path, step: int) -> None:
    assert run("push", full.path, folder / "remote") > 0
    whole = run("pull", folder / "probe", folder / "remote")
    for at in moments(whole, step):
        target = folder / f"store-{at}"
        assert run("pull", target, folder / "remote", at) == -signal.SIGKILL
        store = open_store(target)
        assert store.names() == []
        assert store.verify(full=True).faults == []
        again = run("pull", target, folder / "remote")
        assert again > 0
        assert stored(store, "m") == content(paths)
        assert store.verify(full=True).faults == []
        store.gc(0)
        assert [*(store.path / "tmp").iterdir()] == []
