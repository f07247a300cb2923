"""The locks of a store.

- A session is one operation, such as an import, a save or the opening of a checkpoint. It holds the
  main lock shared.
- A sweep is a garbage collection, which deletes files. It holds the main lock exclusively.
- An open checkpoint holds no lock, with two exceptions. If it lies in more containers than may be
  open at once, or if damage was found in it, it holds the main lock shared.
- Further locks protect changes of references, automatic pulls and drains.

All of them are advisory `flock` locks on files in the store's folder. The kernel releases them when
the process ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format.layout import StoreLayout

# A sweep is a few renames: a session that waits longer is waiting for something that is stuck.
SESSION_WAIT_S = 120.0
SWEEP_WAIT_S = 10.0
# A change of a name is a few operations, so the same holds here.
_NAMING_WAIT_S = 60.0
# A pull is as long as the network makes it.
_PULL_WAIT_S = 24 * 3600.0
# A few requests, each of which is given up after some minutes.
_REMOTE_WAIT_S = 600.0


@contextmanager
def session(files: Files, layout: StoreLayout, *, wait_s: float = SESSION_WAIT_S) -> Iterator[None]:
    """Context manager: while it is active, the store's main lock is held shared.

    No garbage collection runs meanwhile.

    Raises:
        StoreBusyError: A garbage collection did not end within `wait_s` seconds.
    """
    busy = f"a gc is running and did not end in {wait_s:g} s"
    with _held(files, layout.lock, layout.root, busy, exclusive=False, wait_s=wait_s):
        yield


@contextmanager
def sweep(files: Files, layout: StoreLayout, *, wait_s: float = SWEEP_WAIT_S) -> Iterator[None]:
    """Context manager: while it is active, the store's main lock is held exclusively.

    No session is open meanwhile, so files can be deleted.

    Raises:
        StoreBusyError: Open sessions did not end within `wait_s` seconds.
    """
    busy = (
        f"an import, export, verify or repair is running, or a checkpoint of very many containers "
        f"is open, and that did not end in {wait_s:g} s"
    )
    with _held(files, layout.lock, layout.root, busy, exclusive=True, wait_s=wait_s):
        yield


@contextmanager
def naming(files: Files, layout: StoreLayout) -> Iterator[None]:
    """Context manager: while it is active, the lock for changing references is held.

    Hold the lock for a few file operations only.

    Raises:
        StoreBusyError: Another process has held the lock for a minute.
    """
    path, wait_s = layout.names_lock, _NAMING_WAIT_S
    busy = f"whoever changes a name has held it for {wait_s:g} s"
    with _held(files, path, path, busy, exclusive=True, wait_s=wait_s):
        yield


@contextmanager
def pulling(files: Files, layout: StoreLayout, *, wait_s: float = _PULL_WAIT_S) -> Iterator[None]:
    """Context manager: while it is active, the lock for automatic pulls is held.

    An automatic pull is a pull that loading a checkpoint starts. A store has one such lock, so
    pulls of different checkpoints wait for each other, too.

    Raises:
        StoreBusyError: Another process has held the lock for `wait_s` seconds, by default a day.
    """
    busy = f"another process has been pulling for {wait_s / 3600:g} hours"
    path = layout.pull_lock
    with _held(files, path, layout.root, busy, exclusive=True, wait_s=wait_s):
        yield


@contextmanager
def draining(files: Files, layout: StoreLayout) -> Iterator[None]:
    """Context manager: while it is active, the lock for draining steps is held.

    A step is drained when it is copied to the second tier of its run, another store or a remote.
    Hold the lock while you change names of drained steps on a remote.

    Raises:
        StoreBusyError: Another process has held the lock for ten minutes.
    """
    wait_s = _REMOTE_WAIT_S
    busy = f"whoever changes a name on the remote behind it has held it for {wait_s:g} s"
    with _held(files, layout.drain_lock, layout.root, busy, exclusive=True, wait_s=wait_s):
        yield


def lock_of(files: Files, path: Path) -> Handle | None:
    """Lock the file at `path` exclusively, without waiting; return the handle that holds the lock.

    Closing the handle releases the lock. Return None if another handle holds the lock, or if the
    file was removed meanwhile.
    """
    try:
        lock = files.open(path, "lock")
    except FileNotFoundError:
        return None
    status = files.status(path) if files.flock(lock, exclusive=True, wait_s=0) else None
    if status is not None and status.inode == files.status_of(lock).inode:
        return lock
    files.close(lock)
    return None


@contextmanager
def _held(
    files: Files, path: Path, about: Path, busy: str, *, exclusive: bool, wait_s: float
) -> Iterator[None]:
    handle = files.open(path, "lock")
    try:
        if not files.flock(handle, exclusive=exclusive, wait_s=wait_s):
            raise StoreBusyError.at(about, busy, wait_s=wait_s)
        yield
    finally:
        files.close(handle)
