"""Where a pull finds pieces: by the catalog and tables, and elsewhere where these do not lead."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from remote_runs import remotes
from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import (
    KIB,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.catalog import (
    CatalogChange,
    Deletion,
    ListedContainer,
    Trash,
    catalog_of,
    commit,
    note_damage,
    read_table,
    rebuilt,
)
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    MissingRemoteError,
    RemoteAccessError,
)
from tensor_dedup.store.codecs.interface import LEAVES
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.tables import Table

Harm = Callable[[MemoryBucket, ContainerId], None]


def imported(tmp_path: Path, store: Store, name: str, **tensors: bytes) -> None:
    file = safetensors({n: ("BF16", (len(d) // 2,), d) for n, d in tensors.items()})
    store.import_(write(tmp_path / name, {"model.safetensors": file}), name)


def pieces(count: int, first: int = 0) -> dict[str, bytes]:
    return {f"w{n}": noise(n, 70 * KIB) for n in range(first, first + count)}


def pushed(tmp_path: Path, name: str, **tensors: bytes) -> MemoryBucket:
    """A remote of its own with one checkpoint."""
    bucket, store = MemoryBucket(), open_store(tmp_path / f"of-{name}")
    imported(tmp_path, store, name, **tensors)
    store.push(Remote(bucket), name)
    return bucket


def pushed_beside(tmp_path: Path, **tensors: bytes) -> MemoryBucket:
    """A remote of its own with the same tensors and header, in a container with something else."""
    bucket, store = MemoryBucket(), open_store(tmp_path / "beside")
    imported(tmp_path, store, "run@0", **tensors)
    imported(tmp_path, store, "run@1", own=noise(99, 900))
    store.push(Remote(bucket), "run")
    return bucket


def join(bucket: MemoryBucket, *others: MemoryBucket) -> None:
    """Bring the containers of other remotes, too, as those do who push at the same time."""
    for other in others:
        both = (layout.CONTAINERS, layout.TABLES)
        bucket.objects |= {k: o for k, o in other.objects.items() if k.startswith(both)}
    relist(bucket, [*rebuilt(bucket).containers.values()])


def relist(bucket: MemoryBucket, entries: list[ListedContainer]) -> None:
    """Write a catalog with these entries."""
    change = lambda now: CatalogChange((), entries, now.trash, now.damaged)  # noqa: E731
    commit(bucket, catalog_of(bucket), change)


def containers(bucket: MemoryBucket) -> list[ContainerId]:
    return [each for key in sorted(bucket.objects) if (each := layout.container_of(key))]


def pull(tmp_path: Path, bucket: MemoryBucket, name: str, folder: str = "there") -> Faulty:
    """Pull a checkpoint into a new store, byte for byte; the bucket with its calls."""
    store, gate = open_store(tmp_path / folder), Faulty(bucket)
    store.pull(Remote(gate), name)
    assert stored(store, name) == content(tmp_path / name)
    assert store.verify(full=True).fine
    return gate


def change(bucket: MemoryBucket, key: str, new: Callable[[bytes], bytes]) -> None:
    blob, tag, when = bucket.objects[key]
    assert new(blob) != blob
    bucket.objects[key] = (new(blob), tag, when)


def spoil(bucket: MemoryBucket, container: ContainerId) -> None:
    """Flip a bit of each piece."""
    spoilt = {r.offset for r in read_table(bucket, container.name).records}
    key = layout.container_key(container)
    change(bucket, key, lambda b: bytes(x ^ (n in spoilt) for n, x in enumerate(b)))


def cut(bucket: MemoryBucket, container: ContainerId) -> None:
    change(bucket, layout.container_key(container), lambda blob: blob[: 100 * KIB])


def lose(bucket: MemoryBucket, container: ContainerId) -> None:
    del bucket.objects[layout.container_key(container)]


def lose_all(bucket: MemoryBucket, container: ContainerId) -> None:
    lose(bucket, container)
    del bucket.objects[layout.table_key(container.name)]


HARMS = pytest.mark.parametrize("harm", [spoil, cut, lose, lose_all])


@HARMS
def test_a_piece_comes_from_another_copy_where_one_is_lost(tmp_path: Path, harm: Harm) -> None:
    """And what has come until then does not come again."""
    bucket = pushed(tmp_path, "w", **pieces(6))
    join(bucket, pushed_beside(tmp_path, **pieces(6)))
    both, used = containers(bucket), 0
    assert len(both) == 2
    whole = dict(bucket.objects)
    for number, container in enumerate(both):
        bucket.objects = dict(whole)
        harm(bucket, container)
        received = bucket.traffic.received
        gate = pull(tmp_path, bucket, "w", f"there-{number}")
        used += f"get_range {layout.container_key(container)}" in gate.calls
        # What is spoilt is asked for twice.
        times = 3 if harm is spoil else 2
        assert bucket.traffic.received - received < (6 * times + 1) * 70 * KIB
    assert used or harm is lose_all


@HARMS
def test_what_has_no_other_copy_is_lost(tmp_path: Path, harm: Harm) -> None:
    bucket, store = pushed(tmp_path, "w", **pieces(3)), open_store(tmp_path / "there")
    [container] = containers(bucket)
    harm(bucket, container)
    with pytest.raises((MissingRemoteError, DamagedRemoteError, CorruptRemoteTensorError)) as lost:
        store.pull(Remote(bucket), "w")
    table, key = layout.table_key(container.name), layout.container_key(container)
    assert (table if harm is lose_all else key) in str(lost.value)
    assert store.names() == []
    assert store.verify(full=True).fine


class Strict(Faulty):
    """As S3 answers those who may only read objects, and do not know whether they are there."""

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        return self._told(key, super().get(key, limit))

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        try:
            return super().get_range(key, start, stop)
        except FileNotFoundError:
            raise self._refusal(key) from None

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        raise self._refusal(prefix)

    def _told(self, key: str, found: tuple[bytes, str] | None) -> tuple[bytes, str]:
        if found is None:
            raise self._refusal(key)
        return found

    def _refusal(self, key: str) -> RemoteAccessError:
        return RemoteAccessError.at(self.at(key), "403")


@pytest.mark.parametrize("harm", [lose, lose_all])
def test_who_may_not_list_gets_the_other_copy_too(tmp_path: Path, harm: Harm) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    join(bucket, pushed_beside(tmp_path, **pieces(3)))
    whole = dict(bucket.objects)
    for number, container in enumerate(containers(bucket)):
        bucket.objects = dict(whole)
        harm(bucket, container)
        store = open_store(tmp_path / f"there-{number}")
        store.pull(Remote(Strict(bucket)), "w")
        assert stored(store, "w") == content(tmp_path / "w")
    for container in containers(bucket):
        harm(bucket, container)
    with pytest.raises(RemoteAccessError, match="403"):
        open_store(tmp_path / "other").pull(Remote(Strict(bucket)), "w")


def test_what_is_swept_and_pushed_again_meanwhile_is_found_by_a_new_catalog(
    tmp_path: Path,
) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    [old] = containers(bucket)
    calls = pull(tmp_path, bucket, "w").calls
    at = next(n for n, call in enumerate(calls) if call.startswith("get_range"))
    again = pushed_beside(tmp_path, **pieces(3))

    def meanwhile() -> None:
        lose_all(bucket, old)
        join(bucket, again)

    store, gate = open_store(tmp_path / "other"), Faulty(bucket, at, meanwhile=meanwhile)
    store.pull(Remote(gate), "w")
    assert gate.struck
    assert stored(store, "w") == content(tmp_path / "w")
    assert gate.calls.count("get catalog/HEAD") == 2
    assert not [call for call in gate.calls if call.startswith("list tables/")]


def lie(bucket: MemoryBucket, aside: MemoryBucket) -> None:
    """Have the catalog say that another remote's container, and it alone, holds the pieces."""
    [entry] = catalog_of(bucket).containers.values()
    [other] = catalog_of(aside).containers.values()
    join(bucket, aside)
    relist(bucket, [replace(other, alone=other.alone + entry.alone)])


