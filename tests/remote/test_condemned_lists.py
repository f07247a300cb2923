"""The list of what is condemned is short and whole."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from remote_runs import remotes
from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import KIB, open_store, safetensors, u8, write
from tensor_dedup.digest import digest
from tensor_dedup.remote import Remote, layout
from tensor_dedup.remote.catalog import (
    DAMAGED,
    Catalog,
    CatalogChange,
    Trash,
    catalog_of,
    commit,
    condemned,
    read_catalog,
    trash_object,
)
from tensor_dedup.remote.errors import DamagedRemoteError, RemoteBusyError
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames

HOUR = 3600.0
NAMES = [f"{number:02x}" * 32 for number in range(30)]


def keys() -> list[str]:
    """Keys of all kinds that a sweep may find."""
    return [
        *(f"containers/{name[:2]}/{name}.mixed" for name in NAMES),
        *(f"containers/{name[:2]}/{name}.pack" for name in NAMES[:9]),
        *(f"tables/{name[:2]}/{name}" for name in NAMES),
        *(f"manifests/{name[:2]}/{name}" for name in NAMES[3:]),
        *(f"holders/{name[:2]}/{name}" for name in NAMES[5:]),
        *(f"catalog/{name}" for name in NAMES[:7]),
        *(f"trash/{name}" for name in NAMES[:7]),
        *(f"probe/{number:016x}" for number in range(12)),
        *(f"tmp/{number}-0123456789ab" for number in range(12)),
        f"tables/00/{NAMES[9]}",  # below the digits of another one
    ]


def written(bucket: MemoryBucket, trash: Trash) -> None:
    commit(bucket, Catalog(), lambda _: ({}, trash))


def read(bucket: MemoryBucket) -> Trash:
    found = read_catalog(bucket, with_trash=True)
    assert found is not None
    return found.trash


def test_a_list_comes_back_as_it_was() -> None:
    bucket = MemoryBucket()
    deleting: dict[str, tuple[int, ...]] = dict.fromkeys(keys()[::3], (17,))
    # Some by several sweeps at once.
    deleting |= dict.fromkeys(keys()[::6], (17, 17, 18, 1_700_000_000))
    since = {key: (DAMAGED, 17, 1_700_000_000)[n % 3] for n, key in enumerate(keys())}
    trash = Trash(since, deleting)
    written(bucket, trash)
    assert read(bucket) == trash
    assert condemned(bucket) == since
    # The same list is the same object, in whatever order it was put together.
    assert trash_object(Trash(dict(reversed(since.items())), deleting)) == trash_object(trash)


def test_a_later_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put together anew, the catalog would forget what is being deleted."""
    bucket = MemoryBucket()
    with monkeypatch.context() as later:
        later.setattr(frames, "VERSION", 2)
        blob = frames.encode(b"rcnd", [[], []])
    bucket.put(layout.trash_key(digest(blob)), [memoryview(blob)])
    head = frames.encode(b"rcat", [[], bytes.fromhex(digest(blob))])
    bucket.put(layout.HEAD, [memoryview(head)])
    with pytest.raises(NewerFormatError, match="format 2"):
        read(bucket)


@pytest.mark.parametrize("entry", [[0, ["tables/??/*"], b"short"], [0, ["*"] * 9, bytes(32)]])
def test_an_entry_that_contradicts_itself_is_damage(entry: list[object]) -> None:
    bucket = MemoryBucket()
    blob = frames.encode(b"rcnd", [[entry], []])
    assert msgspec.msgpack.decode(blob[24:-32]) == [[entry], []]
    bucket.put(layout.trash_key(digest(blob)), [memoryview(blob)])
    head = frames.encode(b"rcat", [[], bytes.fromhex(digest(blob))])
    bucket.put(layout.HEAD, [memoryview(head)])
    with pytest.raises(DamagedRemoteError, match="contradicts itself"):
        read(bucket)


def test_a_small_push_stays_so_beside_a_hundred_condemned_checkpoints(tmp_path: Path) -> None:
    store, made = open_store(tmp_path / "store"), MemoryBucket()
    base = {f"w{number}": np.random.default_rng(number).bytes(3000) for number in range(8)}
    for number in range(101):
        data = base | {"x": np.random.default_rng(500 + number).bytes(3000)}
        path = write(tmp_path / f"c{number}", {"model.safetensors": safetensors(u8(**data))})
        store.import_(path, f"c{number}")
    for number in range(100):
        store.push(Remote(made), f"c{number}")
    for number in range(99):
        Remote(made).delete(f"c{number}")
    made.clock += 25 * HOUR
    Remote(made).gc(24)
    assert len([key for key in condemned(made) if key.startswith(layout.CONTAINERS)]) == 98
    with remotes.s3() as proxy:
        remote = Remote.open("s3://bucket/condemned")
        for key, (blob, _, _) in made.objects.items():
            remote.bucket.put(key, [memoryview(blob)])
        for name in ("c100", "c5"):  # a new one, and one that is condemned
            proxy.reset()
            pushed = store.push(remote, name)
            assert 3000 <= pushed.moved_bytes <= 2 * 3000
            assert proxy.nbytes <= 1.02 * pushed.moved_bytes + 64 * KIB
        assert remote.verify(full=True).fine


@pytest.mark.parametrize("missing", [False, True])
def test_a_push_that_needs_what_is_deleted_sends_nothing(tmp_path: Path, missing: bool) -> None:
    """Not even the manifest of what is there in other containers."""
    bucket, store = MemoryBucket(), open_store(tmp_path / "store")
    one = safetensors(u8(a=bytes(9_000)))
    more = {"more.json": b"{}"} if missing else {}
    store.import_(write(tmp_path / "one", {"model.safetensors": one}), "one")
    store.import_(write(tmp_path / "two", {"other.safetensors": one, **more}), "two")
    store.push(Remote(bucket), "one")
    [key] = [key for key in bucket.objects if key.startswith("containers/")]

    def change(now: Catalog) -> CatalogChange:
        return now.segments, Trash({}, {key: (int(bucket.clock),)})

    commit(bucket, catalog_of(bucket), change)
    gate = Faulty(bucket)
    with pytest.raises(RemoteBusyError):
        store.push(Remote(gate), "two")
    assert not [call for call in gate.calls if call.startswith("put ")]
