"""One sweep deletes at a time, and what it condemns is still used by pushes until it is deleted."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from remote_runs.remotes import Faulty, Killed, MemoryBucket
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.catalog import (
    Catalog,
    CatalogChange,
    Deletion,
    Trash,
    catalog_of,
    commit,
    note_damage,
    read_table,
    with_more,
)
from tensor_dedup.remote.errors import RemoteBusyError, RemoteUnreachableError
from tensor_dedup.store.format.tables import Record

HOUR = 3600.0


@pytest.fixture
def bucket(full: Store) -> MemoryBucket:
    """A remote whose next sweep deletes what `tune` alone had."""
    found = MemoryBucket()
    for name in ("base", "tune"):
        full.push(Remote(found), name)
    Remote(found).delete("tune")
    for hours in (25, 25):
        found.clock += hours * HOUR
        planned = Remote(found.copied()).gc(24)
        if not planned.delete:
            Remote(found).gc(24)
    assert containers_in(planned.delete)
    return found


def containers_in(keys: tuple[str, ...] | frozenset[str]) -> set[str]:
    return {key for key in keys if key.startswith(layout.CONTAINERS)}


def killed(bucket: MemoryBucket, at: str = "delete ") -> frozenset[str]:
    """Let a sweep be killed before the first call that begins so; what it was deleting."""
    probe = Faulty(bucket.copied())
    Remote(probe).gc(24)
    first = next(n for n, call in enumerate(probe.calls) if call.startswith(at))
    with pytest.raises(Killed):
        Remote(Faulty(bucket, first, "killed before")).gc(24)
    return catalog_of(bucket).trash.deleting


def assert_whole(tmp_path: Path, bucket: MemoryBucket, *names: str) -> None:
    result = Remote(bucket).verify(full=True)
    assert result.fine, result.faults
    for number, name in enumerate(names):
        store = open_store(tmp_path / f"of-{name}-{number}-{len(bucket.objects)}")
        store.pull(Remote(bucket), name)
        assert stored(store, name) == content(tmp_path / name)


def set_trash(bucket: MemoryBucket, trash: Trash) -> None:
    def change(now: Catalog) -> CatalogChange:
        return CatalogChange(*with_more(now, ()), trash, now.damaged)

    commit(bucket, catalog_of(bucket), change)


def test_a_second_sweep_is_refused_while_one_deletes(full: Store, bucket: MemoryBucket) -> None:
    """It says since when, and when it would be over if that one was killed."""
    Remote(bucket).delete("base")
    bucket.clock += 25 * HOUR
    assert Remote(bucket.copied()).gc(24).condemn
    deleting = killed(bucket)
    began = bucket.clock
    bucket.clock += 0.9 * HOUR
    before = dict(bucket.objects)
    # What there is more to delete: all that the first has condemned, without a lease.
    what = r"another gc .* since 1970-01-15 16:46:40 .* after 1970-01-15 17:46:40$"
    with pytest.raises(RemoteBusyError, match=what) as caught:
        Remote(bucket).gc(0)
    assert caught.value.facts["since"] == began
    assert {**bucket.objects, **before} == bucket.objects
    planned = Remote(bucket).gc(0, dry_run=True)
    assert planned.delete
    assert not deleting & {*planned.delete}


def test_a_sweep_that_deletes_nothing_condemns_beside_another_one(
    full: Store, bucket: MemoryBucket
) -> None:
    Remote(bucket).delete("base")
    deletion = killed(bucket)
    entered = catalog_of(bucket).trash.deletion
    bucket.clock += 0.9 * HOUR
    again = Remote(bucket).gc(24)
    assert again.done
    assert not again.delete
    trash = catalog_of(bucket).trash
    assert trash.deletion == entered
    assert not deletion & trash.condemned.keys()
    assert trash.condemned
    listed = {*map(layout.container_key, catalog_of(bucket).containers)}
    assert listed
    assert containers_in(deletion) & bucket.objects.keys()
    assert not listed & deletion
    with pytest.raises(RemoteBusyError):  # that one may be at work still
        full.push(Remote(bucket), "tune")


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_sweep_that_died_was_deleting_is_taken_over(
    tmp_path: Path, full: Store, bucket: MemoryBucket, ahead: bool
) -> None:
    """At once, without another lease; also where the clock was put back since."""
    deleting = killed(bucket)
    there = deleting & bucket.objects.keys()
    assert containers_in(there)
    bucket.clock += -1.1 * HOUR if ahead else HOUR
    assert there <= {*Remote(bucket).gc(24).delete}
    assert not there & bucket.objects.keys()
    assert catalog_of(bucket).trash.deletion is None
    full.push(Remote(bucket), "tune")
    assert_whole(tmp_path, bucket, "base", "tune")


def test_a_clock_that_is_a_little_behind_does_not_declare_a_sweep_dead(
    bucket: MemoryBucket,
) -> None:
    deleting = killed(bucket)
    bucket.clock -= 0.9 * HOUR
    assert not Remote(bucket).gc(24).delete
    assert catalog_of(bucket).trash.deleting == deleting


def test_what_is_used_again_is_not_taken_over(tmp_path: Path, bucket: MemoryBucket) -> None:
    """As by somebody who wrote the reference by hand."""
    text = bucket.objects[layout.ref_key("tune")]
    deleting = killed(bucket)
    whole = open_store(tmp_path / "full")
    reference = layout.reference("tune", whole.handle.objects.ref("tune"))
    bucket.objects[layout.ref_key("tune")] = (reference, *text[1:])
    bucket.clock += HOUR
    assert not containers_in(frozenset(Remote(bucket).gc(24).delete))
    after = catalog_of(bucket)
    assert after.trash.deletion is None
    assert containers_in(deleting) <= {*map(layout.container_key, after.containers)}
    assert_whole(tmp_path, bucket, "base", "tune")


def test_what_is_condemned_is_relied_on_until_it_is_deleted(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    condemned = containers_in(frozenset(catalog_of(bucket).trash.condemned))
    assert condemned
    assert condemned <= {*map(layout.container_key, catalog_of(bucket).containers)}
    sent = full.push(Remote(bucket), "tune")
    assert sent.moved_bytes < 500 * KIB  # a delta against `base` is sent again, and nothing else
    assert not condemned & catalog_of(bucket).trash.condemned.keys()
    assert not condemned & {*Remote(bucket).gc(24).delete}
    assert_whole(tmp_path, bucket, "base", "tune")


def test_what_was_condemned_by_a_clock_that_was_ahead_waits_for_one_lease(
    bucket: MemoryBucket,
) -> None:
    trash = catalog_of(bucket).trash
    ahead = {key: int(bucket.clock + 1000 * HOUR) for key in trash.condemned}
    set_trash(bucket, Trash(ahead))
    assert not Remote(bucket).gc(24).delete
    bucket.clock += 24 * HOUR
    assert containers_in(Remote(bucket).gc(24).delete)


@pytest.fixture
def anchored(tmp_path: Path) -> tuple[Store, MemoryBucket]:
    """A remote with a delta in a container that stays, from a piece in one that is condemned."""
    store, found = open_store(tmp_path / "anchored"), MemoryBucket()
    b, d = noise(2, 400 * KIB), noise(6, 70 * KIB)
    changed = b[:1000] + bytes([b[1000] ^ 1]) + b[1001:]
    files = {"base": u8(b=b), "tune": u8(b=changed, d=d), "more": u8(d=d)}
    for name, tensors in files.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(tensors)})
        store.import_(path, name, compress="auto")
    for name in ("base", "tune", "more"):
        store.push(Remote(found), name)
    for name in ("base", "tune"):
        Remote(found).delete(name)
    return store, found


def records(bucket: MemoryBucket) -> Iterator[Record]:
    for container in catalog_of(bucket).containers:
        yield from read_table(bucket, container.name).records


def test_a_delta_whose_base_is_condemned_is_not_relied_on(
    tmp_path: Path, anchored: tuple[Store, MemoryBucket]
) -> None:
    """A push could not take the base off the list of condemned objects: it does not know it."""
    store, bucket = anchored
    (delta,) = (record for record in records(bucket) if record.base is not None)
    assert catalog_of(bucket).holders(delta.digest)
    bucket.clock += 25 * HOUR
    assert containers_in(Remote(bucket).gc(24).condemn)
    assert delta in {*records(bucket)}  # its container stays
    assert not catalog_of(bucket).holders(delta.digest)
    assert catalog_of(bucket).holders(delta.bases[0], alone=True)
    store.push(Remote(bucket), "tune")
    assert catalog_of(bucket).holders(delta.digest)
    bucket.clock += 25 * HOUR
    Remote(bucket).gc(24)
    assert_whole(tmp_path, bucket, "tune", "more")


def test_a_delta_whose_base_is_condemned_before_it_has_a_name_is_pulled(tmp_path: Path) -> None:
    """A gc that has seen no reference to it condemns what a push relies on, for a lease."""

    class Overtaken(MemoryBucket):
        def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
            if key == layout.ref_key("tune"):
                assert containers_in(Remote(self.beside).gc(24).condemn)
            return super().put_if(key, data, tag)

        beside: MemoryBucket

    server = Overtaken()
    server.beside = MemoryBucket()
    server.beside.objects, server.beside._count = server.objects, 10_000
    store, b = open_store(tmp_path / "store"), noise(2, 400 * KIB)
    for name, tensor in {"base": b, "tune": b[:1000] + bytes([b[1000] ^ 1]) + b[1001:]}.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(u8(b=tensor))})
        store.import_(path, name, compress="auto")
    store.push(Remote(server), "base")
    Remote(server).delete("base")
    server.clock += 25 * HOUR
    server.beside.clock = server.clock
    store.push(Remote(server), "tune")
    (delta,) = (record for record in records(server) if record.base is not None)
    assert not catalog_of(server).holders(delta.digest)
    assert_whole(tmp_path, server, "tune")


@pytest.mark.parametrize("doubt", ["condemned", "damaged", "being deleted"])
def test_no_container_that_is_doubtful_is_kept_in_place_of_another_one(
    tmp_path: Path, doubt: str
) -> None:
    """Though it holds all of what two others hold, and would be kept by itself."""
    bucket, other = MemoryBucket(), MemoryBucket()
    remote, store = Remote(bucket), open_store(tmp_path / "store")
    a, b = noise(1, 30_000), noise(2, 30_000)
    for name, tensors in {"both": {"a": a, "b": b}, "one": {"a": a}, "two": {"b": b}}.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})
        store.import_(path, name)
    store.push(remote, "both")
    (doubtful,) = containers_in(frozenset(bucket.objects))
    store.push(Remote(other), "one")
    store.push(Remote(other), "two")
    assert len(containers_in(frozenset(other.objects))) == 2
    for key, found in other.objects.items():  # as if sent by a push that did not know the first
        if not key.startswith((layout.CATALOG, layout.MARKER)):
            bucket.objects[key] = found
    alone = bucket.copied()
    Remote(alone).delete("both")
    assert doubtful not in Remote(alone).gc(0, dry_run=True).delete, "nobody doubts it"
    remote.delete("both")
    if doubt == "condemned":
        set_trash(bucket, Trash({doubtful: int(bucket.clock)}))
    elif doubt == "damaged":
        note_damage(bucket, [doubtful])
    else:
        set_trash(bucket, Trash({}, Deletion(int(bucket.clock - HOUR), [doubtful])))
    deleted = {*remote.gc(0).delete}
    assert containers_in(frozenset(deleted)) == {doubtful}
    assert_whole(tmp_path, bucket, "one", "two")


def test_no_doubtful_base_is_kept_in_place_of_another_one(
    tmp_path: Path, anchored: tuple[Store, MemoryBucket]
) -> None:
    """A damaged container has the only copy of a piece, as a delta; there are two of its base."""
    store, bucket = anchored
    store.push(Remote(bucket), "tune")
    held = {c: read_table(bucket, c.name).records for c in catalog_of(bucket).containers}
    ((delta, base),) = {(c, r.bases[0]) for c in held for r in held[c] if r.bases}
    whole = {c for c in held if base in {r.digest for r in held[c]}}
    twice, elsewhere = tmp_path / "twice", MemoryBucket()
    tensors = {"b": noise(2, 400 * KIB), "e": noise(100, 100)}
    store.import_(write(twice, {"model.safetensors": safetensors(u8(**tensors))}), "twice")
    store.push(Remote(elsewhere), "twice")
    (spoilt,) = containers_in(frozenset(elsewhere.objects))
    for key, found in elsewhere.objects.items():
        if key.startswith((layout.CONTAINERS, layout.TABLES)):
            bucket.objects[key] = found
    note_damage(bucket, [spoilt, layout.container_key(delta)])
    deleted = {*Remote(bucket).gc(0).delete}
    assert spoilt in deleted
    assert deleted.isdisjoint(map(layout.container_key, [*whole, delta]))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hours", [0.5, 1.0])
def test_a_sweep_is_killed_at_every_request(
    tmp_path: Path, full: Store, bucket: MemoryBucket, when: str, hours: float
) -> None:
    """Then another one runs, and a push: nothing is lost, and after an hour nothing is left."""
    probe = Faulty(bucket.copied())
    Remote(probe).gc(24)
    refused = 0
    for number in range(len(probe.calls)):
        inner = bucket.copied()
        with pytest.raises(Killed):
            Remote(Faulty(inner, number, f"killed {when}")).gc(24)
        inner.clock += hours * HOUR
        with suppress(RemoteBusyError):
            Remote(inner).gc(24)
        try:
            full.push(Remote(inner), "tune")
        except RemoteBusyError:
            refused += 1
            assert hours < 1
            assert catalog_of(inner).trash.deletion is not None
        result = Remote(inner).verify(full=True)
        assert result.fine, (number, result.faults)
        inner.clock += HOUR
        Remote(inner).gc(24)
        assert catalog_of(inner).trash.deletion is None
        full.push(Remote(inner), "tune")
        inner.clock += 25 * HOUR
        Remote(inner).gc(24)
        assert Remote(inner).names() == ["base", "tune"]
        assert Remote(inner).verify(full=True).fine, number
    assert (refused > 0) == (hours < 1)


class Unanswered(MemoryBucket):
    """One that does not answer the first deletion of a container, and may carry it out later."""

    late: str | None = None

    def delete_once(self, key: str) -> bool:
        if key.startswith(layout.CONTAINERS) and self.late is None:
            self.late = key
            self.delete(key)
            return False
        return super().delete_once(key)


def test_only_what_was_not_answered_stays_on_the_list(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    server = Unanswered()
    server.objects, server.clock = bucket.objects, bucket.clock
    assert Remote(server).gc(24).delete
    assert server.late is not None
    assert catalog_of(server).trash.deletion == Deletion(int(server.clock), [server.late])
    with pytest.raises(RemoteBusyError):
        full.push(Remote(server), "tune")
    server.clock += HOUR
    assert Remote(server).gc(24).done
    assert catalog_of(server).trash.deletion is None
    full.push(Remote(server), "tune")
    assert_whole(tmp_path, server, "base", "tune")


def test_a_sweep_that_failed_keeps_the_next_one_from_nothing(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    class Broken(MemoryBucket):
        broken = True

        def head(self, key: str) -> ObjectStatus | None:
            if self.broken and key.startswith(layout.CONTAINERS):
                raise RemoteUnreachableError.at(self.at(key), "no answer")
            return super().head(key)

    server = Broken()
    server.objects, server.clock = bucket.objects, bucket.clock
    with pytest.raises(RemoteUnreachableError):
        Remote(server).gc(24)
    assert catalog_of(server).trash.deletion is None
    server.broken = False
    assert containers_in(Remote(server).gc(24).delete)
    assert_whole(tmp_path, server, "base")


def test_a_sweep_beside_the_deletion_of_another_one_is_certain_of_what_it_sees(
    full: Store, bucket: MemoryBucket
) -> None:
    """Tables and containers vanish while it reads them, and are none of its business."""
    probe = Faulty(bucket.copied())
    Remote(probe).gc(24, dry_run=True)
    enters = len(probe.calls)
    for number in range(enters):
        inner = bucket.copied()
        meanwhile: Callable[[], object] = partial(Remote(inner).gc, 24)
        gate = Faulty(inner, number, meanwhile=meanwhile)
        assert Remote(gate).gc(24).done
        assert gate.struck
        assert Remote(inner).verify(full=True).fine, number
