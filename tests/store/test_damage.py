"""A flipped bit in every kind of file is found, named, kept from readers, and repaired."""

import errno
import os
import random
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from files.gguf_files import entry, file_of, info
from store_runs.damage import PLACES, flip, manifest_of, one
from store_runs.disk_faults import FaultyFiles
from store_runs.stores import (
    KIB,
    MIB,
    Content,
    assert_clean,
    assert_holds,
    content,
    noise,
    open_store,
    safetensors,
    stored,
    three,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    NotAStoreError,
    UnfitForCollectionError,
    UnknownNameError,
)
from tensor_dedup.store.files import RealFiles
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import FOLDERS, MARKER_LINES

# Of SQLite's files, and of ours.
PAGE = 4096


@pytest.fixture
def paths(tmp_path: Path) -> Mapping[str, Path]:
    return three(tmp_path / "sources")


@pytest.fixture
def store(tmp_path: Path, paths: Mapping[str, Path]) -> Store:
    store = open_store(tmp_path / "store")
    for path in paths.values():
        store.import_(path)
    return store


@pytest.fixture
def expected(paths: Mapping[str, Path]) -> dict[str, Content]:
    return {name: content(path) for name, path in paths.items()}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_kept_from_readers_and_repaired(
    place: str, store: Store, paths: Mapping[str, Path], expected: dict[str, Content]
) -> None:
    where, kind = PLACES[place]
    path, offset = where(store.path)
    flip(path, offset)
    for name, files in expected.items():
        try:
            assert stored(store, name) == files
        except (CorruptTensorError, DamagedFileError, MissingObjectError) as error:
            assert "repair --from" in str(error)  # noqa: PT017 (either is right, nothing else is)
    with_reads = store.verify(full=True)
    assert not with_reads.fine
    found = {fault.kind for fault in with_reads.faults}
    # A reader may have met the damage first and noted it: then its bytes are lost, and known to be.
    assert kind in found or (kind == "tensor" and "lost" in found)
    assert any(str(path) == fault.path for fault in with_reads.faults) or "lost" in found
    result = store.repair(list(paths.values()))
    assert result.missing == []
    assert_clean(store, expected)


@pytest.mark.parametrize("place", PLACES)
def test_verify_names_the_file(place: str, store: Store) -> None:
    where, kind = PLACES[place]
    path, offset = where(store.path)
    flip(path, offset)
    faults = store.verify(full=True).faults
    assert [fault.kind for fault in faults if fault.path == str(path)] == [kind]


def test_damage_to_what_nobody_needs_asks_for_nothing(store: Store) -> None:
    """Each fault has one next step: no source is asked for where none would help."""
    flip(one(store.path, "containers/*/*.raw"), 500_000)
    for name in store.names():
        store.delete(name)
    [fault] = store.verify(full=True).faults
    assert (fault.kind, fault.affected) == ("tensor", ())
    assert fault.what.endswith("; no checkpoint needs this copy")


def test_a_damaged_tensor_names_who_uses_it(store: Store) -> None:
    flip(one(store.path, "containers/*/*.raw"), 500_000)
    fault, *_ = store.verify(full=True).faults
    assert set(fault.affected) == {"base: a", "tune: a"}
    with (
        store.checkpoint("tune") as checkpoint,
        pytest.raises(MissingObjectError, match="repair --from") as caught,
    ):
        checkpoint.read("a")
    assert caught.value.facts["digest"] == checkpoint["a"].digest
    assert caught.value.facts["tensors"] == ["a"]
    assert f"holds {checkpoint['a'].digest} (a) of 'tune'" in str(caught.value)


def test_a_reader_finds_damage_by_itself(store: Store, tmp_path: Path) -> None:
    with store.checkpoint("base") as checkpoint:
        flip(one(store.path, "containers/*/*.raw"), 500_000)
        with pytest.raises(CorruptTensorError, match="'base'") as caught:
            checkpoint.read("a")
        assert caught.value.facts["tensors"] == ["a"]
        assert checkpoint.read("b")  # the others are as good as before
    with pytest.raises(StoreError, match="repair --from"):
        store.export("base", tmp_path / "out")
    assert [fault.kind for fault in store.verify().faults] == ["lost"]


