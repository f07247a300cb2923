"""What a Hugging Face cache and a store both hold on disk, and one copy made of it.

`Reflinks` answers like the kernel on a file system that shares space between files; the last tests
ask the kernel itself. They need such a file system, at TENSOR_DEDUP_REFLINKS, or are skipped.
"""

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from files.hub_caches import COMMIT, snapshot
from store_runs.stores import (
    KIB,
    MIB,
    assert_clean,
    content,
    noise,
    open_store,
    safetensors,
    u8,
    write,
)
from tensor_dedup import Store
from tensor_dedup.libc import DiskExtent
from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.files import Handle, Mode, RealFiles
from tensor_dedup.store.upkeep.cache_copies import CacheCopies
from tensor_dedup.store.writing.sources import HubSnapshot

ENVIRONMENT = "TENSOR_DEDUP_REFLINKS"
MEMORY = Path("/dev/shm")
BLOCK = 4 * KIB
# One more than whole blocks: the last block of a file is short.
LARGE = 18 * MIB + 1
SMALL = b'{"model_type": "llama"}'
OTHERS = "the store holds it among other pieces, and only whole files can become one copy"
Identity = tuple[int, int, int, int]


class Reflinks(RealFiles):
    """A disk on which files share space, as far as `dedupe` was called and the kernel agreed."""

    def __init__(self, most: int = 1 << 62) -> None:
        self.most = most
        self.calls: list[tuple[int, int]] = []
        self.synced: set[int] = set()
        self.error: Callable[[int], int | None] = lambda _start: None
        self._shared: dict[int, list[tuple[int, int, int]]] = {}

    def fsync(self, handle: Handle) -> None:
        super().fsync(handle)
        self.synced.add(os.fstat(handle.fd).st_ino)

    def dedupe(self, source: Handle, target: Handle, start: int, nbytes: int) -> int | None:
        one, two = os.fstat(source.fd), os.fstat(target.fd)
        # The store's copy is durable under its own name, and nobody can delete it now.
        assert source.path.suffix == ".raw"
        assert one.st_ino in self.synced
        with pytest.raises(StoreBusyError):
            Store.open(source.path.parents[2], files=RealFiles()).gc(wait_s=0)
        # The kernel refuses what is no range of blocks, but for the end of both files.
        assert start % BLOCK == 0
        assert nbytes % BLOCK == 0 or start + nbytes == one.st_size == two.st_size
        self.calls.append((start, nbytes))
        if (code := self.error(start)) is not None:
            raise OSError(code, os.strerror(code))
        if os.pread(source.fd, nbytes, start) != os.pread(target.fd, nbytes, start):
            return None
        count = min(nbytes, self.most)
        self._shared.setdefault(two.st_ino, []).append((start, count, one.st_ino))
        return count

    def extents(self, handle: Handle) -> list[DiskExtent]:
        """Every file has a place of its own, and what it shares is at that of the other."""
        status, found, at = os.fstat(handle.fd), list[DiskExtent](), 0
        for start, count, inode in self._shared.get(status.st_ino, ()):
            found.append(DiskExtent(start, count, (inode << 40) + start))
            at = start + count
        return [*found, DiskExtent(at, status.st_size - at, (status.st_ino << 40) + at)]


@functools.cache
def model(own: int) -> dict[str, bytes]:
    """A checkpoint whose weights are one file of the store, except for what it shares."""
    tensors = u8(base=noise(1, 3 * MIB), own=noise(own, LARGE))
    return {"model.safetensors": safetensors(tensors), "config.json": SMALL}


