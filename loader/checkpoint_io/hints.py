"""Hints: remembered digests of ranges of files, in an index on this machine. Imports no torch.

A hint records which digests the ranges of a file had while the file had a certain identity (device,
inode, size, mtime, ctime), so that the ranges need not be hashed again. A hint is written only if
all of these conditions hold:

- The stat of the open descriptor was the same before and after hashing.
- The file's mtime and ctime lay at least 2 s before hashing began, so that a later write is certain
  to change ctime.
- The file system maintains these times itself.

A hint is used only if the whole identity matches. Two kinds of change are not detected: a write
through a shared mapping that the kernel has not yet accounted for, and a write to the raw device.

The index is one SQLite file that any number of threads and processes may use. It can be deleted at
any time. If it cannot be used, this is logged once, no hints are found or stored, and no error is
raised. Every row is sealed with a digest of its own, so a damaged index yields no wrong digest.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from tensor_dedup.digest import digest
from tensor_dedup.errors import TensorDedupError
from tensor_dedup.settings import cache_folder
from tensor_dedup.sqlite import INSIDE, connect, marks, transaction

if TYPE_CHECKING:
    # Only here: the import would bring the whole store, which no load by Diffusers needs.
    from tensor_dedup.store.files import FileStatus

QUIET_NS = 2_000_000_000
MAX_DIGESTS = 500_000
ENVIRONMENT = "TENSOR_DEDUP_HINTS"

_APPLICATION_ID = int.from_bytes(b"TDHI")  # which SQLite keeps in the file's header
_SCHEMA_VERSION = 1
_SCHEMA = """CREATE TABLE hint (
    file TEXT NOT NULL, algorithm TEXT NOT NULL, state TEXT NOT NULL, name TEXT NOT NULL,
    used INTEGER NOT NULL, entries INTEGER NOT NULL, seal BLOB NOT NULL, digests BLOB NOT NULL,
    PRIMARY KEY (file, algorithm))"""
_USED_RESOLUTION_S = 3600
_RETRY_S = 0.01
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Digests = dict[tuple[int, int], str]
_entries = msgspec.msgpack.Decoder(list[tuple[int, int, str]])

_STORE_ALGORITHM = "blake3"  # the store knows no other
_said: set[str] = set()
# A network file system may serve cached times, a FUSE one invents them, and neither numbers its
# files for good; these are local and keep ctime themselves, which no program can set back.
TRUSTED = {
    0xEF53: "ext2, ext3, ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
}
# struct statfs begins with the type, as a word of the machine, and takes 120 bytes on 64-bit Linux.
_STATFS_BYTES = 512


def file_system_of(fd: int) -> int | None:
    """Return the magic number of the open file's file system, or None if it is unknown."""
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(fd, buffer) != 0:
        return None
    return ctypes.c_ulong.from_buffer(buffer).value


def is_trusted(fd: int) -> bool:
    """Return whether the open file's file system maintains inode numbers and times reliably.

    Only then does an unchanged `FileIdentity` mean unchanged bytes.
    """
    return file_system_of(fd) in TRUSTED


