"""The contract of a way to the disk, kept by the disk and by the one that fails on purpose."""

import errno
import itertools
import os
import resource
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from processes.process_state import fork, forked
from store_runs.disk_faults import Crash, Faults, FaultyFiles, FilesTests
from tensor_dedup.store.files import PAGE, Files, RealFiles


class TestRealFiles(FilesTests):
    def make(self, folder: Path) -> Files:
        return RealFiles()


class TestFaultyFiles(FilesTests):
    def make(self, folder: Path) -> Files:
        return FaultyFiles(folder)


@pytest.fixture
def limbo(tmp_path: Path) -> Path:
    (tmp_path / "limbo").mkdir()
    (tmp_path / "root").mkdir()
    return tmp_path / "limbo"


def put(files: Files, path: Path, data: bytes, *, sync: bool) -> None:
    handle = files.open(path, "create")
    files.pwrite(handle, data, 0)
    if sync:
        files.fsync(handle)
    files.close(handle)


def test_what_was_not_synced_is_lost(limbo: Path) -> None:
    root = limbo.parent / "root"
    files = FaultyFiles(limbo)
    put(files, root / "durable", b"durable", sync=True)
    files.sync_folder(root)
    put(files, root / "unsynced", b"unsynced", sync=False)
    files.rename(root / "durable", root / "moved")
    files.lose("everything")
    assert [path.name for path in root.iterdir()] == ["durable"]
    assert (root / "durable").read_bytes() == b"durable"


def test_bytes_can_be_lost_while_their_name_stays(limbo: Path) -> None:
    root = limbo.parent / "root"
    files = FaultyFiles(limbo)
    put(files, root / "a", b"unsynced", sync=False)
    files.rename(root / "a", root / "b")
    files.lose("bytes")
    assert (root / "b").read_bytes() == b""


def test_replaced_and_removed_files_come_back(limbo: Path) -> None:
    root = limbo.parent / "root"
    files = FaultyFiles(limbo)
    for name in ("old", "new", "gone"):
        put(files, root / name, name.encode(), sync=True)
    files.sync_folder(root)
    files.rename(root / "new", root / "old")
    files.unlink(root / "gone")
    files.lose("everything")
    found = {path.name: path.read_bytes() for path in root.iterdir()}
    assert found == {"old": b"old", "new": b"new", "gone": b"gone"}


def test_a_torn_write_is_done_half(limbo: Path) -> None:
    root = limbo.parent / "root"
    files = FaultyFiles(limbo, Faults(stop_at=1, torn=True))
    handle = files.open(root / "a", "create")
    with pytest.raises(Crash):
        files.pwrite(handle, b"0123456789", 0)
    with pytest.raises(Crash):
        files.listdir(root)  # the dead do nothing more
    files.lose("nothing")
    assert (root / "a").read_bytes() == b"01234"


def test_an_operation_fails_once_and_a_full_disk_stays_full(limbo: Path) -> None:
    root = limbo.parent / "root"
    files = FaultyFiles(limbo, Faults(fail={0: errno.EIO}, full_from=3))
    with pytest.raises(OSError, match="Input/output"):
        files.listdir(root)
    assert files.listdir(root) == []
    handle = files.open(root / "a", "create")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            files.pwrite(handle, b"x", 0)
    files.lose("nothing")


@pytest.mark.parametrize("faulty", [True, False])
def test_a_mapped_range_is_private_and_outlives_its_file(tmp_path: Path, faulty: bool) -> None:
    (tmp_path / "limbo").mkdir()
    files: Files = FaultyFiles(tmp_path / "limbo") if faulty else RealFiles()
    (tmp_path / "a").write_bytes(bytes(PAGE) + b"mapped" * 1000)
    handle = files.open(tmp_path / "a", "read")
    view = files.map(handle, PAGE, 6000)
    with pytest.raises(OSError, match="ends before"):
        files.map(handle, PAGE, 6001)
    files.close(handle)
    view[:6] = b"MAPPED"
    assert (tmp_path / "a").read_bytes() == bytes(PAGE) + b"mapped" * 1000
    files.unlink(tmp_path / "a")
    assert bytes(view) == b"MAPPED" + b"mapped" * 999


