"""What lies beside a manifest and says which containers hold its pieces: a cache like the catalog.

With it a pull reads no catalog. Without it, or where it is wrong, a pull reads the catalog, and
never gets another byte.
"""

from collections.abc import Callable
from pathlib import Path, PurePath

import msgspec
import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import KIB, content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.remote import Remote, catalog, holders, layout, upkeep
from tensor_dedup.remote.buckets import ObjectStatus
from tensor_dedup.remote.catalog import ListedContainer, prefixes
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    MissingRemoteError,
    RemoteAccessError,
)
from tensor_dedup.remote.holders import read_holders
from tensor_dedup.remote.inventory import RemoteInventory
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.tables import Record, Table

HOUR = 3600.0
NAMES = ("base", "tune", "tiny")


@pytest.fixture
def bucket(full: Store) -> MemoryBucket:
    found = MemoryBucket()
    for name in NAMES:
        full.push(Remote(found), name)
    return found


def holders_key(bucket: MemoryBucket, name: str) -> str:
    return layout.holders_key(Remote(bucket).read(name).manifest)


def pulled(tmp_path: Path, bucket: MemoryBucket, name: str, folder: str) -> list[str]:
    """Pull a checkpoint into a new store; the kinds of objects that were read, in order."""
    store, gate = open_store(tmp_path / folder), Faulty(bucket)
    store.pull(Remote(gate), name)
    assert stored(store, name) == content(tmp_path / name)
    assert store.verify(full=True).fine
    return [call.partition(" ")[2].partition("/")[0] for call in gate.calls]


def swept(bucket: MemoryBucket) -> list[str]:
    """What a sweep deletes, but for segments that were given up."""
    done = Remote(bucket).gc(0)
    assert done.done
    return [key for key in done.delete if not key.startswith(("catalog/", "trash/"))]


def put(bucket: MemoryBucket, key: str, blob: bytes) -> None:
    assert bucket.objects[key][0] != blob
    bucket.put(key, [memoryview(blob)])


@pytest.mark.parametrize("name", NAMES)
def test_a_pull_reads_the_holders_and_no_catalog(
    tmp_path: Path, bucket: MemoryBucket, name: str
) -> None:
    """Also where the anchor of a delta has to come along."""
    assert any(key.startswith("catalog/") for key in bucket.objects)
    read = pulled(tmp_path, bucket, name, "other")
    assert read.count("holders") == 1
    assert "catalog" not in read


