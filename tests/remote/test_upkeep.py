"""What a remote holds, what it takes, and that nothing that is needed is ever deleted."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from remote_runs.remotes import Chunks, Faulty, Killed, MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, Request, Response, client
from store_runs.stores import content, noise, open_store, safetensors, stored, three, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.buckets import Bucket, ObjectStatus
from tensor_dedup.remote.catalog import catalog_of, noted_damage, read_catalog
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    MissingRemoteError,
    NotARemoteError,
    RemoteAccessError,
    RemoteBusyError,
    RemoteUnreachableError,
    UncertainRemoteError,
    UnknownRemoteNameError,
)
from tensor_dedup.training import CheckpointStore

HOUR = 3600.0
NAMES = ("base", "tune", "tiny")


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def full(full: Store, bucket: MemoryBucket) -> Store:
    for name in NAMES:
        full.push(Remote(bucket), name)
    return full


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


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("told_by", ["tag", "time"])
def test_what_was_put_again_since_it_was_listed_is_not_deleted(
    tmp_path: Path, bucket: MemoryBucket, told_by: str
) -> None:
    """By a request that came late, just before the sweep would delete it."""
    Remote(bucket).delete("tune")
    for _ in range(2):
        bucket.clock += 25 * HOUR
        last = bucket.copied()
        done = Remote(bucket).gc(24)
    key = next(key for key in done.delete if key.startswith(layout.CONTAINERS))
    probe = Faulty(last.copied())
    Remote(probe).gc(24)
    assert probe.calls.count(f"delete {key}") == 1
    blob, tag, when = last.objects[key]

    def put() -> None:
        if told_by == "tag":
            last.objects[key] = (blob, "another", when)
        else:  # where equal bytes have equal tags
            last.objects[key] = (blob, tag, last.clock)

    gate = Faulty(last, probe.calls.index(f"head {key}"), meanwhile=put)
    Remote(gate).gc(24)
    assert gate.struck
    assert f"delete {key}" not in gate.calls
    assert key in last.objects


class Unquoted(MemoryS3):
    """One whose lists have tags without quotes, as Azure's have."""

    def answer(self, request: Request) -> Response:
        found = super().answer(request)
        if "list-type" not in request.target:
            return found
        body = re.sub(b'<ETag>"(.*?)"</ETag>', rb"<ETag>\1</ETag>", found.body)
        return Response(found.status, found.headers, body)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("server", [MemoryS3, Unquoted])
def test_a_sweep_deletes_what_it_says(bucket: MemoryBucket, server: type[MemoryS3]) -> None:
    proxy = FaultyProxy(server(bucket))
    remote = Remote(client(proxy.port))
    remote.delete("tune")
    done = remote.gc(0)
    assert any(key.startswith(layout.CONTAINERS) for key in done.delete)
    assert not {*done.delete} & bucket.objects.keys()
    proxy.close()


def test_a_sweep_does_not_count_what_it_left(tmp_path: Path, bucket: MemoryBucket) -> None:
    """As it was put again since it was listed."""
    store = open_store(tmp_path / "full")
    store.import_(three(tmp_path)["tune"], "tune")
    store.push(Remote(bucket), "tune")
    Remote(bucket).delete("tune")
    key = only(bucket)
    probe = Faulty(bucket.copied())
    assert key in Remote(probe).gc(0).delete
    blob = memoryview(bucket.objects[key][0])
    at = probe.calls.index(f"head {key}")
    done = Remote(Faulty(bucket, at, meanwhile=lambda: bucket.put(key, [blob]))).gc(0)
    assert done.delete
    assert key not in done.delete
    assert done.deleted_bytes < blob.nbytes
    assert key in bucket.objects


class GivesUp(MemoryS3):
    """Behind a gateway that gives up on one deletion, which is carried out later."""

    late: Request | None = None

    def answer(self, request: Request) -> Response:
        if request.deletes and layout.CONTAINERS in request.name and self.late is None:
            self.late = request
            return Response(504)
        return super().answer(request)