@pytest.mark.parametrize("kind", ["HEAD gone", "HEAD spoilt", "segment gone", "no entry", "a lie"])
def test_where_the_catalog_does_not_lead_tables_do(tmp_path: Path, kind: str) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    segment = next(k for k in bucket.objects if k.startswith("catalog/") and k != layout.HEAD)
    if kind == "HEAD gone":
        del bucket.objects[layout.HEAD]
    elif kind == "HEAD spoilt":
        change(bucket, layout.HEAD, lambda blob: blob[:9])
    elif kind == "segment gone":
        del bucket.objects[segment]
    elif kind == "no entry":
        relist(bucket, [])
    else:
        lie(bucket, pushed(tmp_path, "aside", **pieces(2, 50)))
    calls = pull(tmp_path, bucket, "w").calls
    assert calls.count("list tables/") == 1


@pytest.mark.parametrize("kind", ["HEAD gone", "HEAD spoilt", "segment gone"])
def test_where_nothing_can_be_listed_a_damaged_catalog_is_named(tmp_path: Path, kind: str) -> None:
    store, there = open_store(tmp_path / "store"), open_store(tmp_path / "there")
    imported(tmp_path, store, "w", **pieces(3))
    store.push(f"file://{tmp_path}/served", "w")
    head = tmp_path / "served" / layout.HEAD
    [segment] = [path for path in head.parent.iterdir() if path != head]
    with remotes.web(tmp_path / "served") as url:
        whole = open_store(tmp_path / "whole").pull(url, "w")
        assert whole.moved_pieces == whole.pieces
        if kind == "HEAD spoilt":
            head.write_bytes(head.read_bytes()[:9])
        else:
            (segment if kind == "segment gone" else head).unlink()
        named = segment.name if kind == "segment gone" else layout.HEAD
        with pytest.raises((MissingRemoteError, DamagedRemoteError), match=named):
            there.pull(url, "w")
    assert there.names() == []


