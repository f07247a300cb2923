"""The catalog: what it says comes back as it was, in few bytes, whoever else writes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from remote_runs.remotes import Faulty, MemoryBucket
from store_runs.stores import content, noise, open_store, safetensors, stored, u8, write
from tensor_dedup import Store
from tensor_dedup.digest import digest, leaf_digests
from tensor_dedup.remote import Remote, catalog, layout
from tensor_dedup.remote.catalog import (
    PREFIX_BYTES,
    Catalog,
    CatalogChange,
    Deletion,
    ListedContainer,
    Trash,
    catalog_of,
    commit,
    corrected,
    entries_of,
    listed,
    note_damage,
    noted_damage,
    read_catalog,
    with_more,
)
from tensor_dedup.remote.errors import DamagedRemoteError, RemoteBusyError, TakenPlaceError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import NewerFormatError
from tensor_dedup.store.format import frames, tables
from tensor_dedup.store.format.tables import PLAIN, Record, Table

PIECES = 100
NO_TRASH = Trash()


def checkpoint(tmp_path: Path, name: str, number: int, *, own: int = PIECES) -> Path:
    """Small tensors, of which all but `own` are those of the number 0."""
    numbers = [(number if n < own else 0) * 10_000 + n for n in range(PIECES)]
    tensors = u8(**{f"t{n:03}": noise(each, 200) for n, each in enumerate(numbers)})
    return write(tmp_path / name, {"model.safetensors": safetensors(tensors)})


@pytest.fixture
def full(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "full")
    for number, name in enumerate(["base", "one", "two", "three"]):
        store.import_(checkpoint(tmp_path, name, number), name)
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


def entry(number: int, pieces: int = 1, *, deltas: int = 0) -> ListedContainer:
    name = bytes.fromhex(digest(f"container {number}".encode()))
    alone, against = (
        noise(7 * number + n, k * PREFIX_BYTES) for n, k in ((1, pieces), (2, deltas))
    )
    return ListedContainer(name, "pack", 99, alone, against)


def write_catalog(
    bucket: MemoryBucket,
    entries: list[ListedContainer],
    trash: Trash = NO_TRASH,
    damaged: frozenset[str] = frozenset(),
) -> None:
    commit(bucket, Catalog(), lambda _: CatalogChange((), entries, trash, damaged))


def read(bucket: MemoryBucket) -> Catalog:
    found = read_catalog(bucket, with_trash=True)
    assert found is not None
    return found


def test_what_is_written_is_read() -> None:
    bucket, entries = MemoryBucket(), [entry(1, 3), entry(2, 0, deltas=2), entry(3, 5, deltas=1)]
    trash = Trash(
        {"containers/00/x.pack": 17, "tmp/1-0": 18}, Deletion(19, ["trash/1", "tables/2"])
    )
    write_catalog(bucket, entries, trash, frozenset({"manifests/00/1"}))
    found = read(bucket)
    assert {*found.containers.values()} == {*entries}
    assert (found.trash, found.damaged) == (trash, frozenset({"manifests/00/1"}))
    assert found.trash.deleting == {"trash/1", "tables/2"}
    assert noted_damage(bucket) == {"manifests/00/1"}
    assert found.tag == catalog.tag_of(bucket)


def test_a_piece_is_found_alone_first() -> None:
    found, piece = Catalog(), noise(5, 32)
    prefix = piece[:PREFIX_BYTES]
    for number, (alone, deltas) in enumerate([(b"", prefix), (prefix, b""), (prefix, prefix)]):
        found.add(ListedContainer(bytes([number]) * 32, "mixed", 9, alone, deltas))
    names = [container.name[:2] for container in found.holders(piece)]
    assert names == ["01", "02", "00", "02"]
    assert [each.name[:2] for each in found.holders(piece, alone=True)] == ["01", "02"]
    assert found.holders(noise(6, 32)) == []


@pytest.mark.parametrize("kind", [b"rhdr", b"rseg", b"rtrs"])
def test_a_later_form_is_refused(monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """Put together anew, the catalog would forget what is being deleted."""
    bucket, encode = MemoryBucket(), frames.encode

    def later(frame: bytes, payload: object) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(frames, "VERSION", 2 if frame == kind else 1)
            return encode(frame, payload)

    with monkeypatch.context() as patch:
        patch.setattr(frames, "encode", later)
        write_catalog(bucket, [entry(1)], Trash({"x": 1}))
    with pytest.raises(NewerFormatError, match="format 2"):
        catalog_of(bucket)


@pytest.mark.parametrize(
    "wrong",
    [
        ListedContainer(b"short", "pack", 9, b"", b""),
        ListedContainer(bytes(32), "drawer", 9, b"", b""),
        ListedContainer(bytes(32), "pack", 0, b"", b""),
        ListedContainer(bytes(32), "pack", 9, bytes(PREFIX_BYTES + 1), b""),
    ],
)
def test_an_entry_that_contradicts_itself_is_damage(wrong: ListedContainer) -> None:
    bucket = MemoryBucket()
    write_catalog(bucket, [entry(1), wrong])
    with pytest.raises(DamagedRemoteError, match="contradicts itself"):
        read(bucket)


@pytest.mark.parametrize("kind", [b"rhed", b"rcat"])
def test_a_remote_from_before_version_1_is_refused(
    tmp_path: Path, full: Store, bucket: MemoryBucket, kind: bytes
) -> None:
    """By all that would read its catalog or write another one; nothing of it is changed."""
    entries = [[bytes(32), "pack", 9, bytes(16), b""]]
    segment = frames.encode(b"rseg", [entries])
    bucket.put(layout.segment_key(digest(segment)), [memoryview(segment)])
    head = frames.encode(kind, [[bytes.fromhex(digest(segment))], None])
    bucket.put(layout.HEAD, [memoryview(head)])
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


# --- segments


def catalog_with(*segments: list[ListedContainer]) -> Catalog:
    found = Catalog()
    for number, held in enumerate(segments):
        found.segments[bytes([number]) * 32] = held
        for each in held:
            found.add(each)
    return found


def test_small_segments_are_merged_and_large_ones_stay() -> None:
    large, small, new = [entry(1, 40_000)], [entry(2), entry(3)], entry(4)
    kept, written = with_more(catalog_with(large, small), [new])
    assert kept == [bytes(32)]
    assert {*written} == {*small, new}


def test_an_entry_takes_the_place_of_the_former_one_wherever_that_is() -> None:
    large = [entry(1, 40_000), entry(2, 2)]
    more = ListedContainer(large[1].name, "pack", 99, large[1].alone, noise(3, PREFIX_BYTES))
    kept, written = with_more(catalog_with(large), [more])
    assert kept == []
    assert {*written} == {large[0], more}


def test_what_is_listed_already_is_not_written_again() -> None:
    held = catalog_with([entry(1, 40_000)], [entry(2)])
    assert with_more(held, [entry(1, 40_000), entry(2)]) == ([*held.segments], [])


def test_pushes_alone_leave_few_segments_and_seldom_write_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "_MERGED_BYTES", 1000)
    now, counts, written, listed_pieces = Catalog(), list[int](), list[int](), 0
    for number in range(2000):
        kept, more = with_more(now, [entry(number, 5)])
        segments = {name: now.segments[name] for name in kept}
        now = Catalog(segments={**segments, number.to_bytes(32, "big"): more})
        listed_pieces += 5
        assert sum(each.pieces for held in now.segments.values() for each in held) == listed_pieces
        counts.append(len(now.segments))
        written.append(sum(each.pieces for each in more))
        small = 1000 // 16
        assert written[-1] <= listed_pieces / 3 + small + 5
    assert max(counts) == 9
    # Each entry is written 16 times or less; 100 times where each push would merge one segment.
    assert sum(written) <= 16 * listed_pieces


def test_a_push_reads_and_writes_few_bytes_for_each_piece_of_the_remote(
    full: Store, bucket: MemoryBucket
) -> None:
    pieces = sum(each.pieces for each in read(bucket).containers.values())
    assert pieces >= 4 * PIECES
    moved = {"get": 0, "put": 0}

    class Counted(Faulty):
        def _do(self, verb: str, key: str, call: Callable[[], object]) -> object:
            found = super()._do(verb, key, call)
            if key.startswith("catalog/") and verb in moved:
                moved[verb] += len(self.inner.get(key, 1 << 30)[0])  # type: ignore[index]
            return found

    gate = Counted(bucket)
    done = full.push(Remote(gate), "tune")
    assert (done.pieces, done.moved_pieces) == (PIECES + 1, 10)
    assert not [call for call in gate.calls if call.startswith("get tables/")]
    assert 0 < moved["get"] <= 24 * pieces
    assert 0 < moved["put"] <= 24 * (pieces + 10)


# --- writers at once


def test_of_two_writers_none_is_lost() -> None:
    bucket = MemoryBucket()
    write_catalog(bucket, [entry(1)])
    before = read(bucket)
    commit(
        bucket,
        before,
        lambda now: CatalogChange(*with_more(now, [entry(2)]), NO_TRASH, now.damaged),
    )
    seen = commit(
        *(bucket, before),
        lambda now: CatalogChange(*with_more(now, [entry(3)]), NO_TRASH, now.damaged),
        pause=lambda _: None,
    )
    assert seen.tag != before.tag
    assert {*read(bucket).containers.values()} == {entry(1), entry(2), entry(3)}


@pytest.mark.parametrize("fault", ["twice", "lost after"])
def test_a_writer_knows_its_own_head(fault: str) -> None:
    """Where the answer is lost, whoever sends requests again is told that another was first."""
    bucket, calls = MemoryBucket(), list[str]()
    write_catalog(bucket, [entry(1)])

    class Again(Faulty):
        def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
            calls.append(key)
            assert self.inner.put_if(key, data, tag)
            return self.inner.put_if(key, data, tag) if fault == "twice" else False

    found = read(bucket)
    change = CatalogChange((), [entry(2)], NO_TRASH, frozenset())
    assert commit(Again(bucket), found, lambda _: change) is found
    assert calls == [layout.HEAD]


def test_no_state_of_the_head_comes_back() -> None:
    bucket = MemoryBucket()
    write_catalog(bucket, [entry(1)])
    first = bucket.objects[layout.HEAD][0]
    commit(bucket, read(bucket), lambda _: CatalogChange((), [entry(1)], NO_TRASH, frozenset()))
    assert bucket.objects[layout.HEAD][0] != first


def test_a_head_that_others_write_again_and_again_is_said_to_be() -> None:
    bucket = MemoryBucket()

    def change(now: Catalog) -> CatalogChange:
        commit(bucket, now, lambda _: CatalogChange((), [], NO_TRASH, frozenset()))
        return CatalogChange((), [entry(1)], NO_TRASH, frozenset())

    with pytest.raises(RemoteBusyError, match="40 times"):
        commit(bucket, Catalog(), change, pause=lambda _: None)


# --- deltas and what is condemned or damaged


SIZE = 4096
ANCHOR, DELTA, OTHER = (noise(number, SIZE) for number in (21, 22, 23))


def table(*records: tuple[bytes, bytes | None]) -> tuple[ContainerId, Table]:
    """A container with pieces, each with the base against which it is stored."""
    held = []
    for n, (data, base) in enumerate(records):
        leaves = b"".join(leaf_digests(memoryview(data)))
        codec, stored, against = PLAIN, SIZE, None
        if base is not None:
            codec, stored, against = "sparse2", SIZE // 2, name_of(base)
        held.append(Record(name_of(data), SIZE * n, stored, SIZE, codec, against, leaves))
    found = Table("mixed", SIZE * len(held), held, None)
    return ContainerId(tables.encode(found).name, "mixed"), found


def name_of(data: bytes) -> bytes:
    return bytes.fromhex(digest(data))


def prefix_of(data: bytes) -> bytes:
    return name_of(data)[:PREFIX_BYTES]


@pytest.mark.parametrize("state", ["whole", "anchor condemned", "delta condemned", "anchor gone"])
def test_a_delta_is_listed_only_with_what_it_is_against(state: str) -> None:
    held, difference = table((ANCHOR, None)), table((DELTA, ANCHOR), (OTHER, None))
    keys = {name: layout.container_key(each[0]) for name, each in (("a", held), ("d", difference))}
    condemned = {"anchor condemned": [keys["a"]], "delta condemned": [keys["d"]]}.get(state, [])
    both = dict([difference] if state == "anchor gone" else [held, difference])
    found = {each.container: each for each in entries_of(both, condemned)}
    assert found[difference[0]].alone == prefix_of(OTHER)
    assert found[difference[0]].deltas == (prefix_of(DELTA) if state == "whole" else b"")
    assert state == "anchor gone" or found[held[0]].alone == prefix_of(ANCHOR)


def test_what_is_corrected_lists_no_container_that_the_catalog_does_not() -> None:
    """A gc may have deleted it since its table was read."""
    held, difference = table((ANCHOR, None)), table((DELTA, ANCHOR), (OTHER, None))
    now = Catalog()
    now.add(listed(*difference))
    [found] = corrected(now, dict([held, difference]), ())
    assert (found.container, found.deltas) == (difference[0], b"")
    # Nor is a delta listed whose table was not read.
    [found] = corrected(now, {}, ())
    assert (found.alone, found.deltas) == (prefix_of(OTHER), b"")
    assert corrected(now, {}, {layout.container_key(difference[0])}) == []


def test_damage_that_is_noted_takes_with_it_what_is_against_it() -> None:
    bucket = MemoryBucket()
    held, difference = table((ANCHOR, None)), table((DELTA, ANCHOR), (OTHER, None))
    pairs = held, difference
    for container, each in pairs:
        frame = tables.encode(each)
        bucket.put(layout.table_key(container.name), [memoryview(frame.blob)])
        size = listed(container, each).nbytes
        bucket.put(layout.container_key(container), [memoryview(bytes(size))])
    write_catalog(bucket, [listed(*each) for each in pairs])
    assert read(bucket).holders(name_of(DELTA))
    key = layout.container_key(held[0])
    note_damage(bucket, [key])
    found = read(bucket)
    assert found.damaged == noted_damage(bucket) == {key}
    assert not found.holders(name_of(ANCHOR))
    assert not found.holders(name_of(DELTA))
    assert found.holders(name_of(OTHER))
    segments = [key for key in bucket.objects if key.startswith("catalog/") and key != layout.HEAD]
    for lost in ([layout.HEAD], segments):
        kept = dict(bucket.objects)
        for key in lost:
            del bucket.objects[key]
        again = catalog_of(bucket)
        assert again.rebuilt
        assert again.holders(name_of(OTHER))
        # Without its head, what was noted is forgotten.
        assert bool(again.holders(name_of(ANCHOR))) == (lost == [layout.HEAD])
        assert bool(again.holders(name_of(DELTA))) == (lost == [layout.HEAD])
        bucket.objects = kept


# --- pushes


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
    trash = Trash({}, Deletion(int(bucket.clock), [key]))
    commit(bucket, read(bucket), lambda now: CatalogChange([*now.segments], [], trash, now.damaged))
    gate = Faulty(bucket)
    with pytest.raises(RemoteBusyError, match="a gc deletes"):
        store.push(Remote(gate), "two")
    assert not [call for call in gate.calls if call.startswith("put ")]


def test_what_is_condemned_is_taken_off_the_list_by_a_push_that_relies_on_it(
    tmp_path: Path, full: Store, bucket: MemoryBucket
) -> None:
    now = read(bucket)
    keys = [key for key in bucket.objects if key.startswith(("containers/", "tables/"))]
    trash = Trash(dict.fromkeys([*keys, "tmp/1-0"], 17))
    commit(
        bucket, now, lambda now: CatalogChange((), [*now.containers.values()], trash, now.damaged)
    )
    assert full.push(Remote(bucket), "tune").moved_pieces == 10
    left = read(bucket).trash.condemned
    relied = {layout.container_key(c) for c in now.containers if c in used(full, bucket, "tune")}
    assert relied
    assert left.keys() == {*keys, "tmp/1-0"} - relied - {k for k in keys if is_table(k, relied)}
    store = open_store(tmp_path / "other")
    store.pull(Remote(bucket), "tune")
    assert stored(store, "tune") == content(tmp_path / "tune")


def used(store: Store, bucket: MemoryBucket, name: str) -> set[ContainerId]:
    """The containers of a remote that hold pieces of a checkpoint."""
    found = read(bucket)
    with store.checkpoint(name) as opened:
        digests = [bytes.fromhex(tensor.digest) for tensor in opened]
    return {container for each in digests for container in found.holders(each)}


def is_table(key: str, containers: set[str]) -> bool:
    names = {each.rpartition("/")[2].partition(".")[0] for each in containers}
    return key.startswith("tables/") and key.rpartition("/")[2] in names


def test_a_push_that_cannot_read_the_catalog_puts_it_together(
    full: Store, bucket: MemoryBucket
) -> None:
    del bucket.objects[layout.HEAD]
    assert full.push(Remote(bucket), "tune").moved_pieces == 10
    assert len(read(bucket).containers) == 5
