"""What a push reads of the catalog: of containers with many pieces, a few bytes for each of these.

They say where a piece may be. Whether it is there, the container's table says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.remote import Remote, catalog, layout
from tensor_dedup.remote.catalog import PREFIX_BYTES, ListedContainer, read_catalog
from tensor_dedup.remote.errors import DamagedRemoteError, TakenPlaceError
from tensor_dedup.store.format import frames

PIECES = 100


def checkpoint(tmp_path: Path, name: str, seed: int, *, own: int = PIECES) -> Path:
    """Small tensors, of which all but `own` are those of seed 0."""
    seeds = [(seed if n < own else 0) * 10_000 + n for n in range(PIECES)]
    tensors = u8(**{f"t{n:03}": noise(each, 200) for n, each in enumerate(seeds)})
    return write(tmp_path / name, {"model.safetensors": safetensors(tensors)})


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Shorten prefixes as a catalog of more pieces does, but for who asks for `small`."""
    if "small" not in request.fixturenames:
        monkeypatch.setattr(catalog, "_WHOLE", 0)


@pytest.fixture
def small() -> None:
    """A catalog as it is."""


@pytest.fixture
def full(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "full")
    for seed, name in enumerate(["base", "one", "two", "three"]):
        store.import_(checkpoint(tmp_path, name, seed), name)
    store.import_(checkpoint(tmp_path, "tune", 9, own=10), "tune")
    return store


@pytest.fixture
def bucket(full: Store) -> MemoryBucket:
    """A remote with four checkpoints that share no tensor."""
    found = MemoryBucket()
    for name in ("base", "one", "two", "three"):
        # The header is the same.
        assert full.push(Remote(found), name).moved_pieces == PIECES + (name == "base")
    return found


def entries(bucket: MemoryBucket) -> list[ListedContainer]:
    found = read_catalog(bucket)
    assert found is not None
    return [*found.containers.values()]


