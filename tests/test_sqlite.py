"""SQLite in a process whose threads fork and write."""

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from processes.process_state import fork, forked
from store_runs.stores import memory_folder
from tensor_dedup.sqlite import connect, transaction

FORKS = 40
WRITES = 40


@contextmanager
def busy(work: Callable[[], object], threads: int) -> Iterator[None]:
    """Threads that do `work` again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()

    crowd = [threading.Thread(target=run) for _ in range(threads)]
    for each in crowd:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in crowd:
            each.join()


def write(path: Path, count: int = 1) -> int:
    """Insert rows, and count them all."""
    with closing(connect(path, timeout_s=30.0)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE IF NOT EXISTS t (x INTEGER)")
        for _ in range(count):
            with transaction(db):
                db.execute("INSERT INTO t VALUES (1)")
        return sum(1 for _ in db.execute("SELECT x FROM t"))


def fork_while_others_write(folder: str) -> list[int]:
    """How each child ended; one that hangs is ended by its alarm."""
    ends = []
    with busy(lambda: write(Path(folder, "parent")), threads=2):
        for number in range(FORKS):
            child = fork()
            if not child:
                signal.alarm(20)
                os._exit(0 if write(Path(folder, f"child {number}")) == 1 else 1)
            ends.append(os.waitpid(child, 0)[1])
    return ends


def test_a_child_forked_while_threads_write_can_use_sqlite() -> None:
    with memory_folder() as folder:  # where threads are in SQLite, and do not wait for a disk
        assert forked(lambda: fork_while_others_write(str(folder))) == [0] * FORKS


def test_threads_that_write_one_file_wait_for_each_other_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "db"
    write(path)
    crowd = [threading.Thread(target=write, args=(path, WRITES)) for _ in range(4)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join()
    assert write(path) == 4 * WRITES + 2


def write_and_fail(db: sqlite3.Connection) -> None:
    with transaction(db):
        db.execute("INSERT INTO t VALUES (1)")
        db.execute("INSERT INTO absent VALUES (1)")


def test_a_transaction_that_fails_leaves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "db"
    write(path)
    with closing(connect(path, timeout_s=30.0)) as db:
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            write_and_fail(db)
        assert db.execute("SELECT COUNT(*) FROM t").fetchone() == (1,)
    other = threading.Thread(target=write, args=(path,))
    other.start()
    other.join(20)
    assert not other.is_alive()
    assert write(path) == 3


def test_a_cursor_that_dies_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "db"
    write(path, 3)
    with closing(connect(path, timeout_s=30.0)) as db:
        cursors = [db.execute("SELECT x FROM t")]
        cursors[0].fetchone()
        other = threading.Thread(target=cursors.clear)
        with transaction(db):
            other.start()
            other.join(20)
            assert not other.is_alive()
        # Closed by whoever came next: nothing is open that would keep the file's log from going.
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_a_transaction_that_cannot_be_committed_is_not_left_open(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "db", timeout_s=1.0)) as db:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("CREATE TABLE known (x INTEGER PRIMARY KEY)")
        late = "REFERENCES known DEFERRABLE INITIALLY DEFERRED"  # looked at by COMMIT
        db.execute(f"CREATE TABLE t (x INTEGER {late})")
        with pytest.raises(sqlite3.IntegrityError), transaction(db):
            db.execute("INSERT INTO t VALUES (1)")
        assert not db.in_transaction
        # And so another connection need not wait, nor this one.
        assert write(tmp_path / "db") == 1