class Scene:
    """A store that has a copy of a model, and a cache that has the model, too."""

    def __init__(self, root: Path, files: RealFiles) -> None:
        self.cache, self.files = root / "hub", files
        self.store = open_store(root / "store", files)
        self.model = model(2)
        # From the file system in memory, so that the store's copy is no reflink of anything.
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            self.store.import_(write(Path(folder) / "copy", self.model))
        self.folder = snapshot(self.cache, "org/name", self.model)
        self.blob = (self.folder / "model.safetensors").resolve()
        assert self.blob.parent.parent == self.cache / "blobs"
        self.snapshots = [HubSnapshot(self.folder, f"org/name@{COMMIT}")]
        self.index()

    def index(self) -> None:
        for each in self.snapshots:
            self.store.import_(each.path, each.name, external=True)

    @property
    def nbytes(self) -> int:
        """The size of the file that the store holds whole."""
        return len(self.model["model.safetensors"])

    def copies(self, *, dedup: bool = True) -> CacheCopies:
        return self.store.cache_copies(self.snapshots, dedup=dedup)

    def identity(self) -> Identity:
        found = self.blob.lstat()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def is_whole(self) -> None:
        """Every checkpoint reads as before; all of these have the files of one model."""
        names = ["copy", *(each.name for each in self.snapshots)]
        assert_clean(self.store, dict.fromkeys(names, self.model))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, Reflinks())


@pytest.fixture
def disk(scene: Scene) -> Reflinks:
    assert isinstance(scene.files, Reflinks)
    return scene.files


def test_what_both_hold_is_counted_once(scene: Scene, tmp_path: Path) -> None:
    twice = scene.nbytes + len(SMALL)
    nothing = CacheCopies(twice, 0, 0, {})
    assert scene.copies(dedup=False) == nothing
    # Another revision with the same blob, and another model with one tensor in common.
    again = snapshot(scene.cache, "org/name", scene.model, "2" * 40)
    tune = snapshot(scene.cache, "org/tune", model(3))
    scene.snapshots += [HubSnapshot(again, "org/name@2"), HubSnapshot(tune, "org/tune@1")]
    scene.index()
    assert scene.copies(dedup=False) == nothing
    # What is not in the store under that name is in no number, nor what has gone from the cache.
    scene.snapshots.append(HubSnapshot(write(tmp_path / "x", model(4)), "org/x"))
    assert scene.copies(dedup=False) == nothing
    shutil.rmtree(scene.cache)
    assert scene.copies(dedup=False) == CacheCopies(0, 0, 0, {})
    assert Store.open(tmp_path / "none").cache_copies(scene.snapshots) == CacheCopies(0, 0, 0, {})


def test_a_whole_file_becomes_one_copy(scene: Scene, disk: Reflinks) -> None:
    again = snapshot(scene.cache, "org/name", scene.model, "2" * 40)  # the same blob
    scene.snapshots.append(HubSnapshot(again, "org/name@2"))
    scene.index()
    before = scene.identity()
    left = {OTHERS: len(SMALL)}
    assert scene.copies() == CacheCopies(len(SMALL), 1, scene.nbytes, left)
    assert sum(nbytes for _, nbytes in disk.calls) == scene.nbytes
    assert max(nbytes for _, nbytes in disk.calls) <= 16 * MIB
    assert scene.identity() == before
    scene.is_whole()
    # It is one copy now: nothing is twice, and there is nothing to do.
    disk.calls.clear()
    assert scene.copies() == CacheCopies(len(SMALL), 0, 0, left)
    assert disk.calls == []


def test_every_file_of_the_cache_with_the_bytes_becomes_the_same_copy(scene: Scene) -> None:
    """One that an older library left has no shared blob."""
    repository = scene.cache / "models--org--old"
    folder = write(repository / "snapshots" / "abc", {"config.json": SMALL})
    blob = write(repository / "blobs", {"f00": scene.model["model.safetensors"]}) / "f00"
    (folder / "model.safetensors").symlink_to("../../blobs/f00")
    assert not blob.is_symlink()
    scene.snapshots.append(HubSnapshot(folder, "org/old@abc"))
    scene.index()
    found = scene.copies()
    assert (found.deduped_files, found.deduped_bytes) == (2, 2 * scene.nbytes)
    assert found.twice_bytes == len(SMALL)
    again = scene.copies()
    assert (again.deduped_files, again.twice_bytes) == (0, len(SMALL))


