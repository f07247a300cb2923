"""Something happens to a subscriber at any of its steps: the next fetch mends it.

It dies, its disk fills, a request or its answer is lost, or an object of the remote is changed.
What is in the store is whole and has the weights that were published, and the next fetch brings
the latest step and lets go of the earlier ones.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from remote_runs.remotes import FAULTS, Faulty, Killed, MemoryBucket
from remote_runs.subscribers import fetch
from store_runs.disk_faults import NEEDS_SPACE, Crash, Faults, FaultyFiles, Loss, some_changes
from store_runs.stores import KIB, open_store, tuned, weights
from store_runs.stores import tmp_path as tmp_path
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.latest import _memory
from tensor_dedup.store.errors import NoSpaceError
from tensor_dedup.store.files import Files
from tensor_dedup.store.steps import followed
from tensor_dedup.training import CheckpointStore

LOSSES: list[Loss] = ["everything", "bytes", "nothing"]
LATEST = 3


def model(step: int) -> dict[str, NDArray[np.uint16]]:
    """Tensors of which a step changes few elements, and one that does not change."""
    data = {name: weights(seed, 128 * KIB) for seed, name in enumerate(("a", "b", "same"))}
    moved = {n: tuned(d, step, 0.01) if step and n != "same" else d for n, d in data.items()}
    return {name: np.frombuffer(each, "<u2") for name, each in moved.items()}


def let_go_of_all() -> None:
    """The process has ended: the kernel takes its locks away."""
    for held in followed._held.values():
        for files, handle in held.values():
            with suppress(Crash):
                files.close(handle)
    followed._held.clear()


class Scene:
    """A remote with a run, and a subscriber that has the steps before the latest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bucket = folder, MemoryBucket()
        full = open_store(folder / "full")
        with CheckpointStore(full, "policy", compress="always") as run:
            for step in range(LATEST + 1):
                run.save(model(step), step)
                full.push(Remote(self.bucket), f"policy@{step}")
                if step < LATEST:
                    fetch(open_store(folder / "template"), Remote(self.bucket), "policy")
        assert open_store(folder / "template").names() == ["policy@1", "policy@2"]
        self._start = dict(self.bucket.objects)

    def run(self, act: Callable[[], object], *, dies: type[BaseException] = Crash) -> bool:
        """Do it, and return whether it got to its end."""
        try:
            act()
            return True
        except (StoreError, dies):
            return False
        finally:
            let_go_of_all()

    def disk(self, faults: Faults | None = None) -> FaultyFiles:
        """A disk with these faults."""
        shutil.rmtree(self.folder / "limbo", ignore_errors=True)
        (self.folder / "limbo").mkdir()
        return FaultyFiles(self.folder / "limbo", faults)

    def store(self, files: Files | None = None) -> Store:
        """The subscriber's store as it was at the beginning."""
        let_go_of_all()
        self.bucket.objects = dict(self._start)
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        shutil.copytree(self.folder / "template", self.folder / "store")
        return Store.open(self.folder / "store", files=files)

    def check(self) -> None:
        """All that is there is as it was published, and after the next fetch nothing else is."""
        store = Store.open(self.folder / "store")
        assert store.verify(full=True).fine
        self.check_all(store)
        assert fetch(store, Remote(self.bucket), "policy").step == LATEST
        assert store.names() == ["policy@2", "policy@3"]
        self.check_all(store)
        assert followed.names(store.handle.objects, "policy") == ["policy@2", "policy@3"]
        assert store.verify(full=True).fine
        left = store.gc(0, dry_run=True)
        let_go_of_all()
        kinds = {item.path.parent.parent.name for item in left.trash}
        assert kinds <= {"manifests", "containers"}  # of a pull that was cut short, at most

    def check_all(self, store: Store) -> None:
        """Each step in a store has the bytes that were published."""
        for name in store.names():
            found, step = store.load(name), int(name.rpartition("@")[2])
            for tensor, expected in model(step).items():
                assert found[tensor].numpy().tobytes() == expected.tobytes()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("tensor_dedup.remote.buckets._THREADS", 1)
    # Another bucket in memory has the same URL, and gives the same tags.
    _memory.cache_clear()
    yield Scene(tmp_path)
    let_go_of_all()


