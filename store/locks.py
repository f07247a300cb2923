"""Who may be in a store at once: any number of sessions, or one sweep."""

from collections.abc import Iterator
from contextlib import contextmanager

from tensor_dedup.store.errors import StoreBusyError
from tensor_dedup.store.files import Files
from tensor_dedup.store.format.layout import StoreLayout

# A sweep is a few renames, so a session that waits longer waits for something else.
SESSION_WAIT_S = 120.0
SWEEP_WAIT_S = 10.0


@contextmanager
def session(files: Files, layout: StoreLayout, *, wait_s: float = SESSION_WAIT_S) -> Iterator[None]:
    """Read or write: nothing is swept meanwhile. StoreBusyError: a sweep did not end."""
    with _held(files, layout, exclusive=False, wait_s=wait_s):
        yield


@contextmanager
def sweep(files: Files, layout: StoreLayout, *, wait_s: float = SWEEP_WAIT_S) -> Iterator[None]:
    """Delete: nobody is in a session meanwhile. StoreBusyError: a session did not end."""
    with _held(files, layout, exclusive=True, wait_s=wait_s):
        yield


@contextmanager
def _held(files: Files, layout: StoreLayout, *, exclusive: bool, wait_s: float) -> Iterator[None]:
    handle = files.open(layout.lock, "lock")
    try:
        if not files.flock(handle, exclusive=exclusive, wait_s=wait_s):
            who = "an import, export, verify or repair" if exclusive else "a gc"
            raise StoreBusyError.at(
                layout.root, f"{who} is running and did not end in {wait_s:g} s", wait_s=wait_s
            )
        yield
    finally:
        files.close(handle)
