"""A page that the disk cannot read is damage like any other: found, named, kept out, repaired."""

import errno
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from store_runs.damage import PLACES, one
from store_runs.disk_faults import FaultyFiles
from store_runs.stores import (
    KIB,
    MIB,
    Content,
    assert_clean,
    assert_same,
    content,
    handle,
    network,
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
    StoreAccessError,
    StoreIOError,
    UnfitForCollectionError,
)
from tensor_dedup.store.files import Handle, RealFiles
from tensor_dedup.store.reading.tensors import iter_tensors, load_tensors

_MEDIA = [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN]
_DAMAGE = (CorruptTensorError, DamagedFileError, MissingObjectError)


@dataclass(frozen=True)
class Disk:
    """A store on a disk with bad sectors, the checkpoints it came from, and what they hold."""

    store: Store
    files: FaultyFiles
    paths: Mapping[str, Path]
    expected: Mapping[str, Content]

    def lose(self, path: Path, offset: int, code: int = errno.EIO) -> None:
        """Make a page unreadable, and make sure that it is."""
        size = path.stat().st_size
        at = offset if offset >= 0 else size + offset
        self.files.lose_page(path, at, code)
        opened = self.files.open(path, "read")
        try:
            with pytest.raises(OSError, match=os.strerror(code)):
                self.files.pread(opened, memoryview(bytearray(1)), at)
        finally:
            self.files.close(opened)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    paths = three(tmp_path / "sources")
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    store = open_store(tmp_path / "store", files)
    for path in paths.values():
        store.import_(path)
    return Disk(store, files, paths, {name: content(path) for name, path in paths.items()})


def assert_right_or_refused(disk: Disk) -> int:
    """Every checkpoint reads back, or says what is damaged; how many do not."""
    refused = 0
    for name, files in disk.expected.items():
        try:
            assert stored(disk.store, name) == files
        except _DAMAGE as error:
            assert "repair --from" in str(error)  # noqa: PT017 (either is right, nothing else is)
            refused += 1
    return refused


@pytest.mark.parametrize("place", PLACES)
def test_a_page_of_any_file(place: str, disk: Disk) -> None:
    where, _ = PLACES[place]
    path, offset = where(disk.store.path)
    disk.lose(path, offset)
    assert_right_or_refused(disk)
    found = disk.store.verify(full=True)
    kinds = {fault.kind for fault in found.faults}
    assert str(path) in {fault.path for fault in found.faults} or "lost" in kinds
    if "reference" in place:  # nothing else says what the name stood for
        for name, source in disk.paths.items():
            disk.store.import_(source, name, replace=True)
    assert disk.store.repair(list(disk.paths.values())).missing == []
    assert_clean(disk.store, disk.expected)


@pytest.mark.parametrize("code", _MEDIA)
@pytest.mark.parametrize("kind", ["raw", "slab", "pack", "delta"])
def test_a_page_of_tensors(kind: str, code: int, disk: Disk) -> None:
    if kind == "delta":
        disk.store.delete("tune")
        disk.store.gc(0)
        disk.store.import_(disk.paths["tune"], base="base")
    path = one(disk.store.path, f"containers/*/*.{kind}")
    disk.lose(path, 100, code)
    assert 0 < assert_right_or_refused(disk) < 3
    assert not disk.store.verify(full=True).fine
    with pytest.raises(UnfitForCollectionError):
        disk.store.gc(0)
    assert disk.store.repair(list(disk.paths.values())).missing == []
    assert_clean(disk.store, disk.expected)


def test_the_error_of_a_read_names_file_tensor_and_offset(disk: Disk) -> None:
    path = one(disk.store.path, "containers/*/*.raw")
    with disk.store.checkpoint("base") as checkpoint:
        disk.lose(path, 500_000)
        with pytest.raises(CorruptTensorError, match="cannot be read from the disk") as caught:
            checkpoint.read("a")
        assert checkpoint.read("b")  # the others are as good as before
    assert caught.value.facts["tensors"] == ["a"]
    assert caught.value.facts["errno"] == errno.EIO
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts["offset"] == path.read_bytes().index(noise(1, 64))
    assert "repair --from" in str(caught.value)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("how", ["read", "range", "load", "iterate", "export"])
