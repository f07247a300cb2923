"""The exit status of every verb but those of `runs`, as the documentation has them."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from manager_runs import managers
from processes import prompts
from project import package_source
from store_runs.stores import KIB, noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import VERBS, main
from tensor_dedup.digest import digest
from tensor_dedup.training import CheckpointStore

# What each can end with, but for Ctrl-C where nothing is asked and for a reader that went away:
# `tests/cli/test_main.py` has these.
_ALL = frozenset({0, 1, 2})
_REMOTE = frozenset({0, 1, 2, 3})
STATUSES = {
    **dict.fromkeys(("analyze", "cat", "diff", "du", "export", "import"), _ALL),
    **dict.fromkeys(("plan", "repair", "show", "substitute", "verify"), _ALL),
    **dict.fromkeys(("push", "pull", "remote show"), _REMOTE),
    **dict.fromkeys(("remote list", "remote du", "remote verify"), _REMOTE),
    "list": {0, 1},
    "doctor": {0, 1},
    "stats": {0, 1},
    "completion": {0, 2},
    "help": {0, 2},
    "find": {0, 2},
    "rename": {0, 2},
    "delete": {0, 2, 4, 130},
    "gc": {0, 1, 2, 4, 130},
    "serve": {2},  # by itself it ends only then
    "follow": {2, 3},  # and with 0 and 1 in tests/publishing/test_follower.py
    "pin": {0, 2, 3},
    "unpin": {0, 2, 3},
    "top": {0, 2, 3},
    "evict": {1, 2, 3},
    "status": {0, 3},
    "stop": {0, 3},
    "remote gc": {*_REMOTE, 4, 130},
    "remote delete": {0, 2, 3, 4, 130},
}
PAGE = package_source.ROOT / "docs" / "reference" / "exit-codes.md"
# Arguments; `store` and `socket` are appended. A store with the checkpoint m, and none.
WITH_STORE = [
    ("analyze m other", 0),
    ("analyze m nowhere", 2),
    ("analyze m store://nope", 2),
    ("analyze m no-weights", 1),
    ("diff m other", 0),
    ("diff m nowhere", 2),
    ("diff m no-weights", 1),
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
    (f"find {digest(noise(1, 90 * KIB))}", 0),
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
    (f"import {'x' * 5000}", 2),
    (f"analyze m {'x' * 300}", 2),
    (f"export m {'x' * 300}", 2),
    ("gc --grace nan", 2),
    ("gc --grace inf", 2),
    ("verify --sample nan", 2),
    ("verify --full", 0),
    ("verify --full --sample 5", 2),
    ("repair", 0),
    ("repair --from nowhere", 2),
    ("doctor --quick", 0),
    ("substitute m m --layers * --output made", 0),
    ("substitute m m --layers nope --output made", 2),
    (f"substitute m m --layers {'9' * 5000} --output made", 2),
    ("substitute m m --output made", 2),
    ("substitute m nowhere --layers * --output made", 2),
    ("substitute m no-weights --layers * --output made", 1),
    ("plan --models models.toml --nodes 1 --memory 1M", 0),
    ("plan --models models.toml --nodes 1 --memory 1K", 2),
    ("plan --models nowhere.toml --nodes 1 --memory 1M", 2),
    ("plan --models bad.toml --nodes 1 --memory 1M", 1),
    ("completion bash", 0),
    ("completion tcsh", 2),
    ("help", 0),
    ("help remote gc", 0),
    ("help nope", 2),
    ("help list nope", 2),
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
    ("diff store://m other", 1),
    ("push m URL", 1),
    ("repair", 1),
]
BAD_MANIFEST = [
    *((verb, 1) for verb in ("list", "du", "du m", "stats", "show m", "cat m a", "export m out")),
    *((f"{verb} store://m other", 1) for verb in ("analyze", "diff")),
    *((verb, 1) for verb in ("gc --yes", "verify", "repair", "doctor --quick", "push m URL")),
    ("delete m --yes", 0),
]
WITH_REMOTE = [
    ("push m URL", 0),
    ("push nope URL", 2),
    ("push m s3://bucket/models", 3),
    ("pull URL m", 0),
    ("pull URL nope", 2),
    ("pull URL", 2),
    ("follow URL --once --run m", 2),  # a checkpoint
    ("follow URL --every 0", 2),
    *((f"remote {verb} URL", 0) for verb in ("list", "du", "verify", "verify --full")),
    ("remote show URL m", 0),
    ("remote show URL nope", 2),
    ("remote list STORE", 2),
    ("remote du oci://host/team:v1", 2),
    ("remote verify ftp://host/models", 2),
    ("remote gc URL --yes", 0),
    ("remote gc URL --lease -1", 2),
    ("remote delete URL nope --yes", 2),
    ("remote delete URL m", 2),
    ("remote delete URL m --yes", 0),
]
WITHOUT_REMOTE = [
    ("pull URL m", 3),
    ("follow URL --once", 3),
    *((f"remote {verb} URL", 3) for verb in ("list", "du", "verify", "gc --yes")),
    ("remote show URL m", 3),
    ("remote delete URL m --yes", 3),
]
DAMAGED_REMOTE = [
    *((f"remote {verb} URL", 1) for verb in ("list", "du", "verify", "gc --yes")),
    ("remote show URL m", 1),
    ("pull URL m --store another", 1),
    ("remote delete URL m --yes", 0),
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
    ("evict x", 2),
    ("unpin x", 0),
    ("evict base", 1),  # a client has it
    ("stop", 0),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TENSOR_DEDUP_SOCKET", str(tmp_path / "m.sock"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nobody is
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for each in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(each, "none")
    write(tmp_path / "m", {"model.safetensors": safetensors(u8(a=noise(1, 90 * KIB)))})
    write(tmp_path / "other", {"model.safetensors": safetensors(u8(a=noise(2, 90 * KIB)))})
    write(tmp_path / "no-weights", {"config.json": b"{}"})
    write(tmp_path / "full", {"config.json": b"{}"})
    (tmp_path / "models.toml").write_text('[models.m]\npath = "m"\n')
    (tmp_path / "bad.toml").write_text('[models.m]\npath = "no-weights"\n')
    return tmp_path


def typed(arguments: str) -> list[str]:
    """The words of a command, with places for names of places."""
    here = Path.cwd()
    places = {"URL": f"file://{here}/remote", "STORE": str(here / "store")}
    return [places.get(word, word) for word in arguments.split()]


def status(arguments: str) -> int:
    done = CliRunner().invoke(main, typed(arguments))
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


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("obstore.store", "push m s3://bucket/models", "remote"),
        ("obstore.store", "remote list s3://bucket/models", "remote"),
        ("requests", "pull oci://host/a:b", "oci"),
        ("ortools.sat.python", "plan --models models.toml --nodes 1 --memory 1M --exact 1", "plan"),
        ("ray", "plan --models models.toml --from ray://", "ray"),
        ("torch", "substitute m other --layers a --output made", "torch"),
        (
            "transformers",
            "substitute m other --layers a --samples models.toml --output made",
            "diffusers",
        ),
        ("vllm", "serve --preload m", "vllm"),
        ("torch", "serve --preload published=m", "torch"),
        ("cuda.bindings.driver", "serve --device 0", "cuda"),
    ],
)
def test_an_extra_that_is_not_installed_is_wrong_use(
    here: Path, module: str, arguments: str, extra: str
) -> None:
    imported(here)
    code = f"import sys; sys.modules[{module!r}] = None; from tensor_dedup.cli import main; main()"
    command = [sys.executable, "-c", code, *typed(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"in your clone of tensor-dedup, run `pip install '.[{extra}]'`" in done.stderr


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


def cut(folder: Path) -> None:
    """Take the last byte of each file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("arguments", "expected"), BAD_MANIFEST)
