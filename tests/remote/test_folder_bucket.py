"""Folders as remotes in which something is not what it should be: an error that names the file."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from store_runs.stores import open_store, safetensors, u8, write
from tensor_dedup.errors import StoreError
from tensor_dedup.remote import Remote
from tensor_dedup.remote.errors import RemoteUrlError, TakenPlaceError
from tensor_dedup.remote.folder_bucket import FolderBucket
from tensor_dedup.store.errors import (
    NotAFolderError,
    PathTooLongError,
    StoreAccessError,
    StoreIOError,
)
from tensor_dedup.store.files import Handle, Mode, RealFiles

KEY, LONG = "containers/ab/x.pack", f"containers/ab/{'x' * 300}"
DATA = memoryview(b"data")
# What reads or deletes an object, and what it returns where there is none.
READS: dict[str, Callable[[FolderBucket, str], object]] = {
    "get": lambda bucket, key: bucket.get(key, 100),
    "get_range": lambda bucket, key: bucket.get_range(key, 0, 4),
    "stream_range": lambda bucket, key: bucket.stream_range(key, 0, 4, lambda _: None),
    "head": lambda bucket, key: bucket.head(key),
    "delete": lambda bucket, key: bucket.delete(key),
}
WRITES: dict[str, Callable[[FolderBucket, str], object]] = {
    "put": lambda bucket, key: bucket.put(key, [DATA]),
    "put_once": lambda bucket, key: bucket.put_once(key, DATA),
    "put_if": lambda bucket, key: bucket.put_if(key, b"data", None),
}
VERBS = READS | WRITES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one object."""
    FolderBucket(tmp_path / "remote", RealFiles()).put(KEY, [DATA])
    return tmp_path / "remote"


def rest(root: Path) -> set[Path]:
    """What is there but for the lock."""
    return {path for path in root.rglob("*") if path.name != "lock"}


@pytest.mark.parametrize("harm", ["a file above", "a folder in its place"])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_file_is_no_object_and_stays(root: Path, verb: str, harm: str) -> None:
    bucket, key = FolderBucket(root, RealFiles()), f"{KEY}/y" if harm == "a file above" else "refs"
    (root / "refs" / "base").mkdir(parents=True)
    before = rest(root)
    if verb in WRITES:
        with pytest.raises((TakenPlaceError, NotAFolderError)) as caught:
            VERBS[verb](bucket, key)
        assert str(root / key) in str(caught.value)
    elif "range" in verb:
        with pytest.raises(FileNotFoundError, match="no such object"):
            VERBS[verb](bucket, key)
    else:
        assert VERBS[verb](bucket, key) is None
    assert rest(root) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_is_too_long_is_said_to_be(root: Path, verb: str) -> None:
    with pytest.raises(PathTooLongError, match="x" * 300):
        VERBS[verb](FolderBucket(root, RealFiles()), LONG)
    assert rest(root) == {root / "tmp", *(root / each for each in (KEY, *map(str, _above(KEY))))}


def _above(key: str) -> list[Path]:
    return [*Path(key).parents][:-1]


class _Refusing(RealFiles):
    """A file system that refuses one kind of operation."""

    def __init__(self, operation: str, number: int) -> None:
        super().__init__()
        self._operation, self._number = operation, number

    def _refuse(self, operation: str, path: Path) -> None:
        if operation == self._operation:
            raise OSError(self._number, os.strerror(self._number), str(path))

    def open(self, path: Path, mode: Mode) -> Handle:
        self._refuse(f"open {mode}", path)
        return super().open(path, mode)

    def listdir(self, path: Path) -> list[str]:
        self._refuse("listdir", path)
        return super().listdir(path)

    def unlink(self, path: Path) -> None:
        self._refuse("unlink", path)
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self._refuse("sync", path)
        super().sync_folder(path)

    def flock(self, handle: Handle, *, exclusive: bool, wait_s: float) -> bool:
        self._refuse("flock", handle.path)
        return super().flock(handle, exclusive=exclusive, wait_s=wait_s)

    def pread(self, handle: Handle, view: memoryview, offset: int) -> int:
        self._refuse("pread", handle.path)
        return super().pread(handle, view, offset)

    def rename(self, source: Path, target: Path) -> None:
        self._refuse("rename", target)
        super().rename(source, target)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOLCK], ids=os.strerror)
@pytest.mark.parametrize(
    ("operation", "verbs"),
    [
        ("open read", ["get", "get_range", "stream_range", "put_if"]),
        ("pread", ["get", "get_range", "stream_range", "put_if"]),
        ("open create", ["put", "put_once"]),
        ("open lock", ["put_if"]),
        ("flock", ["put_if"]),
        ("rename", ["put", "put_once"]),
        ("sync", ["put", "put_once", "delete", "settle"]),
        ("unlink", ["delete"]),
        ("listdir", ["list", "obstacle"]),
    ],
)
def test_what_the_file_system_refuses_names_the_file(
    root: Path, operation: str, verbs: list[str], number: int
) -> None:
    more: dict[str, Callable[[FolderBucket, str], object]] = {
        "settle": lambda bucket, key: bucket.settle(key),
        "list": lambda bucket, _: [*bucket.list("containers/")],
        "obstacle": lambda bucket, _: bucket.obstacle(),
    }
    kind = StoreAccessError if number == errno.EACCES else StoreIOError
    for verb in verbs:
        FolderBucket(root, RealFiles()).put(KEY, [DATA])
        with pytest.raises(kind, match=str(root)) as caught:
            (VERBS | more)[verb](FolderBucket(root, _Refusing(operation, number)), KEY)
        assert caught.value.facts["errno"] == number


@pytest.mark.parametrize("place", ["", "refs", "containers", "catalog", "FORMAT", "catalog/HEAD"])
def test_every_verb_of_a_remote_survives_a_file_for_a_folder_and_the_other_way_round(
    tmp_path: Path, place: str
) -> None:
    store, other = open_store(tmp_path / "store"), open_store(tmp_path / "other")
    store.import_(write(tmp_path / "m", {"m.safetensors": safetensors(u8(w=b"one"))}), "m")
    store.import_(write(tmp_path / "n", {"m.safetensors": safetensors(u8(w=b"two"))}), "n")
    url = str(tmp_path / "remote")
    store.push(url, "m")
    there = tmp_path / "remote" / place
    was_file = there.is_file()
    there.rename(tmp_path / "away")
    if was_file:
        there.mkdir()
    else:
        there.write_bytes(b"a file")
    said = list[str]()
    verbs: list[Callable[[], object]] = [
        lambda: store.push(url, "n"),
        lambda: store.push(url, "m", replace=True),
        lambda: other.pull(url, "m"),
        lambda: Remote.open(url).names(),
        lambda: Remote.open(url).usage(),
        lambda: Remote.open(url).verify(full=True),
        lambda: Remote.open(url).gc(0),
        lambda: Remote.open(url).delete("m"),
    ]
    for verb in verbs:
        try:
            verb()
        except StoreError as error:
            said.append(str(error))
    assert said
    assert not [each for each in said if str(tmp_path / "remote") not in each]
    assert store.verify(full=True).fine
    assert other.verify(full=True).fine


def test_a_relative_path_where_the_working_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd").rmdir()
    with pytest.raises(RemoteUrlError, match="the working folder is gone"):
        Remote.open("remote")
    assert Remote.open(tmp_path / "remote").url == f"file://{tmp_path}/remote"
