"""A gc that others overtake marks again, and then reads only what is new."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from remote_runs.s3_faults import Wire
from store_runs.stores import memory_folder, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout, sweep
from tensor_dedup.remote.catalog import Trash, catalog_of
from tensor_dedup.remote.errors import RemoteBusyError, UncertainRemoteError
from tensor_dedup.remote.inventory import take_inventory
from tensor_dedup.remote.sweep import RemoteGcPlan
from tensor_dedup.store.format import manifests

HOUR = 3600.0
SMALL = 20


def many(first: int) -> dict[str, bytes]:
    """Forty tensors: five pages, and as many containers as tensors."""
    return {f"w{n:02}": noise(first + n, 3000) for n in range(40)}


def small(patch: pytest.MonkeyPatch) -> None:
    """Make pages and containers small."""
    patch.setattr(manifests, "PAGE_ENTRIES", 8)
    patch.setattr(layout, "CONTAINER_BYTES", 3000)


@pytest.fixture(scope="module")
def filled() -> Iterator[Path]:
    with memory_folder() as folder:
        with pytest.MonkeyPatch.context() as patch:
            small(patch)
            fill(folder)
        yield folder


@pytest.fixture
def store(tmp_path: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with two large checkpoints and some small ones.

    `half` has half of the tensors of `gone`, `new` all but one of those of `kept`.
    """
    small(monkeypatch)
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "store")


def fill(folder: Path) -> None:
    found = open_store(folder / "store")
    kept, gone = many(1000), many(2000)
    checkpoints = {
        "kept": kept,
        "gone": gone,
        "half": {name: data for name, data in gone.items() if name < "w20"},
        "new": kept | {"w39": noise(500, 3000)},
        **{f"s{n}": {"a": noise(n, 3000)} for n in range(SMALL)},
    }
    for name, tensors in checkpoints.items():
        path = write(folder / name, {"model.safetensors": safetensors(u8(**tensors))})
        found.import_(path, name)


@pytest.fixture(scope="module")
def condemning(filled: Path) -> MemoryBucket:
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        return condemned_in(open_store(filled / "store"))


def condemned_in(store: Store) -> MemoryBucket:
    found = MemoryBucket()
    remote = Remote(found)
    for name in ("kept", "gone", "s0", "s1"):
        store.push(remote, name)
    remote.delete("gone")
    found.clock += 25 * HOUR
    assert remote.gc(24).condemn
    found.clock += 25 * HOUR
    assert sum(key.startswith(layout.CONTAINERS) for key in Remote(found.copied()).gc(24).delete)
    return found


@pytest.fixture
def bucket(condemning: MemoryBucket, store: Store) -> MemoryBucket:
    """A remote of which the next gc deletes what `gone` alone had."""
    return condemning.copied()


def trash(bucket: MemoryBucket) -> Trash:
    return catalog_of(bucket).trash


def reads(calls: list[str]) -> Counter[str]:
    """How often each manifest, page and table was read."""
    return Counter(call for call in calls if call.startswith(("get manifests/", "get tables/")))


def last_reference(bucket: MemoryBucket) -> int:
    """The number of the call in which a gc reads the last of what it needs."""
    gate = Faulty(bucket.copied())
    Remote(gate).gc(24)
    return max(n for n, call in enumerate(gate.calls) if call in reads(gate.calls))


def attempts_of(gate: Faulty) -> int:
    """How often a gc has listed everything."""
    return gate.calls.count(f"list {layout.REFS}")


def overtaken(bucket: MemoryBucket, meanwhile: Callable[[], object]) -> tuple[Faulty, RemoteGcPlan]:
    """A gc, and what happens when it has read almost all."""
    gate = Faulty(bucket, last_reference(bucket), meanwhile=meanwhile)
    plan = Remote(gate).gc(24)
    assert gate.struck
    assert attempts_of(gate) > 1, "nobody overtook it"
    return gate, plan


