"""A local folder as a bucket: each object is a file, and conditions hold by a lock."""

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from tensor_dedup.errors import StoreError
from tensor_dedup.remote.buckets import OWN_NAMES, Bucket, ObjectStatus, too_large
from tensor_dedup.remote.errors import RemoteBusyError, TakenPlaceError
from tensor_dedup.remote.layout import MARKER, MARKER_LINES, STORE_TITLE, TEXT_BYTES
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.folders import make_folders

_LOCK_WAIT_S: Final = 60.0


class FolderBucket(Bucket):
    """A local folder as a bucket. Conditional writes are safe between processes on one machine.

    A file under a key is an object; a folder there, or a file where a folder of the key should be,
    is none. Any other failure of the file system is a StoreError that names the file.
    """

    is_local = True

    def __init__(self, root: Path, files: Files) -> None:
        super().__init__(f"file://{root}")
        self._root, self._files = root, files

    @property
    def root(self) -> Path:
        """The path of the folder."""
        return self._root

    def obstacle(self) -> str | None:
        # docstring inherited; first as the path was written, then where links lead
        with os_errors(self._root):
            names = self._files.listdir(self._root)
            above = [*self._root.parents, *self._files.resolved(self._root).parents]
        for name in names:
            if name not in OWN_NAMES and not name.startswith("."):
                return f"it holds {name!r} and no remote"
        for folder in dict.fromkeys(above):
            with suppress(StoreError):  # what cannot be read is none of ours
                text = FolderBucket(folder, self._files)._read(MARKER, TEXT_BYTES) or b""
                if text.startswith((MARKER_LINES[0].encode(), STORE_TITLE)):
                    return f"it lies inside {folder}, which is a remote or a store"
        return None

    def get(self, key: str, limit: int) -> tuple[bytes, str] | None:
        # docstring inherited
        blob = self._read(key, limit)
        self.traffic.add(received=len(blob or b""))
        return None if blob is None else (blob, _tag(blob))

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        # docstring inherited
        found = None
        with self._opened(key) as (handle, size):
            if handle is not None:
                view = memoryview(bytearray(max(0, min(stop, size) - start)))
                found = view[: self._files.pread(handle, view, start)]
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.at(key))
        self.traffic.add(received=found.nbytes)
        return found

    def _read(self, key: str, limit: int) -> bytes | None:
        with self._opened(key) as (handle, size):
            if handle is None:
                return None
            if size > limit:
                raise too_large(self.at(key), size, limit)
            blob = bytearray(size)
            return bytes(blob[: self._files.pread(handle, memoryview(blob), 0)])

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[Handle | None, int]]:
        """Context manager: the open file of an object and its size; no handle without an object."""
        files, handle = self._files, None
        with os_errors(self._root / key):
            with suppress(FileNotFoundError, NotADirectoryError):
                handle = files.open(self._root / key, "read")
            if handle is None:
                yield None, 0
                return
            try:
                status = files.status_of(handle)
                yield handle if status.kind == "file" else None, status.size
            finally:
                files.close(handle)

    def head(self, key: str) -> ObjectStatus | None:
        # docstring inherited
        with os_errors(self._root / key):
            status = self._files.status(self._root / key)
        self.traffic.add()
        if status is None or status.kind != "file":
            return None
        tag = f"{status.mtime_ns}-{status.inode}-{status.size}"
        return ObjectStatus(key, status.size, tag, status.mtime_ns / 1e9)

    def put(self, key: str, chunks: Sequence[memoryview] | Iterator[memoryview]) -> None:
        # docstring inherited
        self.traffic.add(sent=self._write(key, chunks))

    def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        # docstring inherited
        with self._locked():
            held = self._read(key, max(len(data), 1 << 30))
            if (None if held is None else _tag(held)) != tag:
                self.traffic.add()
                return False
            self.traffic.add(sent=self._write(key, [memoryview(data)]))
            return True

    def _write(self, key: str, chunks: Iterable[memoryview]) -> int:
        files, path, at = self._files, self._root / key, 0
        with os_errors(path):
            make_folders(files, path.parent)
            make_folders(files, self._root / "tmp")
            tmp = self._root / "tmp" / files.token()
            handle = files.open(tmp, "create")
            try:
                for chunk in chunks:
                    files.pwrite(handle, chunk, at)
                    files.begin_writing(handle, at, chunk.nbytes)
                    at += chunk.nbytes
                files.fsync(handle)
                self._rename(tmp, path)
            except BaseException:
                files.close(handle)
                if files.status(tmp) is not None:
                    files.unlink(tmp)
                raise
            files.close(handle)
        self.settle(key)
        return at

    def _rename(self, tmp: Path, path: Path) -> None:
        try:
            self._files.rename(tmp, path)
        except IsADirectoryError as error:
            what = "it is a folder, so that no object can be written there"
            raise TakenPlaceError.at(path, what) from error
        except OSError as error:  # which names the temporary file
            raise OSError(error.errno, error.strerror, str(path)) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        files = self._files
        with os_errors(self._root / "lock"):
            make_folders(files, self._root)
            handle = files.open(self._root / "lock", "lock")
        try:
            with os_errors(self._root / "lock"):
                held = files.flock(handle, exclusive=True, wait_s=_LOCK_WAIT_S)
            if not held:
                raise RemoteBusyError.at(self.url, f"its lock was held for {_LOCK_WAIT_S:g} s")
            yield
        finally:
            files.close(handle)

    def list(self, prefix: str) -> Iterator[ObjectStatus]:
        # docstring inherited
        folder, _, beginning = prefix.rpartition("/")
        with os_errors(self._root / folder):
            names = self._files.listdir(self._root / folder)
        for name in names:
            if not name.startswith(beginning):
                continue
            key = f"{folder}/{name}"
            with os_errors(self._root / key):
                status = self._files.status(self._root / key)
            if status is not None and status.kind == "folder":
                yield from self.list(f"{key}/")
            elif (found := self.head(key)) is not None:
                yield found

    def delete(self, key: str) -> None:
        # docstring inherited
        self.traffic.add()
        path = self._root / key
        with os_errors(path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._files.unlink(path)
            self._files.sync_folder(path.parent)

    def settle(self, key: str) -> None:
        # docstring inherited
        parent = (self._root / key).parent
        with os_errors(self._root / key):
            # Whoever made the folder may have died before its name was durable.
            for folder in (parent, parent.parent):
                self._files.sync_folder(folder)


def _tag(blob: bytes) -> str:
    return blake3(blob).hexdigest()
