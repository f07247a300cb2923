"""A cache of open files that limits the number of open file descriptors."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensor_dedup.store.containers import NO_ROOM
from tensor_dedup.store.files import Files, Handle

# Of what is free when a reader begins: other readers and the rest of the program need some too.
_SHARE = 4
# What is held open by many readers at once shall not be much either.
_MOST = 256
_Key = TypeVar("_Key")
_T = TypeVar("_T")


def spare_handles(files: Files) -> int:
    """Return the number of files that a reader may keep open in a cache, at least 1."""
    return max(1, min(_MOST, files.free_handles() // _SHARE))


@dataclass(eq=False, slots=True)
class _OpenFile:
    handle: Handle
    users: int = 0


class HandleCache(Generic[_Key]):
    """A cache of open files by key. Safe from any thread.

    `open_file` opens the file for a key. If more than `limit` files are open, the least recently
    used are closed. Files in use are never closed, so more than `limit` may stay open.
    """

    def __init__(self, files: Files, open_file: Callable[[_Key], Handle], limit: int) -> None:
        self._files, self._open_file = files, open_file
        self._limit = limit
        self._lock = threading.Lock()
        # In the order of their last use.
        self._kept: dict[_Key, _OpenFile] = {}

    def __len__(self) -> int:
        """Return how many files are open."""
        return len(self._kept)

    @contextmanager
    def using(self, key: _Key) -> Iterator[Handle]:
        """Context manager: while it is active, the file for `key` is open; it provides the handle.

        Errors of `open_file` propagate.

        Raises:
            OSError: The file cannot be opened.
        """
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                found = _OpenFile(self._with_room(lambda: self._open_file(key)))
            self._kept[key] = found
            found.users += 1
            self._trim()
        try:
            yield found.handle
        finally:
            with self._lock:
                found.users -= 1
                self._trim()

    def with_room(self, act: Callable[[], _T]) -> _T:
        """Return `act()`. If `act` fails for lack of descriptors, close cached files and try again.

        If no cached file can be closed, raise the OSError of `act`.
        """
        with self._lock:
            return self._with_room(act)

    def _with_room(self, act: Callable[[], _T]) -> _T:
        while True:
            try:
                return act()
            except OSError as error:
                before = len(self._kept)
                if error.errno in NO_ROOM:
                    self._limit = max(1, before // 2)
                    self._trim()
                if len(self._kept) == before:
                    raise

    def _trim(self) -> None:
        excess = len(self._kept) - self._limit
        if excess <= 0:
            return
        idle = [key for key, found in self._kept.items() if not found.users]
        for key in idle[:excess]:
            self._files.close(self._kept.pop(key).handle)

    def close(self) -> None:
        """Close all files, none of which may be in use. `using` opens them again."""
        with self._lock:
            while self._kept:
                self._files.close(self._kept.popitem()[1].handle)
