"""For tests: a disk that fails on purpose, and the contract that every way to the disk must keep.

`FaultyFiles` numbers the operations of the store. It dies in place of any of them, tears or fails
it, and afterwards takes back what was never synced: bytes, names, or both. Single pages of its
files can be made unreadable, as bad sectors are.
"""

import errno
import os
import shutil
import sqlite3
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tensor_dedup.libc import DiskExtent
from tensor_dedup.store.files import PAGE, Files, FileStatus, Handle, Mode, RealFiles

Loss: TypeAlias = Literal["nothing", "bytes", "everything"]

WRITES = frozenset({"pwrite", "truncate", "copy_range", "clone"})
CHANGES = WRITES | {"create", "fsync", "sync_folder", "rename", "unlink", "mkdir", "rmdir"}
NEEDS_SPACE = WRITES | {"create", "mkdir", "rename"}


def some_changes(operations: Iterable[tuple[int, str]], one_in: int) -> set[int]:
    """Numbers of the operations at which a short form tries a fault.

    One in so many of those that change something, and the first and the last of each kind: a
    scenario commits with the last rename, unlink or sync of a folder.
    """
    changes = [(number, operation) for number, operation in operations if operation in CHANGES]
    last = {operation: number for number, operation in changes}
    first = {operation: number for number, operation in reversed(changes)}
    return {number for number, _ in changes[::one_in]} | {*first.values()} | {*last.values()}


