"""A tensor that is stored as a difference is there only while what it is against is."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from remote_runs.remotes import Faulty, Killed, MemoryBucket
from store_runs.stores import (
    KIB,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import (
    PREFIX_BYTES,
    Catalog,
    CatalogChange,
    ListedContainer,
    catalog_of,
    commit,
    read_table,
    with_more,
)
from tensor_dedup.remote.errors import CorruptRemoteTensorError, MissingRemoteError

HOUR = 3600.0


@pytest.fixture
def bucket(full: Store) -> MemoryBucket:
    """A remote with `tune`, whose tensor `b` is a difference from that of `base`, and without the
    name `base`."""
    found = MemoryBucket()
    for name in ("base", "tune"):
        full.push(Remote(found), name)
    Remote(found).delete("base")
    return found


def anchor(bucket: MemoryBucket) -> tuple[str, int]:
    """The key of the container that holds the anchor, and where in it."""
    names = [c for key in bucket.objects if (c := layout.container_of(key)) is not None]
    tables = {container: read_table(bucket, container.name).records for container in names}
    [base] = {r.base for records in tables.values() for r in records if r.base is not None}
    [(container, record)] = [
        (c, record) for c, records in tables.items() for record in records if record.digest == base
    ]
    return layout.container_key(container), record.offset


@pytest.fixture
def spoilt(bucket: MemoryBucket) -> str:
    """The key of the container with the anchor, which is damaged, as `verify` has found."""
    return spoil(bucket, "tune")


def spoil(bucket: MemoryBucket, *affected: str) -> str:
    key, at = anchor(bucket)
    blob, tag, when = bucket.objects[key]
    bucket.objects[key] = (blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], tag, when)
    [fault] = Remote(bucket).verify(full=True).faults
    assert (fault.url, fault.affected) == (bucket.at(key), affected)
    return key


def assert_pulls(tmp_path: Path, bucket: MemoryBucket, *names: str) -> None:
    for name in names:
        store = open_store(tmp_path / f"of-{name}-{len(bucket.objects)}")
        store.pull(Remote(bucket), name)
        assert stored(store, name) == content(tmp_path / name)


def damage(bucket: MemoryBucket) -> dict[str, bool]:
    listed, measured = (
        {each.name: each.damage is not None for each in found}
        for found in (Remote(bucket).checkpoints(), Remote(bucket).usage().checkpoints)
    )
    assert listed == measured
    return listed


def sweep(bucket: MemoryBucket) -> set[str]:
    deleted = set[str]()
    for _ in range(3):
        bucket.clock += 25 * HOUR
        deleted |= {*Remote(bucket).gc(24).delete}
    return deleted


def test_a_plain_push_mends_what_is_against_a_damaged_anchor(
    tmp_path: Path, bucket: MemoryBucket, full: Store, spoilt: str
) -> None:
    remote = Remote(bucket)
    assert damage(bucket) == {"tune": True}
    with pytest.raises((CorruptRemoteTensorError, MissingRemoteError)):
        open_store(tmp_path / "other").pull(remote, "tune")
    assert not full.push(remote, "tune").unchanged
    assert damage(bucket) == {"tune": False}
    assert_pulls(tmp_path, bucket, "tune")
    assert full.push(remote, "tune").unchanged
    assert remote.verify(full=True).fine
    assert spoilt in sweep(bucket)
    assert_pulls(tmp_path, bucket, "tune")
    assert remote.verify(full=True).fine


def test_a_push_of_the_anchor_mends_it_too(
    tmp_path: Path, bucket: MemoryBucket, full: Store, spoilt: str
) -> None:
    remote = Remote(bucket)
    full.push(remote, "base")
    assert damage(bucket) == {"base": False, "tune": False}
    assert remote.verify(full=True).fine
    assert full.push(remote, "tune").unchanged
    assert_pulls(tmp_path, bucket, "base", "tune")
    sweep(bucket)
    assert_pulls(tmp_path, bucket, "base", "tune")
    assert remote.verify(full=True).fine


def test_what_was_sent_again_is_found_behind_the_difference(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """For another checkpoint, of which the container with the difference holds more."""
    held = u8(b=tuned(weights(2, 400 * KIB), 4), c=noise(5, 100), d=noise(6, 70 * KIB))
    write(tmp_path / "more", {"model.safetensors": safetensors(held)})
    full.import_(tmp_path / "more", "more")
    assert full.push(Remote(bucket), "more").moved_bytes < 1000
    spoil(bucket, "more", "tune")
    full.push(Remote(bucket), "tune")
    assert damage(bucket) == {"more": False, "tune": False}
    assert_pulls(tmp_path, bucket, "more", "tune")


def test_replacing_a_checkpoint_by_itself_looks_for_its_anchors(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """The container is gone, and nothing is noted of it."""
    key, _ = anchor(bucket)
    del bucket.objects[key]
    with pytest.raises(MissingRemoteError, match="--replace"):
        open_store(tmp_path / "other").pull(Remote(bucket), "tune")
    full.push(Remote(bucket), "tune", replace=True)
    assert_pulls(tmp_path, bucket, "tune")


def test_a_sweep_keeps_the_copy_that_is_whole(
    tmp_path: Path, bucket: MemoryBucket, full: Store, spoilt: str
) -> None:
    """And not the damaged container, which has more of what is needed than any other."""
    damaged = bucket.objects[spoilt]
    for name in ("tune", "base"):  # which leaves of base what tune does not have
        full.push(Remote(bucket), name)
    assert bucket.objects[spoilt] == damaged
    assert damage(bucket) == {"base": False, "tune": False}
    assert Remote(bucket).verify(full=True).fine
    assert spoilt in sweep(bucket)
    assert_pulls(tmp_path, bucket, "base", "tune")
    assert Remote(bucket).verify(full=True).fine


def test_an_entry_that_says_more_comes_in_place_of_the_other() -> None:
    """A container that was sent again, of which a sweep had left a difference out."""
    other = ListedContainer(noise(1, 32), "pack", 900, noise(2, 16), b"")
    less = ListedContainer(noise(3, 32), "mixed", 900, noise(4, 16), b"")
    more = replace(less, deltas=noise(5, 16))
    catalog = Catalog(segments={b"1": [other, less]})
    for each in (other, less):
        catalog.add(each)
    kept, held = with_more(catalog, [more])
    assert not kept
    assert sorted(held, key=lambda each: each.kind) == [more, other]
    assert with_more(catalog, [less]) == ([b"1"], [])


@pytest.mark.parametrize("catalog", ["there", "lost"])
def test_a_sweep_that_takes_an_anchor_leaves_no_difference_from_it(
    tmp_path: Path, full: Store, catalog: str
) -> None:
    """A container may stay for other pieces with a difference that nobody uses."""
    bucket = MemoryBucket()
    remote = Remote(bucket)
    d = safetensors(u8(d=noise(6, 70 * KIB)))  # of tune, too
    full.import_(write(tmp_path / "more", {"model.safetensors": d}), "more")
    for name in ("base", "tune", "more"):
        full.push(remote, name)
    key, _ = anchor(bucket)
    for name in ("base", "tune"):
        remote.delete(name)
    assert key in sweep(bucket)
    if catalog == "lost":
        del bucket.objects[layout.HEAD]
    full.push(remote, "tune")
    assert_pulls(tmp_path, bucket, "tune", "more")
    assert remote.verify(full=True).fine


@pytest.fixture
def lent(tmp_path: Path) -> tuple[Store, MemoryBucket]:
    """A remote with `tune` and `more`, and without `base`, which nothing needs but as an anchor.

    The container of `tune` has all of `more`, and a part of `other`, which is not there.
    """
    b, d = weights(2, 400 * KIB), noise(6, 70 * KIB)
    files = {
        "base": u8(b=b),
        "tune": u8(b=tuned(b, 4), d=d),
        "more": u8(d=d),
        "other": u8(d=d, e=noise(7, 70 * KIB)),
    }
    store, bucket = open_store(tmp_path / "lender"), MemoryBucket()
    for name, tensors in files.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(tensors)})
        store.import_(path, name, compress="auto")
    for name in ("base", "tune", "more"):
        store.push(Remote(bucket), name)
    assert anchor(bucket)
    Remote(bucket).delete("base")
    return store, bucket


def over(bucket: MemoryBucket, at: int, meanwhile: Callable[[Remote], object]) -> Faulty:
    """The remote for one who is at work while another is, before the call of this number."""
    return Faulty(bucket, at, meanwhile=partial(meanwhile, Remote(bucket)))


def swept(remote: Remote) -> None:
    """A day passes, and somebody sweeps."""
    assert isinstance(remote.bucket, MemoryBucket)
    remote.bucket.clock += 25 * HOUR
    remote.gc(24)


def calls(bucket: MemoryBucket, work: Callable[[Remote], object]) -> list[str]:
    gate = Faulty(bucket.copied())
    work(Remote(gate))
    return gate.calls


def assert_no_stray(bucket: MemoryBucket) -> None:
    """Each difference that is listed is from something that is listed, too."""
    found = catalog_of(bucket)
    condemned = found.trash.condemned
    listed = found.containers
    tables = {container: read_table(bucket, container.name) for container in listed}
    kept = {c: t for c, t in tables.items() if layout.container_key(c) not in condemned}
    alone = {r.digest for table in kept.values() for r in table.records if r.base is None}
    for container, table in tables.items():
        deltas = listed[container].deltas
        said = {deltas[at : at + PREFIX_BYTES] for at in range(0, len(deltas), PREFIX_BYTES)}
        records = [r for r in table.records if r.digest[:PREFIX_BYTES] in said]
        assert {base for record in records for base in record.bases} <= alone
        assert not (said and container not in kept)


def test_a_push_over_a_sweep_lists_no_difference_again(lent: tuple[Store, MemoryBucket]) -> None:
    """A container is relied on for another piece; the difference in it a second push would rely on,
    while a second sweep deletes what that is from."""
    store, bucket = lent
    Remote(bucket).delete("tune")
    first = len(calls(bucket, lambda remote: store.push(remote, "other")))
    for number in range(first):
        between = bucket.copied()
        gate = over(between, number, swept)
        store.push(Remote(gate), "other")
        assert gate.struck
        assert_no_stray(between)
        second = calls(between, lambda remote: store.push(remote, "tune"))
        last = between.copied()
        store.push(Remote(over(last, second.index("put_if refs/tune"), swept)), "tune")
        assert_no_stray(last)
        assert not Remote(last).verify(full=True).faults, (number, gate.calls[number])


def test_a_push_over_a_sweep_relies_on_no_difference_that_is_left_out(
    tmp_path: Path, lent: tuple[Store, MemoryBucket]
) -> None:
    """A pull would read all tables to find what it is from, until the next sweep; but for a sweep
    between the push's last two requests, which it does not see."""
    store, bucket = lent
    Remote(bucket).delete("tune")
    reads_all = []
    for number in range(len(calls(bucket, lambda remote: store.push(remote, "tune")))):
        inner = bucket.copied()
        store.push(Remote(over(inner, number, swept)), "tune")
        other, gate = open_store(tmp_path / f"other-{number}"), Faulty(inner)
        other.pull(Remote(gate), "tune")
        assert stored(other, "tune") == content(tmp_path / "tune")
        assert_no_stray(inner)
        reads_all.append("list tables/" in gate.calls)
    assert not any(reads_all[:-1])


