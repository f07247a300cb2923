"""kill -9 of a push and of a pull, at each of their requests; then the same command again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote

CODE = """
import os, signal, sys, threading
from pathlib import Path
from tensor_dedup import Store
from tensor_dedup.store.files import RealFiles
from tensor_dedup.remote import Remote, layout, push
from tensor_dedup.remote.buckets import FolderBucket

layout.CONTAINER_BYTES, push._ASKED_BYTES = 100_000, 1
verb, store, folder, at = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
lock, calls = threading.Lock(), 0

class Deadly(FolderBucket):
    pass

def deadly(name):
    inner = getattr(FolderBucket, name)
    def call(self, *arguments):
        global calls
        with lock:
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *arguments)
    return call

for name in ("get", "get_range", "head", "put", "put_if"):
    setattr(Deadly, name, deadly(name))
remote = Remote(Deadly(folder, RealFiles()))
opened = Store.open(store, worker_count=1)
result = opened.push(remote, "m") if verb == "push" else opened.pull(remote, "m")
print(calls)
"""


def run(verb: str, store: Path, remote: Path, at: int = 0) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", CODE, verb, store, remote, at]
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)


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
    assert whole.returncode == 0, whole.stderr
    sizes = []
    for at in moments(int(whole.stdout), step):
        target = folder / f"remote-{at}"
        assert run("push", full.path, target, at).returncode == -signal.SIGKILL
        held = [*(target / "containers").rglob("*.pack")] if target.is_dir() else []
        sizes.append(len(held))
        if (target / "refs" / "m").exists():
            assert Remote.open(target).verify(full=True).fine
        before = {path: path.stat().st_mtime_ns for path in held}
        again = run("push", full.path, target)
        assert again.returncode == 0, again.stderr
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
    assert run("push", full.path, folder / "remote").returncode == 0
    whole = run("pull", folder / "probe", folder / "remote")
    assert whole.returncode == 0, whole.stderr
    for at in moments(int(whole.stdout), step):
        target = folder / f"store-{at}"
        assert run("pull", target, folder / "remote", at).returncode == -signal.SIGKILL
        store = open_store(target)
        assert store.names() == []
        assert store.verify(full=True).faults == []
        again = run("pull", target, folder / "remote")
        assert again.returncode == 0, again.stderr
        assert stored(store, "m") == content(paths)
        assert store.verify(full=True).faults == []
        store.gc(0)
        assert [*(store.path / "tmp").iterdir()] == []
