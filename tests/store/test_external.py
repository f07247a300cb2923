"""Files indexed where they are: read like any others, and missed as soon as they change."""

import os
import shutil
from pathlib import Path

import pytest

from store_runs import stores
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.formats.hub_cache import cache_path
from tensor_dedup.store.errors import (
    ChangedExternalError,
    CorruptTensorError,
    DamagedFileError,
    UnfitForCollectionError,
)
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.writing.sources import snapshots

FILE = "model.safetensors"
A, B = stores.noise(1, 900 * stores.KIB), stores.noise(2, 700)
CONFIG = b'{"model_type": "toy"}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = stores.safetensors(stores.u8(a=A, b=B), {"format": "pt"})
    return stores.write(tmp_path / "model", {FILE: file, "config.json": CONFIG})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return stores.open_store(tmp_path / "store")


def test_the_weights_are_not_copied_and_read_back(store: Store, model: Path) -> None:
    before = stores.content(model)
    result = store.import_(model, external=True)
    assert result.external_bytes == len(before[FILE])
    assert result.new_bytes + result.known_bytes == len(CONFIG)
    assert stores.size_on_disk(store.path / "containers") < 10 * stores.KIB
    assert store.stats().containers == {"external": 1, "pack": 1}
    stores.assert_clean(store, {"model": before})
    assert stores.content(model) == before


def test_the_same_manifest_as_of_a_copy(store: Store, model: Path, tmp_path: Path) -> None:
    copied = stores.open_store(tmp_path / "other").import_(model)
    indexed = store.import_(model, external=True)
    assert indexed.manifest == copied.manifest
    again = store.import_(model, "again", external=True)
    assert again.containers[0] == indexed.containers[0]
    assert store.stats().containers == {"external": 1, "pack": 1}


def test_a_copy_is_never_left_to_the_file_of_somebody_else(store: Store, model: Path) -> None:
    expected = stores.content(model)
    store.import_(model, "indexed", external=True)
    result = store.import_(model, "copied")
    assert result.new_bytes == len(expected[FILE])  # what others own counts for nothing here
    store.gc(0)
    shutil.rmtree(model)
    assert stores.stored(store, "copied") == expected
    assert stores.stored(store, "indexed") == expected  # and the store's own serves it too
    stores.assert_clean(store, {"copied": expected, "indexed": expected})
    assert EXTERNAL not in store.stats().containers


def test_a_damaged_copy_is_a_fault_until_there_is_one_again(store: Store, model: Path) -> None:
    expected = stores.content(model)
    store.import_(model, "copied")
    store.import_(model, "indexed", external=True)
    (own,) = (p for p in store.path.glob("containers/*/*") if A[:64] in p.read_bytes())
    data = bytearray(own.read_bytes())
    data[data.index(A[:64])] ^= 1
    own.write_bytes(data)
    # Known damage is not forgotten because somebody else's file helps out.
    for kind in ("tensor", "exposed"):
        [fault] = store.verify(full=True).faults
        assert fault.kind == kind
        assert fault.what.endswith("in a file indexed in place; run `tensor-dedup repair`")
        assert stores.stored(store, "copied") == expected
    assert store.repair().pieces == 1
    assert store.verify(full=True).fine
    store.delete("indexed")
    shutil.rmtree(model)
    assert stores.stored(store, "copied") == expected


