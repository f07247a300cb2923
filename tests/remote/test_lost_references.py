"""What a remote has lost of references and manifests is named, and sent again by a push."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, client
from store_runs.stores import content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, catalog, layout
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.catalog import noted_damage
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    RemoteNameTakenError,
    UncertainRemoteError,
)
from tensor_dedup.store.format import manifests
from tensor_dedup.training import CheckpointStore

HOUR = 3600.0


def checkpoint(tmp_path: Path, name: str, own: int) -> Path:
    """Forty tensors, the last of which no other checkpoint has: five pages or more."""
    tensors = {f"w{n:02}": noise(n if n < 39 else own, 64) for n in range(40)}
    return write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(manifests, "PAGE_ENTRIES", 8)
    found = open_store(tmp_path / "store")
    for number, name in enumerate(("base", "tune")):
        found.import_(checkpoint(tmp_path, name, 1000 + number), name)
    return found


@pytest.fixture
def bucket(store: Store) -> MemoryBucket:
    """A remote with both."""
    found = MemoryBucket()
    for name in ("base", "tune"):
        store.push(Remote(found), name)
    return found


def spoil(bucket: MemoryBucket, key: str) -> None:
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (blob[:40] + bytes([blob[40] ^ 1]) + blob[41:], tag, when)


def lose(bucket: MemoryBucket, key: str) -> None:
    del bucket.objects[key]


def parts(bucket: MemoryBucket, name: str) -> list[str]:
    """The keys of a checkpoint's pages, and then of its manifest."""
    found = Remote(bucket).read(name)
    pages = [page.hex() for page in found.content.pages]
    return [layout.manifest_key(part) for part in (*pages, found.manifest)]


def assert_whole(tmp_path: Path, bucket: MemoryBucket, *names: str) -> None:
    remote = Remote(bucket)
    assert remote.verify(full=True).fine
    assert not noted_damage(bucket)
    for name in names:
        other = open_store(tmp_path / f"of-{name}")
        other.pull(remote, name)
        assert stored(other, name) == content(tmp_path / name)


@pytest.mark.parametrize("harm", [lose, spoil])
@pytest.mark.parametrize("which", ["shared", "own", "manifest"])
@pytest.mark.parametrize("full", [False, True])
def test_a_plain_push_sends_what_verify_found_lost_of_a_manifest(
    tmp_path: Path,
    store: Store,
    bucket: MemoryBucket,
    harm: Callable[[MemoryBucket, str], None],
    which: str,
    full: bool,
) -> None:
    remote, keys = Remote(bucket), parts(bucket, "tune")
    key = {"shared": keys[0], "own": keys[-2], "manifest": keys[-1]}[which]
    harm(bucket, key)
    assert store.push(remote, "tune").unchanged  # of what nobody knows
    for _ in range(2):  # and what was noted stays so
        faults = remote.verify(full=full).faults
        hit = {name for fault in faults for name in fault.affected}
        assert hit == ({"base", "tune"} if which == "shared" else {"tune"})
        assert noted_damage(bucket) == {key}
    with pytest.raises(UncertainRemoteError):
        remote.gc(0)
    assert {each.name for each in remote.checkpoints() if each.damage} == hit
    if which != "shared":
        before = dict(bucket.objects)
        assert store.push(remote, "base").unchanged
        assert bucket.objects == before
    again = store.push(remote, "tune")
    assert (again.unchanged, again.moved_pieces) == (False, 0)
    assert_whole(tmp_path, bucket, "base", "tune")
    assert store.push(remote, "tune").unchanged


def test_all_that_is_lost_of_a_manifest_is_noted(
    tmp_path: Path, store: Store, bucket: MemoryBucket
) -> None:
    """A push of another checkpoint sends one page of two, and the other page is still known."""
    remote, keys = Remote(bucket), parts(bucket, "tune")
    lose(bucket, keys[0])
    spoil(bucket, keys[-2])
    assert not remote.verify().fine
    assert noted_damage(bucket) == {keys[0], keys[-2]}
    assert not store.push(remote, "base").unchanged
    assert noted_damage(bucket) == {keys[-2]}
    assert not store.push(remote, "tune").unchanged
    assert_whole(tmp_path, bucket, "base", "tune")