@pytest.mark.parametrize("pushed", ["s2", "half", "new"])
def test_what_was_read_is_not_read_again(
    tmp_path: Path, store: Store, bucket: MemoryBucket, pushed: str
) -> None:
    """And what the push relies on, also of what was condemned, stays."""
    alone = Faulty(bucket.copied())
    assert Remote(alone).gc(24).done
    inventory = sum(reads(alone.calls).values())
    assert inventory > 90
    before = dict(bucket.objects)
    gate, plan = overtaken(bucket, lambda: store.push(Remote(bucket), pushed))
    found = reads(gate.calls)
    twice = {call.split()[1] for call, count in found.items() if count > 1}
    assert {*found.values()} <= {1, 2}
    assert all(bucket.objects[key] != before[key] for key in twice)  # which the push wrote again
    new = found.keys() - reads(alone.calls).keys()
    assert len(new) + len(twice) <= {"s2": 3, "half": 26, "new": 8}[pushed]
    # Lists, references, the catalog, the marker, and for each container that was written again.
    assert len(gate.calls) - len(alone.calls) <= 30 + len(new) + len(twice)
    swept = {key for key in plan.delete if key.startswith(layout.CONTAINERS)}
    assert len(swept) >= (20 if pushed == "half" else 40)
    assert not swept & bucket.objects.keys()
    assert Remote(bucket).verify(full=True).fine
    other = open_store(tmp_path / "other")
    for name in ("kept", "s0", "s1", pushed):
        other.pull(Remote(bucket), name)
        assert stored(other, name) == stored(store, name)


def test_a_page_that_checkpoints_share_is_read_once(store: Store, bucket: MemoryBucket) -> None:
    store.push(Remote(bucket), "new")
    gate = Faulty(bucket)
    take_inventory(gate)
    pages = [Remote(bucket).read(name).content.pages for name in ("kept", "new")]
    assert len({*pages[0]} & {*pages[1]}) >= 4
    assert {*reads(gate.calls).values()} == {1}