def test_a_push_over_a_sweep_brings_no_difference_back(lent: tuple[Store, MemoryBucket]) -> None:
    """It relies on a difference whose container is condemned together with what that is from, and
    ends before it has a name; the next push finds what that has left."""
    store, bucket = lent
    for name in ("tune", "more"):
        Remote(bucket).delete(name)
    for number in range(len(calls(bucket, lambda remote: store.push(remote, "tune")))):
        inner = bucket.copied()
        probe = over(bucket.copied(), number, swept)
        store.push(Remote(probe), "tune")
        named = probe.calls.index("put_if refs/tune")
        with suppress(Killed):
            store.push(Remote(Faulty(over(inner, number, swept), named, "killed before")), "tune")
        assert "tune" not in Remote(inner).names()
        assert_no_stray(inner)
        second = calls(inner, lambda remote: store.push(remote, "tune"))
        store.push(Remote(over(inner, second.index("put_if refs/tune"), swept)), "tune")
        assert not Remote(inner).verify(full=True).faults, (number, probe.calls[number])


def test_a_push_keeps_what_a_verify_has_noted_meanwhile(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """It mends the damage where it can still see it; else the note says so."""
    Remote(bucket).delete("tune")
    full.push(Remote(bucket), "base")

    def verified(remote: Remote) -> None:
        assert isinstance(remote.bucket, MemoryBucket)
        key, at = anchor(remote.bucket)
        blob, tag, when = remote.bucket.objects[key]
        spoilt = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        remote.bucket.objects[key] = (spoilt, tag, when)
        assert not remote.verify(full=True).fine

    mended = []
    for number in range(len(calls(bucket, lambda remote: full.push(remote, "tune")))):
        inner = bucket.copied()
        full.push(Remote(over(inner, number, verified)), "tune")
        mended.append(not damage(inner)["tune"])
        full.push(Remote(inner), "tune")
        other = open_store(tmp_path / f"other-{number}")
        other.pull(Remote(inner), "tune")
        assert stored(other, "tune") == content(tmp_path / "tune")
    assert mended == sorted(mended, reverse=True)
    assert True in mended


def test_a_verify_over_a_sweep_lists_no_difference_again(
    lent: tuple[Store, MemoryBucket],
) -> None:
    """It puts right what the catalog says of a container, of which a sweep says less meanwhile."""
    _, bucket = lent
    Remote(bucket).delete("tune")
    catalog = catalog_of(bucket)
    lying = [
        replace(entry, alone=entry.alone + noise(8, PREFIX_BYTES)) if entry.deltas else entry
        for entry in catalog.containers.values()
    ]
    commit(bucket, catalog, lambda _: CatalogChange((), lying, catalog.trash, catalog.damaged))
    fine = set()
    for number in range(len(calls(bucket, lambda remote: remote.verify()))):
        inner = bucket.copied()
        fine.add(Remote(over(inner, number, swept)).verify().fine)
        assert_no_stray(inner)
        assert Remote(inner).verify(full=True).fine
    assert fine == {True, False}  # a sweep makes the catalog anew


def test_a_push_that_finds_a_container_gone_says_so(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    """Of other checkpoints too, which a plain push of them mends."""
    full.push(Remote(bucket), "base")
    Remote(bucket).delete("tune")
    key, _ = anchor(bucket)
    del bucket.objects[key]
    assert damage(bucket) == {"base": False}  # nobody has looked
    full.push(Remote(bucket), "tune")
    assert damage(bucket) == {"base": True, "tune": False}
    assert_pulls(tmp_path, bucket, "tune")
    assert not full.push(Remote(bucket), "base").unchanged
    assert damage(bucket) == {"base": False, "tune": False}
    assert_pulls(tmp_path, bucket, "base", "tune")
    assert Remote(bucket).verify(full=True).fine