class Crash(BaseException):
    """The process died here. Not an Exception: nothing may handle it."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong, by the number of an operation (from 0).

    `stop_at`: the process dies in its place, or, when `torn`, half-way through it if it writes.
    `fail`: it raises OSError with this errno, once. `full_from`: from there on nothing fits.
    `at`: this happens first, as when somebody sets the clock.
    """

    stop_at: int | None = None
    torn: bool = False
    fail: Mapping[int, int] = field(default_factory=dict)
    full_from: int | None = None
    at: Mapping[int, Callable[[], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Undo:
    """How to take one change back, unless its file (an inode) or folder (a path) was synced."""

    key: int | Path
    action: Callable[[], None]


def _nothing() -> None:
    """Most operations."""


def _close_all(kept: list[int]) -> None:
    while kept:
        os.close(kept.pop())


class FaultyFiles(Files):
    """The disk with faults. Does not really sync: what counts as durable is kept in a journal.

    `limbo` is an empty folder on the same file system, for what may have to come back. What SQLite
    does is not seen: the index is always ahead, as if all it wrote had reached the disk. `inner` is
    the disk below, which may have a clock of its own.
    """

    def __init__(
        self, limbo: Path, faults: Faults | None = None, *, inner: Files | None = None
    ) -> None:
        self.log: list[str] = []
        self._limbo = limbo
        self._faults = faults or Faults()
        self._inner = inner or RealFiles()
        self._lock = threading.RLock()
        self._dead = False
        self._journal: list[_Undo] = []
        self._open: set[Handle] = set()
        self._direct: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._kept: list[int] = []
        # By inode: the pages that cannot be read, and with which errno.
        self._lost_pages: dict[int, dict[int, int]] = {}
        # Of those that never lose anything; a thousand of them would use up all descriptors.
        weakref.finalize(self, _close_all, self._kept)

    def lose_page(self, path: Path, offset: int, code: int = errno.EIO) -> None:
        """From now on the page of a file with this byte cannot be read; a rename changes nothing.

        A write of the whole page makes it good, as a disk puts another sector in its place; a write
        of a part of it fails, because the kernel has to read the rest.
        """
        self._lost_pages.setdefault(path.stat().st_ino, {})[offset // PAGE] = code

    def find_pages(self) -> None:
        """Every page can be read again: a cable had come loose."""
        self._lost_pages.clear()

    def _check_pages(
        self, handle: Handle, offset: int, nbytes: int, *, whole: bool = False
    ) -> None:
        """OSError for a range with a lost page; with `whole`, for one that it does not cover."""
        lost = self._lost_pages.get(os.fstat(handle.fd).st_ino, {})
        for page in range(offset // PAGE, -(-(offset + nbytes) // PAGE)) if lost else ():
            covered = offset <= page * PAGE and (page + 1) * PAGE <= offset + nbytes
            if page in lost and not (whole and covered):
                raise OSError(lost[page], os.strerror(lost[page]), str(handle.path))
            if whole:
                lost.pop(page, None)

    def lose(self, loss: Loss) -> None:
        """After a crash: let go of everything, as a dead process does, and lose what was unsynced.

        `bytes` loses what was written and keeps names, as some file systems do; `everything` both.
        """
        self._dead = True
        for handle in self._open:
            self._inner.close(handle)
        for undo in reversed(self._journal):
            if loss == "everything" or (loss == "bytes" and isinstance(undo.key, int)):
                undo.action()
        _close_all(self._kept)
        self._journal, self._open = [], set()

    def _step(self, operation: str, tear: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._dead:
                raise Crash
            number = len(self.log)
            self.log.append(operation)
            self._faults.at.get(number, _nothing)()
            if number == self._faults.stop_at:
                if self._faults.torn and tear is not None:
                    tear()
                self._dead = True
                raise Crash
            full = self._faults.full_from is not None and number >= self._faults.full_from
            code = self._faults.fail.get(number)
            if full and operation in NEEDS_SPACE:
                code = errno.ENOSPC
            if code is not None:
                raise OSError(code, os.strerror(code), operation)

    def _note(self, key: int | Path, action: Callable[[], None]) -> None:
        with self._lock:
            self._journal.append(_Undo(key, action))

    def _forget(self, key: int | Path) -> None:
        with self._lock:
            self._journal = [undo for undo in self._journal if undo.key != key]

    def _stash(self, path: Path) -> Path:
        return self._limbo / f"{len(self.log)}-{path.name}"

    def open(self, path: Path, mode: Mode) -> Handle:
        fresh = mode in ("create", "lock") and not path.exists()
        self._step("create" if fresh else "open")
        handle = self._inner.open(path, mode)
        self._open.add(handle)
        if mode == "modify direct":
            self._direct.add(handle)
        if fresh:
            self._note(path.parent, lambda: path.unlink(missing_ok=True))
        return handle

    def close(self, handle: Handle) -> None:
        if not self._dead:
            self._open.discard(handle)
            self._inner.close(handle)

    def status(self, path: Path) -> FileStatus | None:
        self._step("status")
        return self._inner.status(path)

    def status_of(self, handle: Handle) -> FileStatus:
        self._step("status_of")
        return self._inner.status_of(handle)

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        self._step("pread")
        self._check_pages(handle, offset, min(len(view), os.fstat(handle.fd).st_size - offset))
        return self._inner.pread(handle, view, offset)

    def cached_bytes(self, handle: Handle, start: int, nbytes: int) -> int | None:
        self._step("cached_bytes")
        return self._inner.cached_bytes(handle, start, nbytes)

    def map(self, handle: Handle, start: int, nbytes: int) -> memoryview:
        self._step("map")
        return self._inner.map(handle, start, nbytes)

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        half = memoryview(data)[: len(data) // 2]
        if handle in self._direct:
            half = half[: len(half) // PAGE * PAGE]
        keep = self._keep(handle, offset, len(data))
        self._step("pwrite", lambda: self._inner.pwrite(handle, half, offset))
        self._check_pages(handle, offset, len(data), whole=True)
        keep()
        self._inner.pwrite(handle, data, offset)

    def begin_writing(self, handle: Handle, start: int, nbytes: int) -> None:
        self._inner.begin_writing(handle, start, nbytes)  # nothing of it can be lost

    def grow(self, handle: Handle, size: int) -> None:
        self._keep(handle, size, 0)()  # a hint that never fails, but changes the file
        self._inner.grow(handle, size)

    def truncate(self, handle: Handle, size: int) -> None:
        keep = self._keep(handle, size, max(0, os.fstat(handle.fd).st_size - size))
        self._step("truncate")
        keep()
        self._inner.truncate(handle, size)

    def _keep(self, handle: Handle, offset: int, nbytes: int) -> Callable[[], None]:
        """What notes the present bytes of a range, so that a write to it can be taken back."""
        # Through the page cache, however the file is written.
        again = os.open(f"/proc/self/fd/{handle.fd}", os.O_RDWR)
        before = os.pread(again, nbytes, offset)
        found = os.fstat(again)
        os.close(again)

        def keep() -> None:
            fd = os.open(f"/proc/self/fd/{handle.fd}", os.O_RDWR)
            self._kept.append(fd)

            def undo() -> None:
                os.pwrite(fd, before, offset)
                os.ftruncate(fd, found.st_size)

            self._note(found.st_ino, undo)

        return keep

    def fsync(self, handle: Handle) -> None:
        self._step("fsync")
        self._forget(os.fstat(handle.fd).st_ino)

    def sync_folder(self, path: Path) -> None:
        self._step("sync_folder")
        if not path.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._forget(path)

    def clone(self, source: Handle, target: Handle) -> bool:
        keep = self._keep(target, 0, 0)
        self._step("clone")
        self._check_pages(source, 0, os.fstat(source.fd).st_size)
        keep()
        return self._inner.clone(source, target)

    def dedupe(self, source: Handle, target: Handle, start: int, nbytes: int) -> int | None:
        self._step("dedupe")
        return self._inner.dedupe(source, target, start, nbytes)

    def extents(self, handle: Handle) -> list[DiskExtent]:
        return self._inner.extents(handle)

    def copy_range(self, source: Handle, target: Handle, start: int, nbytes: int) -> int:
        keep = self._keep(target, start, nbytes)

        def half() -> None:
            self._inner.copy_range(source, target, start, nbytes // 2)

        self._step("copy_range", half)
        self._check_pages(source, start, nbytes)
        keep()
        return self._inner.copy_range(source, target, start, nbytes)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        stash = self._stash(target)
        had = target.exists()
        if had:
            os.link(target, stash)
        self._inner.rename(source, target)

        def undo() -> None:
            with suppress(FileNotFoundError):
                target.replace(source)
            if had:
                stash.replace(target)

        self._note(target.parent, undo)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        stash = self._stash(path)
        path.rename(stash)
        self._note(path.parent, lambda: self._bring_back(stash, path))

    def _bring_back(self, stash: Path, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        stash.rename(path)

    def mkdir(self, path: Path) -> bool:
        self._step("mkdir")
        made = self._inner.mkdir(path)
        if made:
            # A folder whose name was lost is lost with all that is in it.
            self._note(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))
        return made

    def rmdir(self, path: Path) -> None:
        self._step("rmdir")
        self._inner.rmdir(path)
        self._note(path.parent, path.mkdir)

    def listdir(self, path: Path) -> list[str]:
        self._step("listdir")
        return self._inner.listdir(path)

    def flock(self, handle: Handle, *, exclusive: bool, wait_s: float) -> bool:
        self._step("flock")
        return self._inner.flock(handle, exclusive=exclusive, wait_s=wait_s)

    def free_bytes(self, path: Path) -> int:
        self._step("free_bytes")
        return self._inner.free_bytes(path)

    def free_handles(self) -> int:
        return self._inner.free_handles()

    def database(self, path: Path) -> sqlite3.Connection:
        self._step("database")
        return self._inner.database(path)

    def token(self) -> str:
        return self._inner.token()

    def now(self) -> int:
        return self._inner.now()


class FilesTests(ABC):
    """What the store relies on. Subclass it, say how to make yours, and let pytest collect it."""

    @abstractmethod
    def make(self, folder: Path) -> Files:
        """A way to the disk; `folder` is empty and may be used for anything."""

    def _made(self, tmp_path: Path) -> tuple[Files, Path]:
        (tmp_path / "own").mkdir()
        (tmp_path / "root").mkdir()
        return self.make(tmp_path / "own"), tmp_path / "root"

    def _write(self, files: Files, path: Path, data: bytes) -> None:
        handle = files.open(path, "create")
        files.pwrite(handle, data, 0)
        files.fsync(handle)
        files.close(handle)
        files.sync_folder(path.parent)

    def _read(self, files: Files, path: Path, nbytes: int, offset: int = 0) -> bytes:
        handle = files.open(path, "read")
        data = bytearray(nbytes)
        count = files.pread(handle, memoryview(data), offset)
        files.close(handle)
        return bytes(data[:count])

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"0123456789")
        assert self._read(files, root / "a", 4, 3) == b"3456"
        assert self._read(files, root / "a", 99, 8) == b"89"

    def test_a_write_beyond_the_end_leaves_zeros_between(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"x")
        handle = files.open(root / "a", "modify")
        files.pwrite(handle, b"y", 3)
        assert files.status_of(handle).size == 4
        files.close(handle)
        assert self._read(files, root / "a", 9) == b"x\0\0y"

    def test_create_makes_only_what_is_not_there(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"x")
        assert _raises(FileExistsError, lambda: files.open(root / "a", "create"))
        assert _raises(FileNotFoundError, lambda: files.open(root / "b", "modify"))
        assert _raises(FileNotFoundError, lambda: files.open(root / "b", "read"))

    def test_rename_replaces_and_unlink_removes(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"new")
        self._write(files, root / "b", b"old")
        files.rename(root / "a", root / "b")
        assert files.listdir(root) == ["b"]
        assert self._read(files, root / "b", 9) == b"new"
        files.unlink(root / "b")
        assert files.status(root / "b") is None
        assert _raises(FileNotFoundError, lambda: files.unlink(root / "b"))

    def test_an_unlinked_file_can_be_read_by_who_has_it_open(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"still here")
        handle = files.open(root / "a", "read")
        files.unlink(root / "a")
        data = bytearray(10)
        assert files.pread(handle, memoryview(data), 0) == 10
        assert data == b"still here"
        files.close(handle)

    def test_folders_are_made_once_and_listed_in_order(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        assert [files.mkdir(root / "b"), files.mkdir(root / "b"), files.mkdir(root / "a")] == [
            True,
            False,
            True,
        ]
        assert files.listdir(root) == ["a", "b"]
        assert files.listdir(root / "missing") == []
        status = files.status(root / "a")
        assert status is not None
        assert status.kind == "folder"

    def test_a_copy_has_the_same_bytes_and_ends_with_its_source(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"0123456789")
        source, target = files.open(root / "a", "read"), files.open(root / "b", "create")
        if not files.clone(source, target):
            assert files.copy_range(source, target, 0, 5) == 5
            assert files.copy_range(source, target, 5, 99) == 5
        files.close(source)
        files.close(target)
        assert self._read(files, root / "b", 99) == b"0123456789"

    def test_only_equal_ranges_can_become_one(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        data = {"a": b"1" * 2 * PAGE + b"end", "b": b"1" * 2 * PAGE + b"end", "c": b"2" * 3 * PAGE}
        for name, content in data.items():
            self._write(files, root / name, content)
        one, two, other = (files.open(root / name, "read") for name in data)
        with suppress(OSError):  # most file systems cannot
            assert files.dedupe(one, two, 0, 2 * PAGE + 3) == 2 * PAGE + 3
            assert files.extents(one) == files.extents(two) != []
            assert files.dedupe(one, other, 0, PAGE) is None
        for name, content in data.items():
            assert self._read(files, root / name, 4 * PAGE) == content
        for handle in (one, two, other):
            files.close(handle)

    def test_locks_exclude_each_other_as_they_should(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        one, two = files.open(root / "l", "lock"), files.open(root / "l", "lock")
        assert files.flock(one, exclusive=False, wait_s=0)
        assert files.flock(two, exclusive=False, wait_s=0)
        assert not files.flock(two, exclusive=True, wait_s=0.01)
        files.close(one)
        assert files.flock(two, exclusive=True, wait_s=0)
        files.close(two)

    def test_a_closed_handle_reads_nothing(self, tmp_path: Path) -> None:
        files, root = self._made(tmp_path)
        self._write(files, root / "a", b"x")
        handle = files.open(root / "a", "read")
        files.close(handle)
        files.close(handle)
        assert _raises(OSError, lambda: files.pread(handle, memoryview(bytearray(1)), 0))


def _raises(kind: type[OSError], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