def test_an_attempt_more_is_a_fraction_of_the_first_over_sockets(
    store: Store, bucket: MemoryBucket, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.bucket.objects |= bucket.objects
    wire.bucket.clock = bucket.clock
    counts, planned = list[int](), sweep._plan

    def plan(*args: Any) -> Any:
        counts.append(wire.proxy.requests)
        if len(counts) == 1:
            store.push(Remote(wire.bucket), "s2")
        return planned(*args)

    monkeypatch.setattr(sweep, "_plan", plan)
    wire.reset()
    assert len(wire.remote.gc(24).delete) >= 80
    first, both = counts
    assert first > 100
    assert both - first < first / 3
    assert Remote(wire.bucket).verify(full=True).fine


class Busy(Faulty):
    """A bucket into which a push lands where `lands` says so, by the calls until then."""

    def __init__(
        self, inner: MemoryBucket, lands: Callable[[list[str]], bool], pushes: Iterator[Any]
    ) -> None:
        super().__init__(inner)
        self._lands, self._pushes = lands, pushes
        self.landed = 0

    def _do(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        found = super()._do(verb, key, call)
        if self._lands(self.calls):
            next(self._pushes)
            self.landed += 1
        return found


def pushes(store: Store, bucket: MemoryBucket) -> Iterator[object]:
    """Pushes of one small checkpoint after the other."""
    return (store.push(Remote(bucket), f"s{number}") for number in range(2, SMALL))


def is_attempt(calls: list[str]) -> bool:
    """Whether an attempt has just listed what is there."""
    return calls[-1] == f"list {layout.REFS}"


@pytest.mark.parametrize("attempts", [1, 2, 9])
def test_a_push_lands_in_each_of_several_attempts(
    store: Store, bucket: MemoryBucket, attempts: int
) -> None:
    gate = Busy(
        bucket,
        lambda calls: is_attempt(calls) and calls.count(calls[-1]) <= attempts,
        pushes(store, bucket),
    )
    plan = Remote(gate).gc(24)
    assert gate.landed == attempts
    # Segments and lists are large, and what no head names lies there for a lease.
    assert sum(call.startswith(("put catalog/", "put trash/")) for call in gate.calls) <= 3
    # The manifest and the page of each push, which came after the list of that attempt.
    more = reads(gate.calls) - Counter({*reads(gate.calls)})
    assert more.total() <= 2 * attempts
    assert len(plan.delete) >= 80
    assert not {*plan.delete} & bucket.objects.keys()
    assert len(Remote(bucket).names()) == 3 + attempts
    assert Remote(bucket).verify(full=True).fine


def test_pushes_that_come_more_often_than_an_inventory_takes_do_not_stop_it(
    store: Store, bucket: MemoryBucket
) -> None:
    """One after so many requests: fewer than the first attempt makes, more than a later one."""
    alone = Faulty(bucket.copied())
    Remote(alone).gc(24, dry_run=True)
    every = len(alone.calls) // 2
    gate = Busy(bucket, lambda calls: len(calls) % every == 0, pushes(store, bucket))
    assert len(Remote(gate).gc(24).delete) >= 80
    assert gate.landed >= 2
    assert Remote(bucket).verify(full=True).fine


def test_who_is_overtaken_every_time_is_told_what_it_needs(
    store: Store, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_ATTEMPTS", 3)
    before = trash(bucket)
    gate = Busy(bucket, is_attempt, pushes(store, bucket))
    with pytest.raises(RemoteBusyError, match=r"each of 3 attempts; one takes \d+ s, and needs"):
        Remote(gate).gc(24)
    assert gate.landed == 3
    assert before == trash(bucket)
    assert before.condemned.keys() <= bucket.objects.keys()


def first(bucket: MemoryBucket, folder: str, name: str) -> str:
    """The key of an object that a checkpoint needs."""
    found = Remote(bucket).read(name)
    if folder == "manifest":
        return layout.manifest_key(found.manifest)
    if folder == "page":
        return layout.manifest_key(found.content.pages[0].hex())
    container = catalog_of(bucket).holders(found.pieces[-1].digest)[0]
    if folder == "table":
        return layout.table_key(container.name)
    return layout.container_key(container)


def references_and_more(bucket: MemoryBucket) -> set[str]:
    """The keys of all but segments and lists: of these an attempt may leave some."""
    return {key for key in bucket.objects if not key.startswith((layout.CATALOG, layout.TRASH))}


Change = Callable[[Store, MemoryBucket], object]


def replaced(store: Store, bucket: MemoryBucket) -> None:
    """`s0` stands for something else, and what it stood for is nobody's."""
    other = open_store(store.path.parent / f"other-{bucket._count}")
    other.import_(store.path.parent / "s5", "s0")
    other.push(Remote(bucket), "s0", replace=True)


def written_again(store: Store, bucket: MemoryBucket) -> None:
    """Another gc deletes it, and a push of the same sends it."""
    Remote(bucket).gc(24)
    store.push(Remote(bucket), "gone")


def lost(folder: str) -> Change:
    def change(_: Store, bucket: MemoryBucket) -> None:
        del bucket.objects[first(bucket, folder, "kept")]

    return change


def spoilt(folder: str) -> Change:
    def change(_: Store, bucket: MemoryBucket) -> None:
        key = first(bucket, folder, "kept")
        bucket.put(key, [memoryview(bucket.objects[key][0][:-1])])

    return change


CHANGES: dict[str, Change] = {
    "pushed": lambda store, bucket: store.push(Remote(bucket), "s2"),
    "pushed with pages of another": lambda store, bucket: store.push(Remote(bucket), "new"),
    "used again": lambda store, bucket: store.push(Remote(bucket), "half"),
    "deleted": lambda _, bucket: Remote(bucket).delete("kept"),
    "replaced": replaced,
    "swept": lambda _, bucket: Remote(bucket).gc(24),
    "swept and pushed again": written_again,
    **{f"{what} {harm}": change(what)
       for what in ("container", "table", "page", "manifest")
       for harm, change in (("lost", lost), ("spoilt", spoilt))},
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_later_attempt_finds_what_a_first_one_would(
    store: Store, bucket: MemoryBucket, what: str
) -> None:
    known = take_inventory(bucket)
    assert take_inventory(bucket, known) == known
    CHANGES[what](store, bucket)
    gate = Faulty(bucket)
    found, fresh = take_inventory(gate, known), take_inventory(bucket)
    assert found == fresh
    assert found != known
    if what in ("container lost", "table lost"):
        assert found.lost()
    elif "lost" in what or "spoilt" in what:
        assert found.problems or found.unreadable
    assert sum(reads(gate.calls).values()) < 60


@pytest.mark.parametrize("what", CHANGES)
def test_a_gc_that_is_overtaken_does_what_one_does_that_begins_then(
    store: Store, bucket: MemoryBucket, what: str
) -> None:
    then: list[MemoryBucket] = []

    def meanwhile() -> None:
        store.push(Remote(bucket), "s9")  # which overtakes it
        CHANGES[what](store, bucket)
        then.append(bucket.copied())

    if "lost" in what or "spoilt" in what:
        with pytest.raises(UncertainRemoteError):
            overtaken(bucket, meanwhile)
        assert trash(bucket) == trash(then[0])
        assert bucket.objects.keys() >= then[0].objects.keys()
        with pytest.raises(UncertainRemoteError):
            Remote(then[0]).gc(24)
        return
    _, plan = overtaken(bucket, meanwhile)
    assert plan == Remote(then[0]).gc(24)
    assert references_and_more(bucket) == references_and_more(then[0])
    assert trash(bucket) == trash(then[0])
    assert Remote(bucket).verify(full=True).fine
