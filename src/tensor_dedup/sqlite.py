"""SQLite connections for all databases of this package, with atomic transactions.

A lock is held during every call into SQLite and while the process forks, so that a forked child
never inherits a locked SQLite mutex.
"""

import collections
import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# What it raises, for who catches it and opens no file.
Error: Final = sqlite3.Error
# SQLite's own mutexes would be copied into a forked child in whatever state they are: forks wait
# until no thread is inside. Reentrant, because a signal handler may fork.
INSIDE: Final = threading.RLock()
os.register_at_fork(
    before=INSIDE.acquire, after_in_parent=INSIDE.release, after_in_child=INSIDE.release
)


class _Cursor(sqlite3.Cursor):
    """Holds INSIDE during each call: another thread may fork between two of them."""

    def execute(self, *arguments: Any) -> "_Cursor":
        with _inside():
            super().execute(*arguments)
        return self

    def executemany(self, *arguments: Any) -> "_Cursor":
        with _inside():
            super().executemany(*arguments)
        return self

    def executescript(self, script: str) -> "_Cursor":
        with _inside():
            super().executescript(script)
        return self

    def fetchone(self) -> Any:
        with _inside():
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with _inside():
            return super().fetchall()

    def __next__(self) -> Any:
        with INSIDE:  # once a row
            try:
                return super().__next__()
            except UnicodeDecodeError as error:
                raise _malformed(error) from error

    def __del__(self) -> None:
        # Resetting a statement frees memory, under a mutex that the whole process has in common. A
        # collection may bring any thread here, with any lock held: it never waits.
        if INSIDE.acquire(blocking=False):
            try:
                with contextlib.suppress(sqlite3.Error):
                    self.close()
            finally:
                INSIDE.release()
        else:
            _left.append(self)


# Cursors that died while another thread was inside; whoever is next inside closes them.
_left: collections.deque["_Cursor"] = collections.deque()


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    with INSIDE:
        while _left:
            with contextlib.suppress(sqlite3.Error, IndexError):
                _left.popleft().close()
        try:
            yield
        except UnicodeDecodeError as error:
            raise _malformed(error) from error


def _malformed(error: UnicodeDecodeError) -> sqlite3.DatabaseError:
    """A text in a damaged file, or SQLite's message that quotes it, need not be UTF-8."""
    found = sqlite3.DatabaseError(f"database disk image is malformed ({error})")
    found.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return found


class _Connection(sqlite3.Connection):
    # The class's own methods make cursors of the class's own.
    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(factory or _Cursor)

    def execute(self, *arguments: Any) -> Any:
        return self.cursor().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self.cursor().executemany(*arguments)

    def executescript(self, *arguments: Any) -> Any:
        return self.cursor().executescript(*arguments)

    def close(self) -> None:
        with _inside():
            super().close()


def connect(path: str | os.PathLike[str] | Path, *, timeout_s: float) -> sqlite3.Connection:
    """Open a connection to the database `path`, in autocommit mode.

    The connection may be used by one thread at a time. Other threads may fork at any time, but a
    forked child must not use the connection. If another process is writing, a call waits for up to
    `timeout_s` seconds. A fork in another thread waits until the call returns.
    """
    with _inside():
        # Who keeps a connection uses it from one thread at a time, not always from the same one.
        return sqlite3.connect(
            path,
            timeout=timeout_s,
            isolation_level=None,
            factory=_Connection,
            check_same_thread=False,
        )


def marks(db: sqlite3.Connection) -> tuple[int, int]:
    """Return the `application_id` and the `user_version` of a database; both are 0 if it is new.

    Both are read in one transaction.
    """
    if db.in_transaction:
        return _marks(db)
    # Both of one moment: between two reads another process may make the file what it is.
    with _inside():
        db.execute("BEGIN")
        try:
            return _marks(db)
        finally:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")


def _marks(db: sqlite3.Connection) -> tuple[int, int]:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return application, version


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager: run its `with` block as one transaction of the connection `db`.

    The transaction is committed at the end of the block, and rolled back if the block raises an
    error. `db` is a connection that `connect` opened.
    """
    # From the first statement to the last: a thread that waited for this transaction's end would
    # hold what its next statement needs.
    with _inside():
        # IMMEDIATE: a reader that turns writer may find the file changed, and fail at once.
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")  # one that fails, or is not reached, leaves it open
        except BaseException:
            # Some errors end the transaction by themselves; the first error is the one to report.
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