@pytest.mark.parametrize("what", ["gone", "spoilt"])
@pytest.mark.parametrize("within", [True, False])
def test_a_table_that_is_lost_is_read_within_its_container(
    tmp_path: Path, what: str, within: bool
) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    [container] = containers(bucket)
    table = layout.table_key(container.name)
    if what == "gone":
        del bucket.objects[table]
    else:
        change(bucket, table, lambda blob: blob[:9])
    if within:
        calls = pull(tmp_path, bucket, "w").calls
        assert calls.count("get catalog/HEAD") == 1
        return
    change(bucket, layout.container_key(container), lambda blob: blob[:-1] + b"?")
    error = MissingRemoteError if what == "gone" else DamagedRemoteError
    with pytest.raises(error, match=table):
        pull(tmp_path, bucket, "w")


def test_a_table_of_another_kind_or_a_later_version_leads_nowhere(tmp_path: Path) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    [entry] = catalog_of(bucket).containers.values()
    relist(bucket, [replace(entry, kind="slab")])
    calls = pull(tmp_path, bucket, "w").calls
    assert calls.count("list tables/") == 1
    # A container whose table has a codec of a later version.
    later = pushed(tmp_path, "later", **pieces(3))
    [container] = containers(later)
    old = read_table(later, container.name)
    records = [replace(r, codec="later", stored=99) for r in old.records]
    name, blob = tables.encode(Table("delta", old.data_bytes, records, None))
    later.put(layout.table_key(name), [memoryview(blob)])
    [entry] = catalog_of(later).containers.values()
    relist(later, [replace(entry, name=bytes.fromhex(name), kind="delta")])
    lose_all(later, container)
    with pytest.raises(NewerFormatError, match=name):
        pull(tmp_path, later, "later", "other")