@contextmanager
def one_byte() -> Iterator[None]:
    """So short that nearly each piece seems to be in some container."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_SHORTEST", 1)
        patch.setattr(catalog, "_MISTAKEN_BITS", -8)
        yield


def without_holders(bucket: MemoryBucket) -> MemoryBucket:
    for key in [key for key in bucket.objects if key.startswith("holders/")]:
        del bucket.objects[key]
    return bucket


def test_a_push_finds_what_is_there_and_reads_little(full: Store, bucket: MemoryBucket) -> None:
    assert {entry.width for entry in entries(bucket)} == {3}
    assert sum(entry.pieces for entry in entries(bucket)) >= 4 * PIECES
    segments = [k for k in bucket.objects if k.startswith("catalog/") and k != layout.HEAD]
    head, gate = bucket.objects[layout.HEAD][0], Faulty(bucket)
    read = [key for key in segments if bytes.fromhex(key.removeprefix("catalog/")) in head]
    assert sum(len(bucket.objects[key][0]) for key in read) < 4 * PIECES * PREFIX_BYTES / 2
    done = full.push(Remote(gate), "tune")
    assert (done.pieces, done.moved_pieces) == (PIECES + 1, 10)
    assert [c for c in gate.calls if c.startswith("get tables/")] == [
        f"get {layout.table_key(entry.name.hex())}" for entry in entries(bucket) if holds(entry, 0)
    ]


def holds(entry: ListedContainer, seed: int) -> bool:
    """Whether a container has the last tensor of a seed."""
    prefix = bytes.fromhex(digest(noise(seed * 10_000 + PIECES - 1, 200)))[: entry.width]
    return prefix in {*catalog.prefixes(entry)}


def test_few_pieces_have_whole_prefixes_and_cost_no_table(tmp_path: Path) -> None:
    store, bucket = open_store(tmp_path / "store"), MemoryBucket()
    tensors = {f"t{n}": noise(n, 200) for n in range(20)}
    path = write(tmp_path / "a", {"model.safetensors": safetensors(u8(**tensors))})
    store.import_(path, "a")
    store.push(Remote(bucket), "a")
    assert {entry.width for entry in entries(bucket)} == {PREFIX_BYTES}
    tensors["t20"] = noise(20, 200)
    path = write(tmp_path / "b", {"model.safetensors": safetensors(u8(**tensors))})
    store.import_(path, "b")
    gate = Faulty(bucket)
    assert store.push(Remote(gate), "b").moved_pieces == 2
    assert not any(call.startswith("get tables/") for call in gate.calls)


@pytest.mark.usefixtures("small")
def test_a_small_catalog_has_whole_prefixes_and_costs_no_table(tmp_path: Path) -> None:
    """A base in several containers of many pieces: each table would be a request."""
    store, bucket = open_store(tmp_path / "store"), MemoryBucket()
    for seed in range(9):
        store.import_(checkpoint(tmp_path, f"base{seed}", seed), f"base{seed}")
        store.push(Remote(bucket), f"base{seed}")
    blobs = {
        f"s{seed}.t{n}": noise(seed * 10_000 + n, 200) for seed in range(9) for n in range(PIECES)
    }
    tensors = u8(**blobs, new=noise(7_000, 200))
    store.import_(write(tmp_path / "all", {"model.safetensors": safetensors(tensors)}), "all")
    assert {entry.width for entry in entries(bucket)} == {PREFIX_BYTES}
    assert min(entry.pieces for entry in entries(bucket)) >= PIECES
    gate = Faulty(bucket)
    done = store.push(Remote(gate), "all")
    assert (done.pieces, done.moved_pieces) == (9 * PIECES + 2, 2)
    assert not any(call.startswith("get tables/") for call in gate.calls)


def test_a_piece_that_only_seems_to_be_there_is_sent_and_found(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    there = MemoryBucket()
    with one_byte():
        for name in ("base", "one", "two", "three", "tune"):
            done = full.push(Remote(there), name)
            assert done.moved_pieces == {"base": PIECES + 1, "tune": 10}.get(name, PIECES)
        long = [entry for entry in entries(there) if entry.pieces > 32]
        assert {entry.width for entry in long} == {1}
        assert len({p for entry in long for p in catalog.prefixes(entry)}) > 180  # of 256
        assert Remote(there).verify(full=True).fine
        without_holders(there)
        for name in ("base", "one", "two", "three", "tune"):
            store = open_store(tmp_path / f"of-{name}")
            store.pull(Remote(there), name)
            assert stored(store, name) == content(tmp_path / name)
    # Nobody writes them so short: a small object would name very many.
    with pytest.raises(DamagedRemoteError, match="contradicts itself"):
        entries(there)


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_what_no_table_confirms_is_sent_again(
    tmp_path: Path, full: Store, bucket: MemoryBucket, what: str
) -> None:
    [key] = [layout.table_key(entry.name.hex()) for entry in entries(bucket) if holds(entry, 0)]
    blob, tag, when = bucket.objects.pop(key)
    if what == "damaged":
        bucket.objects[key] = (blob[:-1] + bytes([blob[-1] ^ 1]), tag, when)
    assert full.push(Remote(bucket), "tune").moved_pieces == PIECES + 1
    store = open_store(tmp_path / "other")
    store.pull(Remote(bucket), "tune")
    assert stored(store, "tune") == content(tmp_path / "tune")


def test_a_remote_from_before_version_1_is_refused(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    """By all that would read its catalog or write another one; nothing of it is changed."""
    entries_ = [[bytes(32), "pack", 9, bytes(16), b""]]
    segment = frames.encode(b"rseg", [entries_])
    trash = frames.encode(b"rtra", [{"tables/00/" + "00" * 32: 17}, []])
    for key, blob in ((layout.segment_key, segment), (layout.trash_key, trash)):
        bucket.put(key(digest(blob)), [memoryview(blob)])
    names = [bytes.fromhex(digest(segment))], bytes.fromhex(digest(trash))
    bucket.put(layout.HEAD, [memoryview(frames.encode(b"rhed", [*names]))])
    without_holders(bucket)
    before = dict(bucket.objects)
    remote, store = Remote(bucket), open_store(tmp_path / "other")
    says = r"catalog/HEAD: .*before version 1.*push to an empty folder"
    verbs: list[Callable[[], object]] = [
        lambda: full.push(remote, "tune"),
        lambda: store.pull(remote, "one"),
        lambda: remote.verify(full=True),
        lambda: remote.gc(24),
        remote.usage,
    ]
    for verb in verbs:
        with pytest.raises(TakenPlaceError, match=says):
            verb()
    assert bucket.objects == before


@pytest.mark.parametrize(("pieces", "width"), [(4095, 3), (4096, 4), (1 << 20, 5)])
def test_prefixes_are_as_long_as_a_catalog_of_its_size_needs(pieces: int, width: int) -> None:
    entry = ListedContainer(
        noise(1, 32), "pack", 9, noise(2, PIECES * PREFIX_BYTES), b"", PREFIX_BYTES
    )
    [[short]] = catalog.segment_of([entry], pieces - PIECES).values()
    assert (short.width, short.pieces) == (width, PIECES)
    assert [*catalog.prefixes(short)] == [each[:width] for each in catalog.prefixes(entry)]
    blob = catalog.segment_blob([short])
    read = frames.decode(blob, b"rlst", catalog.CatalogSegment, PurePath("x"))
    assert read.containers == [short]


def test_a_container_is_there_once_for_each_prefix() -> None:
    found = catalog.Catalog()
    found.add(ListedContainer(bytes(32), "pack", 9, bytes(3 * 1000), bytes(3 * 1000), 3))
    assert len(found.holders(bytes(32), alone=True)) == 1
    assert len(found.holders(bytes(32))) == 2
