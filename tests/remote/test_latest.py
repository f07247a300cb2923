"""RUN@latest: the step that was saved last, of the remote if there is one, else of the store."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from remote_runs import remotes
from store_runs.stores import open_store, three
from tensor_dedup import Store, TensorDedupConfig
from tensor_dedup.errors import ConfigError
from tensor_dedup.loader.checkpoint_io import stub_folder
from tensor_dedup.publishing.subscriber import fetch_step, is_of_step
from tensor_dedup.remote import Remote, latest, layout, on_demand
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.errors import (
    NotARemoteError,
    RemoteBusyError,
    RemoteNameTakenError,
    RemoteUnreachableError,
    UnknownRemoteNameError,
)
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.remote.latest import latest_name as name_of_latest
from tensor_dedup.remote.on_demand import fetch_latest
from tensor_dedup.store.errors import BadNameError, UnknownNameError
from tensor_dedup.store.steps import followed
from tensor_dedup.store.steps.errors import UnknownStepError
from tensor_dedup.training import CheckpointStore


def save(store: Store, run: str, *steps: int, seed: int = 0) -> None:
    """Save steps in this order, each with two tensors of which one never changes."""
    with CheckpointStore(store, run) as opened:
        for step in steps:
            model = {"same": np.arange(4000), "w": np.full(999, 1000 * seed + step)}
            opened.save(model, step=step, metrics={})


def fetch(store: Store, remote: str | None, run: str, step: int | None = None) -> str:
    return on_demand.fetch_step(store, remote, run, step).name


def latest_name(store: Store, name: str, remote: str | None) -> str:
    return name_of_latest(store, name, None if remote is None else Remote.open(remote))


@pytest.fixture
def there(tmp_path: Path) -> str:
    """A remote with a run that went back: step 6 was saved after step 10."""
    full = open_store(tmp_path / "full")
    save(full, "policy", 4, 10, 6)
    url = f"file://{tmp_path}/remote"
    full.push(url, "policy")
    return url


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return open_store(tmp_path / "here")


def test_it_is_the_step_that_was_saved_last_on_the_remote(
    tmp_path: Path, there: str, here: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here.pull(there, "policy@10")  # what is here does not count
    assert latest_name(here, "policy@latest", there) == "policy@6"
    assert here.names() == ["policy@10"]
    with caplog.at_level(logging.WARNING):
        assert fetch_latest(here, "policy@latest", there) == "policy@6"
    assert f"policy@latest is policy@6 of {there}" in caplog.text
    assert here.names() == ["policy@10", "policy@6"]
    save(Store.open(tmp_path / "full"), "policy", 7)
    assert fetch(here, there, "policy") == "policy@6"
    Store.open(tmp_path / "full").push(there, "policy@7")
    assert fetch(here, there, "policy") == "policy@7"
    # A step can be named, too. Any other name is what it says.
    assert fetch(here, there, "policy", 4) == "policy@4"
    assert fetch_latest(here, "policy@4", there) == "policy@4"
    assert fetch_latest(here, "base", there) == "base"
    assert here.verify(full=True).fine


def test_without_a_remote_it_is_the_last_one_of_the_store(here: Store) -> None:
    with pytest.raises(UnknownNameError, match=r"no step of a run 'policy'.*tensor-dedup list"):
        latest_name(here, "policy@latest", None)
    save(here, "policy", 4, 10, 6)
    assert latest_name(here, "policy@latest", None) == "policy@6"
    assert fetch_latest(here, "policy@latest", None) == "policy@6"
    assert fetch(here, None, "policy", 10) == "policy@10"
    with pytest.raises(UnknownNameError, match="'polisy', perhaps 'policy'"):
        fetch(here, None, "polisy")
    with pytest.raises(UnknownStepError, match="has no step 11"):
        fetch(here, None, "policy", 11)
    with pytest.raises(BadNameError):
        fetch(here, None, "../policy")


def test_it_is_looked_up_in_the_folder_of_another_store(tmp_path: Path, here: Store) -> None:
    full = open_store(tmp_path / "full")
    save(full, "policy", 4, 10, 6)
    for url in (str(full.path), f"file://{full.path}"):
        assert latest_name(here, "policy@latest", url) == "policy@6"
    assert fetch(here, str(full.path), "policy") == "policy@6"
    assert here.names() == ["policy@6"]
    with pytest.raises(UnknownNameError, match="no step of a run 'nobody'"):
        fetch(here, str(full.path), "nobody")


def test_what_is_not_there_is_said(tmp_path: Path, there: str, here: Store) -> None:
    with pytest.raises(UnknownRemoteNameError, match=r"no step of a run 'nobody'; .*remote list"):
        fetch(here, there, "nobody")
    with pytest.raises(UnknownRemoteNameError, match="no step 11 of a run 'policy'"):
        fetch(here, there, "policy", 11)
    full = Store.open(tmp_path / "full")
    full.import_(three(tmp_path)["base"], "base")
    full.push(there, "base")
    with pytest.raises(UnknownRemoteNameError, match="'base', which is a checkpoint"):
        fetch(here, there, "base")
    with pytest.raises(NotARemoteError, match="check the URL"):
        fetch(here, f"file://{tmp_path}/nothing", "policy")
    assert here.names() == []


def test_a_remote_that_does_not_answer_is_not_replaced_by_what_is_here(
    here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteUnreachableError, match="check the URL") as failed:
        fetch(here, "s3://bucket/policy", "policy")
    assert "may be an old one" not in str(failed.value)
    save(here, "policy", 4)
    with pytest.raises(RemoteUnreachableError, match=r"check the URL.*'policy@4'.*to use it"):
        fetch(here, "s3://bucket/policy", "policy")


def test_a_checkpoint_of_that_name_is_meant_before_a_step(
    tmp_path: Path, there: str, here: Store
) -> None:
    paths = three(tmp_path)
    full = Store.open(tmp_path / "full")
    full.import_(paths["base"], "policy@latest")
    full.push(there, "policy@latest")
    assert latest_name(here, "policy@latest", there) == "policy@latest"
    assert latest_name(here, "policy@latest", str(full.path)) == "policy@latest"
    assert fetch(here, there, "policy") == "policy@6"  # who names a run means one
    assert fetch_latest(here, "policy@latest", there) == "policy@latest"
    assert here.names() == ["policy@6", "policy@latest"]
    assert fetch_latest(here, "policy@latest", None) == "policy@latest"
    assert followed.noted(here.handle.objects, "policy@latest") == []


def test_a_step_that_was_saved_anew_is_pulled_again(
    tmp_path: Path, there: str, here: Store
) -> None:
    assert fetch(here, there, "policy") == "policy@6"
    old = here.manifest("policy@6")
    assert followed.names(here.handle.objects, "policy") == ["policy@6"]
    assert followed.noted(here.handle.objects, "policy@6") == [old]
    full = Store.open(tmp_path / "full")
    save(full, "policy", 6, seed=1)
    full.push(there, "policy@6", replace=True)
    assert fetch(here, there, "policy") == "policy@6"
    new = here.manifest("policy@6")
    assert new not in (old, None)
    assert followed.noted(here.handle.objects, "policy@6") == [new, old]
    # What the user pulled or saved under the name is his.
    here.pull(there, "policy@6")
    assert followed.names(here.handle.objects, "policy") == []
    save(full, "policy", 6, seed=2)
    full.push(there, "policy@6", replace=True)
    with pytest.raises(RemoteNameTakenError, match="stands for another checkpoint here"):
        fetch(here, there, "policy")
    assert here.manifest("policy@6") == new


def test_a_step_that_is_deleted_when_a_later_one_has_come_is_not_missed(
    tmp_path: Path, there: str, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Store.open(tmp_path / "full")
    original, done = FolderBucket.list, list[str]()

    def listing(self: FolderBucket, prefix: str) -> object:
        found = [*original(self, prefix)]
        if not done:
            done.append(prefix)
            save(full, "policy", 11)
            full.push(there, "policy@11")
            Remote.open(there).delete("policy@6")
        return iter(found)

    monkeypatch.setattr(FolderBucket, "list", listing)
    assert fetch(here, there, "policy") == "policy@11"
    assert done


@pytest.mark.parametrize("let_go", [(), (4, 10)], ids=["older steps stay", "none stays"])
def test_a_step_that_is_deleted_while_steps_are_listed_is_not_replaced_by_an_older_one(
    there: str,
    here: Store,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    let_go: tuple[int, ...],
) -> None:
    full, remote = Store.open(tmp_path / "full"), Remote.open(there)
    for step in let_go:
        remote.delete(f"policy@{step}")
    original, listed = FolderBucket.list, list[list[str]]()

    def listing(self: FolderBucket, prefix: str) -> Iterator[ObjectStatus]:
        """A listing in two pages; step 11, which is on the first, comes after that was read."""
        first = [each for each in original(self, prefix) if each.key < "refs/policy@6"]
        if not listed:
            save(full, "policy", 11)
            full.push(there, "policy@11")
            Remote.open(there).delete("policy@6")
        second = [each for each in original(self, prefix) if each.key >= "refs/policy@6"]
        listed.append([each.key for each in first + second])
        yield from first + second

    monkeypatch.setattr(FolderBucket, "list", listing)
    assert latest_name(here, "policy@latest", there) == "policy@11"
    assert "refs/policy@11" not in listed[0]
    assert len(listed) == 2
    assert latest_name(here, "policy@latest", there) == "policy@11"
    assert len(listed) == 3  # one is enough where no name was deleted
    remote.delete("policy@11")
    if not let_go:
        assert latest_name(here, "policy@latest", there) == "policy@10"
        assert len(listed) == 5


def test_steps_that_are_deleted_in_each_listing_are_an_error_of_a_busy_remote(
    there: str, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, deleted = FolderBucket.list, list[ObjectStatus]()

    def listing(self: FolderBucket, prefix: str) -> Iterator[ObjectStatus]:
        key, size = f"{prefix}{20 + len(deleted)}", len(layout.reference("policy@20", None))
        deleted.append(ObjectStatus(key, size, "tag", 0.0))
        return iter([*original(self, prefix), *deleted])

    monkeypatch.setattr(FolderBucket, "list", listing)
    with pytest.raises(RemoteBusyError, match="change while they are listed"):
        latest_name(here, "policy@latest", there)
    assert len(deleted) > 2


def test_what_is_listed_and_remembered_is_what_the_run_has(
    tmp_path: Path, there: str, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, remote = Store.open(tmp_path / "full"), Remote.open(there)
    save(full, "policy-b", 1, 2)
    save(full, "other", 1)
    for run in ("policy-b", "other"):
        full.push(there, run)
    assert latest_name(here, "policy@latest", there) == "policy@6"
    memory = latest._memory(there, "policy")
    assert {*memory.refs} == {"policy@4", "policy@10", "policy@6"}
    assert len(memory.manifests) == 3
    for step in (10, 6):
        remote.delete(f"policy@{step}")
    original, heads = FolderBucket.head, list[str]()

    def head(self: FolderBucket, key: str) -> ObjectStatus | None:
        heads.append(key)
        return original(self, key)

    monkeypatch.setattr(FolderBucket, "head", head)
    assert latest_name(here, "policy@latest", there) == "policy@4"
    assert {*heads} == {"refs/policy@4", "refs/policy@10", "refs/policy@6"}
    assert {*memory.refs} == {"policy@4"}
    assert len(memory.manifests) == 1


def test_a_server_lists_the_names_of_one_run() -> None:
    with remotes.s3():
        bucket = Remote.open("s3://bucket/policy").bucket
        keys = [f"refs/{name}" for name in ("a@1", "run", "run@1", "run@10", "run@@", "runs@1")]
        for key in keys:
            bucket.put(key, [memoryview(b"text")])
        assert [each.key for each in bucket.list("refs/")] == sorted(keys)
        assert [each.key for each in bucket.list("refs/run@")] == [
            "refs/run@1",
            "refs/run@10",
            "refs/run@@",
        ]
        assert [*bucket.list("refs/b@")] == []


def test_who_follows_a_run_reads_of_each_step_what_is_new(tmp_path: Path) -> None:
    full, here = open_store(tmp_path / "full"), open_store(tmp_path / "here")
    with remotes.s3() as proxy:
        save(full, "policy", *range(20))
        full.push("s3://bucket/policy", "policy")
        proxy.reset()
        fetched = on_demand.fetch_step(here, "s3://bucket/policy", "policy")
        assert fetched.name == "policy@19"
        assert fetched.transfer is not None
        assert 0 < fetched.transfer.wire_bytes < proxy.received
        first = proxy.requests
        assert first > 40  # each reference and each manifest
        proxy.reset()
        fetched = on_demand.fetch_step(here, "s3://bucket/policy", "policy")
        assert fetched == on_demand.FetchedStep("policy@19", None)
        assert proxy.requests <= 2
        save(full, "policy", 20)
        full.push("s3://bucket/policy", "policy@20")
        proxy.reset()
        assert fetch(here, "s3://bucket/policy", "policy") == "policy@20"
        assert 2 < proxy.requests <= 14


def test_a_config_names_where_steps_come_from(tmp_path: Path, there: str) -> None:
    config = TensorDedupConfig(store=str(tmp_path / "made"), remote=there)
    assert fetch_step(config, "store://policy@latest") == "store://policy@6"
    assert fetch_step(config, "store://policy@10") == "store://policy@10"
    assert Store.open(tmp_path / "made").names() == ["policy@10", "policy@6"]
    for wrong in ("policy@latest", "store://policy", "store://policy@6@keep", "store://@latest"):
        with pytest.raises(ConfigError, match="write store://RUN@STEP or"):
            fetch_step(config, wrong)
    for url, is_step in (
        ("store://policy@latest", True),
        ("store://policy@10", True),
        ("store://policy@6@keep", True),  # which is refused by `fetch_step`
        ("store://org/tune@v2", False),
        ("store://policy", False),
    ):
        assert is_of_step(url) is is_step


def test_an_engine_s_folder_is_that_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    full, url = open_store(tmp_path / "full"), f"file://{tmp_path}/remote"
    with CheckpointStore(full, "policy", config={"config.json": "{}"}) as run:
        for step in (1, 2):
            run.save({"w": np.full(9, step)}, step=step, metrics={})
    full.push(url, "policy")
    made = stub_folder.resolve("store://policy@latest", str(tmp_path / "here"), url)
    assert (made.url, made.name) == ("store://policy@2", "policy@2")
    assert Path(made.folder).name == "policy@2"
    assert Path(made.folder, "config.json").read_text() == "{}"
    alone = stub_folder.resolve("store://policy@latest", str(full.path), None)
    assert alone.manifest == made.manifest