def test_what_is_whole_in_a_damaged_container_comes_where_nothing_else_has_it(
    tmp_path: Path,
) -> None:
    """A verify takes the container out of the catalog, so that pushes do not rely on it."""
    bucket, store = MemoryBucket(), open_store(tmp_path / "store")
    for name, count in (("base", 3), ("one", 1)):
        imported(tmp_path, store, name, **pieces(count))
        store.push(Remote(bucket), name)
    lost = bytes.fromhex(digest(pieces(3)["w2"]))
    [(container, record)] = [
        (container, record)
        for container in containers(bucket)
        for record in read_table(bucket, container.name).records
        if record.digest == lost
    ]
    key, at = layout.container_key(container), record.offset
    change(bucket, key, lambda blob: blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
    note_damage(bucket, [key])
    assert container not in catalog_of(bucket).containers
    assert f"get_range {key}" in pull(tmp_path, bucket, "one").calls
    # Nor does it matter that the catalog has to be put together.
    other, segments = bucket.copied(), {k for k in bucket.objects if k.startswith("catalog/")}
    for segment in segments - {layout.HEAD}:
        del other.objects[segment]
    assert f"get_range {key}" in pull(tmp_path, other, "one", "rebuilt").calls
    with pytest.raises(CorruptRemoteTensorError, match=key):
        pull(tmp_path, bucket, "base", "base-there")
    store.push(Remote(bucket), "base")
    pull(tmp_path, bucket, "base", "again")


def test_what_a_killed_gc_was_to_delete_comes_where_it_is_there_still(tmp_path: Path) -> None:
    """No push relies on it, and no catalog lists it."""
    bucket = pushed(tmp_path, "one", **pieces(2))
    [container] = containers(bucket)
    trash = Trash({}, Deletion(int(bucket.clock), [layout.container_key(container)]))
    commit(bucket, catalog_of(bucket), lambda now: CatalogChange((), [], trash, now.damaged))
    assert container not in catalog_of(bucket).containers
    pull(tmp_path, bucket, "one")


class Struck(Faulty):
    """The bytes at some offsets of an object are hit on their way, the first time."""

    def strike(self, key: str, offset: int) -> None:
        self.key, self.offset = key, offset

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        found = super().get_range(key, start, stop)
        if key == self.key and start <= self.offset < stop:
            self.key, at = "", self.offset - start
            return memoryview(bytes(x ^ (n == at) for n, x in enumerate(found)))
        return found


def test_what_is_hit_on_its_way_is_not_lost_though_something_else_is(tmp_path: Path) -> None:
    bucket = pushed(tmp_path, "w", **pieces(3))
    [container] = containers(bucket)
    key, held = layout.container_key(container), pieces(3).values()
    offsets = {r.digest.hex(): r.offset for r in read_table(bucket, container.name).records}
    first, *_, last = sorted((offsets[digest(data)], data) for data in held)
    change(bucket, key, lambda b: bytes(x ^ (n == first[0]) for n, x in enumerate(b)))
    join(bucket, pushed(tmp_path, "other", w=first[1]))
    store, gate = open_store(tmp_path / "there"), Struck(bucket)
    gate.strike(key, last[0])
    store.pull(Remote(gate), "w")
    assert gate.key == ""
    assert stored(store, "w") == content(tmp_path / "w")


def test_of_two_copies_the_one_that_costs_less_travels(tmp_path: Path) -> None:
    """A delta where its base is here, and the plain copy where it is not."""
    base, own, other = weights(1, 300 * KIB), noise(5, 70 * KIB), noise(6, 70 * KIB)
    tune, bucket, store = tuned(base, 1), MemoryBucket(), open_store(tmp_path / "store")
    imported(tmp_path, store, "base", w=base)
    store.push(Remote(bucket), "base")
    file = safetensors({n: ("BF16", (len(d) // 2,), d) for n, d in {"w": tune, "o": own}.items()})
    write(tmp_path / "tune", {"model.safetensors": file})
    store.import_(tmp_path / "tune", "tune", compress="auto", base="base")
    store.push(Remote(bucket), "tune")
    join(bucket, pushed(tmp_path, "plain", w=tune, p=other))
    imported(tmp_path, store, "all", w=tune, o=own, p=other)
    store.push(Remote(bucket), "all")
    copies = [
        r
        for c in containers(bucket)
        for r in read_table(bucket, c.name).records
        if r.nbytes == len(tune)
    ]
    assert sorted(r.base is None for r in copies) == [False, True, True]  # and the base
    without, with_ = open_store(tmp_path / "without"), open_store(tmp_path / "with")
    plain = without.pull(Remote(bucket), "all")
    assert plain.anchor_pieces == 0
    assert 440 * KIB < plain.moved_bytes < 450 * KIB
    with_.pull(Remote(bucket), "base")
    assert with_.pull(Remote(bucket), "all").moved_bytes < 340 * KIB
    for each in (without, with_):
        assert stored(each, "all") == content(tmp_path / "all")


def test_a_base_that_is_damaged_here_comes_along(tmp_path: Path) -> None:
    """The remote has lost nothing: the pull ends well, and what was damaged here is mended."""
    bucket, store = MemoryBucket(), open_store(tmp_path / "store")
    there = open_store(tmp_path / "there")
    # Two are against one base.
    bases = {f"w{n}": weights(n % 2, 300 * KIB) for n in range(3)}
    imported(tmp_path, store, "base", **bases)
    store.push(Remote(bucket), "base")
    there.pull(Remote(bucket), "base")
    tunes = {
        name: ("BF16", (len(data) // 2,), tuned(data, number))
        for number, (name, data) in enumerate(bases.items())
    }
    write(tmp_path / "tune", {"model.safetensors": safetensors(tunes)})
    store.import_(tmp_path / "tune", "tune", compress="auto", base="base")
    store.push(Remote(bucket), "tune")
    deltas = [r for c in containers(bucket) for r in read_table(bucket, c.name).records if r.base]
    assert len(deltas) == 3
    assert len({record.base for record in deltas}) == 2
    [held] = (there.path / "containers").rglob("*.slab")
    held.write_bytes(bytes(x ^ (n in (99, 400 * KIB)) for n, x in enumerate(held.read_bytes())))
    result = there.pull(Remote(bucket), "tune")
    assert result.anchor_pieces == 2
    for name in ("base", "tune"):
        assert stored(there, name) == content(tmp_path / name)


@pytest.mark.parametrize("plain", [True, False])
def test_a_delta_whose_base_is_nowhere_is_no_copy(tmp_path: Path, plain: bool) -> None:
    """What has lost its base comes as another copy, or is lost, and the base is named."""
    base = noise(1, 5 << 20)
    grown = base[:100] + b"a changed row!" + base[114:]
    bucket, store = MemoryBucket(), open_store(tmp_path / "store")
    imported(tmp_path, store, "base", w=base)
    imported(tmp_path, store, "grown", w=grown)
    with store.checkpoint("grown") as checkpoint:
        assert checkpoint.stored(checkpoint["w"])[0] == LEAVES
    store.push(Remote(bucket), "base")
    [first] = containers(bucket)
    store.push(Remote(bucket), "grown")
    [delta] = {*containers(bucket)} - {first}
    [bases] = {r.bases for r in read_table(bucket, delta.name).records if r.base}
    if plain:
        join(bucket, pushed(tmp_path, "plain", w=grown))
    lose_all(bucket, first)
    if plain:
        pull(tmp_path, bucket, "grown")
        return
    with pytest.raises(MissingRemoteError) as caught:
        pull(tmp_path, bucket, "grown")
    assert any(base.hex() in str(caught.value) for base in bases) or first.name in str(caught.value)


def test_a_run_reads_the_catalog_once_and_each_table_once(tmp_path: Path) -> None:
    bucket, store = MemoryBucket(), open_store(tmp_path / "store")
    for step in range(5):
        imported(tmp_path, store, f"run@{step}", **pieces(2), own=noise(100 + step, 70 * KIB))
        store.push(Remote(bucket), f"run@{step}")
    there, gate = open_store(tmp_path / "there"), Faulty(bucket)
    there.pull(Remote(gate), "run")
    assert there.names() == [f"run@{step}" for step in range(5)]
    calls = Counter(gate.calls)
    assert calls["get catalog/HEAD"] == 1
    assert {n for call, n in calls.items() if call.startswith("get catalog/")} == {1}
    assert [n for call, n in calls.items() if call.startswith("get tables/")] == [1] * 5


def test_few_containers_are_read_that_hold_all_together(tmp_path: Path) -> None:
    bucket = pushed(tmp_path, "all", **pieces(8))
    join(bucket, *(pushed(tmp_path, f"one-{n}", **pieces(1, n)) for n in range(8)))
    assert len(containers(bucket)) == 9
    calls = pull(tmp_path, bucket, "all").calls
    assert sum(call.startswith("get tables/") for call in calls) == 1


def test_a_network_that_fails_is_no_loss(tmp_path: Path) -> None:
    """It ends the pull at once, and nothing is looked for elsewhere."""
    bucket = pushed(tmp_path, "w", **pieces(3))
    calls = pull(tmp_path, bucket, "w").calls
    for number in range(len(calls)):
        store, gate = open_store(tmp_path / f"at-{number}"), Faulty(bucket, number, "lost before")
        with pytest.raises(StoreError, match="the request was lost"):
            store.pull(Remote(gate), "w")
        assert len(gate.calls) == number + 1
        assert store.names() == []