def test_a_range_is_verified_too(store: Store) -> None:
    flip(one(store.path, "containers/*/*.raw"), 500_000)
    with store.checkpoint("base") as checkpoint, pytest.raises(CorruptTensorError):
        checkpoint.read_range("a", 5, 6)


def test_gc_touches_nothing_while_something_is_damaged(store: Store) -> None:
    store.delete("tiny")
    flip(manifest_of(store.path, "tune"), 40)
    before = content(store.path / "containers")
    for _ in range(2):  # before and after verify has set the manifest aside
        with pytest.raises(UnfitForCollectionError, match="repair --from"):
            store.gc(0)
        store.verify()
    assert content(store.path / "containers") == before
    store.delete("tune")  # the other way out: give up what is broken
    store.gc(0)
    assert_clean(store, {"base": stored(store, "base")})


def test_a_sample_reads_a_part(store: Store) -> None:
    part = store.verify(sample=0.5, seed=1)
    assert 0 < part.bytes_checked < store.verify(full=True).bytes_checked
    assert (part.level, part.fine) == ("sample", True)


def test_losing_the_index_loses_nothing(store: Store, expected: dict[str, Content]) -> None:
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    assert_clean(store, expected)


@pytest.mark.parametrize("ruin", [b"", b"no database at all" * 100, None])
def test_a_broken_index_is_made_anew(
    ruin: bytes | None, store: Store, expected: dict[str, Content]
) -> None:
    index = store.path / "index.sqlite"
    if ruin is None:
        data = bytearray(index.read_bytes())
        page = int.from_bytes(data[16:18], "big")
        data[page : 2 * page] = bytes(page)
        ruin = bytes(data)
    index.write_bytes(ruin)
    assert_holds(store, expected)
    assert_clean(store, expected)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_an_index_before_version_1_is_made_anew_and_is_no_fault(
    version: int, store: Store, expected: dict[str, Content]
) -> None:
    """Its schemas were 1 to 5, and nothing said whose they were."""
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    with sqlite3.connect(store.path / "index.sqlite") as db:
        db.execute("CREATE TABLE container (id INTEGER PRIMARY KEY, name TEXT, kind TEXT)")
        db.execute("CREATE TABLE place (digest BLOB, container INTEGER, offset INTEGER)")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    assert_holds(store, expected)
    assert_clean(store, expected)
    with sqlite3.connect(store.path / "index.sqlite") as db:
        assert db.execute("PRAGMA application_id").fetchone() == (0x54444958,)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM place").fetchone() > (0,)
    db.close()


def test_a_database_with_tables_of_others_is_no_index(
    store: Store, expected: dict[str, Content]
) -> None:
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    change_index(store, "CREATE TABLE place (something TEXT)")
    assert_holds(store, expected)
    assert_clean(store, expected)