def test_what_is_noted_of_a_manifest_and_is_whole_is_taken_back(
    tmp_path: Path, store: Store, bucket: MemoryBucket
) -> None:
    """The server has said that it is gone, or somebody has brought it back."""
    remote, keys = Remote(bucket), parts(bucket, "tune")
    kept = bucket.objects[keys[0]]
    lose(bucket, keys[0])
    assert not remote.verify().fine
    bucket.objects[keys[0]] = kept
    (fault,) = remote.verify().faults
    assert fault.url.endswith(keys[0])
    assert "it is whole" in fault.what
    assert store.push(remote, "tune").unchanged
    assert_whole(tmp_path, bucket, "base", "tune")


def test_what_was_lost_of_a_deleted_name_is_forgotten_by_a_sweep(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    remote, keys = Remote(bucket), parts(bucket, "tune")
    lose(bucket, keys[-2])
    assert not remote.verify().fine
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    remote.gc(24)
    assert_whole(tmp_path, bucket, "base")


def test_what_is_lost_is_noted_where_the_catalog_is_lost_too(
    tmp_path: Path, store: Store, bucket: MemoryBucket
) -> None:
    """And what is put together in its place says of all containers what they hold."""
    remote, key = Remote(bucket), parts(bucket, "tune")[-1]
    there = {*catalog.catalog_of(bucket).containers}
    lose(bucket, key)
    for segment in [each for each in bucket.objects if each.startswith(layout.CATALOG)]:
        if segment != layout.HEAD:
            lose(bucket, segment)
    assert not remote.verify().fine
    assert noted_damage(bucket) == {key}
    assert {*catalog.catalog_of(bucket).containers} == there
    assert store.push(remote, "tune").moved_pieces == 0
    assert_whole(tmp_path, bucket, "tune")


@pytest.fixture(params=["s3", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> Iterator[Remote]:
    """A remote with one checkpoint and two that were deleted."""
    server = FaultyProxy(MemoryS3(MemoryBucket()))
    folder = Remote.open(tmp_path / "remote")
    found = folder if request.param == "folder" else Remote(client(server.port))
    store.push(found, "base")
    for name in ("gone-1", "gone-2"):
        written(found, name, layout.reference(name, None))
    yield found
    server.close()


def written(remote: Remote, name: str, text: bytes) -> None:
    remote.bucket.put(layout.ref_key(name), [memoryview(text)])


def test_a_damaged_reference_that_is_as_long_as_a_deleted_one_is_listed(remote: Remote) -> None:
    assert [(each.name, each.damage) for each in remote.checkpoints()] == [("base", None)]
    deleted = layout.reference("base", None)
    written(remote, "base", b"?" * len(deleted))
    (found,) = remote.checkpoints()
    assert found.name == "base"
    assert "refs/base" in (found.damage or "")
    assert remote.names() == []
    written(remote, "base", deleted)
    assert remote.checkpoints() == []


class Sealed(MemoryBucket):
    """A server whose tags look like sums of what objects hold, and are none."""

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        for status in super().list(prefix):
            yield ObjectStatus(status.key, status.size, "0" * 32, status.modified)


def test_deleted_references_are_not_all_read_where_tags_are_no_sums(store: Store) -> None:
    bucket = Sealed()
    store.push(Remote(bucket), "base")
    for number in range(20):
        written(Remote(bucket), f"gone-{number}", layout.reference(f"gone-{number}", None))
    before = bucket.traffic.calls
    assert [each.name for each in Remote(bucket).checkpoints()] == ["base"]
    assert bucket.traffic.calls - before < 20


@pytest.mark.parametrize("what", ["a deleted name", "a reference", "a manifest"])
def test_a_damaged_step_keeps_no_other_step_of_its_run_from_coming(
    tmp_path: Path, what: str
) -> None:
    """The pull of the run says so at its end, every time."""
    bucket, here = MemoryBucket(), open_store(tmp_path / "here")
    with CheckpointStore(here, "run") as run:
        for step in range(3):
            run.save({"w": np.full(900, step)}, step=step)
    here.push(Remote(bucket), "run")
    key = layout.ref_key("run@0")
    if what == "a deleted name":
        Remote(bucket).delete("run@0")
    elif what == "a manifest":
        key = layout.manifest_key(Remote(bucket).read("run@0").manifest)
    spoil(bucket, key)
    proxy, there = FaultyProxy(MemoryS3(bucket)), open_store(tmp_path / "there")
    remote = Remote(client(proxy.port))  # whose list has sums
    for _ in range(2):
        with pytest.raises(DamagedRemoteError, match=key.rpartition("/")[2]):
            there.pull(remote, "run")
        assert there.names() == ["run@1", "run@2"]
    remote.delete("run@0")
    assert there.pull(remote, "run").names == ("run@1", "run@2")
    proxy.close()


def run_there(tmp_path: Path, steps: int) -> MemoryBucket:
    """A remote with a run, whose steps share a tensor; the last is kept."""
    bucket, here = MemoryBucket(), open_store(tmp_path / "here")
    with CheckpointStore(here, "run") as run:
        for step in range(steps):
            run.save({"w": np.full(900, step), "same": np.arange(99_000)}, step=step)
        run.keep(steps - 1)
    here.push(Remote(bucket), "run")
    return bucket


def test_a_mark_does_not_come_without_its_step(tmp_path: Path) -> None:
    """A training that goes on could not save that step."""
    bucket, there = run_there(tmp_path, 3), open_store(tmp_path / "there")
    spoil(bucket, layout.ref_key("run@2"))
    with pytest.raises(DamagedRemoteError, match=r"not pulled: run@2; steps pulled: 2; run `"):
        there.pull(Remote(bucket), "run")
    assert there.names() == ["run@0", "run@1"]
    with CheckpointStore(there, "run") as run:
        run.save({"w": np.full(900, 7)}, step=2)


def test_all_damaged_steps_are_named(tmp_path: Path) -> None:
    bucket, there = run_there(tmp_path, 4), open_store(tmp_path / "there")
    for step in (0, 2):
        spoil(bucket, layout.manifest_key(Remote(bucket).read(f"run@{step}").manifest))
    what = r"not pulled: run@0, run@2; steps pulled: 2; run `"
    with pytest.raises(DamagedRemoteError, match=what) as caught:
        there.pull(Remote(bucket), "run")
    assert caught.value.facts["not_pulled"] == ("run@0", "run@2")
    assert there.handle.objects.references() == ["run@1", "run@3", "run@3@keep"]
    with pytest.raises(DamagedRemoteError) as alone:  # of one step there are no others
        there.pull(Remote(bucket), "run@0")
    assert "not pulled" not in str(alone.value)


@pytest.mark.parametrize("also", [False, True])
def test_a_piece_that_all_steps_have_lost_is_read_by_the_first(tmp_path: Path, also: bool) -> None:
    bucket, there = run_there(tmp_path, 6), open_store(tmp_path / "there")
    if also:
        spoil(bucket, layout.ref_key("run@0"))
    (key,) = [key for key in bucket.objects if key.startswith(layout.CONTAINERS)]
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (bytes(each ^ 1 for each in blob), tag, when)
    before = bucket.traffic.received
    # The first error counts.
    error = DamagedRemoteError if also else CorruptRemoteTensorError
    with pytest.raises(error, match=r"not pulled: run@0, .*, run@5; steps pulled: 0; run `"):
        there.pull(Remote(bucket), "run")
    assert bucket.traffic.received - before < 4 * len(blob)
    assert there.names() == []


def test_an_error_of_another_kind_names_the_damaged_steps_too(tmp_path: Path) -> None:
    bucket, there = run_there(tmp_path, 3), open_store(tmp_path / "there")
    spoil(bucket, layout.ref_key("run@0"))
    with CheckpointStore(there, "run") as run:
        run.save({"w": np.full(900, 7)}, step=1)
    what = "another checkpoint here; not pulled: run@0, run@1; steps pulled: 0; choose"
    with pytest.raises(RemoteNameTakenError, match=what):
        there.pull(Remote(bucket), "run")
