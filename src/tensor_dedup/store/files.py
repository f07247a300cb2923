"""The file system interface of the store. All other modules of the store do file I/O through it.

`Files` is the interface, and `RealFiles` is its implementation. Tests wrap the implementation to
make single operations fail, stop or write too little.
"""

import errno
import fcntl
import os
import resource
import sqlite3
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tensor_dedup import libc
from tensor_dedup.sqlite import connect
from tensor_dedup.store import buffers

# What `direct` and `map` count in.
PAGE = buffers.PAGE
Mode: TypeAlias = Literal["read", "direct", "create", "modify", "modify direct", "lock"]

# linux/fs.h: share the blocks of another file, copied only when one of the two is written.
_FICLONE = 0x40049409
_COPY_STEP = 1 << 30
_POLL_S = 0.02
_ANY = 1 << 20
# A file is extended by at most an eighth of what is free: others write, too.
_SHARE = 8
_CANNOT_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL}
_CANNOT_CLONE |= {errno.ENOSYS, errno.EPERM, errno.ETXTBSY}
_FLAGS: dict[Mode, int] = {
    # Non-blocking: opening a pipe nobody writes to would wait for ever.
    "read": os.O_RDONLY | os.O_NONBLOCK,
    "direct": os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECT,
    "create": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "modify": os.O_RDWR,
    "modify direct": os.O_RDWR | os.O_DIRECT,
    "lock": os.O_RDWR | os.O_CREAT,
}


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The status of a file from `stat`.

    If two statuses are equal, the file did not change between them.
    """

    kind: Literal["file", "folder", "other"]
    size: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int


class Handle:
    """An open file. Any thread may read and write through it.

    The owner of the handle closes it by `Files.close`.
    """

    __slots__ = ("__weakref__", "_fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @property
    def fd(self) -> int:
        """The file descriptor.

        Raises:
            OSError: The handle was closed, or `take` was called (EBADF).
        """
        if self._fd < 0:
            raise OSError(errno.EBADF, "the file was closed", str(self.path))
        return self._fd

    def take(self) -> int:
        """Give up the file descriptor and return it, for the caller to close.

        Return -1 if the handle has no descriptor any more.
        """
        fd, self._fd = self._fd, -1
        return fd


class Files(ABC):
    """The file operations of a store. A failed operation raises OSError with the file's name.

    Written bytes are durable after `fsync`. The names in a folder are durable after `sync_folder`.
    Safe from any thread.
    """

    @abstractmethod
    def open(self, path: Path, mode: Mode) -> Handle:
        """Open the file at `path`. `mode` is one of these:

        - `read` opens an existing file for reading.
        - `modify` opens an existing file for reading and writing.
        - `create` makes a new file, and raises FileExistsError if it exists.
        - `lock` opens a file for `flock`. It creates a missing file. Without permission to write,
          it opens the file read-only.
        - `direct` and `modify direct` are `read` and `modify` with O_DIRECT. Memory address, offset
          and size must then be multiples of PAGE. File systems without support for O_DIRECT raise
          OSError (EINVAL).
        """

    @abstractmethod
    def close(self, handle: Handle) -> None:
        """Close a file and release the locks held through `handle`. A second call has no effect."""

    @abstractmethod
    def status(self, path: Path) -> FileStatus | None:
        """Return the status of the file at `path`, or None if the file does not exist.

        Symbolic links are followed.
        """

    def resolved(self, path: Path) -> Path:
        """Return `path` as an absolute path without symbolic links. The path need not exist."""
        return Path(os.path.realpath(path))

    @abstractmethod
    def status_of(self, handle: Handle) -> FileStatus:
        """Return the current status of an open file."""

    @abstractmethod
    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        """Read into `view` from `offset`; return the number of bytes read.

        The number is smaller than the view only if the file ends there.
        """

    @abstractmethod
    def cached_bytes(self, handle: Handle, start: int, nbytes: int) -> int | None:
        """Return approximately how many of the `nbytes` from offset `start` are in the page cache.

        Return None if the kernel cannot tell.
        """

    @abstractmethod
    def map(self, handle: Handle, start: int, nbytes: int) -> memoryview:
        """Map `nbytes` of a file copy-on-write, from the offset `start`.

        `start` is a multiple of PAGE. The mapping is freed when nothing refers to it any more, even
        if the file was closed or unlinked before.
        """

    @abstractmethod
    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""

    @abstractmethod
    def begin_writing(self, handle: Handle, start: int, nbytes: int) -> None:
        """Start writing `nbytes` from offset `start` to the disk, so that `fsync` waits less later.

        Never fails.
        """

    @abstractmethod
    def grow(self, handle: Handle, size: int) -> None:
        """Reserve disk space for a file that will have about `size` bytes. Never fails.

        The call may extend the file with zeros, so the caller must truncate it to its final size.
        """

    @abstractmethod
    def truncate(self, handle: Handle, size: int) -> None:
        """Change the size of a file to `size`. If the file grows, zeros are appended."""

    @abstractmethod
    def fsync(self, handle: Handle) -> None:
        """Make the bytes of a file durable. The file's name is durable only after `sync_folder`."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    @abstractmethod
    def clone(self, source: Handle, target: Handle) -> bool:
        """Make `target` share all of its disk space with `source` (a reflink).

        Return False if the file system cannot.
        """

    @abstractmethod
    def dedupe(self, source: Handle, target: Handle, start: int, nbytes: int) -> int | None:
        """Make a range of `target` share the disk space of the same range of `source`.

        The kernel compares the two; no byte, size or time of either changes. Return how many bytes
        from `start` are shared now, which may be fewer than `nbytes`, or None if the two differ.
        `start` and `nbytes` are multiples of 64 KiB, but the end may be that of both files. To have
        `target` open for reading is enough for its owner.

        Raises:
            OSError: The file system cannot do this (EOPNOTSUPP or ENOTTY), the files are not on the
                same one (EXDEV), or `target` belongs to another user (EPERM).
        """

    @abstractmethod
    def extents(self, handle: Handle) -> list[libc.DiskExtent]:
        """Return where a file lies on the disk, in order, or an empty list if that is not known."""

    @abstractmethod
    def copy_range(self, source: Handle, target: Handle, start: int, nbytes: int) -> int:
        """Copy `nbytes` at offset `start` of `source` to the same offset of `target`.

        Return the number of bytes copied. The number is smaller than `nbytes` only if `source` ends
        there.
        """

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Move the file `source` to `target` atomically, within one file system.

        An existing file `target` is replaced.
        """

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """

    @abstractmethod
    def mkdir(self, path: Path) -> bool:
        """Create a folder; return False if it exists already. Its parent folder must exist."""

    @abstractmethod
    def rmdir(self, path: Path) -> None:
        """Remove an empty folder.

        Raises:
            FileNotFoundError: The folder does not exist.
        """

    @abstractmethod
    def listdir(self, path: Path) -> list[str]:
        """Return the sorted names in a folder, or an empty list if the folder does not exist."""

    @abstractmethod
    def flock(self, handle: Handle, *, exclusive: bool, wait_s: float) -> bool:
        """Lock a file, exclusively or shared, until `handle` is closed.

        Return False if another handle still holds a conflicting lock after `wait_s` seconds.
        """

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this user can still write to the file system that holds `path`."""

    @abstractmethod
    def free_handles(self) -> int:
        """Return approximately how many more files this process may open. Never fails."""

    @abstractmethod
    def database(self, path: Path) -> sqlite3.Connection:
        """Open or create the SQLite database of the index. SQLite does the file I/O itself."""

    @abstractmethod
    def token(self) -> str:
        """Return a random file name that is unique across processes."""

    @abstractmethod
    def now(self) -> int:
        """Return the current time in whole seconds since 1970."""


# A forked child has its parent's descriptors, and a file stays locked until all of them are closed:
# the locks of its parent are not the child's to hold. Nobody forks between opening and noting.
_LOCKS: "weakref.WeakSet[Handle]" = weakref.WeakSet()
_opening = threading.RLock()


def _in_child() -> None:
    # This unlocks nothing of the parent's. A handle has no descriptor then: closing it later cannot
    # close another file of this number.
    global _opening
    _opening = threading.RLock()
    for handle in list(_LOCKS):
        fd = handle.take()
        if fd >= 0:
            os.close(fd)
    _LOCKS.clear()


os.register_at_fork(
    before=lambda: _opening.acquire(),
    after_in_parent=lambda: _opening.release(),
    after_in_child=_in_child,
)


class RealFiles(Files):
    """The implementation of `Files` for Linux.

    It has no state, so one object may serve any number of stores. In a forked child, handles that
    were opened with the mode `lock` are closed, so the child holds none of its parent's locks.
    """

    def open(self, path: Path, mode: Mode) -> Handle:
        if mode != "lock":
            return self._open(path, mode)
        with _opening:
            handle = self._open(path, mode)
            _LOCKS.add(handle)
            return handle

    def _open(self, path: Path, mode: Mode) -> Handle:
        flags = _FLAGS[mode] | os.O_CLOEXEC
        try:
            return Handle(os.open(path, flags, 0o644), path)
        except OSError as error:
            if mode == "lock" and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
                # flock needs no right to write: a store that is only read has readers too.
                return Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
            raise

    def close(self, handle: Handle) -> None:
        # A fork between the two would leave a child the lock, and nobody to close it.
        with _opening if handle in _LOCKS else nullcontext():
            fd = handle.take()
            if fd >= 0:
                os.close(fd)

    def status(self, path: Path) -> FileStatus | None:
        try:
            return _status(os.stat(path))  # noqa: PTH116 (one call style for all of this file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link that leads to itself leads to nothing
                return None
            raise

    def status_of(self, handle: Handle) -> FileStatus:
        with _naming(handle):
            return _status(os.fstat(handle.fd))

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        done = 0
        with _naming(handle):
            while done < view.nbytes:
                count = os.preadv(handle.fd, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def cached_bytes(self, handle: Handle, start: int, nbytes: int) -> int | None:
        return libc.cached_bytes(handle.fd, start, nbytes)

    def map(self, handle: Handle, start: int, nbytes: int) -> memoryview:
        with _naming(handle):
            return buffers.map_file(handle.fd, start, nbytes)

    def pwrite(self, handle: Handle, data: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        with _naming(handle):
            while done < view.nbytes:
                done += os.pwrite(handle.fd, view[done:], offset + done)

    def begin_writing(self, handle: Handle, start: int, nbytes: int) -> None:
        libc.begin_writing(handle.fd, start, nbytes)

    def grow(self, handle: Handle, size: int) -> None:
        # Not measured on others; btrfs keeps the room when the file is truncated.
        with suppress(OSError):
            if not libc.is_ext4(handle.fd):
                return
            more = size - os.fstat(handle.fd).st_size
            most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # beyond which a signal kills
            if more < self.free_bytes(handle.path) // _SHARE and not 0 <= most < size:
                libc.grow(handle.fd, size)

    def truncate(self, handle: Handle, size: int) -> None:
        with _naming(handle):
            os.ftruncate(handle.fd, size)

    def fsync(self, handle: Handle) -> None:
        with _naming(handle):
            os.fsync(handle.fd)

    def sync_folder(self, path: Path) -> None:
        handle = Handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)
        try:
            self.fsync(handle)
        finally:
            self.close(handle)

    def clone(self, source: Handle, target: Handle) -> bool:
        try:
            fcntl.ioctl(target.fd, _FICLONE, source.fd)
        except OSError as error:
            if error.errno in _CANNOT_CLONE:
                return False
            error.filename = str(target.path)
            raise
        return True

    def dedupe(self, source: Handle, target: Handle, start: int, nbytes: int) -> int | None:
        with _naming(target):
            return libc.dedupe(source.fd, target.fd, start, nbytes)

    def extents(self, handle: Handle) -> list[libc.DiskExtent]:
        try:
            return list(libc.extents(handle.fd))
        except OSError:
            return []

    def copy_range(self, source: Handle, target: Handle, start: int, nbytes: int) -> int:
        done = 0
        with _naming(target):
            while done < nbytes:
                count = _copy_some(source.fd, target.fd, start + done, nbytes - done)
                if count == 0:
                    break
                done += count
        return done

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)  # noqa: PTH105

    def unlink(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108

    def mkdir(self, path: Path) -> bool:
        try:
            os.mkdir(path)  # noqa: PTH102
        except FileExistsError:
            return False
        return True

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)  # noqa: PTH106

    def listdir(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208
        except FileNotFoundError:
            return []

    def flock(self, handle: Handle, *, exclusive: bool, wait_s: float) -> bool:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        with _naming(handle):
            return _poll_lock(handle.fd, kind, time.monotonic() + wait_s)

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def free_handles(self) -> int:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            held = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        except OSError:  # which takes a descriptor itself
            return 0
        return _ANY if most == resource.RLIM_INFINITY else max(0, most - held)

    def database(self, path: Path) -> sqlite3.Connection:
        return connect(path, timeout_s=30.0)

    def token(self) -> str:
        return f"{os.getpid()}-{os.urandom(6).hex()}"

    def now(self) -> int:
        return int(time.time())


@contextmanager
def _naming(handle: Handle) -> Iterator[None]:
    """Errors of calls on descriptors do not know the file's name: add it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(handle.path)
        raise


def _status(found: os.stat_result) -> FileStatus:
    mode = found.st_mode
    kind: Literal["file", "folder", "other"] = (
        "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    )
    return FileStatus(
        kind, found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
    )


def _copy_some(source: int, target: int, offset: int, nbytes: int) -> int:
    try:
        return os.copy_file_range(source, target, min(nbytes, _COPY_STEP), offset, offset)
    except OSError as error:
        if error.errno not in _CANNOT_CLONE:
            raise
    # Between some file systems only user space can copy.
    return os.pwrite(target, os.pread(source, min(nbytes, 8 << 20), offset), offset)


def _poll_lock(fd: int, kind: int, deadline: float) -> bool:
    pause = _POLL_S / 16  # most are held for a moment
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        else:
            return True