def change(path: Path, how: str) -> None:
    """Make a file another one, in one of the ways people do."""
    if how == "gone":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "touched":
        os.utime(path, ns=(1, 1))
    elif how == "written":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        shutil.copyfile(path, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("how", ["gone", "folder", "pipe", "touched", "written", "replaced"])
def test_a_changed_file_is_missed_and_named(store: Store, model: Path, how: str) -> None:
    before = stores.content(model)
    store.import_(model, external=True)
    change(model / FILE, how)
    with (
        store.checkpoint("model") as checkpoint,
        pytest.raises(ChangedExternalError, match=f"{FILE}.*--external --replace.*repair --from"),
    ):
        checkpoint.read("a")
    faults = store.verify(full=True).faults
    assert [f.path for f in faults if f.kind == "external"] == [str(model / FILE)]
    with pytest.raises(UnfitForCollectionError, match=FILE):
        store.gc(0)
    # Who still has what it held brings it back, into the store this time.
    kept = stores.write(model.parent / "kept", before)
    assert store.repair([kept]).whole
    stores.assert_clean(store, {"model": before})


def test_a_changed_file_that_nobody_needs_is_no_fault(store: Store, model: Path) -> None:
    store.import_(model, external=True)
    store.delete("model")
    (model / FILE).unlink()
    assert store.verify(full=True).fine
    store.gc(0)
    assert store.stats().containers == {}


def test_it_is_there_again_when_the_disk_is(store: Store, model: Path) -> None:
    before = stores.content(model)
    store.import_(model, external=True)
    model.rename(model.with_name("away"))
    assert not store.verify().fine
    model.with_name("away").rename(model)
    stores.assert_clean(store, {"model": before})


def test_a_changed_file_is_indexed_anew(store: Store, model: Path) -> None:
    store.import_(model, external=True)
    change(model / FILE, "written")
    store.import_(model, replace=True, external=True)
    stores.assert_clean(store, {"model": stores.content(model)})
    assert store.stats().containers == {"external": 1, "pack": 1}


def test_bytes_that_changed_behind_the_file_systems_back_are_not_returned(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.import_(model, external=True)
    change(model / FILE, "written")
    # As after a write through a mapping: nothing says that it is another file.
    monkeypatch.setattr(ExternalFile, "is_still", lambda *_: True)
    with store.checkpoint("model") as checkpoint, pytest.raises(CorruptTensorError, match=FILE):
        checkpoint.read("b")
    assert [fault.kind for fault in store.verify(full=True).faults] == ["lost"]


def test_a_file_written_while_it_is_indexed_is_refused(store: Store, model: Path) -> None:
    class Writing(RealFiles):
        def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
            if handle.path == model / FILE:
                os.utime(handle.path)
            return super().pread(handle, view, offset)

    touched = stores.open_store(store.path, Writing())
    with pytest.raises(ChangedFileError, match=FILE):
        touched.import_(model, external=True)
    assert store.list() == []
    store.gc(0)
    assert store.stats().containers == {}


def test_a_lost_index_loses_nothing(store: Store, model: Path) -> None:
    before = stores.content(model)
    store.import_(model, external=True)
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    stores.assert_clean(store, {"model": before})


def test_a_trashed_table_comes_back(store: Store, model: Path) -> None:
    before = stores.content(model)
    store.import_(model, external=True)
    (table,) = store.path.glob("containers/*/*.external")
    table.rename(store.path / "trash" / f"5.{table.name}")
    assert store.repair().from_trash == 1
    stores.assert_clean(store, {"model": before})


@pytest.mark.parametrize("at", [0, 30, 100, -1])
def test_a_flipped_bit_in_the_table_is_found(store: Store, model: Path, at: int) -> None:
    before = stores.content(model)
    store.import_(model, external=True)
    (table,) = store.path.glob("containers/*/*.external")
    data = bytearray(table.read_bytes())
    data[at] ^= 4
    table.write_bytes(data)
    assert {fault.kind for fault in store.verify().faults} >= {"table", "lost"}
    assert store.repair([model]).whole
    stores.assert_clean(store, {"model": before})


@pytest.mark.parametrize(
    "texts",
    [
        None,
        [],
        ["/file"],
        ["file", "10", "1", "1", "1", "1"],
        ["/file", "11", "1", "1", "1", "1"],
        ["/file", "10", "1", "1", "1", "x"],
        ["/file", "10", "1", "1", "1", "--1"],
        ["/file", "10", "1", "1", "1", "9" * 5000],
        ["/file\0", "10", "1", "1", "1", "1"],
        ["/file", "10", "1", "1", "1", "1", "1"],
    ],
)
def test_an_origin_of_another_form_is_damage(texts: list[str] | None) -> None:
    data = b"0123456789"
    record = tables.Record(bytes.fromhex(digest(data)), 0, 10, 10, "raw", None, tables_leaves(data))
    name, blob = tables.encode(tables.Table(EXTERNAL, 10, [record], texts))
    with pytest.raises(DamagedFileError):
        tables.decode(blob, name, EXTERNAL, Path("table"))
    right = ["/file", "10", "1", "1", "-1", "1"]
    name, blob = tables.encode(tables.Table(EXTERNAL, 10, [record], right))
    assert tables.decode(blob, name, EXTERNAL, Path("table")).origin == right


def tables_leaves(data: bytes) -> bytes:
    from tensor_dedup.digest import leaf_digests

    return b"".join(leaf_digests(data))


def test_the_snapshots_of_a_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (
        "models--org--name/snapshots/abc123",
        "models--org--name/snapshots/def456",
        "models--gpt2/snapshots/abc",
        "models--org--empty",
        "datasets--org--data/snapshots/abc",
        ".locks/models--org--name/snapshots/abc",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models--org--name" / "snapshots" / "a-file").touch()
    found = [snapshot.name for snapshot in snapshots(tmp_path)]
    assert found == ["gpt2@abc", "org/name@abc123", "org/name@def456"]
    assert list(snapshots(tmp_path / "nowhere")) == []
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert cache_path() == Path("/somewhere/hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cache_path() == tmp_path
