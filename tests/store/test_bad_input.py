"""What must not be done, and what must not be believed: a clear error each, and no harm."""

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from files.refusals import peak_of
from store_runs.clocks import ClockedFiles, SetClock
from store_runs.stores import (
    KIB,
    assert_clean,
    content,
    handle,
    noise,
    open_store,
    safetensors,
    three,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.digest import digest
from tensor_dedup.errors import (
    ChangedFileError,
    CheckpointNotFoundError,
    FormatError,
    StoreError,
    UnsupportedError,
)
from tensor_dedup.store.errors import (
    BadNameError,
    BadRangeError,
    ClosedCheckpointError,
    DamagedFileError,
    EscapingPathError,
    ExportTargetError,
    NameTakenError,
    NewerFormatError,
    NoStoreError,
    NotAStoreError,
    PathTooLongError,
    StoreAccessError,
    StoreBusyError,
    UnfitForCollectionError,
    UnknownNameError,
    UnknownTensorError,
)
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.format import frames, manifests, tables
from tensor_dedup.store.format.layout import FOLDERS
from tensor_dedup.store.format.manifests import FileEntry, Piece
from tensor_dedup.store.format.tables import Record, Table


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(tmp_path / "store")
    store.import_(write(tmp_path / "m", {"a.safetensors": safetensors(u8(t=noise(1, 100 * KIB)))}))
    return store


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../m", "a/../b", "/etc/passwd", "a//b", "a/", ".hidden", "a\0b"),
        *("a\nb", "ü", "a%2Fb", "-rf", "a b", "x" * 201),
    ],
)
def test_a_name_leads_nowhere_else(store: Store, name: str) -> None:
    for act in (store.checkpoint, store.delete, lambda n: store.import_("m", n)):
        with pytest.raises(BadNameError, match="letters, digits"):
            act(name)


@pytest.mark.parametrize("name", ["a", "org/model", "Qwen3-0.6B@main", "_x.y=1+2"])
def test_ordinary_names_are_names(store: Store, tmp_path: Path, name: str) -> None:
    store.import_(tmp_path / "m", name)
    assert name in [listed.name for listed in store.list()]
    store.delete(name)


def test_a_snapshot_of_a_hub_cache_is_called_by_its_repository(
    store: Store, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "abcdef"
    write(snapshot, {"model.safetensors": safetensors(u8(a=b"1"))})
    assert store.import_(snapshot).name == "org/some-model"


def _commit(store: Store, files: list[FileEntry], pieces: list[Piece]) -> None:
    """What no import would write."""
    manifest, blobs = manifests.build(files, pieces)
    for name, blob in blobs.items():
        store.handle.objects.publish(blob, store.handle.objects.layout.manifest(name))
    store.handle.objects.set_ref("evil", manifest, replace=False)


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", ".", "a/./b", "a\0"])
def test_a_manifest_cannot_write_outside(store: Store, tmp_path: Path, path: str) -> None:
    with store.checkpoint("m") as checkpoint:
        piece = Piece(bytes.fromhex(checkpoint["t"].digest), 100 * KIB)
    _commit(store, [FileEntry(path, 100 * KIB, 1, "")], [piece])
    with pytest.raises(EscapingPathError, match="delete this checkpoint"):
        store.export("evil", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([FileEntry("a", 5, 1, "")], 1),
        ([FileEntry("a", 100 * KIB, 2, "")], 1),
        ([FileEntry("a", 100 * KIB, 1, ""), FileEntry("a", 0, 0, "")], 1),
        ([FileEntry("a", 100 * KIB, 1, ""), FileEntry("a/b", 0, 0, "")], 1),
        ([FileEntry("a", 100 * KIB, 1, ""), FileEntry("b", 0, -1, "")], 1),
        ([FileEntry("a", 0, 0, ""), FileEntry("b", 0, -1, ""), FileEntry("c", 102400, 1, "")], 1),
    ],
)
def test_a_manifest_that_contradicts_itself(
    store: Store, files: list[FileEntry], count: int
) -> None:
    with store.checkpoint("m") as checkpoint:
        piece = Piece(bytes.fromhex(checkpoint["t"].digest), 100 * KIB)
    _commit(store, files, [piece] * count)
    with pytest.raises(DamagedFileError):
        store.checkpoint("evil")


