"""What `verify` says and mends while others push, sweep and note damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import KIB, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import catalog_of, note_damage, noted_damage, read_table

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in which `tune` has a delta against a tensor of `base`."""
    found = open_store(tmp_path / "store")
    b = noise(2, 400 * KIB)
    changed = b[:1000] + bytes([b[1000] ^ 1]) + b[1001:]
    for name, tensors in {
        "base": {"b": b},
        "tune": {"b": changed},
        "other": {"c": noise(3, 30_000)},
    }.items():
        path = write(tmp_path / name, {"model.safetensors": safetensors(u8(**tensors))})
        found.import_(path, name, compress="auto")
    return found


def remote_with(store: Store, *names: str) -> MemoryBucket:
    found = MemoryBucket()
    for name in names:
        store.push(Remote(found), name)
    return found


def at_each_call(
    start: MemoryBucket, full: bool, meanwhile: Callable[[MemoryBucket], object]
) -> list[tuple[MemoryBucket, bool]]:
    """What a verify says, and the remote after it, where something happens before one call."""
    probe = Faulty(start.copied())
    Remote(probe).verify(full=full)
    found = []
    for number in range(len(probe.calls)):
        inner = start.copied()
        gate = Faulty(inner, number, meanwhile=lambda inner=inner: meanwhile(inner))  # type: ignore[misc]
        fine = Remote(gate).verify(full=full).fine
        assert gate.struck
        found.append((inner, fine))
    assert len(found) > 10
    return found


@pytest.mark.parametrize("full", [False, True])
def test_what_a_sweep_deletes_meanwhile_is_no_damage(store: Store, full: bool) -> None:
    start = remote_with(store, "base", "other")
    Remote(start).delete("other")
    start.clock += 25 * HOUR
    assert Remote(start).gc(24).condemn
    start.clock += 25 * HOUR
    assert any(k.startswith(layout.CONTAINERS) for k in Remote(start.copied()).gc(24).delete)
    for number, (bucket, fine) in enumerate(
        at_each_call(start, full, lambda bucket: Remote(bucket).gc(24))
    ):
        assert fine, number
        assert not noted_damage(bucket), number
        assert Remote(bucket).verify(full=True).fine


@pytest.mark.parametrize("full", [False, True])
def test_what_a_sweep_is_deleting_is_no_damage(store: Store, full: bool) -> None:
    """It is cut short wherever it is, also between a table and its container."""
    start = remote_with(store, "base", "other")
    Remote(start).delete("other")
    for _ in range(2):
        start.clock += 25 * HOUR
        last = start.copied()
        Remote(start).gc(24)
    probe = Faulty(last.copied())
    Remote(probe).gc(24)
    deletions = [n for n, call in enumerate(probe.calls) if call.startswith("delete ")]
    for number in deletions:
        inner = last.copied()
        verified = list[bool]()

        def verify(inner: MemoryBucket = inner, verified: list[bool] = verified) -> None:
            tables = {key for key in inner.objects if key.startswith(layout.TABLES)}
            verified.append(Remote(inner).verify(full=full).fine)
            assert tables >= {key for key in inner.objects if key.startswith(layout.TABLES)}

        Remote(Faulty(inner, number, meanwhile=verify)).gc(24)
        assert verified == [True], number
        assert Remote(inner).verify(full=True).fine


def test_what_is_noted_after_it_was_read_stays_noted(store: Store) -> None:
    """A push finds a container gone that a full check has found whole just before."""
    start = remote_with(store, "base", "other")
    key = layout.container_key(catalog_of(start).holders(pieces(store, "other")[-1])[0])

    def lose(bucket: MemoryBucket) -> None:
        bucket.objects.pop(key, None)
        note_damage(bucket, [key])

    for number, (bucket, _) in enumerate(at_each_call(start, True, lose)):
        assert key in noted_damage(bucket), number
        store.push(Remote(bucket), "other")
        assert Remote(bucket).verify(full=True).fine


def test_a_head_that_is_gone_is_a_fault_until_something_writes_it(store: Store) -> None:
    bucket = remote_with(store, "base")
    del bucket.objects[layout.HEAD]
    assert [fault.url for fault in Remote(bucket).verify().faults] == [bucket.at(layout.HEAD)]
    Remote(bucket).gc(24)
    assert Remote(bucket).verify().fine


def test_a_delta_that_is_pushed_while_a_verify_mends_stays_listed(
    tmp_path: Path, store: Store
) -> None:
    start = remote_with(store, "base", "other")
    key = layout.container_key(catalog_of(start).holders(pieces(store, "other")[-1])[0])
    blob, *rest = start.objects[key]
    start.objects[key] = (blob[:-1], *rest)  # type: ignore[assignment]
    records = set[bytes]()
    for bucket, _ in at_each_call(start, False, lambda b: store.push(Remote(b), "tune")):
        assert key in noted_damage(bucket)
        for container in catalog_of(bucket).containers:
            table = read_table(bucket, container.name)
            records |= {record.digest for record in table.records if record.base is not None}
        assert records
        assert all(catalog_of(bucket).holders(digest) for digest in records)
    other = open_store(tmp_path / "pulled")
    other.pull(Remote(bucket), "tune")
    assert stored(other, "tune") == stored(store, "tune")


def pieces(store: Store, name: str) -> list[bytes]:
    objects = store.handle.objects
    manifest = objects.ref(name)
    found = objects.pieces(manifest, objects.manifest(manifest))
    return [piece.digest for piece in found if piece.name is not None]