def test_another_container_that_has_the_piece_stands_in(
    how: str, twice: bool, disk: Disk, tmp_path: Path
) -> None:
    path = one(disk.store.path, "containers/*/*.raw")
    before = set(disk.store.path.glob("containers/*/*"))
    # The same tensor once more, in a container of which next to nothing else is wanted.
    more = u8(a=noise(1, 700 * KIB), other=noise(50, 4 * MIB))
    disk.lose(path, 500_000)
    assert not disk.store.verify(full=True).fine
    disk.store.import_(write(tmp_path / "more", {"model.safetensors": safetensors(more)}))
    (second,) = set(disk.store.path.glob("containers/*/*.raw")) - before
    disk.files.find_pages()
    assert disk.store.verify(full=True).fine  # the first is read again, too
    disk.lose(path, 500_000)
    if twice:
        disk.lose(second, second.read_bytes().index(noise(1, 64)))
    with disk.store.checkpoint("base") as checkpoint:
        for _ in range(2):
            if twice:
                with pytest.raises(_DAMAGE, match=r"'base'.*repair --from"):
                    checkpoint.read("a")
                continue
            if how == "read":
                assert checkpoint.read("a") == noise(1, 700 * KIB)
            elif how == "range":
                assert checkpoint.read_range("a", 5, 6) == noise(1, 700 * KIB)[5:6]
            elif how == "load":
                found = load_tensors(checkpoint)["a"]
                assert found.numpy().tobytes() == noise(1, 700 * KIB)
            elif how == "iterate":
                a = next(tensor for name, tensor in iter_tensors(checkpoint) if name == "a")
                assert a.numpy().tobytes() == noise(1, 700 * KIB)
    if how == "export" and not twice:
        disk.store.export("base", tmp_path / "out")
        assert content(tmp_path / "out") == disk.expected["base"]


