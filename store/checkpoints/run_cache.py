"""What a handle keeps open between saves: the index and some threads.

Closing the last connection to the index writes all of it to disk, and opening it reads its scheme:
together longer than a save takes. A forked child does not touch what its parent keeps.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from tensor_dedup import sqlite
from tensor_dedup.store.errors import os_errors
from tensor_dedup.store.index import StoreIndex, open_index
from tensor_dedup.store.locks import session
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.hashing import Hasher

# What a child inherited: closing it would end what the parent is doing, so it stays as it is.
_INHERITED: list["_Kept"] = []


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: int
    index: StoreIndex
    hasher: Hasher
    undo: ExitStack

    def close(self) -> None:
        if self.owner == os.getpid():
            self.undo.close()
        else:
            _INHERITED.append(self)


class RunCache:
    """Sessions of one handle, one at a time; close() lets go of what is kept."""

    def __init__(self, objects: Objects, workers: int) -> None:
        self._objects, self._workers = objects, workers
        self._finalizer: weakref.finalize[[], RunCache] | None = None
        self._kept: _Kept | None = None

    @contextmanager
    def session(self) -> Iterator[tuple[StoreIndex, Hasher]]:
        """Nothing is swept meanwhile. What the disk says is a StoreError."""
        objects = self._objects
        with os_errors(objects.layout.root), session(objects.files, objects.layout):
            kept = self._usable()
            try:
                yield kept.index, kept.hasher
            except BaseException:
                # Whatever it was, it may have been this; that comes first, and so it is raised.
                with suppress(OSError, sqlite.Error):
                    self.close()
                raise
            if kept.index.broken:
                self.close()

    def close(self) -> None:
        """Let go; the next session takes it up again."""
        finalizer, self._finalizer, self._kept = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def _usable(self) -> _Kept:
        if self._kept is not None and self._kept.owner != os.getpid():
            self.close()
        if self._kept is None:
            with ExitStack() as undo:
                hasher = Hasher(self._objects.files, self._workers)
                undo.callback(hasher.close)
                index = undo.enter_context(open_index(self._objects))
                index.relax()
                self._kept = _Kept(os.getpid(), index, hasher, undo.pop_all())
            self._finalizer = weakref.finalize(self, self._kept.close)
        else:
            self._kept.index.fresh = False
        return self._kept