def test_with_a_damaged_manifest(here: Path, arguments: str, expected: int) -> None:
    cut(imported(here) / "manifests")
    assert status(arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), WITH_REMOTE)
def test_with_a_remote(here: Path, arguments: str, expected: int) -> None:
    imported(here)
    assert status("push m URL") == 0
    assert status(arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), WITHOUT_REMOTE)
def test_without_a_remote(here: Path, arguments: str, expected: int) -> None:
    imported(here)
    assert status(arguments) == expected
    assert not (here / "remote").exists()


@pytest.mark.parametrize(("arguments", "expected"), DAMAGED_REMOTE)
def test_with_a_damaged_remote(here: Path, arguments: str, expected: int) -> None:
    imported(here)
    assert status("push m URL") == 0
    cut(here / "remote" / "manifests")
    assert status(arguments) == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("arguments", "expected"), WITHOUT_MANAGER)
def test_without_a_manager(arguments: str, expected: int) -> None:
    assert status(arguments) == expected


def test_with_a_manager(here: Path) -> None:
    with managers.running(here) as manager, manager.client() as client:
        kept = managers.build(client, "layer", managers.pattern(1, KIB))
        for arguments, expected in WITH_MANAGER:
            assert status(arguments) == expected, arguments
        del kept


# What is done before, the question, and what is there until it is answered with yes.
PROMPTS = [
    ([], "delete m", "store/refs/m"),
    (["delete m --yes"], "gc --grace 0", "store/manifests/*/*"),
    (["push m URL"], "remote delete URL m", "store/refs/m"),
    (
        ["push m URL", "remote delete URL m --yes"],
        "remote gc URL --lease 0",
        "remote/containers/**/*.pack",
    ),
]


@pytest.mark.parametrize(
    ("answer", "expected"), [("n\n", 4), ("y\n", 0), ("\x04", 2), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize(("before", "question", "there"), PROMPTS)
def test_at_a_prompt(
    here: Path,
    before: list[str],
    question: str,
    there: str,
    answer: str | signal.Signals,
    expected: int,
) -> None:
    imported(here)
    for each in before:
        assert status(each) == 0
    assert [*here.glob(there)]
    assert prompts.answered(typed(question), answer) == expected
    if question.startswith("remote delete"):
        assert status("remote show URL m") == (0 if expected else 2)
    else:
        assert bool([*here.glob(there)]) == (expected != 0)


def test_every_status_of_every_verb_is_tried() -> None:
    tables = (WITH_STORE, WITHOUT_STORE, DAMAGED, BAD_MANIFEST, WITHOUT_MANAGER, WITH_MANAGER)
    remotes = (WITH_REMOTE, WITHOUT_REMOTE, DAMAGED_REMOTE)
    tried: dict[str, set[int]] = {}
    for arguments, expected in (each for table in (*tables, *remotes) for each in table):
        words = arguments.split()
        verb = " ".join(words[: 1 + (words[0] == "remote")])
        tried.setdefault(verb, set()).add(expected)
    for _, question, _ in PROMPTS:
        words = question.split()
        tried[" ".join(words[: 1 + (words[0] == "remote")])] |= {4, 130}
    assert tried == STATUSES
    assert {verb.split()[0] for verb in STATUSES} == VERBS.keys() - {"runs"}


def test_the_documentation_and_the_help_have_the_table() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGE.read_text(), re.MULTILINE)}
    assert table == {0, 1, 2, 3, 4, 130, 141}
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
