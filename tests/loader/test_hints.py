"""Hints: every rule that keeps them sound, one test each that fails without it."""

import ctypes
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from files.hinted import DIGESTS, known, old_enough, opened, remember
from store_runs.clocks import SetClock
from tensor_dedup.digest import digest
from tensor_dedup.loader.checkpoint_io import hints
from tensor_dedup.loader.checkpoint_io.hints import (
    QUIET_NS,
    FileIdentity,
    HintIndex,
    file_system_of,
    is_trusted,
)


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


def test_what_was_recorded_is_found(index: HintIndex, file: Path) -> None:
    assert known(index, file) == {}
    assert remember(index, file)
    assert known(index, file) == DIGESTS
    assert known(HintIndex(index.path), file) == DIGESTS


def test_another_name_of_the_same_file_is_the_same_file(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    link = file.with_name("link")
    link.symlink_to(file)
    assert known(index, link) == DIGESTS


def test_algorithms_do_not_mix(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    assert known(index, file, "xxh3_128") == {}


def test_records_of_one_state_are_merged(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    more = {(1, 2): digest(b"bc"), (0, 3): "corrected"}
    with opened(file) as fd:
        before = FileIdentity.of(fd)
        assert index.record(fd, before, old_enough(before), "blake3", more)
    assert known(index, file) == DIGESTS | more


def test_a_rewrite_with_its_mtime_restored_is_another_state(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    status = file.stat()
    with file.open("r+b") as writer:
        writer.write(b"X")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = file.stat()
    assert (again.st_mtime_ns, again.st_size, again.st_ino) == (
        status.st_mtime_ns,
        status.st_size,
        status.st_ino,
    )
    assert known(index, file) == {}


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_every_part_of_the_identity_counts(
    index: HintIndex, file: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remember(index, file)
    with opened(file) as fd:
        real = FileIdentity.of(fd)
    values = {name: getattr(real, name) for name in FileIdentity.__slots__}
    other = FileIdentity(**values | {field: values[field] + 1})
    monkeypatch.setattr(FileIdentity, "of", classmethod(lambda cls, fd: other))
    assert known(index, file) == {}
    monkeypatch.setattr(FileIdentity, "of", classmethod(lambda cls, fd: real))
    assert known(index, file) == DIGESTS


def test_a_file_put_in_its_place_is_another_file(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    status = file.stat()
    other = file.with_name("other")
    other.write_bytes(b"12345678")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    assert known(index, file) == {}


def test_a_link_that_was_switched_leads_to_another_file(
    index: HintIndex, file: Path, tmp_path: Path
) -> None:
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_bytes(b"12345678")
    link.symlink_to(file)
    with opened(link) as fd:
        before = FileIdentity.of(fd)
        link.unlink()
        link.symlink_to(other)
        # The descriptor still is the old file: what was hashed is remembered for that one.
        assert index.record(fd, before, old_enough(before), "blake3", DIGESTS)
    assert known(index, link) == {}
    assert known(index, file) == DIGESTS


def test_a_file_that_changed_while_it_was_hashed_is_not_recorded(
    index: HintIndex, file: Path
) -> None:
    with opened(file) as fd:
        before = FileIdentity.of(fd)
        with file.open("ab") as writer:
            writer.write(b"more")
        assert not index.record(fd, before, old_enough(before), "blake3", DIGESTS)
    assert known(index, file) == {}


def test_a_file_that_changed_and_changed_back_is_not_recorded(index: HintIndex, file: Path) -> None:
    with opened(file) as fd:
        before = FileIdentity.of(fd)
        time.sleep(0.02)  # further than the kernel's clock ticks
        with file.open("r+b") as writer:
            writer.write(b"X")
        os.utime(file, ns=(before.mtime_ns, before.mtime_ns))
        assert not index.record(fd, before, old_enough(before), "blake3", DIGESTS)


@pytest.mark.parametrize("field", ["mtime_ns", "ctime_ns"])
def test_a_fresh_file_is_not_recorded(
    index: HintIndex, file: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = 100 * QUIET_NS
    old = began - 10 * QUIET_NS
    with opened(file) as fd:
        for age, fine in ((QUIET_NS - 1, False), (0, False), (-5, False), (QUIET_NS, True)):
            times = {"mtime_ns": old, "ctime_ns": old, field: began - age}
            identity = FileIdentity(1, 2, 8, **times)
            monkeypatch.setattr(
                FileIdentity, "of", classmethod(lambda cls, fd, found=identity: found)
            )
            assert index.record(fd, identity, began, "blake3", DIGESTS) is fine


def test_a_file_just_written_is_not_recorded_by_the_real_clock(
    index: HintIndex, file: Path
) -> None:
    with opened(file) as fd:
        os.utime(file, ns=(0, 0))  # an old mtime, as downloads set it: ctime is fresh
        before = FileIdentity.of(fd)
        assert not index.record(fd, before, time.time_ns(), "blake3", DIGESTS)


def test_other_file_systems_are_refused(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "hints.sqlite"
    assert remember(HintIndex(path), file)
    elsewhere = HintIndex(path, trusted=lambda fd: False)
    assert known(elsewhere, file) == {}
    assert not remember(elsewhere, file)
    assert known(HintIndex(path), file) == DIGESTS


def test_an_index_on_another_file_system_is_not_used(
    index: HintIndex,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hints, "is_trusted", lambda fd: False)
    assert not remember(index, file)
    assert "TENSOR_DEDUP_HINTS" in caplog.text


def test_file_systems_are_told_apart(tmp_path: Path) -> None:
    with opened(Path("/proc/self/stat")) as fd:
        assert file_system_of(fd) == 0x9FA0
        assert not is_trusted(fd)
    memory = os.memfd_create("test")
    try:
        assert hints.TRUSTED[file_system_of(memory) or 0] == "tmpfs"
    finally:
        os.close(memory)
    assert file_system_of(-1) is None
    assert ctypes.sizeof(ctypes.c_ulong) == 8  # the layout of statfs that is relied on


def test_forgotten_files_are_unknown(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    assert remember(index, file, "xxh3_128")
    with opened(file) as fd:
        index.forget(fd)
    assert known(index, file) == known(index, file, "xxh3_128") == {}


def test_the_index_stays_small(tmp_path: Path) -> None:
    index = HintIndex(tmp_path / "hints.sqlite", max_digests=3 * len(DIGESTS))
    files = [tmp_path / f"{i}" for i in range(5)]
    for i, path in enumerate(files):
        path.write_bytes(b"abcdefgh")
        assert remember(index, path)
        with closing(sqlite3.connect(index.path)) as db, db:
            # As if an hour had passed.
            db.execute("UPDATE hint SET used = used - 3601")
        if i == 2:
            assert known(index, files[0]) == DIGESTS
    assert [i for i, path in enumerate(files) if known(index, path)] == [0, 3, 4]


def test_hints_that_are_dated_ahead_displace_no_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock(hours=1000)
    clock.rule(monkeypatch)
    index = HintIndex(tmp_path / "hints.sqlite", max_digests=3 * len(DIGESTS))
    files = [tmp_path / f"{i}" for i in range(6)]
    for i, path in enumerate(files):
        path.write_bytes(b"abcdefgh")
        if i == 3:
            clock.hours = 0  # somebody has set it right
            assert known(index, files[0]) == DIGESTS  # it is in use
        assert remember(index, path)
        clock.hours += 2
    assert [i for i, path in enumerate(files) if known(index, path)] == [3, 4, 5]
    with closing(sqlite3.connect(index.path)) as db:
        (latest,) = db.execute("SELECT MAX(used) FROM hint").fetchone()
    assert latest <= time.time()


def test_one_file_larger_than_the_limit_is_kept(tmp_path: Path, file: Path) -> None:
    index = HintIndex(tmp_path / "hints.sqlite", max_digests=1)
    assert remember(index, file)
    assert known(index, file) == DIGESTS


def test_an_old_state_makes_room_for_the_new(index: HintIndex, file: Path) -> None:
    assert remember(index, file)
    file.write_bytes(b"12345678")
    assert remember(index, file)
    with closing(sqlite3.connect(index.path)) as db:
        assert db.execute("SELECT COUNT(*) FROM hint").fetchone() == (1,)
