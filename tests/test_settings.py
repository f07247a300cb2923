"""The configuration file: option before environment before file before default."""

import os
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from project import package_source
from store_runs.stores import safetensors, u8, write
from tensor_dedup import ConfigError, Store
from tensor_dedup.cli import main
from tensor_dedup.memory_manager.protocol.paths import socket_path
from tensor_dedup.memory_manager.server.main import default_budget, own_budget
from tensor_dedup.settings import FILE, parse_size, remote_url
from tensor_dedup.store.init import default_path, own_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STORE", "SOCKET", "CONFIG", "REMOTE"):
        monkeypatch.delenv(f"TENSOR_DEDUP_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "config" / "tensor-dedup").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def write_own(folder: Path, text: str) -> Path:
    path = folder / "config" / "tensor-dedup" / FILE
    path.write_text(text)
    return path


def test_each_source_counts_before_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_path() == own_path()
    assert own_budget() == default_budget()
    write_own(folder, 'store = "~/mine"\nsocket = "m.sock"\nbudget = "3GiB"\n')
    assert default_path() == folder / "home" / "mine"
    assert socket_path() == folder / "config" / "tensor-dedup" / "m.sock"
    assert own_budget() == 3 << 30
    (folder / "work" / FILE).write_text('store = "here"\n')
    assert default_path() == folder / "work" / "here"
    assert own_budget() == 3 << 30  # key by key
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(folder / "named"))
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(folder / "named.sock"))
    assert default_path() == folder / "named"
    assert socket_path() == folder / "named.sock"
    assert Store.open(folder / "given").path == folder / "given"


def test_the_remote_is_what_is_named_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_url() is None
    write_own(folder, 'remote = "s3://bucket/models"\n')
    assert remote_url() == "s3://bucket/models"
    monkeypatch.setenv("TENSOR_DEDUP_REMOTE", "gs://bucket/models")
    assert remote_url() == "gs://bucket/models"
    assert remote_url("az://bucket/models") == "az://bucket/models"
    monkeypatch.delenv("TENSOR_DEDUP_REMOTE")
    for wrong in ("3", '"user:secret@host"'):
        write_own(folder, f"remote = {wrong}\n")
        with pytest.raises(ConfigError, match="remote is no URL") as caught:
            remote_url()
        assert "secret" not in str(caught.value)


def test_the_users_own_file_can_be_another_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own(folder, 'store = "/wrong"\n')
    (folder / "other.toml").write_text('store = "right"\n')
    monkeypatch.setenv("TENSOR_DEDUP_CONFIG", str(folder / "other.toml"))
    assert default_path() == folder / "right"
    (folder / "other.toml").unlink()
    with pytest.raises(ConfigError, match="TENSOR_DEDUP_CONFIG names it, and it is not there"):
        default_path()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stor = 1", "stor is no setting; did you mean 'store'?"),
        ("colour = 1", "colour is no setting; there are store, socket, remote, budget"),
        ("store = 1", "store is 1; give a path"),
        ('socket = ""', "socket is ''; give a path"),
        ('budget = "much"', "budget is 'much'; give a size"),
        ("budget = true", "budget is True; give a size"),
        ("budget = 0", "budget is 0; give a size"),
        ('store = "~nobody-of-this-name/x"', "store is '~nobody-of-this-name/x'; there is no such"),
        ("store = [", "cannot be read"),
        ("\ufffe", "cannot be read"),
        ("store = " + "[" * 100_000 + "]" * 100_000, "cannot be read"),
        ("budget = " + "9" * 5000, "cannot be read"),
        ('budget = "99999999TiB"', "budget is '99999999TiB'; give a size"),
        ('store = "a\\u0000b"', "store is 'a\\x00b'; give a path"),
    ],
)
def test_what_is_wrong_is_said_with_its_file_and_key(folder: Path, text: str, said: str) -> None:
    path = write_own(folder, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {said}")):
        Store.open()


def test_a_working_folder_that_is_gone_holds_no_file(folder: Path) -> None:
    write_own(folder, 'store = "/mine"\n')
    (folder / "work").rmdir()
    with pytest.raises(FileNotFoundError):  # or it is still there, and nothing is shown
        Path.cwd()
    assert default_path() == Path("/mine")


def test_a_working_folder_of_somebody_else_holds_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a container's process changes its user, and stays in root's folder."""
    write_own(folder, 'socket = "/mine.sock"\n')
    (folder / "work" / FILE).write_text('socket = "/theirs.sock"\n')
    assert socket_path() == Path("/theirs.sock")
    tried = []
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path == Path(FILE):  # as the system does it for every user but root, who runs tests
            tried.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert socket_path() == Path("/mine.sock")
    assert tried


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512B", 512),
        ("64G", 64 << 30),
        ("64Gi", 64 << 30),
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("64GB", 64 * 10**9),
        ("1.5MiB", 3 << 19),
        ("2T", 2 << 40),
        *((text, None) for text in ("", "-1", "G", "1i", "1iB", "1.G", "1 2", "1e9", "12X", "nan")),
        ("1024TiB", 1 << 50),
        *((text, None) for text in ("1024.1TiB", "9" * 5000, "9" * 30 + "T")),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: str, nbytes: int | None) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("moved", [False, True])
def test_files_lie_where_the_page_about_uninstalling_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    for name in ("TENSOR_DEDUP_HINTS", "TENSOR_DEDUP_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    if moved:
        monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(folder / "moved"))
    source = {"model.safetensors": safetensors(u8(weight=bytes(1 << 16)))}
    model = write(folder / "work" / "model", source)
    before = os.umask(0o022)
    try:
        for verb in (["import", str(model), "--name", "model"], ["analyze", str(model)]):
            assert CliRunner().invoke(main, verb).exit_code == 0
    finally:
        os.umask(before)
    cache = folder / "moved" if moved else folder / "home" / ".cache" / "tensor-dedup"
    store = folder / "home" / ".local" / "share" / "tensor-dedup" / "store"
    files = [path for path in folder.rglob("*") if path.is_file()]
    elsewhere = [path for path in files if not path.is_relative_to(folder / "work")]
    cached = {path.name: path for path in elsewhere if path.is_relative_to(cache)}
    assert "hints.sqlite" in cached
    assert {stat.S_IMODE(path.stat().st_mode) for path in cached.values()} == {0o600}
    stored = [path for path in elsewhere if path.is_relative_to(store)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in stored} == {0o644}
    assert len(cached) + len(stored) == len(elsewhere)
    page = (package_source.ROOT / "docs" / "howto" / "uninstall.md").read_text()
    assert "`~/.cache/tensor-dedup`" in page
    assert "`~/.local/share/tensor-dedup/store`" in page
