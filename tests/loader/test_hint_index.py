"""The index of hints: broken, locked, altered, written by many at once, killed."""

import logging
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from files.hinted import DIGESTS, known, opened, remember
from processes import process_state
from tensor_dedup.loader.checkpoint_io import hints
from tensor_dedup.loader.checkpoint_io.hints import FileIdentity, HintIndex


@pytest.fixture
def index(tmp_path: Path) -> HintIndex:
    return HintIndex(tmp_path / "cache" / "hints.sqlite", busy_s=0.1)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_said", set())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abcdefgh")
    return path


def garbage(path: Path) -> None:
    path.write_bytes(b"not a database, certainly" * 400)


def broken_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * (path.stat().st_size - 1000))


@pytest.mark.parametrize("spoil", [garbage, broken_pages])
def test_a_broken_index_is_moved_away_and_made_anew(
    index: HintIndex, file: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert remember(index, file)
    spoil(index.path)
    assert known(index, file) == {}
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "broken" in warnings[0].getMessage()
    assert index.path.with_name("hints.sqlite.broken").exists()
    assert remember(index, file)
    assert known(index, file) == DIGESTS
    assert len(caplog.records) == 1


def test_an_index_cut_to_nothing_is_empty(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    os.truncate(index.path, 0)
    assert known(index, file) == {}
    assert remember(index, file)
    assert known(index, file) == DIGESTS


@pytest.mark.parametrize("column", ["seal", "digests", "state"])
def test_a_row_that_was_altered_is_not_believed(index: HintIndex, file: Path, column: str) -> None:
    assert remember(index, file)
    with closing(sqlite3.connect(index.path)) as db, db:
        (value,) = db.execute(f"SELECT {column} FROM hint").fetchone()
        if isinstance(value, bytes):
            changed: object = value[:-1] + bytes([value[-1] ^ 1])
        else:
            changed = value + "0"
        db.execute(f"UPDATE hint SET {column} = ?", (changed,))
    assert known(index, file) == {}
    assert remember(index, file)
    assert known(index, file) == DIGESTS


def test_a_row_moved_to_another_file_is_not_believed(
    index: HintIndex, file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"12345678")
    assert remember(index, file)
    with opened(other) as fd, closing(sqlite3.connect(index.path)) as db, db:
        identity = FileIdentity.of(fd)
        db.execute("UPDATE hint SET file = ?, state = ?", (identity.file, identity.state))
    assert known(index, other) == {}


def test_an_index_of_a_later_version_is_left_alone(
    index: HintIndex, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert remember(index, file)
    with closing(sqlite3.connect(index.path)) as db:
        db.execute("PRAGMA user_version = 99")
    assert known(index, file) == {}
    assert not remember(index, file)
    assert not index.path.with_name("hints.sqlite.broken").exists()
    assert caplog.text.count("version 99") == 1


@pytest.mark.parametrize("application", [0, 7])
def test_what_does_not_say_that_it_is_an_index_is_left_alone(
    index: HintIndex, file: Path, caplog: pytest.LogCaptureFixture, application: int
) -> None:
    """An index from before version 1 does not, nor does another program's database."""
    assert remember(index, file)
    with closing(sqlite3.connect(index.path)) as db:
        db.execute(f"PRAGMA application_id = {application}")
        db.execute("PRAGMA user_version = 1")
    before = index.path.read_bytes()
    assert known(index, file) == {}
    assert not remember(index, file)
    assert f"{index.path}: it is no index of hints of this version; delete it" in caplog.text
    assert index.path.read_bytes() == before
    assert not index.path.with_name("hints.sqlite.broken").exists()


def test_an_index_others_may_write_is_not_believed(
    index: HintIndex, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert remember(index, file)
    assert index.path.stat().st_mode & 0o777 == 0o600
    index.path.chmod(0o666)
    assert known(index, file) == {}
    assert "others may write it" in caplog.text


@pytest.mark.parametrize("place", ["file/hints.sqlite", "/proc/nowhere/hints.sqlite"])
def test_a_folder_that_cannot_be_written_means_no_hints(
    place: str, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    index = HintIndex(tmp_path / place)
    assert not remember(index, file)
    assert known(index, file) == {}
    with opened(file) as fd:
        index.forget(fd)
    assert len(caplog.records) == 1


def test_a_locked_index_means_no_hints(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    with closing(sqlite3.connect(index.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert not remember(index, file, "xxh3_128")
        assert known(index, file) == DIGESTS  # reading goes on beside a writer
        writer.execute("ROLLBACK")
    assert remember(index, file, "xxh3_128")


def write_many(path: Path, files: list[Path]) -> None:
    index = HintIndex(path, busy_s=30)
    for file in files:
        if not remember(index, file):
            os._exit(1)


def start(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        process.start()
    return process


def test_two_processes_write_at_once(index: HintIndex, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}" for i in range(60)]
    for path in files:
        path.write_bytes(b"abcdefgh")
    writers = [start(write_many, index.path, half) for half in (files[::2], files[1::2])]
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert all(known(index, path) == DIGESTS for path in files)


def write_for_ever(path: Path, file: Path) -> None:
    index = HintIndex(path, busy_s=30)
    while True:
        remember(index, file)


def test_a_killed_writer_leaves_an_index_that_works(index: HintIndex, file: Path) -> None:
    for _ in range(3):
        writer = start(write_for_ever, index.path, file)
        while known(index, file) != DIGESTS:
            assert writer.is_alive()
            time.sleep(0.01)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert known(index, file) == DIGESTS
        with opened(file) as fd:
            index.forget(fd)
        assert known(index, file) == {}


def _make(path: Path, begin: multiprocessing.synchronize.Barrier) -> None:
    fd = os.open(path, os.O_RDONLY)
    for number in range(150):
        index = HintIndex(path / f"{number}.sqlite", busy_s=5.0)
        begin.wait(30)
        index.forget(fd)
    os._exit(bool(hints._said))  # what was wrong with an index


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_make_it_at_once_take_it_for_no_other(tmp_path: Path) -> None:
    """What marks it is read at one moment: between two reads another process may have made it."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(4)
    processes = [context.Process(target=_make, args=(tmp_path, begin)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len([*tmp_path.glob("*.sqlite")]) == 150


# Python 3.12 warns of forks with threads, which is what is tested here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_and_forks_use_it_at_once(index: HintIndex, file: Path) -> None:
    stop = threading.Event()
    failed: list[object] = []

    def work(algorithm: str) -> None:
        while not stop.is_set():
            if not remember(index, file, algorithm) or known(index, file, algorithm) != DIGESTS:
                failed.append(algorithm)

    index = HintIndex(index.path, busy_s=30)
    threads = [threading.Thread(target=work, args=(f"a{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(8):
            child = context.Process(target=write_many, args=(index.path, [file]))
            child.start()
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []


def test_the_index_lies_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_HINTS", str(tmp_path / "mine"))
    assert HintIndex().path == tmp_path / "mine"
    monkeypatch.delenv("TENSOR_DEDUP_HINTS")
    monkeypatch.delenv("TENSOR_DEDUP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert HintIndex().path == tmp_path / "cache" / "tensor-dedup" / "hints.sqlite"
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "moved"))
    assert HintIndex().path == tmp_path / "moved" / "hints.sqlite"


def test_nothing_stays_open(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    before = process_state.descriptors()
    assert known(index, file) == DIGESTS
    assert not process_state.descriptors() - before