class Torn(RealFiles):
    """A disk that loses the bytes of what is mapped, as the kernel sees it: a touch is SIGBUS."""

    def __init__(self) -> None:
        self.torn: list[Path] = []

    def map(self, handle: Handle, start: int, nbytes: int) -> memoryview:
        memory = super().map(handle, start, nbytes)
        os.truncate(handle.path, start + nbytes // 2)
        self.torn.append(handle.path)
        return memory


def test_a_mapped_page_that_cannot_be_read_is_not_touched(disk: Disk, tmp_path: Path) -> None:
    copy = open_store(tmp_path / "copy")
    data = safetensors(u8(a=noise(1, 700 * KIB), z=noise(60, 3 * MIB)))
    copy.import_(write(tmp_path / "m", {"model.safetensors": data}))
    files = Torn()
    with (
        open_store(copy.path, files).checkpoint("m") as checkpoint,
        pytest.raises(CorruptTensorError),  # where a touch would have ended the process
    ):
        load_tensors(checkpoint, mapped=True)
    assert files.torn
    assert not copy.verify(full=True).fine
    assert copy.repair([tmp_path / "m"]).missing == []
    assert stored(copy, "m") == content(tmp_path / "m")


def test_verify_goes_on_and_a_sample_finds_it_too(disk: Disk) -> None:
    raw, slab = (one(disk.store.path, f"containers/*/*.{kind}") for kind in ("raw", "slab"))
    disk.lose(raw, 500_000)
    disk.lose(raw, 900_000)
    disk.lose(slab, 9000)
    sampled = disk.store.verify(sample=0.999999, seed=1)
    assert [(f.kind, f.path) for f in sampled.faults if f.kind == "tensor"] == sorted(
        [("tensor", str(raw)), ("tensor", str(raw)), ("tensor", str(slab))],
        key=lambda each: Path(each[1]).name,
    )
    affected = {name for fault in sampled.faults for name in fault.affected}
    assert {"base: a", "base: b", "tune: b"} <= affected
    assert {fault.kind for fault in disk.store.verify(full=True).faults} == {"lost"}


def test_padding_that_cannot_be_read_is_named_once(disk: Disk, tmp_path: Path) -> None:
    odd = safetensors(u8(p=noise(70, 66 * KIB + 1), q=noise(71, 66 * KIB)))
    source = write(tmp_path / "odd", {"model.safetensors": odd})
    before = set(disk.store.path.glob("containers/*/*"))
    disk.store.import_(source)
    (slab,) = set(disk.store.path.glob("containers/*/*.slab")) - before
    expected = {**disk.expected, "odd": content(source)}
    disk.lose(slab, 66 * KIB + 1)
    assert {fault.kind for fault in disk.store.verify(full=True).faults} == {
        "tensor",
        "padding",
    }
    assert disk.store.repair([source]).missing == []
    assert_clean(disk.store, expected)


@pytest.mark.parametrize("kind", ["raw.table", "slab"])
def test_what_can_be_read_again_comes_back_from_the_quarantine(kind: str, disk: Disk) -> None:
    disk.lose(one(disk.store.path, f"containers/*/*.{kind}"), -60)
    with disk.store.checkpoint("tune") as checkpoint:
        manifest = checkpoint.manifest
    if kind == "slab":
        manifest = disk.store.handle.objects.manifest(manifest).pages[0].hex()
    disk.lose(disk.store.path / "manifests" / manifest[:2] / manifest, 40)
    assert not disk.store.verify(full=True).fine
    assert disk.store.repair().missing != []
    disk.files.find_pages()
    result = disk.store.repair()
    # What a whole file without its table holds is found in it, before anybody else is asked.
    assert (result.missing, result.from_trash, result.manifests) == ([], int(kind == "slab"), 1)
    assert_clean(disk.store, disk.expected)


def test_a_source_of_repair_with_bad_sectors_gives_what_it_can(disk: Disk) -> None:
    raw = one(disk.store.path, "containers/*/*.raw")
    disk.lose(raw, 500_000)
    disk.lose(raw, 900_000)
    assert not disk.store.verify(full=True).fine
    source = disk.paths["base"] / "model.safetensors"
    disk.lose(source, 500_000)
    result = disk.store.repair([disk.paths["base"]])
    assert result.pieces == 1
    assert any(str(source) in what for what in result.missing)
    disk.files.find_pages()
    assert disk.store.repair([disk.paths["base"]]).missing == []
    assert_clean(disk.store, disk.expected)


def test_a_file_indexed_in_place(disk: Disk, tmp_path: Path) -> None:
    data = safetensors(u8(o=noise(80, 300 * KIB), p=noise(81, 300 * KIB)))
    source = write(tmp_path / "outside", {"o.safetensors": data})
    disk.store.import_(source, external=True)
    disk.lose(source / "o.safetensors", 100_000)
    with disk.store.checkpoint("outside") as checkpoint:
        with pytest.raises(CorruptTensorError, match=r"o\.safetensors"):
            checkpoint.read("o")
        assert checkpoint.read("p") == noise(81, 300 * KIB)
    assert "lost" in {fault.kind for fault in disk.store.verify(full=True).faults}


def test_a_step_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "limbo").mkdir()
    files = FaultyFiles(tmp_path / "limbo")
    run = handle(tmp_path / "store", files=files)
    model = network(1)
    run.save(model, 0)
    run.store.export("run@0", tmp_path / "out")
    files.lose_page(one(tmp_path / "store", "containers/*/*.delta"), 100)
    with pytest.raises(CorruptTensorError, match="layer0"):
        run.load(0)
    assert not run.store.verify(full=True).fine
    assert run.store.repair().missing != []
    assert run.store.repair([tmp_path / "out"]).missing == []
    assert_same(run.load(0), model)
    run.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, StoreAccessError),
        (errno.EMFILE, StoreIOError),
        (errno.ETIMEDOUT, StoreIOError),
    ],
)
def test_what_is_no_damage_is_not_taken_for_it(
    code: int, kind: type[StoreError], disk: Disk
) -> None:
    for path in disk.store.path.glob("containers/*/*"):
        for at in range(0, path.stat().st_size, 4096):
            disk.files.lose_page(path, at, code)
    with pytest.raises(kind):
        disk.store.verify(full=True)
    with pytest.raises(kind):
        disk.store.checkpoint("base")
    disk.files.find_pages()
    with disk.store.checkpoint("base") as checkpoint:
        disk.lose(one(disk.store.path, "containers/*/*.raw"), 500_000, code)
        with pytest.raises(kind):
            checkpoint.read("a")
        disk.files.find_pages()
        assert checkpoint.read("a") == noise(1, 700 * KIB)
    assert list((disk.store.path / "quarantine").iterdir()) == []
    assert_clean(disk.store, disk.expected)


def test_an_error_holds_no_memory_of_the_caller(disk: Disk) -> None:
    with disk.store.checkpoint("base") as checkpoint:
        disk.lose(one(disk.store.path, "containers/*/*.raw"), 500_000)
        memory = bytearray(700 * KIB)
        try:
            with memoryview(memory) as view:
                checkpoint.read_piece_into(
                    bytes.fromhex(checkpoint["a"].digest), 0, view, len(memory)
                )
        except CorruptTensorError as error:
            kept = error.__cause__
    gc.collect()
    assert kept is None
    memory.clear()  # BufferError while anything looks at it
