"""Atomic and durable file operations in the folder of a store, and helpers for folder trees.

Files of a store are never modified in place. A file is written and synced under a temporary name
and then renamed to its final name. Its folder is synced before anything refers to the file.
"""

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePath

from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    unreadable_as_damage,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format import frames
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.locks import naming

_CHUNK_BYTES = 1 << 20


class StoreFolder:
    """The folder of one store. Safe from any thread and process.

    No file stays open between calls.
    """

    def __init__(self, files: Files, layout: StoreLayout) -> None:
        self.files = files
        self.layout = layout

    def read(self, path: Path, limit: int = frames.MAX_FRAME_BYTES) -> bytes:
        """Return the content of a file.

        Raises:
            MissingObjectError: The file does not exist.
            DamagedFileError: The file is larger than `limit` bytes, or the disk cannot read it.
        """
        with self.opened(path) as handle:
            size = self.files.status_of(handle).size
            if size > limit:
                raise DamagedFileError.at(path, f"{size} bytes, the limit is {limit}", size=size)
            blob = bytearray(size)
            return bytes(blob[: self.files.pread(handle, memoryview(blob), 0)])

    @contextmanager
    def opened(self, path: Path) -> Iterator[Handle]:
        """Context manager: while it is active, the file at `path` is open for reading.

        Raises:
            MissingObjectError: The file does not exist.
            DamagedFileError: The disk cannot read the file.
        """
        with unreadable_as_damage(path):
            try:
                handle = self.files.open(path, "read")
            except FileNotFoundError as error:
                raise MissingObjectError.at(path, "this file of the store is gone") from error
            try:
                yield handle
            finally:
                self.files.close(handle)

    def tmp_path(self) -> Path:
        """Return a new, unused path in the store's folder for temporary files."""
        return self.layout.tmp / self.files.token()

    def publish(self, blob: bytes, target: Path) -> None:
        """Create the file `target` with the content `blob`, atomically and durably.

        An existing file with this content is left in place; a file with other content is replaced.
        """
        if self.holds(target, blob):
            self._sync_place(target)
            return
        tmp = self.tmp_path()
        handle = self.files.open(tmp, "create")
        try:
            self.files.pwrite(handle, blob, 0)
            self.files.fsync(handle)
        finally:
            self.files.close(handle)
        self.place(tmp, target)

    def holds(self, path: Path, blob: bytes) -> bool:
        """Return whether `path` is a readable file with exactly the content `blob`."""
        with suppress(DamagedFileError), unreadable_as_damage(path):
            status = self.files.status(path)
            return status is not None and status.size == len(blob) and self.read(path) == blob
        return False

    def place(self, tmp: Path, target: Path) -> None:
        """Move the file `tmp` to `target` and sync the folder.

        The bytes of the file must be durable already. An existing file `target` is replaced.
        """
        self.files.mkdir(target.parent)
        self.files.rename(tmp, target)
        self._sync_place(target)

    def _sync_place(self, target: Path) -> None:
        self.files.sync_folder(target.parent)
        # The process that made the folder may have died before it synced the one above.
        if target.parent != self.layout.root:
            self.files.sync_folder(target.parent.parent)

    def tree(self, folder: str) -> Iterator[Path]:
        """Iterate over the files in the subfolders of `folder`.

        `folder` is relative to the store's folder. The subfolders are named by the first digits of
        the names of their files.
        """
        root = self.layout.root / folder
        for part in self.files.listdir(root):
            for file in self.files.listdir(root / part):
                yield root / part / file

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move the file `path` durably to `folder`, the trash or the quarantine.

        Return its new path. The new file name is the time in seconds since 1970, a dot and the old
        name.
        """
        target = folder / f"{self.files.now()}.{path.name}"
        self.files.rename(path, target)
        self.files.sync_folder(folder)
        self.files.sync_folder(path.parent)
        return target

    def naming(self) -> AbstractContextManager[None]:
        """Return a context manager: while it is active, the lock for changing references is held.

        Hold the lock for a few file operations only.

        Raises:
            StoreBusyError: Another process has held the lock for a minute.
        """
        return naming(self.files, self.layout)


def content_of(files: Files, path: Path) -> Iterator[bytes]:
    """Iterate over the content of a file, in chunks of 1 MiB.

    Raises:
        OSError: The file cannot be read.
    """
    handle, at = files.open(path, "read"), 0
    try:
        chunk = bytearray(_CHUNK_BYTES)
        while size := files.pread(handle, memoryview(chunk), at):
            yield bytes(memoryview(chunk)[:size])
            at += size
    finally:
        files.close(handle)


def files_below(files: Files, folder: Path) -> Iterator[Path]:
    """Iterate over all files in `folder` and its subfolders, recursively."""
    for name in files.listdir(folder):
        status = files.status(folder / name)
        if status is not None and status.kind == "folder":
            yield from files_below(files, folder / name)
        else:
            yield folder / name


def remove_folder(files: Files, path: Path) -> None:
    """Remove a folder with all its content. Do nothing if `path` is not a folder."""
    status = files.status(path)
    if status is None or status.kind != "folder":
        return
    for name in files.listdir(path):
        inner = files.status(path / name)
        if inner is not None and inner.kind == "folder":
            remove_folder(files, path / name)
        else:
            files.unlink(path / name)
    files.rmdir(path)


def make_folders(files: Files, path: Path) -> None:
    """Create the folder `path` and its missing parents, durably. Existing folders are kept."""
    missing = []
    while files.status(path) is None:
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        files.mkdir(folder)
        files.sync_folder(folder.parent)


def is_too_long(files: Files, folder: Path, path: PurePath) -> bool:
    """Return whether `path` is too long for a file below `folder`.

    This is so if one of its names, or the whole path with `folder`, is longer than the file system
    takes. `folder` need not exist.
    """
    there = next(each for each in (folder, *folder.parents) if files.status(each) is not None)
    try:
        for place in (*(there / name for name in path.parts), folder / path):
            files.status(place)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return True
    return False