def test_the_kernel_may_do_less_at_a_time(scene: Scene, disk: Reflinks) -> None:
    disk.most = 5 * MIB
    assert scene.copies().deduped_bytes == scene.nbytes
    assert len(disk.calls) == -(-scene.nbytes // disk.most)
    assert [start for start, _ in disk.calls] == [n * disk.most for n in range(len(disk.calls))]


def test_what_differs_stays_what_it_is(scene: Scene, disk: Reflinks) -> None:
    """The digests agree and the bytes do not: an index that errs, or a bit that rotted."""
    at = 17 * MIB
    changed = bytearray(scene.model["model.safetensors"])
    changed[at] ^= 1
    scene.blob.chmod(0o644)
    scene.blob.write_bytes(changed)
    found = scene.copies()
    done = 16 * MIB  # the ranges before that
    assert (found.deduped_files, found.deduped_bytes) == (1, done)
    assert found.twice_bytes == scene.nbytes - done + len(SMALL)
    [(why, nbytes)] = [(w, n) for w, n in found.not_deduped.items() if w != OTHERS]
    assert "verify --full" in why
    assert nbytes == scene.nbytes - done
    assert scene.blob.read_bytes() == changed
    assert disk.calls[-1][0] == done  # and no further one is tried
    scene.store.export("copy", scene.cache.parent / "out")
    assert content(scene.cache.parent / "out") == scene.model


def test_a_file_system_that_stops_half_way_is_counted_as_far_as_it_went(
    scene: Scene, disk: Reflinks
) -> None:
    disk.error = lambda start: errno.ENOSPC if start else None
    found = scene.copies()
    assert found.deduped_bytes == 16 * MIB
    left = scene.nbytes - 16 * MIB
    assert found.not_deduped == {
        "the file system refuses it (No space left on device)": left,
        OTHERS: len(SMALL),
    }
    disk.error = lambda _: None
    disk.most = 0
    found = scene.copies()
    assert (found.deduped_files, found.twice_bytes) == (0, left + len(SMALL))
    assert found.not_deduped["the file system shared only a part"] == left
    disk.most = 1 << 62
    assert scene.copies() == CacheCopies(len(SMALL), 1, left, {OTHERS: len(SMALL)})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EOPNOTSUPP, "XFS and Btrfs can"),
        (errno.ENOTTY, "XFS and Btrfs can"),
        (errno.EXDEV, "on different file systems"),
        (errno.EPERM, "belongs to another user"),
        (errno.EINVAL, "refuses it (Invalid argument)"),
    ],
)
def test_what_cannot_be_shared_says_why(scene: Scene, disk: Reflinks, code: int, said: str) -> None:
    before = scene.identity()
    disk.error = lambda _: code
    found = scene.copies()
    assert (found.deduped_files, found.deduped_bytes) == (0, 0)
    assert found.twice_bytes == sum(found.not_deduped.values()) == scene.nbytes + len(SMALL)
    [(why, nbytes)] = [(w, n) for w, n in found.not_deduped.items() if w != OTHERS]
    assert said in why
    assert nbytes == scene.nbytes
    assert len(disk.calls) == 1
    assert scene.identity() == before
    scene.is_whole()


class Unreadable(Reflinks):
    """A disk on which a file may not be read."""

    forbidden = Path("/nothing")

    def open(self, path: Path, mode: Mode) -> Handle:
        if path == self.forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().open(path, mode)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    disk = Unreadable()
    scene = Scene(tmp_path, disk)
    disk.forbidden = scene.folder / "model.safetensors"
    found = scene.copies()
    assert found.not_deduped == {"it cannot be read": scene.nbytes, OTHERS: len(SMALL)}