@pytest.mark.parametrize("faulty", [True, False])
def test_only_empty_folders_are_removed(tmp_path: Path, faulty: bool) -> None:
    (tmp_path / "limbo").mkdir()
    files: Files = FaultyFiles(tmp_path / "limbo") if faulty else RealFiles()
    (tmp_path / "full" / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        files.rmdir(tmp_path / "full")
    files.rmdir(tmp_path / "full" / "inner")
    assert files.listdir(tmp_path / "full") == []
    with pytest.raises(FileNotFoundError):
        files.rmdir(tmp_path / "full" / "inner")


def test_what_was_just_written_is_cached(tmp_path: Path) -> None:
    files = RealFiles()
    (tmp_path / "a").write_bytes(bytes(10 * PAGE))
    handle = files.open(tmp_path / "a", "read")
    assert files.cached_bytes(handle, 0, 10 * PAGE) in (None, 10 * PAGE)
    assert files.cached_bytes(handle, 20 * PAGE, PAGE) in (None, 0)
    files.close(handle)


def test_a_hint_to_begin_writing_changes_nothing_and_never_fails(tmp_path: Path) -> None:
    files = RealFiles()
    handle = files.open(tmp_path / "a", "create")
    files.pwrite(handle, b"x" * (3 * PAGE), 0)
    for start, nbytes in ((0, 3 * PAGE), (PAGE, 9 * PAGE), (1 << 62, 1 << 62), (0, 0), (-1, 5)):
        files.begin_writing(handle, start, nbytes)
    files.pwrite(handle, b"y", PAGE)
    files.fsync(handle)
    files.close(handle)
    assert (tmp_path / "a").read_bytes() == b"x" * PAGE + b"y" + b"x" * (2 * PAGE - 1)


def test_a_file_is_extended_where_that_is_known_to_pay(tmp_path: Path) -> None:
    files = RealFiles()
    for folder in (tmp_path, None):  # memory; and, if it is a disk, the system's folder
        with tempfile.TemporaryDirectory(dir=folder) as name:
            path = Path(name, "a")
            handle = files.open(path, "create")
            files.pwrite(handle, b"x" * 3, 0)
            files.grow(handle, 2 * PAGE)
            found = subprocess.run(
                ["stat", "-f", "-c", "%T", name], capture_output=True, check=True
            )
            more = bytes(2 * PAGE - 3) if found.stdout == b"ext2/ext3\n" else b""
            assert path.read_bytes() == b"xxx" + more
            for wrong in (1, 0, -1, 1 << 62):
                files.grow(handle, wrong)
            assert path.stat().st_size == 3 + len(more)
            files.close(handle)


def limited(folder: str) -> int:
    """A file is extended beyond what a process may write, where the signal ends it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    files = RealFiles()
    handle = files.open(Path(folder, "a"), "create")
    files.grow(handle, 2 * PAGE)
    files.close(handle)
    return Path(folder, "a").stat().st_size


def test_a_file_is_not_extended_beyond_what_the_process_may_write() -> None:
    with tempfile.TemporaryDirectory() as name:
        assert forked(lambda: limited(name)) == 0


def forking(folder: str) -> list[bool]:
    """A child is forked while a file is locked, and outlives the lock."""
    files, path = RealFiles(), Path(folder, "lock")
    held, other = files.open(path, "lock"), files.open(path, "lock")
    assert files.flock(held, exclusive=True, wait_s=0)
    (born, say_born), (ended, say_ended) = os.pipe(), os.pipe()
    child = fork()
    if not child:
        code = 1
        try:
            own = files.open(path, "lock")
            refused = not files.flock(own, exclusive=True, wait_s=0)
            files.close(own)
            os.write(say_born, b"x")
            os.read(ended, 1)
            taken = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)  # the locks' numbers
            files.close(held)
            files.close(other)
            for fd in taken:
                os.fstat(fd)
            code = 0 if refused else 2
        finally:
            os._exit(code)
    os.read(born, 1)
    found = [files.flock(other, exclusive=True, wait_s=0)]  # the parent's lock is the parent's
    files.close(held)
    found.append(files.flock(other, exclusive=True, wait_s=0))  # and the child has no part in it
    os.write(say_ended, b"x")
    _, status = os.waitpid(child, 0)
    return [*found, os.waitstatus_to_exitcode(status) == 0]


def test_a_forked_child_does_not_hold_its_parent_s_locks(tmp_path: Path) -> None:
    assert forked(lambda: forking(str(tmp_path))) == [False, True, True]


def test_every_extent_of_a_file_is_found() -> None:
    """More of them than the kernel tells at once, with holes between."""
    with tempfile.NamedTemporaryFile() as file:
        count, step = 600, 16 * PAGE
        for number in range(count):
            os.pwrite(file.fileno(), b"x" * PAGE, number * step)
        files = RealFiles()
        handle = files.open(Path(file.name), "read")
        found = files.extents(handle)
        files.close(handle)
    if not found:
        pytest.skip(f"the file system of {tempfile.gettempdir()} does not say where files lie")
    # XFS rounds each of them up.
    ranges = [(extent.start, extent.start + extent.nbytes) for extent in found]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    for start in range(0, count * step, step):
        assert any(begin <= start and start + PAGE <= end for begin, end in ranges)


def test_where_files_in_memory_lie_is_not_known() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.pwrite(file.fileno(), b"x" * PAGE, 0)
        files = RealFiles()
        handle = files.open(Path(file.name), "read")
        assert files.extents(handle) == []
        files.close(handle)