def _repeated(store: Store, page: list[Piece], times: int, pieces: int) -> str:
    """A manifest that has one page many times; its name."""
    page_name, page_blob = manifests.encode_page(page)
    pages = [bytes.fromhex(page_name)] * times
    name, blob = manifests.encode_manifest(manifests.Manifest([], pages, pieces, 0, {}))
    objects = store.handle.objects
    objects.publish(page_blob, objects.layout.manifest(page_name))
    objects.publish(blob, objects.layout.manifest(name))
    objects.set_ref("evil", name, replace=False)
    return name


def test_a_page_that_is_there_again_and_again_takes_what_its_manifest_does(store: Store) -> None:
    page = [Piece(bytes(30) + number.to_bytes(2, "little"), 0) for number in range(256)]
    times = 4_000
    name = _repeated(store, page, times, times * len(page))
    objects = store.handle.objects
    found: list[Piece] = []
    peak = peak_of(lambda: found.extend(objects.pieces(name, objects.manifest(name))))
    assert len(found) == times * len(page)
    size = objects.layout.manifest(name).stat().st_size
    # A list of this length is there twice, while it is copied.
    assert peak < 64 * size * 2 + (8 << 20)
    assert peak_of(lambda: store.verify(full=False)) < 64 * size * 2 + (8 << 20)


def test_a_page_of_more_than_a_page_holds_is_damage(store: Store) -> None:
    page = [Piece(bytes(30) + number.to_bytes(2, "little"), 0) for number in range(257)]
    name = _repeated(store, page, 2, 257)
    objects = store.handle.objects
    assert objects.manifest(name).pieces == len(page)
    with pytest.raises(DamagedFileError, match="257 pieces, a page has 256"):
        objects.pieces(name, objects.manifest(name))


def _framed(kind: bytes, payload: object, version: int) -> bytes:
    body = msgspec.msgpack.encode(payload)
    head = b"TDST" + kind + version.to_bytes(4, "little") + bytes(4)
    head += len(body).to_bytes(8, "little")
    return head + body + blake3(head + body).digest()


def test_a_later_version_is_said_to_be_one(store: Store) -> None:
    blob = _framed(b"mani", ["something", "else"], 2)
    name = digest(blob)
    store.handle.objects.publish(blob, store.handle.objects.layout.manifest(name))
    store.handle.objects.set_ref("later", name, replace=False)
    with pytest.raises(NewerFormatError, match=r"format 2.*use a newer tensor-dedup"):
        store.checkpoint("later")
    with pytest.raises(UnfitForCollectionError):
        store.gc(0)
    assert store.verify().faults[0].kind == "manifest"
    assert (store.handle.objects.layout.manifest(name)).exists()  # not damaged, so not set aside


@pytest.mark.parametrize("kind", ["magnetic", "hologram"])
def test_a_container_of_a_later_version_is_left_alone(store: Store, kind: str) -> None:
    path = store.handle.objects.layout.container(digest(b"whatever"), kind)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"laid out in a way that is not known yet")
    with store.checkpoint("m") as checkpoint:
        assert len(checkpoint.read("t")) == 100 * KIB
    with pytest.raises(UnfitForCollectionError, match=kind):
        store.gc(0)
    assert [fault.path for fault in store.verify(full=True).faults] == [str(path)]
    store.repair()
    assert path.exists()


@pytest.mark.parametrize(("kind", "codec"), [("slab", "planes2"), ("delta", "telepathy")])
def test_a_codec_of_a_later_version_is_left_alone(store: Store, kind: str, codec: str) -> None:
    piece = noise(3, 70 * KIB)
    record = Record(bytes.fromhex(digest(piece)), 0, 5, len(piece), codec, None, b"")
    name, blob = tables.encode(Table(kind, 5, [record], None))
    path = store.handle.objects.layout.container(name, kind)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"12345" + blob + tables.tail(5))
    with pytest.raises(UnfitForCollectionError, match=f"the codec '{codec}'"):
        store.gc(0)
    assert [fault.kind for fault in store.verify(full=True).faults] == ["table"]
    assert path.exists()