def test_what_the_store_has_encoded_or_in_parts_stays_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Reflinks())
    tune = snapshot(scene.cache, "org/tune", model(3))
    scene.store.import_(tune)  # `base` is known, so it is stored as what differs
    scene.snapshots = [HubSnapshot(tune, "org/tune")]
    found = scene.copies()
    assert found.deduped_files == 0
    assert list(found.not_deduped) == [OTHERS]
    assert found.twice_bytes > LARGE


def test_a_link_that_leads_elsewhere_now_is_not_followed(scene: Scene, disk: Reflinks) -> None:
    secret = scene.cache.parent / "secret"
    shutil.copyfile(scene.blob, secret)
    (scene.folder / "model.safetensors").unlink()
    (scene.folder / "model.safetensors").symlink_to(secret)
    assert scene.copies() == CacheCopies(len(SMALL), 0, 0, {OTHERS: len(SMALL)})
    assert disk.calls == []
    follow = scene.store.cache_copies(scene.snapshots, dedup=True, follow_links=True)
    assert follow.deduped_bytes == scene.nbytes


@pytest.mark.parametrize("folder", [Path(tempfile.gettempdir()), MEMORY])
def test_the_kernel_says_whether_it_can(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        scene = Scene(Path(root), RealFiles())
        before = scene.identity()
        found = scene.copies()
        cannot = "its file system cannot let files share space (XFS and Btrfs can)"
        left = {cannot: scene.nbytes, OTHERS: len(SMALL)}
        if folder == MEMORY or cannot in found.not_deduped:
            assert found == CacheCopies(scene.nbytes + len(SMALL), 0, 0, left)
        else:
            assert found == CacheCopies(len(SMALL), 1, scene.nbytes, {OTHERS: len(SMALL)})
        assert scene.identity() == before
        scene.is_whole()


@pytest.fixture
def reflinks(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that shares space between files."""
    with tempfile.TemporaryDirectory(dir=os.environ.get(ENVIRONMENT, tmp_path)) as folder:
        for name in "ab":
            (Path(folder) / name).write_bytes(bytes(BLOCK))
        files = RealFiles()
        one, two = (files.open(Path(folder) / name, "read") for name in "ab")
        try:
            files.dedupe(one, two, 0, BLOCK)
        except OSError as error:
            pytest.skip(
                f"{folder}: {error.strerror}; `truncate -s 400M x`, `mkfs.xfs x` (or mkfs.btrfs), "
                f"`sudo mount -o loop x DIR`, then {ENVIRONMENT}=DIR"
            )
        finally:
            files.close(one)
            files.close(two)
        yield Path(folder)


def used(folder: Path) -> int:
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_the_kernel_makes_one_copy(reflinks: Path) -> None:
    scene = Scene(reflinks, RealFiles())
    assert scene.blob.stat().st_mode & 0o222 == 0
    before, taken = scene.identity(), used(reflinks)
    assert scene.copies(dedup=False).twice_bytes == scene.nbytes + len(SMALL)
    left = {OTHERS: len(SMALL)}
    assert scene.copies() == CacheCopies(len(SMALL), 1, scene.nbytes, left)
    assert taken - used(reflinks) > scene.nbytes - MIB
    assert scene.identity() == before
    assert scene.copies() == CacheCopies(len(SMALL), 0, 0, left)
    scene.is_whole()
    # A write to the one leaves the other as it was.
    scene.blob.chmod(0o644)
    with scene.blob.open("r+b") as file:
        file.seek(17 * MIB)
        file.write(bytes([file.read(1)[0] ^ 1]))
    scene.store.export("copy", reflinks / "out")
    assert content(reflinks / "out") == scene.model


def test_an_import_that_cloned_a_blob_is_one_copy_already(reflinks: Path) -> None:
    store, files = Store.open(reflinks / "store"), model(2)
    folder = snapshot(reflinks / "hub", "org/name", files)
    store.import_(folder)
    copies = store.cache_copies([HubSnapshot(folder, "org/name")], dedup=True)
    assert copies == CacheCopies(len(SMALL), 0, 0, {OTHERS: len(SMALL)})