def test_what_a_pull_reads_does_not_grow_with_what_others_have_pushed(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    def received(number: int) -> int:
        before = bucket.traffic.received
        pulled(tmp_path, bucket, "tiny", f"other-{number}")
        return bucket.traffic.received - before

    alone = received(0)
    for number in range(3):
        tensors = u8(**{f"t{n}": noise(2000 * number + n, 64) for n in range(1200)})
        path = write(tmp_path / f"past-{number}", {"model.safetensors": safetensors(tensors)})
        full.import_(path, f"past-{number}")
        full.push(Remote(bucket), f"past-{number}")
    head = [len(bucket.objects[k][0]) for k in bucket.objects if k.startswith("catalog/")]
    assert max(head) > 8 * KIB
    assert received(1) == alone


def test_a_remote_without_holders_is_read_by_its_catalog(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    for key in [key for key in bucket.objects if key.startswith("holders/")]:
        del bucket.objects[key]
    for name in NAMES:
        assert "catalog" in pulled(tmp_path, bucket, name, f"of-{name}")
    assert Remote(bucket).verify(full=True).fine
    bucket.clock += 1000 * HOUR
    assert swept(bucket) == []
    full.push(Remote(bucket), "tune", replace=True)
    assert "catalog" not in pulled(tmp_path, bucket, "tune", "again")


def test_who_may_not_list_is_told_that_he_may_not_read_what_is_not_there(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    class Strict(Faulty):
        """As S3 answers those who may only read objects."""

        refused = 0

        def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
            found = super().get(key, limit)
            if found is None:
                self.refused += 1
                raise RemoteAccessError.at(self.at(key), "403")
            return found

    del bucket.objects[holders_key(bucket, "base")]
    store, gate = open_store(tmp_path / "other"), Strict(bucket)
    store.pull(Remote(gate), "base")
    assert gate.refused == 1
    assert stored(store, "base") == content(tmp_path / "base")


def of_another(bucket: MemoryBucket, blob: bytes) -> bytes:
    return bucket.objects[holders_key(bucket, "tiny")][0]


def of_an_unknown_kind(bucket: MemoryBucket, blob: bytes) -> bytes:
    return changed(blob, lambda entry: [entry[0], "later", *entry[2:]])


def of_another_kind(bucket: MemoryBucket, blob: bytes) -> bytes:
    return changed(blob, lambda entry: [entry[0], "slab", *entry[2:]])


def of_a_container_that_is_gone(bucket: MemoryBucket, blob: bytes) -> bytes:
    return changed(blob, lambda entry: [noise(5, 32), *entry[1:]])


def of_a_container_without_them(bucket: MemoryBucket, blob: bytes) -> bytes:
    read = Remote(bucket).read("tiny")
    held = read_holders(bucket, read.manifest, read.pieces)
    assert held is not None
    [other] = held.containers
    return changed(blob, lambda entry: [bytes.fromhex(other.name), other.kind, *entry[2:]])


def of_prefixes_that_are_too_short(bucket: MemoryBucket, blob: bytes) -> bytes:
    def shortened(entry: list[object]) -> list[object]:
        whole = msgspec.convert(entry, ListedContainer)
        assert whole.pieces > 0
        assert whole.deltas == b""
        return [*entry[:3], b"".join(prefix[:2] for prefix in prefixes(whole)), b"", 2]

    return changed(blob, shortened)


def of_more_than_its_pieces(bucket: MemoryBucket, blob: bytes) -> bytes:
    def enlarged(entry: list[object]) -> list[object]:
        whole = msgspec.convert(entry, ListedContainer)
        return [*entry[:3], whole.alone + noise(6, 16 * KIB), *entry[4:]]

    return changed(blob, enlarged)


def of_more_prefixes_than_pieces(bucket: MemoryBucket, blob: bytes) -> bytes:
    """As many bytes as there may be; each is that of a piece, and they are short."""

    def repeated(entry: list[object]) -> list[object]:
        whole = msgspec.convert(entry, ListedContainer)
        held = b"".join(prefix[:3] for prefix in prefixes(whole))
        assert whole.pieces > 0
        assert whole.deltas == b""
        return [*entry[:3], held * 99, b"", 3]

    return changed(blob, repeated)


def changed(blob: bytes, change: Callable[[list[object]], list[object]]) -> bytes:
    """The frame with the first entry changed."""
    [containers] = frames.decode(blob, b"rlst", list, PurePath("x"))
    first, *others = containers
    return frames.encode(b"rlst", [[change(first), *others]])


LIES: dict[str, Callable[[MemoryBucket, bytes], bytes]] = {
    "nothing": lambda _, blob: b"",
    "noise": lambda _, blob: noise(3, len(blob)),
    "a flipped bit": lambda _, blob: blob[:-40] + bytes([blob[-40] ^ 1]) + blob[-39:],
    "no containers": lambda _, blob: frames.encode(b"rlst", [[]]),
    "of another": of_another,
    "of an unknown kind": of_an_unknown_kind,
    "of another kind": of_another_kind,
    "of a container that is gone": of_a_container_that_is_gone,
    "of more than its pieces": of_more_than_its_pieces,
    "of more prefixes than pieces": of_more_prefixes_than_pieces,
    "of prefixes that are too short": of_prefixes_that_are_too_short,
    "of a container without them": of_a_container_without_them,
}


@pytest.mark.parametrize("lie", LIES)
def test_holders_that_are_wrong_cost_requests_and_nothing_else(
    tmp_path: Path, bucket: MemoryBucket, lie: str
) -> None:
    key = holders_key(bucket, "base")
    put(bucket, key, LIES[lie](bucket, bucket.objects[key][0]))
    assert "catalog" in pulled(tmp_path, bucket, "base", "other")
    assert swept(bucket) == []  # it is nothing that a sweep need understand
    found = Remote(bucket).verify()
    # What they leave out is no lie, and that a container is gone may be the work of a sweep.
    gone = "of a container that is gone", "of another kind"
    stale = lie in ("no containers", "of another", *gone)
    assert [fault.url for fault in found.faults] == ([] if stale else [bucket.at(key)])
    assert not any(fault.affected for fault in found.faults)
    assert Remote(bucket).verify(full=True).fine
    assert "catalog" not in pulled(tmp_path, bucket, "base", "again")


def test_holders_that_are_wrong_about_the_size_of_a_container_are_written_anew(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    """By it a pull fetches a small container whole; it would fetch too much, or twice."""
    key = holders_key(bucket, "base")

    def shorter(entry: list[object]) -> list[object]:
        assert isinstance(entry[2], int)
        return [*entry[:2], entry[2] - 7, *entry[3:]]

    put(bucket, key, changed(bucket.objects[key][0], shorter))
    pulled(tmp_path, bucket, "base", "other")
    assert [fault.url for fault in Remote(bucket).verify().faults] == [bucket.at(key)]
    assert Remote(bucket).verify(full=True).fine
    read = Remote(bucket).read("base")
    held = read_holders(bucket, read.manifest, read.pieces)
    assert held is not None
    for container, entry in held.containers.items():
        assert entry.nbytes == len(bucket.objects[layout.container_key(container)][0])


def test_prefixes_that_pieces_of_several_containers_share_cost_tables_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many pieces holders have short prefixes, and what these lead to has whole digests."""
    monkeypatch.setattr(layout, "CONTAINER_BYTES", 64 * 64)
    store, found = open_store(tmp_path / "many"), MemoryBucket()
    path = write(
        tmp_path / "base",
        {"model.safetensors": safetensors(u8(**{f"t{n}": noise(n, 64) for n in range(200)}))},
    )
    store.import_(path, "base")
    store.push(Remote(found), "base")
    key = holders_key(found, "base")
    [entries] = frames.decode(found.objects[key][0], b"rlst", list, PurePath("x"))
    assert {entry[5] if len(entry) > 5 else 16 for entry in entries} >= {3}
    monkeypatch.setattr(catalog, "_SHORTEST", 1)
    monkeypatch.setattr(holders, "_MISTAKEN_BITS", -100)
    store.push(Remote(found), "base", replace=True)
    there = Remote(found).read("base")
    held = read_holders(found, there.manifest, there.pieces)
    assert held is not None
    assert len(held.containers) >= 4
    several = [
        n for n in range(200) if len({*held.holders(bytes.fromhex(digest(noise(n, 64))))}) > 1
    ]
    assert several
    assert Remote(found).verify(full=True).fine
    read = pulled(tmp_path, found, "base", "other")
    assert "catalog" not in read
    assert read.count("tables") <= len(held.containers)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_container_that_only_the_holders_name_still_does_no_harm(
    tmp_path: Path, bucket: MemoryBucket, full: Store, what: str
) -> None:
    """It was found damaged and pushed again, or a sweep is just deleting it: its table is there and
    leads to it. The catalog names another one."""
    key = next(key for key in bucket.objects if key.startswith("containers/"))
    manifest, objects = holders_key(bucket, "base"), bucket.objects
    blob, tag, when = objects[key]
    objects[key] = (bytes([blob[0] ^ 1]) + blob[1:], tag, when)
    assert not Remote(bucket).verify(full=True).fine
    other = open_store(tmp_path / "of-base")  # which lays it out in other containers
    other.import_(tmp_path / "base", "base")
    old = objects[manifest]
    other.push(Remote(bucket), "base", replace=True)
    assert objects[manifest][0] != old[0]
    table = objects[f"tables/{key.removeprefix('containers/').partition('.')[0]}"]
    assert table
    objects[manifest] = stale_holders(full, manifest)
    if what == "gone":
        del objects[key]
    else:
        assert key in objects
    direct = open_store(tmp_path / "direct")
    gate = Faulty(bucket)
    direct.pull(Remote(gate), "base")
    assert any(call == f"get_range {key}" for call in gate.calls)
    assert any(call == "get catalog/HEAD" for call in gate.calls)
    assert stored(direct, "base") == content(tmp_path / "base")
    assert direct.verify(full=True).fine


def stale_holders(full: Store, key: str) -> tuple[bytes, str, float]:
    """What the first push wrote."""
    bucket = MemoryBucket()
    full.push(Remote(bucket), "base")
    return bucket.objects[key]


def test_what_is_damaged_for_the_catalog_too_is_an_error(
    tmp_path: Path, bucket: MemoryBucket
) -> None:
    store = open_store(tmp_path / "other")
    keys = [key for key in bucket.objects if key.startswith("containers/")]
    originals = dict(bucket.objects)
    for key in keys:
        blob, tag, when = originals[key]
        bucket.objects[key] = (bytes(each ^ 1 for each in blob), tag, when)
    with pytest.raises(CorruptRemoteTensorError):
        store.pull(Remote(bucket), "base")
    for key in keys:
        del bucket.objects[key]
    with pytest.raises(MissingRemoteError, match="this container is gone"):
        store.pull(Remote(bucket), "base")
    assert store.names() == []
    assert store.verify(full=True).fine


def test_a_sweep_takes_the_holders_with_the_manifest(tmp_path: Path, bucket: MemoryBucket) -> None:
    keys = {name: holders_key(bucket, name) for name in NAMES}
    assert len({*keys.values()} & bucket.objects.keys()) == 3
    remote = Remote(bucket)
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    assert keys["tune"] in remote.gc(24).condemn
    bucket.clock += 25 * HOUR
    assert keys["tune"] in remote.gc(24).delete
    assert {*keys.values()} & bucket.objects.keys() == {keys["base"], keys["tiny"]}
    assert remote.verify(full=True).fine
    assert "catalog" not in pulled(tmp_path, bucket, "base", "other")


def test_a_push_that_uses_a_condemned_manifest_again_keeps_its_holders(
    tmp_path: Path, bucket: MemoryBucket, full: Store
) -> None:
    key, remote = holders_key(bucket, "tune"), Remote(bucket)
    remote.delete("tune")
    bucket.clock += 25 * HOUR
    assert key in remote.gc(24).condemn
    full.push(remote, "tune")
    bucket.clock += 25 * HOUR
    assert key not in remote.gc(24).delete
    assert "catalog" not in pulled(tmp_path, bucket, "tune", "other")


def test_holders_that_verify_writes_are_no_larger_than_they_may_be(bucket: MemoryBucket) -> None:
    """What a piece is against is named for the one container that is named for the piece."""
    read = Remote(bucket).read("tune")
    own = [piece.digest for piece in read.pieces if piece.nbytes]
    key = layout.holders_key(read.manifest)
    found = RemoteInventory([read], objects={key: ObjectStatus(key, 0, "", 0.0)})
    anchors = [bytes.fromhex(digest(bytes([n]))) for n in range(9)]
    records = [Record(each, 0, 64, 64, "raw", None, each) for each in (*anchors, *own[1:])]
    found.tables[ContainerId("a" * 64, "pack")] = Table("pack", 64, records, None)
    for n, base in enumerate(anchors):
        table = Table("delta", 64, [Record(own[0], 0, 9, 64, "zstd", base, own[0])], None)
        found.tables[ContainerId(f"{n}" * 64, "delta")] = table
    bucket.put(key, [memoryview(b"")])
    assert len(own) + len(anchors) > 2 * len(own)
    assert [*upkeep._mended_holders(bucket, found, ())]
    held = read_holders(bucket, read.manifest, read.pieces)
    assert held is not None
    assert all(map(held.holders, (*own, anchors[0])))


def test_what_a_manifest_says_of_sizes_lets_in_no_holders_of_any_size(bucket: MemoryBucket) -> None:
    """No number of a remote is believed: of tensors of many leaves they may be large, not huge."""
    limits = dict[str, int]()

    class Asked(Faulty):
        def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
            limits[key] = limit
            return super().get(key, limit)

    read, key = Remote(bucket).read("tune"), holders_key(bucket, "tune")
    pieces = [msgspec.structs.replace(piece, nbytes=1 << 60) for piece in read.pieces]
    assert read_holders(Asked(bucket), read.manifest, pieces) is not None
    assert limits == {key: layout.FRAME_BYTES}
