"""Runs whose steps each change another leaf, on remotes, where each leaf travels and lies once."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from remote_runs.bounds import assert_priced, held_pieces, most_bytes, most_requests
from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.parted_runs import (
    BASE,
    BOOKS,
    LEAVES,
    all_tables,
    check,
    data_of,
    in_parts,
    model,
    parted_run,
    save_parted_run,
)
from store_runs.stores import (
    Model,
    assert_same,
    handle,
    memory_folder,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    weights,
    write,
)
from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.remote import Remote, catalog, layout, transfer
from tensor_dedup.remote.buckets import Bucket
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    MissingRemoteError,
    RemoteUnreachableError,
)
from tensor_dedup.remote.inventory import take_inventory
from tensor_dedup.remote.pull import open_pulled
from tensor_dedup.remote.results import SilentTransfer
from tensor_dedup.store import LocalStore
from tensor_dedup.store.errors import CorruptTensorError
from tensor_dedup.store.format import frames, tables
from tensor_dedup.store.format.tables import Record, Table
from tensor_dedup.training import CheckpointStore


@pytest.fixture(scope="module", params=[None, "auto"])
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[Path, str | None]]:
    with memory_folder() as folder:
        save_parted_run(folder / "store", request.param)
        yield folder / "store", request.param


@pytest.fixture
def run(saved: tuple[Path, str | None], tmp_path: Path) -> Iterator[CheckpointStore]:
    template, compress = saved
    with parted_run(template, tmp_path / "store", compress) as run:
        yield run


def parts_there(remote: Path) -> dict[bytes, Record]:
    """The records of a remote that have parts, by digest."""
    found = {r.digest: r for table in tables_there(remote) for r in table.records if r.parts}
    alone = {r.digest for table in tables_there(remote) for r in table.records if r.base is None}
    assert all(alone.issuperset(record.bases) for record in found.values())
    return found


def tables_there(remote: Path) -> list[Table]:
    paths = [path for path in (remote / "tables").rglob("*") if path.is_file()]
    return [frames.decode(path.read_bytes(), tables.KIND, Table, path) for path in paths]


def sent(remote: Path) -> int:
    return sum(p.stat().st_size for p in (remote / "containers").rglob("*") if p.is_file())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_remote_gets_each_leaf_once(run: CheckpointStore, tmp_path: Path, at_once: bool) -> None:
    there, store = tmp_path / "remote", run.store
    url = there.as_uri()
    names = [f"run@{step}" for step in range(LEAVES)]
    costs = []
    for each in ["run"] if at_once else names:
        before = sent(there)
        result = transfer.push(store, url, each)
        assert result.moved_bytes <= sent(there) - before
        costs.append(sent(there) - before)
    if at_once:
        assert costs[0] <= 2 * len(BASE) + LEAVES * 300_000, costs
    else:
        assert all(cost <= LEAF_BYTES + 200_000 + 2 * BOOKS for cost in costs[1:]), costs
    assert parts_there(there).keys() == in_parts(store).keys()
    remote = Remote.open(url)
    assert remote.verify(full=True).faults == ()
    other = open_store(tmp_path / "other")
    for name in reversed(names):
        other.pull(url, name)
        assert stored(other, name) == stored(store, name)
    check(run, list(range(LEAVES)), other.path)
    # Parts have containers of their own there, too, so pruning frees what the others take.
    assert in_parts(other).keys() == in_parts(store).keys()
    parts = {part for record in in_parts(other).values() for part in record.parts.values()}
    for table in all_tables(other).values():
        held = {record.digest for record in table.records if record.nbytes == LEAF_BYTES}
        assert held <= parts or not held & parts


def test_a_remote_keeps_what_the_last_step_needs_and_no_more(tmp_path: Path) -> None:
    """What lies with a part stays as long as that: so nothing large does."""
    there, dense = tmp_path / "remote", 2 * LEAF_BYTES

    def step_of(step: int) -> Model:
        other = np.frombuffer(noise(1000 + step, dense), np.uint8).copy()
        return {"embedding": model(step)["embedding"], "dense": other}

    with handle(tmp_path / "store", compress=None) as run:
        for step in range(LEAVES):
            run.save(step_of(step), step)
            transfer.push(run.store, there.as_uri(), f"run@{step}")
    remote = Remote.open(there.as_uri())
    for step in range(LEAVES - 1):
        remote.delete(f"run@{step}")
    assert sent(there) > LEAVES * dense
    for _ in range(3):
        remote.gc(0)
    # The first one is in a container with the anchor.
    assert sent(there) < len(BASE) + LEAVES * LEAF_BYTES + 2 * dense + BOOKS
    assert len(parts_there(there)) == 1
    assert remote.verify(full=True).faults == ()
    last, other = f"run@{LEAVES - 1}", open_store(tmp_path / "other")
    other.pull(there.as_uri(), last)
    with handle(other.path) as after:
        assert_same(after.load(LEAVES - 1), step_of(LEAVES - 1))
    # Nobody needs them any more.
    remote.delete(last)
    for _ in range(3):
        remote.gc(0)
    assert sent(there) == 0


def containers_with(remote: Path, digests: Collection[bytes]) -> list[Path]:
    """The containers of a remote that hold one of these pieces."""
    return [
        path
        for path in (remote / "containers").rglob("*.*")
        for table in tables_there(remote)
        if tables.encode(table).name == path.stem
        if {record.digest for record in table.records} & {*digests}
    ]


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_a_part_that_is_lost_there_is_named_and_sent_again(
    run: CheckpointStore, tmp_path: Path, what: str
) -> None:
    there, store, last = tmp_path / "remote", run.store, f"run@{LEAVES - 1}"
    for step in range(LEAVES):
        transfer.push(store, there.as_uri(), f"run@{step}")
    record = in_parts(store)[bytes.fromhex(digest(data_of(LEAVES - 1)))]
    [path] = containers_with(there, [record.parts[2]])
    if what == "gone":
        path.unlink()
    else:
        blob = bytearray(path.read_bytes())
        [table] = [t for t in tables_there(there) if tables.encode(t).name == path.stem]
        [held] = [r for r in table.records if r.digest == record.parts[2]]
        blob[held.offset + held.stored // 2] ^= 1
        path.write_bytes(blob)
    other = open_store(tmp_path / "other")
    with pytest.raises((MissingRemoteError, CorruptRemoteTensorError)):
        other.pull(there.as_uri(), last)
    remote = Remote.open(there.as_uri())
    affected = {name for fault in remote.verify(full=True).faults for name in fault.affected}
    assert affected == {f"run@{step}" for step in range(2, LEAVES)}
    listed = {each.name for each in remote.checkpoints() if each.damage is not None}
    assert listed == affected
    assert not transfer.push(store, there.as_uri(), last).unchanged
    other.pull(there.as_uri(), last)
    check(run, [LEAVES - 1], other.path)
    # What the others need of it is there again, too.
    assert remote.verify(full=True).fine
    for step in range(LEAVES):
        other.pull(there.as_uri(), f"run@{step}")
    check(run, list(range(LEAVES)), other.path)


@pytest.mark.parametrize("noted", [False, True])
def test_what_has_a_part_that_is_damaged_here_is_sent_from_another_copy(
    run: CheckpointStore, tmp_path: Path, noted: bool
) -> None:
    store, last = run.store, f"run@{LEAVES - 1}"
    there = tmp_path / "remote"
    transfer.push(store, there.as_uri(), "run@0")
    record = in_parts(store)[bytes.fromhex(digest(data_of(LEAVES - 1)))]
    [(container, place)] = [
        (container, r)
        for container, table in all_tables(store).items()
        for r in table.records
        if r.digest == record.parts[2]
    ]
    path = store.handle.objects.layout.container(container.name, container.kind)
    blob = bytearray(path.read_bytes())
    blob[place.offset + place.stored // 2] ^= 1
    path.write_bytes(blob)
    with pytest.raises(CorruptTensorError):
        transfer.push(store, there.as_uri(), last)
    assert [each.name for each in Remote.open(there.as_uri()).checkpoints()] == ["run@0"]
    # The same tensor comes, whole, from another store.
    with handle(tmp_path / "whole", compress=None) as whole:
        whole.save({"embedding": model(LEAVES - 1)["embedding"]}, 0)
        transfer.push(whole.store, (tmp_path / "both").as_uri(), "run@0")
    assert not store.verify(full=True).fine
    assert transfer.pull(store, (tmp_path / "both").as_uri(), "run@0", replace=True).moved_pieces
    if not noted:
        store.handle.objects.set_bad_offsets(container.name, ())
        store = open_store(store.path)
    transfer.push(store, there.as_uri(), last)
    assert parts_there(there) == {}
    other = open_store(tmp_path / "other")
    other.pull(there.as_uri(), last)
    check(run, [LEAVES - 1], other.path)


def test_a_run_is_drained_to_a_remote_and_begun_again_there(tmp_path: Path) -> None:
    there = tmp_path / "remote"
    with handle(tmp_path / "fast", compress=None, drain=there.as_uri()) as run:
        costs = []
        for step in range(LEAVES):
            before = sent(there)
            run.save(model(step), step)
            run.drain()
            costs.append(sent(there) - before)
    assert all(cost <= LEAF_BYTES + 200_000 + 2 * BOOKS for cost in costs[1:]), costs
    assert len(parts_there(there)) == LEAVES - 1
    with handle(tmp_path / "new", compress=None, drain=there.as_uri()) as after:
        assert after.latest() == LEAVES - 1
        assert_same(after.load(LEAVES - 1), model(LEAVES - 1))
        after.save(model(LEAVES), LEAVES)
        after.drain()
        assert_same(after.load(LEAVES), model(LEAVES))


def test_each_step_costs_its_leaf_and_few_requests(tmp_path: Path) -> None:
    bucket, there = MemoryBucket(), 0
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(24):
            run.save({"embedding": wide(step)}, step)
            result = transfer.push(run.store, Remote(bucket), f"run@{step}")
            if step:
                assert result.moved_bytes < LEAF_BYTES + 10_000
                pieces = held_pieces(bucket)
                assert_priced(result.wire_bytes, result.requests, result.moved_bytes, pieces)
            there += result.moved_bytes
    other = open_store(tmp_path / "other")
    last = other.pull(Remote(bucket), "run@23")
    assert last.anchor_pieces == 24
    assert there - 100_000 < last.moved_bytes <= there
    assert last.wire_bytes <= most_bytes(last.moved_bytes, held_pieces(bucket))
    assert last.requests <= most_requests(last.moved_bytes, gaps=24)  # each step's container
    fresh = open_store(tmp_path / "fresh")
    for step in (22, 23):
        result = fresh.pull(Remote(bucket), f"run@{step}")
    assert result.moved_bytes < LEAF_BYTES + 10_000
    assert result.requests <= most_requests(result.moved_bytes)
    assert result.anchor_pieces <= 1


@pytest.fixture
def two(tmp_path: Path) -> tuple[LocalStore, MemoryBucket]:
    """A run of two steps, the second of which has one part, and a remote with both."""
    bucket = MemoryBucket()
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(2):
            run.save({"embedding": model(step)["embedding"]}, step)
            transfer.push(run.store, Remote(bucket), f"run@{step}")
    return run.store, bucket


@pytest.mark.parametrize("afresh", [True, False])
def test_what_is_pulled_afresh_does_not_rely_on_what_is_here(
    tmp_path: Path, two: tuple[LocalStore, MemoryBucket], afresh: bool
) -> None:
    """What a tensor is stored against may be damaged here, too."""
    store, bucket = two
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "run@1")
    [base] = {record.base for record in in_parts(other).values()}
    objects = other.handle.objects
    for container, table in all_tables(other).items():
        path = objects.layout.container(container.name, container.kind)
        blob = bytearray(path.read_bytes())
        for record in table.records:
            if record.digest == base:
                blob[record.offset + record.stored // 2] ^= 1
                path.write_bytes(blob)
    with other.handle.session() as (index, hasher):
        here = objects, index, hasher
        opened = open_pulled(bucket, "run@1", here, SilentTransfer(), afresh=afresh)
    with opened as checkpoint, store.checkpoint("run@1") as right:
        [tensor] = [t for t in right if t.nbytes == len(BASE)]
        digest_ = bytes.fromhex(tensor.digest)
        if afresh:
            read = checkpoint.read_piece(digest_, 0, tensor.nbytes, tensor.nbytes)
            assert read == right.read_piece(digest_, 0, tensor.nbytes, tensor.nbytes)
        else:
            with pytest.raises(CorruptTensorError):
                checkpoint.read_piece(digest_, 0, tensor.nbytes, tensor.nbytes)


def without(bucket: MemoryBucket, digest_: bytes) -> None:
    """Lose the containers that hold a piece, and their tables."""
    found = take_inventory(bucket)
    for container, table in found.tables.items():
        if digest_ in {record.digest for record in table.records}:
            del bucket.objects[layout.container_key(container)]
            del bucket.objects[layout.table_key(container.name)]


def test_a_catalog_lists_what_has_all_of_its_parts(two: tuple[LocalStore, MemoryBucket]) -> None:
    _, bucket = two
    [(container, table, record)] = [
        (container, table, record)
        for container, table in take_inventory(bucket).tables.items()
        for record in table.records
        if record.parts
    ]
    assert len(record.bases) == 2
    for base in record.bases:
        assert not catalog.listed(container, table, {base}).deltas
    entry = catalog.listed(container, table, {*record.bases})
    assert entry.deltas == record.digest[: catalog.PREFIX_BYTES]
    # Where it is put together from tables, what has lost a part is sent again.
    [part] = record.parts.values()
    without(bucket, part)
    assert not catalog.rebuilt(bucket).holders(record.digest)


def test_what_a_step_takes_there_has_its_parts(two: tuple[LocalStore, MemoryBucket]) -> None:
    _, bucket = two
    before = {each.name: each.unique_bytes for each in Remote(bucket).usage().checkpoints}
    assert before["run@0"] == 0  # the anchor is both's
    assert (before["run@1"] or 0) >= LEAF_BYTES
    Remote(bucket).delete("run@0")
    [last] = Remote(bucket).usage().checkpoints
    assert last.unique_bytes is not None
    assert last.unique_bytes >= len(BASE) + LEAF_BYTES


def test_what_has_lost_a_part_is_pulled_from_another_copy(
    tmp_path: Path, two: tuple[LocalStore, MemoryBucket]
) -> None:
    store, bucket = two
    [record] = in_parts(store).values()
    [part] = record.parts.values()
    without(bucket, part)
    assert not Remote(bucket).verify().fine
    with handle(tmp_path / "whole", "other", compress=None) as whole:
        whole.save({"embedding": model(1)["embedding"]}, 0)
        assert transfer.push(whole.store, Remote(bucket), "other@0").moved_pieces == 1
    tables_ = take_inventory(bucket).tables.values()
    assert len([r for table in tables_ for r in table.records if r.digest == record.digest]) == 2
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "run@1")
    assert stored(other, "run@1") == stored(store, "run@1")


def pushed_next(tmp_path: Path, store: LocalStore, bucket: Bucket) -> None:
    """Push a step that needs the part of the one before, and one more; pull it elsewhere."""
    with handle(store.path, compress=None) as run:
        run.save({"embedding": model(2)["embedding"]}, 2)
        assert sorted(len(record.parts) for record in in_parts(store).values()) == [1, 2]
        transfer.push(run.store, Remote(bucket), "run@2")
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "run@2")
    assert stored(other, "run@2") == stored(store, "run@2")


def test_a_part_that_is_relied_on_is_looked_for(
    tmp_path: Path, two: tuple[LocalStore, MemoryBucket]
) -> None:
    store, bucket = two
    [record] = in_parts(store).values()
    without(bucket, record.parts[1])
    pushed_next(tmp_path, store, bucket)


def test_a_part_that_is_relied_on_and_deleted_meanwhile_is_sent_again(
    tmp_path: Path, two: tuple[LocalStore, MemoryBucket]
) -> None:
    store, bucket = two
    [record] = in_parts(store).values()
    Remote(bucket).delete("run@1")
    deleted: list[str] = []

    class Slow(Faulty):
        """A push, in the midst of which two sweeps come, a lease apart."""

        def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
            if key.startswith("containers/") and not deleted:
                for _ in range(2):
                    bucket.clock += 25 * 3600
                    deleted.extend(Remote(bucket).gc(24).delete)
            super().put(key, chunks)

    [container] = [
        layout.container_key(container)
        for container, table in take_inventory(bucket).tables.items()
        if record.parts[1] in {each.digest for each in table.records}
    ]
    pushed_next(tmp_path, store, Slow(bucket))
    assert container in deleted


@pytest.mark.parametrize("before", [False, True])
def test_a_part_that_is_a_piece_too_is_there_without_a_base(tmp_path: Path, before: bool) -> None:
    """As a piece it is stored, and was sent `before`, as a difference from another."""
    small, large = weights(7, LEAF_BYTES), noise(1, 4 * LEAF_BYTES)
    leaf = tuned(small, 8)
    mixed = large[:LEAF_BYTES] + leaf + large[2 * LEAF_BYTES :]
    bucket, part = MemoryBucket(), bytes.fromhex(digest(leaf))
    with handle(tmp_path / "store", compress=None) as run:
        store, remote = run.store, Remote(bucket)
        for name, data in {"base": small, "tune": leaf}.items():
            tensors = {"small": ("BF16", (len(data) // 2,), data)}
            path = write(tmp_path / name, {"model.safetensors": safetensors(tensors)})
            store.import_(path, name, compress="auto")
            if before or name == "base":
                transfer.push(store, remote, name)
        run.save({"large": np.frombuffer(large, np.uint8)}, 0)
        transfer.push(store, remote, "run@0")
        run.save({n: np.frombuffer(d, np.uint8) for n, d in {"b": mixed, "a": leaf}.items()}, 1)
        assert [record.parts for record in in_parts(store).values()] == [{1: part}]
        records = [r for table in all_tables(store).values() for r in table.records]
        assert {bool(record.base) for record in records if record.digest == part} == {True, False}
        transfer.push(store, remote, "run@1")
        there = [r for t in take_inventory(bucket).tables.values() for r in t.records]
        assert [record.parts for record in there if record.parts] == [{1: part}]
        assert any(r.digest == part and r.base for r in there) == before
        other = open_store(tmp_path / "other")
        other.pull(remote, "run@1")
        assert stored(other, "run@1") == stored(store, "run@1")
    assert remote.verify(full=True).fine


class Hit(MemoryBucket):
    """A server, which takes no request for nothing; the first range of a container comes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = set[str]()

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        if start >= stop:
            raise RemoteUnreachableError.at(self.at(key), f"range started at {start}")
        found = super().get_range(key, start, stop)
        if key in self.hits:
            self.hits.remove(key)
            return memoryview(bytes([found[0] ^ 1]) + found[1:])
        return found


def test_a_record_of_references_that_was_hit_on_its_way_is_fetched_again(tmp_path: Path) -> None:
    """Its chunks are nothing, which no server sends."""
    bucket = Hit()
    with handle(tmp_path / "store", compress=None) as run:
        for step in range(2):
            run.save({"embedding": model(step)["embedding"]}, step)
            transfer.push(run.store, Remote(bucket), f"run@{step}")
    other = open_store(tmp_path / "other")
    other.pull(Remote(bucket), "run@0")
    bucket.hits.update(key for key in bucket.objects if key.endswith(".delta"))
    assert len(bucket.hits) == 1
    other.pull(Remote(bucket), "run@1")
    assert not bucket.hits
    assert stored(other, "run@1") == stored(run.store, "run@1")


def wide(step: int) -> NDArray[np.uint8]:
    """A tensor of 31 leaves of which one more has changed in each step."""
    found = np.zeros(31 * LEAF_BYTES, np.uint8)
    found[::4096] = np.arange(len(found) // 4096) % 251
    for number in range(1, step + 1):
        found[number * LEAF_BYTES + 7] = number
    return found
