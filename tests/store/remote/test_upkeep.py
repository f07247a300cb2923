"""What a remote holds, what it takes, and that nothing that is needed is ever deleted."""

from pathlib import Path

import pytest

from remotes import Faulty, MemoryBucket
from s3_faults import FaultyProxy, MemoryS3, client
from stores import content, open_store, stored, three
from tensor_dedup.store import Store
from tensor_dedup.store.remote import Remote
from tensor_dedup.store.remote.catalog import read_catalog
from tensor_dedup.store.remote.errors import (
    RemoteBusyError,
    UncertainRemoteError,
    UnknownRemoteNameError,
)

HOUR = 3600.0
NAMES = ("base", "tune", "tiny")


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def full(tmp_path: Path, bucket: MemoryBucket) -> Store:
    store = open_store(tmp_path / "full")
    for name, path in three(tmp_path).items():
        store.import_(path, name, compress="auto")
        store.push(Remote(bucket), name)
    return store


def pulled(tmp_path: Path, bucket: MemoryBucket, name: str, folder: str) -> None:
    store = open_store(tmp_path / folder)
    store.pull(Remote(bucket), name)
    assert stored(store, name) == content(tmp_path / name)


@pytest.mark.usefixtures("full")
def test_usage_adds_up(bucket: MemoryBucket) -> None:
    usage = Remote(bucket).usage()
    assert [each.name for each in usage.checkpoints] == sorted(NAMES)
    sizes = [len(o[0]) for key, o in bucket.objects.items() if key.startswith("containers/")]
    assert usage.stored_bytes == sum(sizes)
    assert 0 <= usage.unused_bytes < 4000  # tables and padding
    assert all((each.unique_bytes or 0) > 0 for each in usage.checkpoints)


@pytest.mark.usefixtures("full")
def test_space_comes_back_after_two_sweeps_that_are_a_lease_apart(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    before = remote.gc(24)
    assert before.condemn == ()  # all of it was written just now
    sizes = {key: len(found[0]) for key, found in bucket.objects.items()}
    bucket.clock += 25 * HOUR
    keys = {*bucket.objects}
    first = remote.gc(24)
    assert first.condemn
    unused = [key for key in first.condemn if not key.startswith(("catalog/", "trash/"))]
    assert (before.young, first.young) == (len(unused), 0)
    assert before.young_bytes == sum(sizes[key] for key in unused)
    assert first.delete == ()
    assert keys <= {*bucket.objects}
    bucket.clock += 23 * HOUR
    assert remote.gc(24).delete == ()
    bucket.clock += 2 * HOUR
    last = remote.gc(24)
    assert {*first.condemn} <= {*last.delete}
    assert not {*last.delete} & bucket.objects.keys()
    assert remote.verify(full=True).fine
    for name in ("base", "tiny"):
        pulled(tmp_path, bucket, name, f"of-{name}")


def test_what_is_condemned_is_used_again_by_a_push(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    assert remote.gc(24).condemn
    full.push(remote, "tune")
    bucket.clock += 25 * HOUR
    assert all(key.startswith(("catalog/", "trash/")) for key in remote.gc(24).delete)
    pulled(tmp_path, bucket, "tune", "other")
    assert remote.verify(full=True).fine


def test_a_deleted_name_is_unknown_and_may_be_pushed_again(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    remote = Remote(bucket)
    remote.delete("base")
    assert remote.names() == ["tiny", "tune"]
    with pytest.raises(UnknownRemoteNameError, match="remote list"):
        full.pull(remote, "base")
    with pytest.raises(UnknownRemoteNameError):
        remote.delete("base")
    full.push(remote, "base")
    pulled(tmp_path, bucket, "base", "other")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("folder", ["refs/", "manifests/", "tables/"])
def test_nothing_is_deleted_while_something_cannot_be_read(
    bucket: MemoryBucket, folder: str
) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 1000 * HOUR
    plan = remote.gc(24, dry_run=True)
    assert plan.condemn
    needed = [k for k in bucket.objects if k.startswith(folder) and k not in plan.condemn]
    blob, tag, when = bucket.objects[needed[0]]
    bucket.objects[needed[0]] = (blob[:-1] + b"?", tag, when)
    keys = {*bucket.objects}
    with pytest.raises(UncertainRemoteError):
        remote.gc(24)
    assert {*bucket.objects} == keys


@pytest.mark.usefixtures("full")
def test_a_foreign_object_stops_a_gc(bucket: MemoryBucket) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 1000 * HOUR
    bucket.put("containers/zz/of-a-later-version", [memoryview(b"x")])
    with pytest.raises(UncertainRemoteError, match="of-a-later-version"):
        remote.gc(0)


def test_what_verify_finds_damaged_is_sent_again(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    remote = Remote(bucket)
    key = next(key for key in bucket.objects if key.endswith((".delta", ".mixed")))
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)
    assert remote.verify().fine  # the bookkeeping is
    result = remote.verify(full=True)
    assert [fault.url for fault in result.faults] == [bucket.at(key)]
    users = result.faults[0].affected
    assert users
    bucket.clock += 1000 * HOUR
    remote.gc(24)  # it is needed: it stays, and stays out of the catalog
    for name in users:
        remote.delete(name)
        full.push(remote, name)
    assert remote.verify(full=True).fine
    for name in users:
        pulled(tmp_path, bucket, name, f"of-{name}")


@pytest.mark.parametrize("lease", [0, 24])
def test_a_sweep_that_writes_a_segment_of_the_past_does_not_delete_it(
    tmp_path: Path, full: Store, lease: int
) -> None:
    """What the catalog says when a name is deleted is what it said before the name was there."""
    bucket = MemoryBucket()
    proxy = FaultyProxy(MemoryS3(bucket))  # equal bytes have equal tags there
    remote = Remote(client(proxy.port))
    for name in ("base", "tune"):
        full.push(remote, name)
    before = {key for key in bucket.objects if key.startswith("catalog/")}
    remote.delete("tune")
    for _ in range(3):
        bucket.clock += 1.5 * lease * HOUR
        remote.gc(lease)
        named = read_catalog(remote.bucket)  # which reads its segments
        assert named is not None
        assert {f"catalog/{name.hex()}" for name in named.segments} <= before
    assert remote.verify(full=True).fine
    proxy.close()


def calls_of(bucket: MemoryBucket) -> int:
    probe = Faulty(copied(bucket))
    Remote(probe).gc(24)
    return len(probe.calls)


def copied(bucket: MemoryBucket) -> MemoryBucket:
    found = MemoryBucket()
    found.objects, found.clock = dict(bucket.objects), bucket.clock
    found._count = 10_000
    return found


def test_a_push_at_any_moment_of_a_gc_loses_nothing(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """The push uses again what the gc is about to delete."""
    Remote(bucket).delete("tune")
    bucket.clock += 25 * HOUR
    assert Remote(bucket).gc(24).condemn
    bucket.clock += 25 * HOUR
    assert Remote(copied(bucket)).gc(24).delete
    refused = 0
    for number in range(calls_of(bucket)):
        inner = copied(bucket)

        def push(inner: MemoryBucket = inner) -> None:
            nonlocal refused
            try:
                full.push(Remote(inner), "tune")
            except RemoteBusyError:
                refused += 1

        gate = Faulty(inner, number, meanwhile=push)
        Remote(gate).gc(24)
        assert gate.struck
        found = Remote(inner).verify(full=True)
        assert found.fine, (number, found.faults)
        full.push(Remote(inner), "tune")
        assert "tune" in Remote(inner).names()
        assert Remote(inner).verify(full=True).fine, number
    assert 0 < refused < number
