"""One process at a time publishes a run from one store, whatever becomes of the others."""

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from processes.process_state import fork, forked
from tensor_dedup import Publisher
from tensor_dedup.publishing.errors import RunInUseError
from tensor_dedup.publishing.lock import PublishingLock
from tensor_dedup.remote import Remote
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import StoreIOError
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.training.tiers.two_tiers import TwoTiers
from training_runs.published import model_at

MODEL = model_at(0)


@contextmanager
def holder(folder: Path, run: str = "policy") -> Iterator[int]:
    """The pid of a process that has the lock. It is killed at the end."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        os.close(reading)
        lock = PublishingLock.of(LocalStore.open(folder), run)
        os.write(writing, b"1" if lock.is_held else b"0")
        signal.pause()
        os._exit(0)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"1"
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_second_process_is_told_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    url = (tmp_path / "policy").as_uri()
    policies = [
        (tmp_path / "folder", Publisher(tmp_path / "folder", run="policy")),
        (tmp_path / "work", Publisher(url, work=tmp_path / "work")),
    ]
    for folder, policy in policies:
        with holder(folder) as pid:
            for publish in (policy.publish, policy.publish_async):
                with pytest.raises(RunInUseError) as caught:
                    publish(MODEL, 0)
                facts = {"path": str(folder), "run": "policy", "host": socket.gethostname()}
                assert caught.value.facts == {**facts, "pid": pid}
                assert f"the process {pid} on" in str(caught.value)
            assert policy.run.steps() == []
            Publisher(folder, run="another").publish(MODEL, 0)  # other runs are others'
        assert policy.publish(MODEL, 0).name == "policy@0"
        policy.close()


def _others_error(folder: str) -> dict[str, object]:
    try:
        PublishingLock.of(LocalStore.open(folder), "policy")
    except RunInUseError as error:
        return error.facts
    return {}


def test_close_lets_another_process_publish(tmp_path: Path) -> None:
    policy = Publisher(tmp_path, run="policy")
    assert forked(lambda: _others_error(str(tmp_path))) == {}  # it has not published yet
    for step in range(2):
        policy.publish(MODEL, step)
        assert forked(lambda: _others_error(str(tmp_path)))["pid"] == os.getpid()
        policy.close()
        assert forked(lambda: _others_error(str(tmp_path))) == {}


def test_close_waits_for_a_publish_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Publisher(tmp_path, run="policy")
    save, reached, go_on = policy.run.save, threading.Event(), threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return save(*args, **options)

    monkeypatch.setattr(policy.run, "save", slowly)
    threads = [threading.Thread(target=policy.publish, args=(MODEL, 0))]
    threads += [threading.Thread(target=policy.close)]
    threads[0].start()
    assert reached.wait(60)
    threads[1].start()
    assert forked(lambda: _others_error(str(tmp_path)))["pid"] == os.getpid()
    go_on.set()
    for each in threads:
        each.join()
    assert forked(lambda: _others_error(str(tmp_path))) == {}


def test_the_next_trainer_sends_what_a_killed_one_has_saved(tmp_path: Path) -> None:
    """Also where it was opened before that."""
    url = (tmp_path / "policy").as_uri()
    standby = Publisher(url, work=tmp_path / "work")
    child = fork()
    if child == 0:
        policy = Publisher(url, work=tmp_path / "work")
        policy.publish(MODEL, 0)
        with mock.patch.object(TwoTiers, "copy", side_effect=lambda *_: threading.Event().wait()):
            policy.publish_async(model_at(1), 1)
            while "policy@1" not in policy.run.store.names():
                time.sleep(0.01)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Remote.open(url).steps("policy") == ["policy@0"]
    standby.publish(model_at(2), 2)
    standby.close()
    assert Remote.open(url).steps("policy") == ["policy@0", "policy@1", "policy@2"]


def test_publishers_of_one_process_share_the_lock(tmp_path: Path) -> None:
    """Also by another path, in threads, and when one that was never closed is gone."""
    (tmp_path / "link").symlink_to(tmp_path / "store")
    one, two = (Publisher(tmp_path / each, run="policy") for each in ("store", "link"))
    steps = [
        threading.Thread(target=each.publish, args=(MODEL, step))
        for step, each in enumerate((one, two, one, two))
    ]
    for each in steps:
        each.start()
    for each in steps:
        each.join()
    assert one.run.steps() == [0, 1, 2, 3]
    two.close()
    assert forked(lambda: _others_error(str(tmp_path / "store")))["pid"] == os.getpid()
    del one, steps, each
    assert forked(lambda: _others_error(str(tmp_path / "store"))) == {}


def test_a_forked_child_neither_has_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    """As the workers of a data loader, which may outlive the trainer."""
    policy = Publisher(tmp_path, run="policy")
    policy.publish(MODEL, 0)
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        try:
            policy.publish(MODEL, 1)
        except RunInUseError:
            os.write(writing, b"1")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"1"
        assert policy.publish(MODEL, 2).step == 2  # and it has not taken it away
        policy.close()
        assert forked(lambda: _others_error(str(tmp_path))) == {}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    assert policy.run.steps() == [0, 2]


def test_a_note_that_cannot_be_read_names_nobody(tmp_path: Path) -> None:
    policy = Publisher(tmp_path, run="policy")
    with holder(tmp_path):
        (tmp_path / "publishers" / "policy").write_text("?")
        with pytest.raises(RunInUseError, match="another process publishes the run") as caught:
            policy.publish(MODEL, 0)
    assert caught.value.facts["pid"] is None


class WithoutLocks(RealFiles):
    """A network file system whose server has no locks."""

    missing = False

    def flock(self, handle: Handle, *, exclusive: bool, wait_s: float) -> bool:
        if self.missing:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(handle.path))
        return super().flock(handle, exclusive=exclusive, wait_s=wait_s)


def test_without_locks_nothing_is_published(tmp_path: Path) -> None:
    files = WithoutLocks()
    policy = Publisher(LocalStore.open(tmp_path, files=files), run="policy")
    files.missing = True
    with pytest.raises(StoreIOError, match="No locks available"):
        policy.publish(MODEL, 0)
    files.missing = False
    assert policy.run.steps() == []
    policy.publish(MODEL, 0)