def test_a_later_store_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_bytes(frames.encode_text(["tensor-dedup store", "version 2"]))
    for mend in (False, True):
        with pytest.raises(NewerFormatError, match="version 2"):
            Store.open(tmp_path, mend=mend)


def test_a_foreign_folder_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "photos", {"a.jpg": b"1"})
    with pytest.raises(NotAStoreError, match="other files"):
        Store.open(tmp_path / "photos")
    with pytest.raises(NotAStoreError, match="there is no store"):
        Store.open(tmp_path / "missing", create=False)
    assert not (tmp_path / "missing").exists()


def test_the_store_of_the_environment_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "mine"))
    assert Store.open().path == tmp_path / "mine"
    monkeypatch.delenv("TENSOR_DEDUP_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert Store.open().path == tmp_path / "data" / "tensor-dedup" / "store"


def test_alien_files_are_named_and_stop_gc_only(store: Store) -> None:
    alien = store.path / "containers" / "ab"
    write(alien, {"notes.txt": b"mine"})
    assert [fault.path for fault in store.verify().faults] == [str(alien / "notes.txt")]
    with pytest.raises(UnfitForCollectionError, match=r"notes\.txt"):
        store.gc(0)
    with store.checkpoint("m") as checkpoint:
        assert checkpoint.read("t")


@pytest.mark.parametrize("made", [1, 3])
def test_a_store_that_was_never_finished_is_none_for_repair_too(made: int, tmp_path: Path) -> None:
    for folder in FOLDERS[:made]:
        (tmp_path / "begun" / folder).mkdir(parents=True)
    for mend in (False, True):
        with pytest.raises(NoStoreError, match="there is no store yet"):
            Store.open(tmp_path / "begun", create=False, mend=mend)
    assert Store.open(tmp_path / "begun").list() == []


def test_what_is_not_there(store: Store, tmp_path: Path) -> None:
    for act in (store.checkpoint, store.delete, lambda n: store.export(n, tmp_path / "out")):
        with pytest.raises(UnknownNameError, match="tensor-dedup list"):
            act("nobody")
    with store.checkpoint("m") as checkpoint:
        with pytest.raises(UnknownTensorError, match="no tensor 'u'"):
            checkpoint.read("u")
        for start, stop in ((-1, 2), (3, 2), (0, 100 * KIB + 1)):
            with pytest.raises(BadRangeError, match=r"give 0 <= start <= stop <= 102400$"):
                checkpoint.read_range("t", start, stop)
    with pytest.raises(ClosedCheckpointError):
        checkpoint.read("t")


def test_a_taken_name_is_refused_and_nothing_is_written(store: Store, tmp_path: Path) -> None:
    before = content(store.path)
    for size in (100, 101):  # of the same length, and of another
        blob = safetensors(u8(t=noise(7, size * KIB)))
        other = write(tmp_path / str(size), {"model.safetensors": blob})
        with pytest.raises(NameTakenError, match="--replace"):
            store.import_(other, "m")
    assert content(store.path) == before


@pytest.mark.parametrize("external", [False, True])
def test_the_same_again_is_unchanged_unless_it_cannot_be_read(
    store: Store, tmp_path: Path, external: bool
) -> None:
    folder = write(tmp_path / "again", {"model.safetensors": safetensors(u8(t=noise(8, 90 * KIB)))})
    first, again = (store.import_(folder, external=external) for _ in range(2))
    assert (first.unchanged, again.unchanged) == (False, True)
    assert (again.manifest, again.tensors, again.stored_bytes) == (first.manifest, 1, 0)
    if external:
        copy = shutil.copytree(folder, tmp_path / "copy")
        (folder / "model.safetensors").unlink()
        assert any(each.damage for each in store.usage().checkpoints)
        assert not store.import_(copy, "again").unchanged  # what is lost is stored again
        assert not any(each.damage for each in store.usage().checkpoints)
    assert store.verify(full=True).fine


@pytest.mark.parametrize("hours", [-1.0, float("nan")])
def test_a_grace_is_not_negative(store: Store, hours: float) -> None:
    with pytest.raises(
        BadRangeError, match=r"grace_hours is .*; give a number of hours, 0 or more$"
    ):
        store.gc(hours)


@pytest.mark.parametrize("sample", [-0.5, 2, float("nan")])
def test_a_sample_is_a_share(store: Store, sample: float) -> None:
    with pytest.raises(BadRangeError, match=r"sample is .*; give a share from 0\.0 to 1\.0$"):
        store.verify(sample=sample)


def test_bad_checkpoints_leave_no_trace(store: Store, tmp_path: Path) -> None:
    good = safetensors(u8(a=noise(1, 300 * KIB)))
    bad = {
        "truncated": (good[:-1], FormatError),
        "trailing": (good + b"x", FormatError),
        "empty": (b"", FormatError),
        "huge": ((1 << 40).to_bytes(8, "little") + b"{}", FormatError),
    }
    before = content(store.path / "containers")
    for name, (data, kind) in bad.items():
        with pytest.raises(kind):
            store.import_(write(tmp_path / name, {"model.safetensors": data}))
    with pytest.raises(FormatError, match=r"pytorch_model\.bin"):
        store.import_(write(tmp_path / "pickle", {"pytorch_model.bin": b"x"}))
    with pytest.raises(UnsupportedError):
        store.import_(write(tmp_path / "foreign", {"tf_model.h5": b"x"}))
    with pytest.raises(CheckpointNotFoundError):
        store.import_(tmp_path / "nothing")
    assert content(store.path / "containers") == before
    assert [listed.name for listed in store.list()] == ["m"]


class Meddling(RealFiles):
    """Lets somebody write to the file while it is copied or read."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def copy_range(self, source: Handle, target: Handle, start: int, nbytes: int) -> int:
        if source.path == self._target:
            with self._target.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"!")
        return super().copy_range(source, target, start, nbytes)

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        count = super().pread(handle, view, offset)
        if handle.path == self._target:
            os.utime(self._target)
        return count


@pytest.mark.parametrize("nbytes", [3 << 20, 100 * KIB])
def test_a_file_that_changes_is_not_taken(tmp_path: Path, nbytes: int) -> None:
    folder = write(tmp_path / "m", {"a.safetensors": safetensors(u8(t=noise(1, nbytes)))})
    store = open_store(tmp_path / "store", Meddling(folder / "a.safetensors"))
    with pytest.raises(ChangedFileError, match="import it again"):
        store.import_(folder)
    assert store.list() == []
    assert_clean(open_store(store.path), {})


def test_an_export_goes_to_an_empty_folder(store: Store, tmp_path: Path) -> None:
    write(tmp_path / "full", {"keep.txt": b"keep"})
    for target in (tmp_path / "full", tmp_path / "full" / "keep.txt"):
        with pytest.raises(ExportTargetError):
            store.export("m", target)
    assert content(tmp_path / "full") == {"keep.txt": b"keep"}


@pytest.mark.parametrize(
    "path", ["a" * 300, f"folder/{'a' * 256}/x", "模" * 200, "b/" * 2100 + "x"]
)
def test_an_export_of_a_path_that_is_too_long_here_writes_nothing(
    tmp_path: Path, path: str
) -> None:
    """A manifest may have such a path: of a run's own files, or from another file system."""
    with handle(tmp_path / "there") as run:
        run.save({"t": np.zeros(3)}, 1, files={"a": b"first", path: b"x"})
        name = run.store.names()[0]
    open_store(tmp_path / "there").push(f"file://{tmp_path}/remote", name)
    store = open_store(tmp_path / "here")
    store.pull(f"file://{tmp_path}/remote", name)
    assert store.load(name)["t"].tolist() == [0] * 3
    with pytest.raises(PathTooLongError, match="too long; choose a shorter path") as caught:
        store.export(name, tmp_path / "out" / "deeper")
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "out").exists()


