"""A run is pushed while its training goes on, whose retention rules delete steps and collect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remote_runs.remotes import MemoryBucket
from store_runs.stores import open_store, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, TransferResult, layout, transfer
from tensor_dedup.remote.transfer import copy_checkpoint
from tensor_dedup.store.errors import MissingObjectError, UnknownNameError


class Telling(MemoryBucket):
    """Calls `before`, once, before the first request for a key."""

    def __init__(self, key: str, before: Callable[[], None]) -> None:
        super().__init__()
        self._key, self._before = key, before
        self.told = False

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        if key == self._key and not self.told:
            self.told = True
            self._before()
        return super().get(key, limit)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = open_store(tmp_path / "store")
    for step in range(3):
        data = np.random.default_rng(step).bytes(5000)
        path = write(tmp_path / f"{step}", {"model.safetensors": safetensors(u8(w=data))})
        found.import_(path, f"run@{step}")
    return found


def prune(store: Store, *names: str) -> None:
    for name in names:
        store.delete(name)
    for _ in range(2):  # the second takes them out of the trash
        store.gc(grace_hours=0)


@pytest.mark.parametrize("key", [layout.MARKER, layout.ref_key("run@1"), layout.HEAD])
def test_steps_that_are_pruned_meanwhile_are_left_out(store: Store, key: str) -> None:
    bucket = Telling(key, lambda: prune(store, "run@0", "run@1"))
    remote = Remote(bucket)
    pushed = store.push(remote, "run")
    assert bucket.told
    assert store.names() == ["run@2"]
    assert pushed.names == ("run@2",)
    assert remote.names() == ["run@2"]
    assert remote.verify(full=True).fine


def test_a_push_of_what_is_deleted_meanwhile_says_so(store: Store) -> None:
    bucket = Telling(layout.HEAD, lambda: prune(store, "run@1"))
    with pytest.raises(UnknownNameError, match="'run@1' was deleted here before it was sent"):
        store.push(Remote(bucket), "run@1")
    assert bucket.told
    assert Remote(bucket).names() == []


def test_what_is_lost_here_and_not_deleted_is_an_error_still(store: Store) -> None:
    def lose() -> None:
        for path in (store.path / "containers").rglob("*.*"):
            path.unlink()

    bucket = Telling(layout.HEAD, lose)
    with pytest.raises(MissingObjectError, match="repair"):
        store.push(Remote(bucket), "run")
    assert bucket.told


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_steps_that_are_pruned_are_left_out_of_a_copy(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    other = open_store(tmp_path / "other")

    def pruned_first(*words: Any, **named: Any) -> TransferResult:
        if "run@1" in store.names():
            prune(store, "run@1")
        return copy_checkpoint(*words, **named)

    monkeypatch.setattr(transfer, "copy_checkpoint", pruned_first)
    copied = store.push(other.path, "run") if verb == "push" else other.pull(store.path, "run")
    assert copied.names == ("run@0", "run@2")
    assert other.names() == store.names() == ["run@0", "run@2"]
