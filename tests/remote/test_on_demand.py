"""What is loaded by name and not here is pulled first, once; what is here is not asked about."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import MemoryBucket
from store_runs.stores import KIB, content, open_store, stored, three
from tensor_dedup import Store
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import (
    MissingRemoteError,
    NotARemoteError,
    RemoteUrlError,
    UnknownRemoteNameError,
)
from tensor_dedup.remote.on_demand import pull_missing
from tensor_dedup.store.errors import BadNameError
from tensor_dedup.training import CheckpointStore


@pytest.fixture
def full(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "full")
    for name, path in three(tmp_path).items():
        store.import_(path, name)
    return store


def test_only_what_is_missing_is_pulled_and_then_nothing_is_asked(
    tmp_path: Path, full: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = MemoryBucket()
    for name in ("base", "tune"):
        full.push(Remote(bucket), name)
    store = open_store(tmp_path / "here")
    assert pull_missing(store, "base", None) is None
    assert store.names() == []
    with caplog.at_level(logging.WARNING):
        first = pull_missing(store, "base", Remote(bucket))
    assert first is not None
    assert first.moved_bytes > 700 * KIB
    assert f"base is not in {store.path}: pulling" in caplog.text
    assert "on the wire" in caplog.text
    second = pull_missing(store, "tune", Remote(bucket))
    assert second is not None
    assert second.moved_bytes < 500 * KIB
    assert stored(store, "tune") == content(tmp_path / "tune")
    bucket.objects.clear()
    calls = bucket.traffic.calls
    assert pull_missing(store, "base", Remote(bucket)) is None
    assert bucket.traffic.calls == calls


def test_a_replaced_checkpoint_there_does_not_count(tmp_path: Path, full: Store) -> None:
    bucket = MemoryBucket()
    full.push(Remote(bucket), "base")
    store = open_store(tmp_path / "here")
    pull_missing(store, "base", Remote(bucket))
    other = open_store(tmp_path / "other")
    other.import_(tmp_path / "tune", "base")
    other.push(Remote(bucket), "base", replace=True)
    assert pull_missing(store, "base", Remote(bucket)) is None
    assert stored(store, "base") == content(tmp_path / "base")


def test_two_that_start_at_once_pull_it_once(tmp_path: Path, full: Store) -> None:
    class Slow(MemoryBucket):
        """The first to read data waits until the other thread is about to pull too."""

        def get_range(self, key: str, start: int, stop: int) -> memoryview:
            assert both.wait(60)
            return super().get_range(key, start, stop)

    both, bucket = threading.Event(), Slow()
    full.push(Remote(bucket), "base")
    store = open_store(tmp_path / "here")
    results: list[object] = []

    def load() -> None:
        results.append(pull_missing(Store.open(store.path), "base", Remote(bucket)))

    before = bucket.traffic.counts()[0]
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.5)  # both are in it, as far as they get
    both.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results.count(None) == 1
    nbytes = sum(map(len, content(tmp_path / "base").values()))
    assert bucket.traffic.counts()[0] - before <= 1.02 * nbytes + 64 * KIB
    assert stored(store, "base") == content(tmp_path / "base")


def test_from_the_folder_of_another_store(tmp_path: Path, full: Store) -> None:
    store = open_store(tmp_path / "here")
    assert pull_missing(store, "tune", str(full.path)) is not None
    assert stored(store, "tune") == content(tmp_path / "tune")
    with pytest.raises(UnknownRemoteNameError, match="no checkpoint 'nobody'"):
        pull_missing(store, "nobody", str(full.path))


def test_a_step_comes_alone_and_a_run_not_at_all(tmp_path: Path) -> None:
    full = open_store(tmp_path / "full")
    with CheckpointStore(full, "run") as run:
        for step in range(3):
            run.save({"w": np.full(9, step)}, step=step, metrics={})
    full.push(f"file://{tmp_path}/remote", "run")
    store = open_store(tmp_path / "here")
    pull_missing(store, "run@1", f"file://{tmp_path}/remote")
    assert store.names() == ["run@1"]
    with pytest.raises(UnknownRemoteNameError, match="remote list"):
        pull_missing(store, "run", f"file://{tmp_path}/remote")


def test_what_cannot_be_pulled_is_said_and_leaves_nothing(tmp_path: Path, full: Store) -> None:
    bucket = MemoryBucket()
    full.push(Remote(bucket), "base")
    store = open_store(tmp_path / "here")
    with pytest.raises(UnknownRemoteNameError, match=r"no checkpoint 'nobody'.*remote list"):
        pull_missing(store, "nobody", Remote(bucket))
    for key in [key for key in bucket.objects if key.startswith("containers/")]:
        del bucket.objects[key]
    with pytest.raises(MissingRemoteError, match="remote verify"):
        pull_missing(store, "base", Remote(bucket))
    with pytest.raises(NotARemoteError, match="check the URL"):
        pull_missing(store, "base", f"file://{tmp_path}/nothing")
    with pytest.raises(RemoteUrlError):
        pull_missing(store, "base", "ftp://host/models")
    with pytest.raises(BadNameError):
        pull_missing(store, "../base", Remote(bucket))
    assert store.names() == []
    assert store.verify(full=True).fine
