"""What `verify`, `gc` and `du` find while others push, and of what nobody needs any longer."""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from remote_runs.remotes import Chunks, Faulty, MemoryBucket
from store_runs.stores import noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, RemoteGcPlan, RemoteUsage, RemoteVerifyResult, layout
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.catalog import (
    CatalogChange,
    Deletion,
    Trash,
    catalog_of,
    commit,
    note_damage,
    noted_damage,
    read_table,
)
from tensor_dedup.remote.errors import (
    RemoteAccessError,
    UncertainRemoteError,
)
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format import tables

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with two checkpoints that have a tensor in common, and one that has nothing of it."""
    found = open_store(tmp_path / "store")
    for name, tensors in {
        "one": {"a": noise(1, 30_000), "b": noise(2, 30_000)},
        "two": {"a": noise(1, 30_000), "b": noise(3, 30_000)},
        "new": {"c": noise(4, 30_000)},
    }.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})
        found.import_(path, name)
    return found


VERBS: dict[str, Callable[[Remote], object]] = {
    "verify": lambda remote: remote.verify(),
    "verify_full": lambda remote: remote.verify(full=True),
    "du": lambda remote: remote.usage(),
    "gc": lambda remote: remote.gc(24),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_push_that_ends_meanwhile_is_no_damage(store: Store, verb: str) -> None:
    """Whatever was listed or read before, and whatever comes later."""
    start = MemoryBucket()
    store.push(Remote(start), "one")
    probe = Faulty(start.copied())
    VERBS[verb](Remote(probe))
    assert len(probe.calls) > 5
    for number in range(len(probe.calls)):
        bucket = start.copied()

        def push(bucket: MemoryBucket = bucket) -> None:
            for name in ("new", "two"):  # which relies on what is there
                store.push(Remote(bucket), name)

        gate = Faulty(bucket, number, meanwhile=push)
        found = VERBS[verb](Remote(gate))
        assert gate.struck
        if isinstance(found, RemoteVerifyResult):
            assert found.fine, (number, found.faults)
        elif isinstance(found, RemoteUsage):
            assert not [each for each in found.checkpoints if each.damage], number
        else:
            assert isinstance(found, RemoteGcPlan)
            assert not found.delete
        assert Remote(bucket).names() == ["new", "one", "two"]
        assert not noted_damage(bucket)
        assert Remote(bucket).verify(full=True).fine, number


class Together(MemoryBucket):
    """A reference is only answered when another one is asked for, too."""

    each = Bucket.each

    def __init__(self) -> None:
        super().__init__()
        self.pair: threading.Barrier | None = None

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        if key.startswith(layout.REFS) and self.pair is not None:
            self.pair.wait(60)
        return super().get(key, limit)


def test_references_are_read_at_once(store: Store) -> None:
    bucket = Together()
    remote = Remote(bucket)
    for name in ("one", "two"):
        store.push(remote, name)
    bucket.pair = threading.Barrier(2)
    assert remote.gc(24).done
    assert remote.verify(full=True).fine
    assert sorted(each.name for each in remote.usage().checkpoints) == ["one", "two"]


def spoil(bucket: MemoryBucket, key: str) -> None:
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (blob[:50], tag, when)


def first_container(bucket: MemoryBucket) -> str:
    """The key of the container that came with the first push."""
    (key,) = [key for key in bucket.objects if key.startswith(layout.CONTAINERS)]
    return key


def table_of(key: str) -> str:
    container = layout.container_of(key)
    assert container is not None
    return layout.table_key(container.name)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("lost", ["gone", "damaged", "gone with the catalog"])
def test_a_table_that_is_lost_is_written_again_from_its_container(
    tmp_path: Path, store: Store, lost: str, full: bool
) -> None:
    """A pull reads the one in the container: `verify` must not take that from it."""
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    table = table_of(first_container(bucket))
    whole = bucket.objects[table][0]
    if lost == "damaged":
        spoil(bucket, table)
    else:
        del bucket.objects[table]
    if lost == "gone with the catalog":
        del bucket.objects[layout.HEAD]
    with pytest.raises(UncertainRemoteError):
        remote.gc(24)
    theirs = ReadOnly()
    theirs.objects = dict(bucket.objects)
    for found in (Remote(theirs).verify(full=full), remote.verify(full=full)):
        assert bucket.at(table) in {fault.url for fault in found.faults}
        assert {fault.url for fault in found.faults} <= {bucket.at(table), bucket.at(layout.HEAD)}
        assert not any(fault.affected for fault in found.faults)
    assert theirs.objects.keys() >= bucket.objects.keys() - {table}
    assert bucket.objects[table][0] == whole
    assert not noted_damage(bucket)
    assert remote.gc(24).done
    assert remote.verify(full=full).fine
    other = open_store(tmp_path / "other")
    other.pull(remote, "one")
    assert stored(other, "one") == stored(store, "one")


def test_what_was_noted_for_its_table_is_taken_back(tmp_path: Path, store: Store) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    container = first_container(bucket)
    del bucket.objects[table_of(container)]
    note_damage(bucket, [container])
    assert noted_damage(bucket)
    assert not any(fault.affected for fault in remote.verify(full=True).faults)
    assert not noted_damage(bucket)
    assert remote.verify(full=True).fine
    assert store.push(remote, "one").unchanged
    store.import_(tmp_path / "one", "again")
    assert store.push(remote, "again").moved_pieces == 0


def swept_and_lost(store: Store, bucket: MemoryBucket) -> tuple[str, str]:
    """A container that a sweep has begun to delete, and one that a checkpoint needs and is lost."""
    remote = Remote(bucket)
    store.push(remote, "one")
    swept = first_container(bucket)
    store.push(remote, "new")
    (other,) = {key for key in bucket.objects if key.startswith(layout.CONTAINERS)} - {swept}
    remote.delete("one")
    bucket.clock += 25 * HOUR
    assert swept in remote.gc(24).condemn
    for key in (table_of(swept), other):
        del bucket.objects[key]
    return swept, other


@pytest.mark.parametrize("entered", [False, True])
def test_the_table_of_what_a_sweep_deletes_is_not_written_again(
    store: Store, entered: bool
) -> None:
    """It deletes tables first; a catalog that is put together anew would name what is gone."""
    bucket = MemoryBucket()
    swept, _ = swept_and_lost(store, bucket)
    if entered:
        trash = Trash({}, Deletion(int(bucket.clock), [swept, table_of(swept)]))
        commit(bucket, catalog_of(bucket), lambda now: CatalogChange((), (), trash, now.damaged))
    faults = Remote(bucket).verify().faults
    assert any(fault.affected for fault in faults)  # so pieces are looked for
    assert table_of(swept) not in bucket.objects


def list_of_condemned(bucket: MemoryBucket) -> str:
    """The key of the list that the head names."""
    (key,) = [key for key in bucket.objects if key.startswith(layout.TRASH)]
    return key


@pytest.mark.parametrize("lost", ["list gone", "list damaged", "head gone", "head damaged"])
def test_nor_where_nobody_knows_what_a_sweep_deletes(store: Store, lost: str) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    swept, _ = swept_and_lost(store, bucket)
    key = list_of_condemned(bucket) if "list" in lost else layout.HEAD
    if "gone" in lost:
        del bucket.objects[key]
    else:
        blob, tag, when = bucket.objects[key]
        bucket.objects[key] = (blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:], tag, when)
    faults = remote.verify().faults
    (said,) = [fault for fault in faults if "what a sweep is deleting" in fault.what]
    assert said.url == bucket.at(key)
    assert any(fault.affected for fault in faults)
    assert table_of(swept) not in bucket.objects
    # And what it tells to do leads out.
    store.push(remote, "new", replace=True)
    remote.verify()
    assert remote.verify(full=True).fine


def lose_tables(bucket: MemoryBucket, name: str) -> None:
    """Lose the tables of all containers with pieces of a checkpoint."""
    needed = {piece.digest for piece in Remote(bucket).read(name).pieces}
    for key in [key for key in bucket.objects if key.startswith(layout.TABLES)]:
        table = read_table(bucket, key.rpartition("/")[2])
        if needed & {record.digest for record in table.records}:
            del bucket.objects[key]


def test_a_table_is_written_when_it_is_known_again_what_a_sweep_deletes(store: Store) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    swept_and_lost(store, bucket)
    for name in ("new", "two"):
        store.push(remote, name, replace=True)
    spoil(bucket, layout.HEAD)
    lose_tables(bucket, "two")
    for _ in range(2):
        assert any(fault.affected == ("two",) for fault in remote.verify().faults)
    store.push(remote, "new", replace=True)
    assert not any(fault.affected for fault in remote.verify().faults)
    assert remote.verify(full=True).fine
    other = open_store(store.path.parent / "other")
    other.pull(remote, "two")
    assert stored(other, "two") == stored(store, "two")


def test_a_head_that_is_damaged_has_named_no_list_where_there_is_none(store: Store) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    spoil(bucket, layout.HEAD)
    lose_tables(bucket, "one")
    assert not any(fault.affected for fault in remote.verify().faults)
    other = open_store(store.path.parent / "other")
    other.pull(remote, "one")
    assert stored(other, "one") == stored(store, "one")


class ReadOnly(MemoryBucket):
    """One that this user may only read."""

    def put(self, key: str, chunks: Chunks) -> None:
        raise RemoteAccessError.at(self.at(key), "403 Forbidden")

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        raise RemoteAccessError.at(self.at(key), "403 Forbidden")


@pytest.mark.parametrize("cut", ["container", "table"])
def test_what_is_damaged_and_nobody_needs_is_garbage(
    tmp_path: Path, store: Store, cut: str
) -> None:
    """When all that a message asks for is done, nothing is wrong any longer, and gc goes on."""
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    container = first_container(bucket)
    store.push(remote, "two")
    spoil(bucket, container)
    if cut == "table":
        spoil(bucket, table_of(container))
    assert {name for fault in remote.verify().faults for name in fault.affected} == {"one", "two"}
    with pytest.raises(UncertainRemoteError):
        remote.gc(24)
    remote.delete("one")
    store.push(remote, "two", replace=True)
    assert container in noted_damage(bucket)
    assert remote.verify(full=True).fine
    bucket.clock += 25 * HOUR
    remote.gc(24)
    assert container in bucket.objects  # it has the lease, like all garbage
    bucket.clock += 25 * HOUR
    assert {container, table_of(container)} <= {*remote.gc(24).delete}
    assert container not in bucket.objects
    assert remote.verify(full=True).fine
    other = open_store(tmp_path / "other")
    other.pull(remote, "two")
    assert stored(other, "two") == stored(store, "two")


def test_what_is_damaged_and_was_never_noted_stops_gc_while_a_push_may_rely_on_it(
    store: Store,
) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    container = first_container(bucket)
    remote.delete("one")
    store.push(remote, "new")
    spoil(bucket, container)
    with pytest.raises(UncertainRemoteError, match="cannot be read"):
        remote.gc(0)
    assert not remote.verify().fine  # which notes it
    assert remote.verify().fine
    bucket.clock += 1
    remote.gc(0)
    assert container not in bucket.objects
    assert remote.verify(full=True).fine


def of_a_later_version(bucket: MemoryBucket) -> None:
    """Let a container of the remote have a codec that nobody here knows."""
    key = next(key for key in bucket.objects if key.startswith("containers/"))
    container = layout.container_of(key)
    assert container is not None
    table = read_table(bucket, container.name)
    record = msgspec.structs.replace(table.records[0], codec="of 2031")
    later = msgspec.structs.replace(table, records=[record, *table.records[1:]])
    name, blob = tables.encode(later)
    data = bytes(bucket.get_range(key, 0, table.data_bytes))
    made = ContainerId(name, container.kind)
    bucket.put(layout.container_key(made), [memoryview(data + blob + tables.tail(len(data)))])
    bucket.put(layout.table_key(name), [memoryview(blob)])
    for old in (key, layout.table_key(container.name)):
        bucket.delete(old)
    catalog = catalog_of(bucket)
    entries = [
        msgspec.structs.replace(entry, name=bytes.fromhex(name)) if c == container else entry
        for c, entry in catalog.containers.items()
    ]
    commit(bucket, catalog, lambda now: CatalogChange((), entries, now.trash, now.damaged))
    assert made in catalog_of(bucket).containers


def test_what_a_later_version_has_written_is_neither_damage_nor_garbage(store: Store) -> None:
    bucket = MemoryBucket()
    for name in ("one", "two"):
        store.push(Remote(bucket), name)
    of_a_later_version(bucket)
    before = {key: found[0] for key, found in bucket.objects.items()}
    found = Remote(bucket).verify(full=True)
    assert [
        (fault.affected, "use a newer tensor-dedup" in fault.what) for fault in found.faults
    ] == [((), True)]
    assert {key: found[0] for key, found in bucket.objects.items()} == before
    bucket.clock += 1000 * HOUR
    for _ in range(2):
        with pytest.raises(UncertainRemoteError, match=r"later version.*use a newer tensor-dedup$"):
            Remote(bucket).gc(0)
    assert {key: found[0] for key, found in bucket.objects.items()} == before


@pytest.mark.parametrize("folder", [layout.MANIFESTS, layout.TABLES])
def test_a_container_that_lies_in_a_wrong_folder_is_none(store: Store, folder: str) -> None:
    bucket = MemoryBucket()
    remote = Remote(bucket)
    store.push(remote, "one")
    container = first_container(bucket)
    wrong = folder + container.removeprefix(layout.CONTAINERS)
    bucket.objects[wrong] = bucket.objects.pop(container)
    assert bucket.at(wrong) in {fault.url for fault in remote.verify().faults}
    assert remote.usage().containers == 0
    with pytest.raises(UncertainRemoteError):
        remote.gc(0)
    assert wrong in bucket.objects