def test_a_deletion_that_comes_late_takes_nothing_that_was_pushed_since(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """What may still be deleted stays on the list, as if the sweep had been killed."""
    server = GivesUp(bucket)
    proxy = FaultyProxy(server)
    remote = Remote(client(proxy.port))
    remote.delete("tune")
    assert remote.gc(0).done
    assert server.late is not None
    key = server.late.name.split()[1]
    assert key not in bucket.objects
    assert {*catalog_of(bucket).trash.deleting} == {key}
    with pytest.raises(RemoteBusyError):
        full.push(remote, "tune")
    full.push(remote, "base", replace=True)  # which needs nothing of that
    server.answer(server.late)
    bucket.clock += HOUR
    assert remote.gc(24).done
    assert not catalog_of(bucket).trash.deleting
    full.push(remote, "tune")
    assert remote.verify(full=True).fine
    pulled(tmp_path, bucket, "tune", "other")
    proxy.close()


class Asleep(MemoryS3):
    """One that breaks off a deletion, while the machine that has asked for it sleeps."""

    def __init__(self, bucket: MemoryBucket, meanwhile: Callable[[], object]) -> None:
        super().__init__(bucket)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def answer(self, request: Request) -> Response:
        if request.deletes and layout.CONTAINERS in request.name and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
            return Response(504)
        return super().answer(request)


def test_a_sweep_that_slept_does_not_repeat_a_deletion(
    tmp_path: Path, bucket: MemoryBucket, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has taken over since, and what it deleted was pushed again."""
    slept = 0.0
    monkeypatch.setattr("tensor_dedup.remote.sweep.boottime", lambda: slept)

    def sleep() -> None:
        nonlocal slept
        slept += HOUR
        bucket.clock += HOUR
        assert any(key.startswith(layout.CONTAINERS) for key in Remote(bucket).gc(0).delete)
        full.push(Remote(bucket), "tune")

    proxy = FaultyProxy(Asleep(bucket, sleep))
    remote = Remote(client(proxy.port))
    monkeypatch.setattr(remote.bucket, "each", bucket.each)  # no other request is under way
    remote.delete("tune")
    with pytest.raises(RemoteBusyError):
        remote.gc(0)
    assert slept
    assert remote.verify(full=True).fine
    pulled(tmp_path, bucket, "tune", "other")
    proxy.close()


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


def test_a_delete_where_no_remote_is_writes_nothing() -> None:
    """A marker that is there for a moment would be taken from a first push at the same time."""
    gate = Faulty(MemoryBucket())
    with pytest.raises(NotARemoteError, match="there is no remote"):
        Remote(gate).delete("base")
    assert not [call for call in gate.calls if call.startswith("put")]


def test_a_kept_step_is_deleted_with_its_mark(tmp_path: Path, bucket: MemoryBucket) -> None:
    store, remote = open_store(tmp_path / "runs"), Remote(bucket)
    with CheckpointStore(store, "run-001") as run:
        for step in range(3):
            own = np.frombuffer(noise(step, 99_000), np.uint8)
            run.save({"frozen": np.arange(50_000), "w": own}, step=step)
        run.keep(1)
    for step in range(3):  # in containers of their own
        store.push(remote, f"run-001@{step}")
    store.push(remote, "run-001")
    calls, start = 0, bucket
    while True:  # cut short at each of its requests, it goes on when it is done again
        bucket = start.copied()
        gate = Faulty(bucket, calls, "killed before")
        with suppress(Killed):
            Remote(gate).delete("run-001@1")
        if not gate.struck:
            break
        assert "run-001@1" in Remote(bucket).names()
        Remote(bucket).delete("run-001@1")
        calls += 1
    assert calls == 7
    for kept in (bucket, start):
        if kept is start:
            remote.delete("run-001@1")
        assert Remote(kept).names() == ["run-001@0", "run-001@2"]
        assert {each.name for each in Remote(kept).usage().checkpoints} == {
            *("run-001@0", "run-001@2")
        }
    for _ in range(2):
        start.clock += 25 * HOUR
        done = remote.gc(24)
    assert done.deleted_bytes > 90_000  # nothing keeps what only that step had
    with pytest.raises(UnknownRemoteNameError):
        remote.delete("run-001@1")
    other = open_store(tmp_path / "other")
    assert other.pull(remote, "run-001").names == ("run-001@0", "run-001@2")
    for step in (0, 2):
        remote.delete(f"run-001@{step}")
    with pytest.raises(UnknownRemoteNameError, match="run-001"):
        other.pull(remote, "run-001")


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


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("key", ["trash/old.txt", "catalog/mine", "probe/a/b", "trash/m/FORMAT"])
def test_what_no_program_makes_among_lists_and_segments_stops_a_gc(
    bucket: MemoryBucket, key: str
) -> None:
    bucket.put(key, [memoryview(b"mine")])
    bucket.clock += 1000 * HOUR
    with pytest.raises(UncertainRemoteError, match=key):
        Remote(bucket).gc(0)
    assert key in bucket.objects


@pytest.mark.parametrize("linked", [False, True])
def test_a_sweep_leaves_what_others_have_in_tmp(tmp_path: Path, full: Store, linked: bool) -> None:
    """Be it a file, another remote, or what is behind a link."""
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    tmp = scratch if linked else place / "tmp"
    tmp.mkdir()
    if linked:
        (place / "tmp").symlink_to(scratch)
    (tmp / "thesis.txt").write_text("mine")
    left = tmp / "12345-0123456789ab"  # of a push that was cut short
    left.write_text("x")
    inner = Remote.open(tmp / "m")
    full.push(inner, "base")
    remote = Remote.open(place)
    full.push(remote, "base")
    full.push(remote, "tune")
    remote.delete("tune")
    done = remote.gc(0)
    assert "tmp/12345-0123456789ab" in done.delete
    assert any(key.startswith("containers/") for key in done.delete)
    assert (tmp / "thesis.txt").read_text() == "mine"
    assert not left.exists()
    assert inner.names() == ["base"]
    assert inner.verify(full=True).fine


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


def spoil(bucket: MemoryBucket, key: str) -> None:
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)


def only(bucket: MemoryBucket) -> str:
    """The key of the only container."""
    [key] = [key for key in bucket.objects if key.startswith(layout.CONTAINERS)]
    return key


@pytest.fixture
def apart(tmp_path: Path, full: Store) -> tuple[Store, MemoryBucket]:
    """A remote with `base` and `tiny`, in a container each, of which that of `base` is damaged."""
    bucket = MemoryBucket()
    full.push(Remote(bucket), "base")
    key = only(bucket)
    full.push(Remote(bucket), "tiny")
    spoil(bucket, key)
    return full, bucket


def test_a_plain_push_sends_again_what_verify_found_damaged(
    tmp_path: Path, apart: tuple[Store, MemoryBucket]
) -> None:
    store, bucket = apart
    remote = Remote(bucket)
    assert store.push(remote, "base").unchanged  # of what nobody knows
    assert not remote.verify(full=True).fine
    before = dict(bucket.objects)
    assert store.push(remote, "tiny").unchanged
    assert bucket.objects == before  # with tags and times
    again = store.push(remote, "base")
    assert not again.unchanged
    assert again.moved_pieces == again.pieces
    assert remote.verify(full=True).fine
    assert store.push(remote, "base").unchanged
    assert store.push(remote, "base").requests == 2  # the reference, and what is noted
    for name in ("base", "tiny"):
        pulled(tmp_path, bucket, name, f"of-{name}")


def test_a_plain_push_of_a_run_sends_again_its_damaged_step(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    store, remote = open_store(tmp_path / "runs"), Remote(bucket)
    with CheckpointStore(store, "run-001") as run:
        for step in range(3):
            run.save({"w": np.frombuffer(noise(step, 99_000), np.uint8)}, step=step)
    store.push(remote, "run-001@0")  # with what all have in common
    shared = only(bucket)
    store.push(remote, "run-001@1")
    [own] = {key for key in bucket.objects if key.startswith(layout.CONTAINERS)} - {shared}
    store.push(remote, "run-001")
    spoil(bucket, own)
    assert not remote.verify(full=True).fine
    refs = {key: found for key, found in bucket.objects.items() if key.startswith(layout.REFS)}
    again = store.push(remote, "run-001")
    assert (again.moved_pieces, again.moved_bytes) == (1, 99_000)
    for key in ("refs/run-001@0", "refs/run-001@2"):
        assert bucket.objects[key] == refs[key]
    assert remote.verify(full=True).fine


def test_a_plain_push_of_a_new_step_sends_again_what_others_of_its_run_have_lost(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    store, remote = open_store(tmp_path / "runs"), Remote(bucket)
    before = {key for key in bucket.objects if key.startswith(layout.MANIFESTS)}
    with CheckpointStore(store, "run-001") as run:
        run.save({"w": np.frombuffer(noise(0, 99_000), np.uint8)}, step=0)
        store.push(remote, "run-001")
        run.save({"w": np.frombuffer(noise(1, 99_000), np.uint8)}, step=1)
    for key in [key for key in bucket.objects if key.startswith(layout.MANIFESTS)]:
        if key not in before:
            del bucket.objects[key]
    assert not remote.verify().fine
    store.push(remote, "run-001")
    assert remote.verify(full=True).fine
    assert open_store(tmp_path / "other").pull(remote, "run-001").names == (
        "run-001@0",
        "run-001@1",
    )


def test_what_verify_found_damaged_is_not_listed_as_fine(
    apart: tuple[Store, MemoryBucket],
) -> None:
    store, bucket = apart
    remote = Remote(bucket)
    assert not remote.verify(full=True).fine
    for found in (remote.checkpoints(), remote.usage().checkpoints):
        assert [each.name for each in found] == ["base", "tiny"]
        assert "found damaged" in (found[0].damage or "")
        assert found[1].damage is None
    assert remote.names() == ["base", "tiny"]
    store.push(remote, "base")
    for found in (remote.checkpoints(), remote.usage().checkpoints):
        assert not any(each.damage for each in found)


@pytest.mark.parametrize("what", ["checkpoints", "usage"])
def test_what_is_pushed_beside_is_not_listed_as_damaged(
    tmp_path: Path, apart: tuple[Store, MemoryBucket], what: str
) -> None:
    """The catalog that notes some damage was read before the name was there."""
    store, bucket = apart
    assert not Remote(bucket).verify(full=True).fine
    assert noted_damage(bucket)
    store.import_(
        write(tmp_path / "new", {"model.safetensors": safetensors(u8(n=b"n" * 99))}), "new"
    )

    class Beside(MemoryBucket):
        pushed = False

        def list(self, prefix: str) -> Iterator[ObjectStatus]:
            if prefix.startswith(layout.REFS) and not self.pushed:
                self.pushed = True
                store.push(Remote(bucket), "new")
            return super().list(prefix)

    server = Beside()
    server.objects, server.clock = bucket.objects, bucket.clock
    remote = Remote(server)
    found = remote.checkpoints() if what == "checkpoints" else [*remote.usage().checkpoints]
    assert server.pushed
    assert {each.name: each.damage is None for each in found} == {
        "base": False,
        "tiny": True,
        "new": True,
    }


@pytest.mark.parametrize("lease", [0, 24])
def test_a_sweep_deletes_nothing_that_the_head_names(
    tmp_path: Path, full: Store, lease: int
) -> None:
    """Though what the catalog says when a name is deleted, it has said before."""
    bucket = MemoryBucket()
    proxy = FaultyProxy(MemoryS3(bucket))  # equal bytes have equal tags there
    remote = Remote(client(proxy.port))
    for name in ("base", "tune"):
        full.push(remote, name)
    remote.delete("tune")
    deleted = set[str]()
    for _ in range(4):
        bucket.clock += 1.5 * lease * HOUR
        deleted |= {*remote.gc(lease).delete}
        named = read_catalog(remote.bucket, with_trash=True)  # which reads segments and trash
        assert named is not None
        assert named.containers
    assert {key.split("/")[0] for key in deleted} >= {"catalog", "trash", "containers"}
    assert remote.verify(full=True).fine
    proxy.close()


@pytest.mark.usefixtures("full")
def test_a_sweep_that_finds_nothing_to_do_writes_nothing(bucket: MemoryBucket) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    assert remote.gc(24).condemn
    assert remote.gc(24).condemn  # the segments that became one
    before = dict(bucket.objects)
    gate = Faulty(bucket)
    assert Remote(gate).gc(24).done
    assert bucket.objects == before
    assert not [call for call in gate.calls if call.startswith("put")]


@pytest.mark.usefixtures("full")
def test_a_sweep_keeps_the_segment_that_says_what_is_so(bucket: MemoryBucket) -> None:
    """Of a large remote, it has many megabytes."""
    remote = Remote(bucket)
    remote.delete("tune")
    remote.delete("tiny")
    bucket.clock += 25 * HOUR
    remote.gc(24)  # several segments become one
    bucket.clock += 12 * HOUR
    gate = Faulty(bucket)
    bucket.put("tmp/12-0123456789ab", [memoryview(b"old")])
    bucket.clock += 12.5 * HOUR
    segments = read_catalog(bucket)
    assert segments is not None
    assert Remote(gate).gc(12).delete
    after = read_catalog(bucket)
    assert after is not None
    assert not {*after.segments} & {*segments.segments}  # containers have left
    bucket.put("tmp/13-0123456789ab", [memoryview(b"old")])
    bucket.clock += 12.5 * HOUR
    assert "tmp/13-0123456789ab" in Remote(gate).gc(12).condemn
    last = read_catalog(bucket)
    assert last is not None
    assert last.segments.keys() == after.segments.keys()


def calls_of(bucket: MemoryBucket) -> int:
    probe = Faulty(bucket.copied())
    Remote(probe).gc(24)
    return len(probe.calls)


def test_a_push_at_any_moment_of_a_gc_loses_nothing(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """The push uses again what the gc is about to delete."""
    Remote(bucket).delete("tune")
    bucket.clock += 25 * HOUR
    assert Remote(bucket).gc(24).condemn
    bucket.clock += 25 * HOUR
    assert Remote(bucket.copied()).gc(24).delete
    refused = 0
    for number in range(calls_of(bucket)):
        inner = bucket.copied()

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


@pytest.mark.parametrize("broken", ["damaged", "gone"])
def test_what_is_condemned_stays_so_when_a_segment_is_broken(
    tmp_path: Path, bucket: MemoryBucket, full: Store, broken: str
) -> None:
    """No table says what is condemned, so a catalog that is put together anew takes it over."""
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    condemned = remote.gc(24).condemn
    assert condemned
    before = read_catalog(bucket, with_trash=True)
    assert before is not None
    for segment in before.segments:
        key = layout.segment_key(segment.hex())
        blob, tag, when = bucket.objects.pop(key)
        if broken == "damaged":
            bucket.objects[key] = (blob[:-9] + bytes(9), tag, when)
    with pytest.raises(DamagedRemoteError if broken == "damaged" else MissingRemoteError):
        read_catalog(bucket, with_trash=True)
    again = catalog_of(bucket)
    assert again.trash == before.trash
    assert {*again.trash.condemned} >= {key for key in condemned if key.startswith("containers/")}
    assert again.containers.keys() == before.containers.keys()
    # The next push names it in the new head, and the sweep after the lease deletes it.
    full.import_(tmp_path / "tiny", "more")
    full.push(remote, "more")
    after = read_catalog(bucket, with_trash=True)
    assert after is not None
    assert after.trash == before.trash
    bucket.clock += 25 * HOUR
    assert {*before.trash.condemned} <= {*remote.gc(24).delete}
    for name in ("base", "tiny"):
        pulled(tmp_path, bucket, name, f"of-{name}")


class OldAnswers(MemoryBucket):
    """One that says of some containers that they are not there, or cannot be read."""

    denied = 0
    lost = False

    def head(self, key: str) -> ObjectStatus | None:
        if self.denied and key.startswith(layout.CONTAINERS):
            self.denied -= 1
            return None
        return super().head(key)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        if self.lost:
            raise RemoteUnreachableError.at(self.at(key), "timed out")
        return super().get_range(key, start, stop)


def test_what_a_server_says_twice_is_gone_is_sent_again(tmp_path: Path) -> None:
    """And noted; though it is there, nothing is lost by that."""
    bucket, paths = OldAnswers(), three(tmp_path)
    store = open_store(tmp_path / "full")
    for name in ("base", "tune"):
        store.import_(paths[name], name, compress="auto")
    store.push(Remote(bucket), "base")
    there = {*catalog_of(bucket).containers}
    bucket.clock += 25 * HOUR
    bucket.denied = 2
    assert store.push(Remote(bucket), "tune").moved_bytes > 0
    assert not bucket.denied
    after = catalog_of(bucket)
    assert after.damaged == {*map(layout.container_key, there)}
    assert not there & {*after.containers}
    Remote(bucket).delete("base")
    Remote(bucket).gc(24)
    assert not Remote(bucket).gc(24).delete
    pulled(tmp_path, bucket, "tune", "again")
    assert "it is whole" in Remote(bucket).verify(full=True).faults[0].what
    assert Remote(bucket).verify(full=True).fine
    pulled(tmp_path, bucket, "tune", "and again")


def test_a_note_of_damage_is_taken_back_where_all_is_whole(tmp_path: Path) -> None:
    """The server said twice that a container is gone, and nobody pushes its checkpoint again."""
    bucket, paths = OldAnswers(), three(tmp_path)
    store = open_store(tmp_path / "full")
    for name in ("base", "tune"):
        store.import_(paths[name], name, compress="auto")
    store.push(Remote(bucket), "base")
    bucket.denied = 2
    store.push(Remote(bucket), "tune")
    remote = Remote(bucket)
    [noted] = catalog_of(bucket).damaged
    assert [each.name for each in remote.checkpoints() if each.damage] == ["base"]
    assert remote.verify().fine  # which reads no tensors, and so says nothing of them
    assert [each.name for each in remote.checkpoints() if each.damage] == ["base"]
    [fault] = remote.verify(full=True).faults
    assert fault.url.endswith(noted)
    assert "it is whole" in fault.what
    assert not fault.affected
    assert not any(each.damage for each in remote.checkpoints())
    assert remote.verify(full=True).fine
    after = catalog_of(bucket)
    assert not after.damaged
    assert noted in {layout.container_key(each) for each in after.containers}
    other = open_store(tmp_path / "other")
    other.import_(paths["base"], "base")
    other.import_(tmp_path / "tiny", "more")
    assert other.push(remote, "base").unchanged
    bucket.clock += 1000 * HOUR
    assert not remote.gc(24).condemn or noted not in remote.gc(24).condemn
    pulled(tmp_path, bucket, "base", "again")


def test_what_is_damaged_stays_noted_where_other_things_are_whole(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    keys = sorted(key for key in bucket.objects if key.startswith("containers/"))
    blob, tag, when = bucket.objects[keys[0]]
    bucket.objects[keys[0]] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)
    for _ in range(2):
        assert any(fault.affected for fault in Remote(bucket).verify(full=True).faults)
        assert catalog_of(bucket).damaged == {keys[0]}


class Away(MemoryBucket):
    """One that cannot be asked for the objects of a folder."""

    folder = "-"
    error: type[RemoteUnreachableError | RemoteAccessError] = RemoteUnreachableError

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        if key.startswith(self.folder):
            raise self.error.at(self.at(key), "for now")
        return super().get(key, limit)


@pytest.mark.parametrize("folder", ["tables/", "manifests/", "refs/", "catalog/"])
@pytest.mark.parametrize("error", [RemoteUnreachableError, RemoteAccessError])
def test_a_server_that_cannot_be_asked_has_damaged_nothing(
    tmp_path: Path,
    full: Store,
    bucket: MemoryBucket,
    folder: str,
    error: type[RemoteUnreachableError | RemoteAccessError],
) -> None:
    away = Away()
    away.objects, before = dict(bucket.objects), dict(bucket.objects)
    away.folder, away.error = folder, error
    remote = Remote(away)
    with pytest.raises(error):
        remote.verify(full=True)
    with pytest.raises(error):
        remote.gc(0)
    assert away.objects == before
    if error is RemoteUnreachableError and folder in ("manifests/", "refs/"):
        with pytest.raises(error):
            remote.checkpoints()
    away.folder = "-"
    assert remote.verify(full=True).fine
    assert not any(each.damage for each in remote.checkpoints())


def test_no_catalog_is_put_together_from_tables_that_cannot_be_read(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    away = Away()
    away.objects = dict(bucket.objects)
    del away.objects[layout.HEAD]
    away.folder = "tables/"
    store = open_store(tmp_path / "more")
    store.import_(tmp_path / "base", "more")
    with pytest.raises(RemoteUnreachableError):
        store.push(Remote(away), "more")
    assert layout.HEAD not in away.objects
    away.folder = "-"
    assert store.push(Remote(away), "more").moved_pieces == 0


class ReadOnly(MemoryBucket):
    """One that this user may only read."""

    def now(self) -> float:
        return Bucket.now(self)  # which writes an object

    def put(self, key: str, chunks: Chunks) -> None:
        raise RemoteAccessError.at(self.at(key), "403 Forbidden")

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        raise RemoteAccessError.at(self.at(key), "403 Forbidden")


@pytest.mark.usefixtures("full")
def test_who_may_only_read_is_told_what_is_damaged(bucket: MemoryBucket) -> None:
    theirs = ReadOnly()
    theirs.objects = dict(bucket.objects)
    key = min(key for key in theirs.objects if key.startswith("containers/"))
    blob, tag, when = theirs.objects[key]
    theirs.objects[key] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)
    expected = Remote(bucket.copied()).verify(full=True)
    assert expected.fine
    found = Remote(theirs).verify(full=True)
    assert [fault.url for fault in found.faults if fault.affected] == [f"memory://test/{key}"]


@pytest.mark.usefixtures("full")
def test_who_may_only_read_is_told_what_a_gc_would_do(bucket: MemoryBucket) -> None:
    Remote(bucket).delete("tune")
    theirs = ReadOnly()
    theirs.objects = dict(bucket.objects)
    expected = Remote(bucket.copied()).gc(0, dry_run=True)
    assert expected.delete
    assert Remote(theirs).gc(0, dry_run=True) == expected
    with pytest.raises(RemoteAccessError):
        Remote(theirs).gc(0)
    assert theirs.objects == bucket.objects


def test_what_cannot_be_read_for_now_is_not_called_damaged(tmp_path: Path) -> None:
    bucket = OldAnswers()
    store = open_store(tmp_path / "full")
    store.import_(three(tmp_path)["base"], "base")
    store.push(Remote(bucket), "base")
    before = catalog_of(bucket)
    bucket.lost = True
    with pytest.raises(RemoteUnreachableError):
        Remote(bucket).verify(full=True)
    after = catalog_of(bucket)
    assert after.containers == before.containers
    assert not after.damaged


@pytest.mark.usefixtures("full")
def test_what_was_found_damaged_is_given_the_lease_too(bucket: MemoryBucket) -> None:
    remote = Remote(bucket)
    remote.delete("tune")
    for key in [key for key in bucket.objects if key.startswith(layout.CONTAINERS)]:
        blob, tag, when = bucket.objects[key]
        bucket.objects[key] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)
    assert not remote.verify(full=True).fine
    found = catalog_of(bucket).damaged
    assert found
    bucket.clock += 25 * HOUR
    assert not found & {*remote.gc(24).delete}
    assert not found & {*remote.gc(24).delete}
    assert catalog_of(bucket).damaged == found  # no push relies on what may be deleted
    bucket.clock += 25 * HOUR
    deleted = found & {*remote.gc(24).delete}
    assert deleted
    assert deleted < found  # base and tiny still refer to theirs
    assert catalog_of(bucket).damaged == found - deleted
