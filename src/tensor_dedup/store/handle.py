"""Access to one store for the other modules of this package: its files, locks and sessions.

A session is a period in which a store is in use: the shared lock is held, so garbage collection
cannot run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tensor_dedup.store.errors import UnknownNameError, os_errors
from tensor_dedup.store.files import Files
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex, open_index
from tensor_dedup.store.locks import session
from tensor_dedup.store.objects import Objects
from tensor_dedup.suggestions import nearest, perhaps


class StoreHandle:
    """A store's folder, its file system interface, and its number of hashing threads.

    No file stays open between calls, so any number of threads and processes may use one store.
    """

    def __init__(self, path: Path, files: Files, worker_count: int) -> None:
        self.path = path
        self.files = files
        self.worker_count = worker_count
        self.objects = Objects(files, StoreLayout(path))

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Within the block, turn OSError into StoreError."""
        with os_errors(self.path):
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block, hold the store's shared lock and turn OSError into StoreError.

        The lock keeps garbage collection out.

        Raises:
            StoreBusyError: Garbage collection is running and did not end in two minutes.
        """
        with os_errors(self.path), session(self.files, self.objects.layout):
            yield

    @contextmanager
    def session(self, *, update: bool = True) -> Iterator[tuple[StoreIndex, Hasher]]:
        """Like `locked`, and provide the store's index and a hasher within the block.

        The index is brought up to date first unless `update` is False.
        """
        with self.locked(), ExitStack() as undo:
            hasher = Hasher(self.files, self.worker_count)
            undo.callback(hasher.close)
            yield undo.enter_context(open_index(self.objects, update=update)), hasher

    @contextmanager
    def saying_near(self, name: str) -> Iterator[None]:
        """Within the block, add the most similar existing name to an UnknownNameError."""
        try:
            yield
        except UnknownNameError as error:
            names = self.objects.names()
            what = f"no checkpoint {name!r}{perhaps(name, names)}"
            raise type(error).at(self.path, what, name=name, near=nearest(name, names)) from error
