"""What our SQLite files have in common."""

import contextlib
import sqlite3
from collections.abc import Iterator


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of the block's changes, or none. For connections in autocommit (isolation_level None)."""
    # IMMEDIATE: a reader that turns writer may find the file changed, and fail at once.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        # Some errors end the transaction by themselves; the first error is the one to report.
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
