"""Access to a store for the other modules of this package: its files, locks and sessions.

A session is one operation on a store, such as an import or a save. During a session, the store's
main lock is held shared, so garbage collection cannot run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tensor_dedup.store.errors import RunNameError, UnknownNameError, os_errors
from tensor_dedup.store.files import Files
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.store.format.names import STEP_FORM, marked_by
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex, open_index
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
        """Context manager: while it is active, an OSError becomes a StoreError."""
        with os_errors(self.path):
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager: while it is active, the store's main lock is held shared.

        The lock keeps garbage collection out. An OSError becomes a StoreError.

        Raises:
            StoreBusyError: Garbage collection is running and did not end within two minutes.
        """
        with os_errors(self.path), self.objects.session():
            yield

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context manager: while it is active, no other name in the store is made or removed.

        The main lock is held, too, as by `locked`. Hold the lock of names for a moment only,
        because every save takes it.

        Raises:
            StoreBusyError: Garbage collection is running and did not end within two minutes.
        """
        with self.locked(), self.objects.naming():
            yield

    @contextmanager
    def session(self, *, update: bool = True) -> Iterator[tuple[StoreIndex, Hasher]]:
        """Context manager: while it is active, the index is open, and the main lock is held shared.

        It provides the index and a hasher. If `update` is True, the index is brought up to date
        first. The lock keeps garbage collection out. An OSError becomes a StoreError.

        Raises:
            StoreBusyError: Garbage collection is running and did not end within two minutes.
        """
        with self.locked(), ExitStack() as undo:
            hasher = Hasher(self.files, self.worker_count)
            undo.callback(hasher.close)
            yield undo.enter_context(open_index(self.objects, update=update)), hasher

    @contextmanager
    def saying_near(self, name: str) -> Iterator[None]:
        """Context manager: while it is active, an UnknownNameError suggests the most similar name.

        `name` is the unknown name. The mark of a kept step is the name of no checkpoint.

        Raises:
            UnknownNameError: `name` is that of a mark.
            RunNameError: `name` is that of a run.
        """
        if (step := marked_by(name)) is not None:
            what = f"{name!r} is no checkpoint: it is what keeps the step {step!r}; name that"
            raise UnknownNameError.at(self.path, what, name=name, near=step)
        try:
            yield
        except UnknownNameError as error:
            names = self.objects.names()
            forms = (STEP_FORM.fullmatch(each) for each in names)
            steps = [form for form in forms if form is not None and form["run"] == name]
            if steps:
                steps.sort(key=lambda form: int(form["step"]))
                raise RunNameError.of(self.path, name, [form[0] for form in steps]) from error
            what = f"no checkpoint {name!r}{perhaps(name, names)}"
            raise type(error).at(self.path, what, name=name, near=nearest(name, names)) from error