def changes(scene: Scene, one_in: int) -> list[int]:
    """Numbers of operations of a fetch that change something."""
    files = scene.disk()
    fetch(scene.store(files), Remote(scene.bucket), "policy")
    assert Store.open(scene.folder / "store").names() == ["policy@2", "policy@3"]
    let_go_of_all()
    assert {"rename", "unlink", "fsync"} <= {*files.log}
    return sorted(some_changes(enumerate(files.log), one_in))


def dies_at(scene: Scene, number: int, loss: Loss) -> None:
    files, remote = scene.disk(Faults(stop_at=number)), Remote(scene.bucket)
    store = scene.store()
    died = not scene.run(lambda: fetch(Store.open(store.path, files=files), remote, "policy"))
    assert died or number >= len(files.log)  # how often it looks at something varies a little
    files.lose(loss)
    scene.check()


def test_it_dies(scene: Scene) -> None:
    for turn, number in enumerate(changes(scene, 40)):
        dies_at(scene, number, LOSSES[turn % len(LOSSES)])


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_it_dies_at_any_operation(scene: Scene, loss: Loss) -> None:
    for number in changes(scene, 1):
        dies_at(scene, number, loss)


def test_its_disk_fills(scene: Scene) -> None:
    files = scene.disk()
    fetch(scene.store(files), Remote(scene.bucket), "policy")
    needs = [number for number, operation in enumerate(files.log) if operation in NEEDS_SPACE]
    failed = 0
    for number in needs[:: max(1, len(needs) // 6)]:
        store = scene.store(scene.disk(Faults(full_from=number)))
        try:
            fetch(store, Remote(scene.bucket), "policy")
        except NoSpaceError:
            failed += 1
        let_go_of_all()
        scene.check()
    assert failed


def lost_at(scene: Scene, number: int, fault: str) -> None:
    remote = Remote(Faulty(scene.bucket, number, fault))
    store = scene.store()
    scene.run(partial(fetch, store, remote, "policy"), dies=Killed)
    scene.check()


def requests(scene: Scene) -> int:
    counted = Faulty(scene.bucket)
    fetch(scene.store(), Remote(counted), "policy")
    let_go_of_all()
    assert len(counted.calls) > 8
    return len(counted.calls)


def test_a_request_or_its_answer_is_lost(scene: Scene) -> None:
    for number in range(0, requests(scene), 2):
        lost_at(scene, number, ("lost before", "killed after")[number // 2 % 2])


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_any_request_or_its_answer_is_lost(scene: Scene, fault: str) -> None:
    for number in range(requests(scene)):
        lost_at(scene, number, fault)


def test_no_changed_object_of_the_remote_is_believed(scene: Scene) -> None:
    """Each fetch fails, or brings just what was published."""
    scene.store()
    keys, refused = sorted(scene.bucket.objects), 0
    assert {key.partition("/")[0] for key in keys} >= {"containers", "manifests", "refs", "tables"}
    # Of those that a fetch of the latest step reads or may read, and some of the others.
    for key in [key for key in keys if "policy@3" in key] + keys[::4]:
        store = scene.store()
        data, tag, when = scene.bucket.objects[key]
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        scene.bucket.objects[key] = bytes(changed), f"{tag}*", when
        refused += not scene.run(partial(fetch, store, Remote(scene.bucket), "policy"))
        scene.check_all(store)
        scene.bucket.objects[key] = data, tag, when
        assert fetch(store, Remote(scene.bucket), "policy").step == LATEST
        scene.check_all(store)
    assert refused > 1