def test_gc_waits_for_sessions_and_then_gives_up(store: Store) -> None:
    with store.handle.session(), pytest.raises(StoreBusyError, match="try again"):
        store.gc(wait_s=0.01)
    assert store.gc(wait_s=0.01).done


def test_an_open_checkpoint_survives_gc(store: Store) -> None:
    with store.checkpoint("m") as checkpoint:
        store.delete("m")
        assert store.gc(0).freed_bytes > 100 * KIB
        assert checkpoint.read("t") == noise(1, 100 * KIB)


def test_the_trash_keeps_for_its_grace(store: Store) -> None:
    store.delete("m")
    plan = store.gc(dry_run=True)
    assert (plan.done, len(plan.trash), plan.delete) == (False, len(plan.trash), ())
    assert store.stats().trash_bytes == 0
    assert store.gc().trash == plan.trash
    assert store.stats().trash_bytes == sum(item.nbytes for item in plan.trash)
    assert store.gc().delete == ()
    assert len(store.gc(0).delete) == len(plan.trash)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def clocked(store: Store, clock: SetClock) -> Store:
    return open_store(store.path, ClockedFiles(clock))


def test_what_the_trash_dates_ahead_keeps_for_its_grace_and_no_longer(
    clocked: Store, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.hours = 1000
    clocked.delete("m")
    moved = len(clocked.gc().trash)
    (clocked.path / "damaged").write_bytes(b"x")
    clocked.handle.objects.set_aside(clocked.path / "damaged", clocked.path / "quarantine")
    clock.hours = 0  # somebody has set it right
    for _ in range(2):
        clock.hours += 20
        assert (clocked.gc(dry_run=True).delete, clocked.gc().delete) == ((), ())
        assert moved > 0
        assert {f"trash: {moved} files", "quarantine: 1 files"} == {
            text.partition(" were dated up to")[0].rpartition("/")[2] for text in caplog.messages
        }
    assert [text for text in caplog.messages if "980.0 hours ahead" in text] == caplog.messages
    clock.hours += 5
    assert len(clocked.gc().delete) == moved + 1
    assert list((clocked.path / "trash").iterdir()) == []


def test_without_a_grace_what_the_trash_dates_ahead_goes_too(
    clocked: Store, clock: SetClock
) -> None:
    clocked.delete("m")
    clock.hours = 1000
    moved = len(clocked.gc().trash)
    clock.hours = 0
    assert len(clocked.gc(0).delete) == moved > 0
    assert clocked.stats().trash_bytes == 0


class ReadOnly(RealFiles):
    """A disk that lets nothing be changed; also for the superuser, unlike permissions."""

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode in ("create", "modify"):
            raise _denied(path)
        return super().open(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        raise _denied(target)

    def unlink(self, path: Path) -> None:
        raise _denied(path)

    def database(self, path: Path) -> sqlite3.Connection:
        name = str(path) if path == Path(":memory:") else f"file:{path}?mode=ro"
        return sqlite3.connect(name, uri=True, isolation_level=None)


def _denied(path: Path) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_store_that_may_only_be_read(store: Store, tmp_path: Path) -> None:
    before = {n: data for n, data in content(store.path).items() if "sqlite" not in n}
    held = open_store(store.path, ReadOnly())
    with held.checkpoint("m") as checkpoint:
        assert checkpoint.read("t") == noise(1, 100 * KIB)
    assert held.verify(full=True).fine
    with pytest.raises(StoreAccessError, match="permissions"):
        held.import_(tmp_path / "m", "again")
    with pytest.raises(StoreAccessError, match="permissions"):
        held.delete("m")
    kept = content(store.path)
    assert {name: data for name, data in kept.items() if "sqlite" not in name} == before


def test_every_error_of_the_store_is_a_store_error(store: Store) -> None:
    (store.path / "lock").unlink()
    (store.path / "lock").mkdir()
    with pytest.raises(StoreError, match="lock"):
        store.list()


def test_three_kinds_of_containers_live_together(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    paths = three(tmp_path)
    for path in paths.values():
        store.import_(path)
    assert set(store.stats().containers) == {"raw", "slab", "pack"}
    assert_clean(store, {name: content(path) for name, path in paths.items()})
