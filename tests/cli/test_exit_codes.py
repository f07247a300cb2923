"""The exit status of every verb of the store and of the manager, as the documentation has them."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import managers
import package_source
import prompts
from stores import KIB, noise, safetensors, u8, write
from tensor_dedup.cli import GROUPS, VERBS, main
from tensor_dedup.store import Store
from tensor_dedup.store.checkpoints import CheckpointStore

PAGE = package_source.ROOT / "docs" / "reference" / "exit-codes.md"
# Arguments; `store` and `socket` are appended. A store with the checkpoint m, and none.
WITH_STORE = [
    ("import m", 0),
    ("import other --name m", 2),
    ("import m --name a//b", 2),
    ("import nowhere", 2),
    ("import no-weights", 1),
    ("import other --compress auto --base nix", 2),
    ("import --hub-cache", 2),
    ("list", 0),
    ("show m", 0),
    ("show nope", 2),
    ("stats", 0),
    ("du", 0),
    ("du m", 0),
    ("du nope", 2),
    ("find 0000000000000000", 2),
    ("find not-hex", 2),
    ("cat m a", 0),
    ("cat m nope", 2),
    ("cat nope a", 2),
    ("export m out", 0),
    ("export m full", 2),
    ("export m -", 2),
    ("export nope out", 2),
    ("rename m new", 0),
    ("rename m m", 2),
    ("rename nope new", 2),
    ("rename m a//b", 2),
    ("delete nope --yes", 2),
    ("delete nope", 2),
    ("delete m", 2),
    ("delete m --yes", 0),
    ("gc --yes", 0),
    ("gc --grace -1", 2),
    ("verify --full", 0),
    ("verify --full --sample 5", 2),
    ("repair", 0),
    ("repair --from nowhere", 2),
    ("doctor --quick", 0),
    ("substitute m m --layers * --output made", 0),
    ("substitute m m --layers nope --output made", 2),
    ("substitute m m --output made", 2),
    ("substitute m nowhere --layers * --output made", 2),
    ("substitute m no-weights --layers * --output made", 1),
    ("completion bash", 0),
    ("completion tcsh", 2),
]
WITHOUT_STORE = [
    *((verb, 0) for verb in ("list", "stats", "gc", "du")),
    *((f"{verb} m", 2) for verb in ("show", "find", "delete --yes")),
    *((f"{verb} m x", 2) for verb in ("cat", "export", "rename")),
    *((verb, 2) for verb in ("verify", "repair")),
]
DAMAGED = [
    ("verify --full", 1),
    ("list", 0),
    ("doctor --quick", 0),  # it reads no tensor
    ("export m out", 1),
    ("cat m a", 1),
    ("repair", 1),
]
WITHOUT_MANAGER = [
    *((verb, 3) for verb in ("status", "top", "stop", "pin x", "unpin x", "evict x")),
    ("serve --budget much", 2),
    ("serve --budget 1K", 2),
    ("top --every 0", 2),
]
WITH_MANAGER = [
    *((f"{verb} nope", 2) for verb in ("pin", "unpin", "evict")),
    ("status", 0),
    ("top --json", 0),
    ("serve", 2),
    ("pin x --ahead", 0),
    ("unpin x", 0),
    ("stop", 0),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(tmp_path / "m.sock"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write(tmp_path / "m", {"model.safetensors": safetensors(u8(a=noise(1, 90 * KIB)))})
    write(tmp_path / "other", {"model.safetensors": safetensors(u8(a=noise(2, 90 * KIB)))})
    write(tmp_path / "no-weights", {"config.json": b"{}"})
    write(tmp_path / "full", {"config.json": b"{}"})
    return tmp_path


def status(arguments: str) -> int:
    done = CliRunner().invoke(main, arguments.split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code in (2, 3):
        assert done.stdout == ""
        assert done.stderr.strip()
    return done.exit_code


def imported(here: Path) -> Path:
    assert status("import m") == 0
    return here / "store"


@pytest.mark.parametrize(("arguments", "expected"), WITH_STORE)
def test_with_a_store(here: Path, arguments: str, expected: int) -> None:
    imported(here)
    assert status(arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), WITHOUT_STORE)
def test_without_a_store(here: Path, arguments: str, expected: int) -> None:
    assert status(arguments) == expected
    assert not (here / "store").exists()
    if expected == 0:
        assert "no store yet at" in CliRunner().invoke(main, arguments.split()).stdout


@pytest.mark.parametrize(("arguments", "expected"), DAMAGED)
def test_with_damage(here: Path, arguments: str, expected: int) -> None:
    (path,) = imported(here).glob("containers/*/*.slab")
    data = bytearray(path.read_bytes())
    data[77] ^= 1
    path.write_bytes(data)
    if arguments == "repair":
        assert status("verify --full") == 1
    assert status(arguments) == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("arguments", "expected"), WITHOUT_MANAGER)
def test_without_a_manager(arguments: str, expected: int) -> None:
    assert status(arguments) == expected


def test_with_a_manager(here: Path) -> None:
    with managers.running(here):
        for arguments, expected in WITH_MANAGER:
            assert status(arguments) == expected, arguments


@pytest.mark.parametrize(("answer", "expected"), [("n\n", 4), ("y\n", 0), (signal.SIGINT, 130)])
def test_at_a_prompt(here: Path, answer: str | signal.Signals, expected: int) -> None:
    imported(here)
    assert prompts.answered(["delete", "m"], answer) == expected
    assert (here / "store" / "refs" / "m").exists() == (expected != 0)


def test_every_verb_is_tried() -> None:
    tables = (*WITH_STORE, *WITHOUT_STORE, *WITHOUT_MANAGER, *WITH_MANAGER)
    tried = {arguments.split()[0] for arguments, _ in tables}
    groups = (GROUPS[title] for title in ("Store", "Memory", "Other"))
    listed = {verb for group in groups for verb in group} & VERBS.keys()
    assert tried == listed | {"substitute"}


def test_the_documentation_and_the_help_have_the_table() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE.read_text(), re.MULTILINE)}
    assert table == {0, 1, 2, 3, 4, 130}
    text = CliRunner().invoke(main, ["--help"]).stdout
    assert all(re.search(rf"\b{code}\b", text) for code in table)


@pytest.mark.parametrize(
    "verb", ["list", "stats", "gc", "gc --dry-run", "du", "runs list", "runs stats"]
)
def test_a_document_has_the_same_keys_where_there_is_no_store_yet(here: Path, verb: str) -> None:
    found = []
    for path in ("no-store", "empty-store", "full-store"):
        if path != "no-store":
            Store.open(here / path)
        if path == "full-store":
            CheckpointStore(here / path, "run").save({"w": np.zeros(3)}, 1)
        arguments = [*verb.split(), "--json", "--store", str(here / path)]
        found.append(json.loads(CliRunner().invoke(main, arguments).stdout))
        assert found[-1].get("store", str(here / path)) == str(here / path)
    none, empty, full = (set(each) for each in found)
    assert none == empty == full