class _UnusableIndexError(TensorDedupError):
    """The index cannot be used as it is; never leaves this module."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of an open file: device, inode, size, mtime and ctime.

    If a file has the same identity at two moments, it was not modified in between, provided that:

    - The file system maintains inode numbers and times reliably (`is_trusted`).
    - At the first moment, mtime and ctime were at least 2 s old.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> Self:
        """Return the current identity of the file behind the open descriptor `fd`."""
        return cls._of_status(os.fstat(fd))

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """Return the current identity of the file at `path`, of which links are followed.

        Raises:
            OSError: There is no such file.
        """
        return cls._of_status(Path(path).stat())

    @classmethod
    def _of_status(cls, status: os.stat_result) -> Self:
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    # As text: an inode number may need all of 64 bits, SQLite's integers have 63.
    @property
    def file(self) -> str:
        """The device and inode number, as `DEVICE:INODE`."""
        return f"{self.device}:{self.inode}"

    @property
    def state(self) -> str:
        """The size and times, as `SIZE:MTIME_NS:CTIME_NS`."""
        return f"{self.size}:{self.mtime_ns}:{self.ctime_ns}"


class HintIndex:
    """The index of remembered digests, one SQLite file. Safe from any thread and process.

    The file is opened for each call only, so the object can be used after a fork.

    - `path` is the file. It defaults to the environment variable TENSOR_DEDUP_HINTS, or else to a
      file in the user's cache folder.
    - `trusted(fd)` returns whether an open file lies on a file system whose times are reliable.
    - `max_digests` limits the index: beyond it, the digests of the files used least recently are
      removed.
    - `busy_s` is how long to wait for another process's write, in seconds.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        trusted: Callable[[int], bool] = is_trusted,
        max_digests: int = MAX_DIGESTS,
        busy_s: float = 2.0,
    ) -> None:
        self.path = path if path is not None else _default_path()
        self._trusted = trusted
        self._max_digests = max_digests
        self._busy_s = busy_s

    def lookup(self, fd: int, algorithm: str) -> dict[tuple[int, int], str]:
        """Return the known digests of the open file `fd`, by (start, nbytes) of the range.

        `algorithm` is the hash algorithm. The result is empty if there is no hint for the file's
        current identity. To notice a change of the file, compare `FileIdentity.of(fd)` before and
        after its bytes are used.
        """
        if not self._trusted(fd):
            return {}
        identity = FileIdentity.of(fd)
        return self._use(lambda db: _lookup(db, identity, algorithm)) or {}

    def record(
        self,
        fd: int,
        before: FileIdentity,
        began_ns: int,
        algorithm: str,
        digests: Mapping[tuple[int, int], str],
    ) -> bool:
        """Add `digests` of ranges of the open file `fd`, keyed by (start, nbytes).

        `before` is the file's identity before hashing began, and `began_ns` is time.time_ns() at
        that moment. Returns whether the digests were stored. They are not stored in these cases:

        - The file has changed since hashing began, or had changed less than 2 s before.
        - The file lies on a file system that is not trusted.
        - The index cannot be written.
        """
        quiet_ns = began_ns - max(before.mtime_ns, before.ctime_ns)
        if quiet_ns < QUIET_NS or not self._trusted(fd) or FileIdentity.of(fd) != before:
            return False
        name = _name(fd)

        def write(db: sqlite3.Connection) -> bool:
            with transaction(db):
                merged = _lookup_row(db, before, algorithm) | dict(digests)
                _store(db, before, algorithm, name, merged)
                _prune(db, before, self._max_digests)
            return True

        return self._use(write) or False

    def forget(self, fd: int) -> None:
        """Delete all hints of the open file `fd`, for all of its states and all algorithms."""
        file = FileIdentity.of(fd).file
        self._use(lambda db: db.execute("DELETE FROM hint WHERE file = ?", (file,)).rowcount)

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
        """Return `work(connection)`, or None if the index cannot be used."""
        try:
            with INSIDE, self._locked(fcntl.LOCK_SH):
                try:
                    with contextlib.closing(self._connect()) as db:
                        return work(db)
                except sqlite3.OperationalError as error:
                    # Locked, full, read-only: it may be well again the next time.
                    _say_once(f"no hints from {self.path}: {error}")
                    return None
                except sqlite3.DatabaseError as error:
                    # Its text: the error itself would hold this frame, and the frame the error.
                    broken, inode = str(error), self.path.stat().st_ino
            with INSIDE, self._locked(fcntl.LOCK_EX):
                # Unless another process has just done so: its new index is not the broken one.
                if self.path.stat().st_ino == inode:
                    self._set_aside(broken)
        except (OSError, _UnusableIndexError) as error:
            _say_once(f"no hints from {self.path}: {error}")
        return None

    @contextlib.contextmanager
    def _locked(self, lock: int) -> Iterator[None]:
        """Hold the index's lock: shared to use it, exclusive to replace it, which drops the WAL."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not is_trusted(fd):
                raise _UnusableIndexError(
                    f"its file system is not a local one; set {ENVIRONMENT} to a local path"
                )
            # Not waited for: it is held for as long as one transaction lasts, hints are a luxury.
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def _connect(self) -> sqlite3.Connection:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        # Hints are believed: whoever can write them can choose what weights are shared.
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise _UnusableIndexError("others may write it; delete it or take their right away")
        db = connect(self.path, timeout_s=self._busy_s)
        # What a broken page holds need not be UTF-8.
        db.text_factory = bytes
        try:
            _prepare(db, self._busy_s)
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{self.path}.broken{suffix}")
        _log.warning(
            "the hints in %s are broken (%s): moved to %s.broken, starting anew",
            self.path,
            error,
            self.path,
        )


@dataclass(frozen=True, slots=True)
class StoreHints:
    """A listener that turns the digests of a store import into hints. Safe from any thread.

    A later load of the imported files then hashes nothing. The import itself reads and hashes every
    byte and uses no hints.
    """

    index: HintIndex = field(default_factory=HintIndex)

    def imported(
        self, fd: int, before: "FileStatus", began_ns: int, digests: Mapping[tuple[int, int], str]
    ) -> None:
        """Record `digests` of ranges of an imported file as hints, keyed by (start, nbytes).

        `fd` is the open file, `before` is its status before hashing began, and `began_ns` is
        time.time_ns() at that moment. If `HintIndex.record` does not store them, nothing happens.
        """
        identity = FileIdentity(
            before.device, before.inode, before.size, before.mtime_ns, before.ctime_ns
        )
        self.index.record(fd, identity, began_ns, _STORE_ALGORITHM, digests)

    def known(self, _: Path, fd: int) -> Mapping[tuple[int, int], str]:
        """Return the known digests of the open file `fd`, by (start, nbytes) of the range."""
        return self.index.lookup(fd, _STORE_ALGORITHM)


def _default_path() -> Path:
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    return cache_folder() / "hints.sqlite"


def _prepare(db: sqlite3.Connection, busy_s: float) -> None:
    application, version = marks(db)
    if application == _APPLICATION_ID:
        if version != _SCHEMA_VERSION:
            raise _UnusableIndexError(f"version {version} of it is not known; update or delete it")
        return
    if (application, version) != (0, 0):
        # It may be anybody's: nothing is moved away that does not say that it is ours.
        what = "it is no index of hints of this version"
        raise _UnusableIndexError(f"{what}; delete it, or set {ENVIRONMENT} to another path")
    deadline = time.monotonic() + busy_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                if marks(db) == (0, 0):  # another process may have been first
                    db.execute(_SCHEMA)
                    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.OperationalError as error:
            # When two make the index at once, SQLite does not wait before it gives up.
            contended = error.sqlite_errorcode & 0xFF in (
                sqlite3.SQLITE_BUSY,
                sqlite3.SQLITE_LOCKED,
            )
            if not contended or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _lookup(db: sqlite3.Connection, identity: FileIdentity, algorithm: str) -> _Digests:
    found = _lookup_row(db, identity, algorithm)
    if found:
        now = int(time.time())
        # Not at every use: a write for each file of each load would queue the engines.
        with contextlib.suppress(sqlite3.OperationalError):
            db.execute(
                "UPDATE hint SET used = ? WHERE file = ? AND algorithm = ? "
                "AND used NOT BETWEEN ? AND ?",
                (now, identity.file, algorithm, now - _USED_RESOLUTION_S, now),
            )
    return found


def _lookup_row(db: sqlite3.Connection, identity: FileIdentity, algorithm: str) -> _Digests:
    row = db.execute(
        "SELECT seal, digests FROM hint WHERE file = ? AND algorithm = ? AND state = ?",
        (identity.file, algorithm, identity.state),
    ).fetchone()
    if row is None or not isinstance(row[1], bytes) or row[0] != _seal(identity, algorithm, row[1]):
        return {}
    return {(start, nbytes): found for start, nbytes, found in _entries.decode(row[1])}


def _store(
    db: sqlite3.Connection, identity: FileIdentity, algorithm: str, name: str, digests: _Digests
) -> None:
    blob = msgspec.msgpack.encode([(*place, found) for place, found in digests.items()])
    seal = _seal(identity, algorithm, blob)
    now = int(time.time())
    db.execute(
        "REPLACE INTO hint VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (identity.file, algorithm, identity.state, name, now, len(digests), seal, blob),
    )


def _seal(identity: FileIdentity, algorithm: str, blob: bytes) -> bytes:
    return digest(f"{identity.file} {identity.state} {algorithm} ".encode() + blob).encode()


def _prune(db: sqlite3.Connection, keep: FileIdentity, limit: int) -> None:
    (total,) = db.execute("SELECT TOTAL(entries) FROM hint").fetchone()
    if total <= limit:
        return
    # What is dated ahead of now, by a clock that was set back, would outlive all that is used.
    rows = db.execute(
        "SELECT rowid, entries FROM hint WHERE file != ? ORDER BY used <= ?, used, rowid",
        (keep.file, int(time.time())),
    ).fetchall()
    for rowid, entries in rows:
        if total <= limit:
            break
        db.execute("DELETE FROM hint WHERE rowid = ?", (rowid,))
        total -= entries


def _name(fd: int) -> str:
    # Only for people who look into the index: a name is never part of what is compared.
    try:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        return name.encode("utf-8", "backslashreplace").decode()
    except OSError:
        return ""


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)