RUINS: dict[str, Callable[[bytearray, int, random.Random], object]] = {
    "zeros": lambda page, at, dice: page.__setitem__(slice(at, at + PAGE), bytes(PAGE)),
    "ones": lambda page, at, dice: page.__setitem__(slice(at, at + PAGE), b"\xff" * PAGE),
    "noise": lambda page, at, dice: page.__setitem__(slice(at, at + PAGE), dice.randbytes(PAGE)),
    "half": lambda page, at, dice: page.__setitem__(
        slice(at + PAGE // 2, at + PAGE), dice.randbytes(PAGE // 2)
    ),
    "another": lambda page, at, dice: page.__setitem__(
        slice(at, at + PAGE), page[(at + PAGE) % len(page) :][:PAGE]
    ),
    "texts": lambda page, at, dice: [
        page.__setitem__(slice(found.start(), found.start() + 3), b"\xac\xff\xfe")
        for found in re.finditer(rb"[0-9a-f]{64}|CREATE TABLE", page)
    ],
}


@pytest.mark.parametrize("ruin", RUINS)
def test_every_verb_copes_with_a_bad_page_of_the_index(
    ruin: str, store: Store, paths: Mapping[str, Path], expected: dict[str, Content]
) -> None:
    index, dice = store.path / "index.sqlite", random.Random(ruin)
    new = write(
        store.path.parent / "new", {"m.safetensors": safetensors(u8(q=noise(33, 70 * KIB)))}
    )
    with store.checkpoint("base") as checkpoint:
        digests = [tensor.digest for tensor in checkpoint]
    after = {**expected, "new": content(new)}
    verbs: dict[str, Callable[[], object]] = {
        "reads": lambda: assert_holds(store, expected),
        "pieces": lambda: store.open_pieces(digests).close(),
        "verify": lambda: store.verify(full=True),
        "repair": lambda: store.repair(list(paths.values())),
        "gc": lambda: store.gc(0),
        "stats": store.stats,
        "import": lambda: store.import_(new, replace=True),
    }
    store.import_(new)
    store.delete("new")
    good = index.read_bytes()
    for verb, act in verbs.items():
        for at in range(0, len(good), PAGE):
            data = bytearray(good)
            RUINS[ruin](data, at, dice)
            index.write_bytes(data)
            (store.path / "index.sqlite-wal").write_bytes(dice.randbytes(9000))
            (store.path / "index.sqlite-shm").write_bytes(dice.randbytes(32 * KIB))
            act()
        store.verify(full=True)
        assert store.verify(full=True).fine, verb
    assert_clean(store, after)


class _Unreadable:
    """A connection to a file of which the disk cannot read a page."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.in_transaction = False

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        if query.startswith(("PRAGMA", "CREATE")):
            return self._db.execute(query, *values)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    def close(self) -> None:
        self._db.close()


class _BadIndex(RealFiles):
    """A disk that cannot read the index file that is there now; a new one lies elsewhere."""

    def __init__(self, index: Path) -> None:
        self.inode = index.stat().st_ino
        self.refused = 0

    def database(self, path: Path) -> sqlite3.Connection:
        db = super().database(path)
        if path.exists() and path.stat().st_ino == self.inode:
            self.refused += 1
            return cast("sqlite3.Connection", _Unreadable(db))
        return db


def test_an_index_that_the_disk_cannot_read_is_replaced(
    store: Store, paths: Mapping[str, Path], expected: dict[str, Content]
) -> None:
    files = _BadIndex(store.path / "index.sqlite")
    holder = (store.path / "index.sqlite").open("rb")  # so that no other file gets its inode
    bad = Store.open(store.path, files=files)
    assert [fault.kind for fault in bad.verify().faults] == ["index"]
    bad.import_(paths["tiny"], "again")
    bad.delete("again")
    assert_clean(bad, expected)
    assert files.refused == 1
    holder.close()


def change_index(store: Store, statement: str) -> None:
    with sqlite3.connect(store.path / "index.sqlite") as db:
        db.execute(statement)
    db.close()


def test_an_index_that_knows_nothing_hides_nothing(
    store: Store, expected: dict[str, Content]
) -> None:
    change_index(store, "DELETE FROM place")
    assert_holds(store, expected)
    assert [fault.kind for fault in store.verify().faults] == ["index"]
    assert_clean(store, expected)


def test_an_index_that_lies_is_found_and_not_believed(
    store: Store, expected: dict[str, Content]
) -> None:
    change_index(store, "UPDATE place SET offset = offset + 64")
    assert_holds(store, expected)
    assert "index" in {fault.kind for fault in store.verify(full=True).faults}
    assert_clean(store, expected)


def test_flipping_each_digest_in_the_index_is_found(store: Store) -> None:
    with store.checkpoint("base") as checkpoint:
        digest = bytes.fromhex(checkpoint["a"].digest)
    index = store.path / "index.sqlite"
    data = index.read_bytes()
    at = data.index(digest)
    flip(index, at + 3)
    faults = store.verify(full=True).faults
    assert [(fault.kind, fault.path) for fault in faults] == [("index", str(index))]
    assert store.verify(full=True).fine


MARKER = frames.encode_text(MARKER_LINES)
MARKERS: dict[str, bytes | None] = {
    "flipped": MARKER.replace(b"store", b"stare"),
    "another version by a flip": MARKER.replace(b"version 1", b"version 3"),
    "empty": b"",
    "cut": MARKER[:25],
    "cut early": MARKER[:4],
    "zeros": bytes(100),
    "no text": b"\xff" * 100,
    "too long": bytes(10_000),
    "gone": None,
}


@pytest.mark.parametrize("found", MARKERS)
def test_a_damaged_marker_stops_everything_but_repair(
    found: str, store: Store, paths: Mapping[str, Path], expected: dict[str, Content]
) -> None:
    marker, left = store.path / "FORMAT", MARKERS[found]
    marker.unlink() if left is None else marker.write_bytes(left)
    for create in (False, True):
        with pytest.raises(DamagedFileError, match=r"FORMAT.*run `tensor-dedup repair`"):
            Store.open(store.path, create=create)
    Store.open(store.path, mend=True, create=False)
    assert marker.read_bytes() == MARKER
    assert_clean(Store.open(store.path), expected)


def test_a_marker_that_the_disk_cannot_read_is_written_anew(
    store: Store, tmp_path: Path, expected: dict[str, Content]
) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    files.lose_page(store.path / "FORMAT", 0)
    with pytest.raises(DamagedFileError, match="run `tensor-dedup repair`"):
        Store.open(store.path, files=files)
    Store.open(store.path, mend=True, files=files)
    assert_clean(open_store(store.path, files), expected)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_marker_of_another_version_stays(damaged: bool, store: Store) -> None:
    later = frames.encode_text(["tensor-dedup store", "version 2"])
    marker = store.path / "FORMAT"
    marker.write_bytes(later[:-20] if damaged else later)
    before = marker.read_bytes()
    for mend in (False, True):
        with pytest.raises(DamagedFileError if damaged else NewerFormatError):
            Store.open(store.path, mend=mend, create=False)
    assert marker.read_bytes() == before


@pytest.mark.parametrize("missing", FOLDERS)
def test_repair_makes_no_store_of_what_is_none(missing: str, store: Store, tmp_path: Path) -> None:
    alike = tmp_path / "alike"
    for folder in FOLDERS:
        if folder != missing:
            write(alike / folder, {"file": b"1"})
    write(alike, {missing: b"a file"})
    before = content(alike)
    for marker in (None, b"", MARKER[:30]):
        if marker is not None:
            (alike / "FORMAT").write_bytes(marker)
            before["FORMAT"] = marker
        with pytest.raises((NotAStoreError, DamagedFileError)):
            Store.open(alike, mend=True, create=False)
        assert content(alike) == before


def test_a_damaged_manifest_hides_no_other_checkpoint(store: Store) -> None:
    flip(manifest_of(store.path, "base"), 40)
    flip(store.path / "refs" / "tiny", 70)
    found = {each.name: each for each in store.list()}
    assert list(found) == ["base", "tiny", "tune"]
    assert found["tune"].damage is None
    assert found["tune"].nbytes > 0
    assert "its bytes do not have the digest" in str(found["base"].damage)
    assert "refs/tiny" in str(found["tiny"].damage)
    with pytest.raises(UnfitForCollectionError, match="broken: base, tiny") as caught:
        store.gc(0)
    assert caught.value.facts["checkpoints"] == ["base", "tiny"]
    assert store.stats().damaged_files == 2


def test_a_broken_list_of_bad_places_is_made_anew(
    store: Store, paths: Mapping[str, Path], expected: dict[str, Content]
) -> None:
    flip(one(store.path, "containers/*/*.raw"), 500_000)
    store.verify(full=True)
    flip(one(store.path, "quarantine/*.bad"), 20)
    assert {fault.kind for fault in store.verify().faults} >= {"list"}
    assert store.repair([paths["base"]]).missing == []
    assert_clean(store, expected)


def test_a_part_of_a_model_is_found_in_a_file_without_its_table(tmp_path: Path) -> None:
    """The container of a part is not called as the part is, and holds no other part."""
    parts = {}
    for number, name in enumerate("ab"):
        entries = [
            entry(key, 2, struct.pack("<H", value))
            for key, value in (("split.no", number), ("split.count", 2))
        ]
        data = file_of(entries, [info(name, (MIB // 4,))], noise(80 + number, MIB))
        parts[f"m-0000{number + 1}-of-00002.gguf"] = data
    source = write(tmp_path / "m", parts)
    store = open_store(tmp_path / "store")
    store.import_(source)
    raw = sorted(store.path.glob("containers/*/*.raw"))
    assert len(raw) == 2
    for path in raw:
        flip(path.with_name(f"{path.name}.table"), 60)
    assert not store.verify(full=True).fine
    assert store.repair().missing == []
    assert_clean(store, {"m": parts})


def test_the_trash_is_asked_before_anybody_else(store: Store) -> None:
    kept = stored(store, "tiny")
    manifest = store.import_(store.path.parent / "sources" / "tiny", "copy").manifest
    store.delete("tiny")
    store.delete("copy")
    store.gc(24)
    for path in (store.path / "trash").iterdir():
        if path.name.endswith(manifest):  # as if the reference had come back without its bytes
            target = store.path / "manifests" / manifest[:2] / manifest
            path.rename(target)
    store.handle.objects.set_ref("tiny", manifest, replace=False)
    pages = [p for p in (store.path / "trash").iterdir() if p.suffix not in (".pack", ".slab")]
    for path in pages:
        name = path.name.partition(".")[2]
        path.rename(store.path / "manifests" / name[:2] / name)
    assert store.repair().from_trash == 1
    assert stored(store, "tiny") == kept


_MEDIA = [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN]


def _flip(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    flip(path, at)


def _zero(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    data = bytearray(path.read_bytes())
    start = at // PAGE * PAGE
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)


def _noise(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + 100] = dice.randbytes(len(data[at : at + 100]))
    path.write_bytes(data)


def _cut(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    os.truncate(path, at)


def _remove(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    path.unlink()


def _lose(path: Path, at: int, dice: random.Random, files: FaultyFiles) -> None:
    files.lose_page(path, at, dice.choice(_MEDIA))


FAULTS = [_flip, _zero, _noise, _cut, _remove, _lose, _lose, _lose]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Path]]:
    """A store with a container of each kind, and the checkpoints that it came from."""
    root = tmp_path_factory.mktemp("world")
    paths = three(root)
    data = safetensors(u8(o=noise(30, 300 * KIB), tail=noise(9, 5 * KIB)))
    paths["outside"] = write(root / "outside", {"o.safetensors": data})
    store = open_store(root / "store")
    for name in ("base", "tune", "tiny"):
        store.import_(paths[name], base="base" if name == "tune" else None)
    store.import_(paths["outside"], external=True)
    assert set(store.stats().containers) == {"raw", "slab", "pack", "delta", "external"}
    return root / "store", paths


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 400))]
)
def test_random_damage_is_found_and_repaired(
    seed: int, world: tuple[Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    template, paths = world
    expected = {name: content(path) for name, path in paths.items()}
    root, dice = tmp_path / "store", random.Random(seed)
    shutil.copytree(template, root)
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    for _ in range(dice.randint(1, 4)):
        names = sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size)
        path, fault = dice.choice(names), dice.choice(FAULTS)
        fault(path, dice.randrange(path.stat().st_size), dice, files)
    try:
        store = open_store(root, files)
    except DamagedFileError:
        store = Store.open(root, files=files, mend=True, create=False, worker_count=1)
    kept = _readable(store, expected)
    assert [each.name for each in store.list()] == store.handle.objects.names()
    store.verify(sample=0.3, seed=seed)
    store.verify(full=True)
    assert _readable(store, expected) >= kept
    if not store.verify(full=True).fine:
        with suppress(UnfitForCollectionError):
            store.gc(24)
    store.repair(list(paths.values()))
    for name in expected.keys() - _readable(store, expected):  # whose reference is lost
        store.import_(paths[name], name, replace=True)
    assert store.repair(list(paths.values())).missing == []
    for _ in range(2):  # the first may find that the index was wrong
        found = store.verify(full=True)
    assert found.fine, found.faults
    assert_clean(store, expected)


def _readable(store: Store, expected: Mapping[str, Content]) -> set[str]:
    """The checkpoints that read back as they are; the others must say what is wrong."""
    found = set()
    for name, files in expected.items():
        try:
            assert stored(store, name) == files
        except (CorruptTensorError, DamagedFileError, MissingObjectError, UnknownNameError):
            continue
        found.add(name)
    return found
