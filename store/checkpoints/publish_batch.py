"""Making several files durable at once, which takes hardly longer than one.

A journal commits what all who wait for it have written: syncs that are asked for together cost
about as much as a single one.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

from tensor_dedup.store.files import Handle
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import discard
from tensor_dedup.store.writing.hashing import Hasher

_SLOW_S = 1e-3
_T = TypeVar("_T")


class SyncedFolders:
    """The folders whose own names are known to be durable, as this handle saw them."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()


class PublishBatch:
    """Files that are to appear together, or not at all as far as anybody refers to them.

    Use it as a context manager: what was not published is removed.
    """

    def __init__(self, objects: Objects, hasher: Hasher, settled: SyncedFolders) -> None:
        self._objects, self._hasher, self._settled = objects, hasher, settled
        self._waiting: list[tuple[Handle, Path | None]] = []
        self._there: list[Path] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def take(self, handle: Handle, target: Path | None) -> None:
        """An open file, written and not synced, that gets a name; None: it keeps the one it has."""
        self._waiting.append((handle, target))
        self._undo.callback(discard, self._objects, handle)

    def write(self, blob: bytes, target: Path | None) -> Path:
        """A file of these bytes; where it is until it has its name. One that is equal stays."""
        files = self._objects.files
        if target is not None and self._has(target, blob):
            self._there.append(target)
            return target
        handle = files.open(self._objects.tmp_path(), "create")
        self.take(handle, target)
        files.pwrite(handle, blob, 0)
        return handle.path

    def _has(self, target: Path, blob: bytes) -> bool:
        status = self._objects.files.status(target)
        if status is None or status.size != len(blob):
            return False
        return self._objects.read(target) == blob

    def publish(self) -> None:
        """Make all of them durable under their names."""
        files = self._objects.files
        self._sync(files.fsync, [handle for handle, _ in self._waiting])
        folders = dict.fromkeys(folder for path in self._there for folder in self._above(path))
        for handle, target in self._waiting:
            files.close(handle)
            if target is not None:
                folders |= dict.fromkeys(self._place(handle.path, target))
        self._sync(files.sync_folder, list(folders))
        self._settled.folders |= folders.keys()

    def settle(self, paths: Iterable[Path]) -> None:
        """Make the names of files durable that others gave them, perhaps a moment ago."""
        folders = dict.fromkeys(folder for path in paths for folder in self._above(path))
        self._sync(self._objects.files.sync_folder, list(folders))
        self._settled.folders |= folders.keys()

    def _above(self, path: Path) -> list[Path]:
        """The folders to sync for a name; whoever made the lower one may not have got so far."""
        if path.parent in self._settled.folders:
            return [path.parent]
        return [path.parent, path.parent.parent]

    def _sync(self, sync: Callable[[_T], None], things: Sequence[_T]) -> None:
        """Sync all, together where the disk takes its time: else threads cost more than that."""
        for number, thing in enumerate(things):
            began = time.monotonic()
            sync(thing)
            if time.monotonic() - began > _SLOW_S:
                for _ in self._hasher.each(sync, things[number + 1 :]):
                    pass
                return

    def _place(self, path: Path, target: Path) -> list[Path]:
        """Give a file its name; the folders to sync."""
        if self._objects.files.mkdir(target.parent):
            self._settled.folders.discard(target.parent)
        self._objects.files.rename(path, target)
        return self._above(target)
