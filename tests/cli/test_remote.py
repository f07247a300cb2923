"""push, pull and remote, as they are typed."""

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner, Result

from remote_runs import registries
from remote_runs.remotes import answered
from store_runs.stores import content, noise, three
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.remote import Remote, layout
from tensor_dedup.training import CheckpointStore


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    store = Store.open(tmp_path / "store")
    for name, path in three(tmp_path).items():
        store.import_(path, name)
    return tmp_path


def run(*words: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == status, result.output + str(result.exception)
    return result


def test_there_and_back(folder: Path) -> None:
    url = f"file://{folder}/remote"
    text = run("push", "base", url).stdout
    assert "on the wire" in text
    assert "saved" in text
    document = json.loads(run("push", "tune", url, "--json").stdout)
    assert document["moved_pieces"] < document["pieces"]
    assert document["saved_bytes"] > 700_000
    listed = json.loads(run("remote", "list", url, "--json").stdout)
    assert [each["name"] for each in listed["checkpoints"]] == ["base", "tune"]
    assert "base" in run("remote", "list", url).stdout
    shown = json.loads(run("remote", "show", url, "tune", "--json").stdout)
    assert {file["path"] for file in shown["files"]} == {"model.safetensors", "config.json"}
    assert "model.safetensors" in run("remote", "show", url, "tune").stdout
    assert "unused" in run("remote", "du", url).stdout
    assert json.loads(run("remote", "verify", url, "--full", "--json").stdout)["faults"] == []
    lines = run("pull", url, "tune", "--store", folder / "other").stdout
    assert "came too" not in lines  # this one is stored as it is
    run("export", "tune", folder / "out", "--store", folder / "other")
    assert content(folder / "out") == content(folder / "tune")
    assert "unchanged" in run("pull", url, "tune", "--store", folder / "other").stdout


def test_to_a_registry_and_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(folder / "cache"))
    pytest.importorskip("requests")
    with registries.registry(folder / "registry") as proxy:
        url = f"oci://{registries.host(proxy)}/team/base:v3"
        registry = folder / "registry" / "data"
        planned = dry("push", "base", url, untouched=registry)
        done = json.loads(run("push", "base", url, "--json").stdout)
        assert planned["moved_bytes"] == done["moved_bytes"] > 0
        assert "unchanged" in run("push", "base", url).stdout
        assert dry("push", "base", url, untouched=registry)["unchanged"]
        planned = dry("pull", url, "--store", folder / "other", untouched=registry)
        assert not (folder / "other").exists()
        assert 0 < planned["moved_pieces"] == planned["pieces"]
        assert "--replace" in run("push", "tune", url, status=2).stderr
        document = json.loads(run("pull", url, "--store", folder / "other", "--json").stdout)
        assert document["names"] == ["base"]
        run("pull", url, "another", "--store", folder / "other")
        nothing = url.replace("v3", "v4")
        assert "no such artifact" in run("pull", nothing, status=3).stderr
    run("export", "another", folder / "out", "--store", folder / "other")
    assert content(folder / "out") == content(folder / "base")


def dry(*words: object, untouched: Path) -> dict[str, Any]:
    """The document of a dry run; its text is looked at, too."""
    before = content(untouched) if untouched.exists() else None
    said = run(*words, "--dry-run").stdout
    document: dict[str, Any] = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert (content(untouched) if untouched.exists() else None) == before
    assert not document["done"]
    assert ("unchanged, all of it is" in said) == document["unchanged"]
    assert ("; nothing was written" in said) != document["unchanged"]
    assert ("(before encoding)" in said) != document["unchanged"]
    return document


@pytest.mark.parametrize("kind", ["remote", "store"])
def test_a_dry_push_and_a_dry_pull_write_nothing(folder: Path, kind: str) -> None:
    url = f"file://{folder}/remote"
    if kind == "store":
        store = Store.open(folder / "remote")
        url, _ = str(store.path), store.verify()  # which makes its index
    compared = ("names", "pieces", "nbytes", "moved_pieces", "unchanged")
    for name in ("base", "tune", "tune"):
        planned = dry("push", name, url, untouched=folder)
        done = json.loads(run("push", name, url, "--json").stdout)
        assert {key: planned[key] for key in compared} == {key: done[key] for key in compared}
    assert done["unchanged"]
    for name in ("base", "tune", "tune"):
        pull = ("pull", url, name, "--store", folder / "other")
        planned = dry(*pull, untouched=folder)
        done = json.loads(run(*pull, "--json").stdout)
        assert {key: planned[key] for key in compared} == {key: done[key] for key in compared}
    assert done["unchanged"]
    assert "no checkpoint 'nope'" in run("push", "nope", url, "--dry-run", status=2).stderr
    run("pull", url, "nope", "--dry-run", status=2)


def test_a_dry_push_refuses_what_a_push_refuses(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "photos" / "a.jpg").write_bytes(b"1")
    for place, name in (("photos", "base"), ("remote", "tune")):
        url = f"file://{folder}/{place}"
        if place == "remote":
            run("push", "base", url)
            run("rename", "base", "former")
            run("rename", "tune", "base")
            name = "base"
        before = content(folder)
        assert run("push", name, url, "--dry-run", status=2).stderr
        assert content(folder) == before


def test_a_run_is_counted_once_in_a_dry_push_and_a_dry_pull(folder: Path) -> None:
    url, steps = f"file://{folder}/remote", CheckpointStore(folder / "store", "run")
    for step in (1, 2, 3):
        steps.save({"same": np.arange(50_000), "own": np.full(9, step)}, step)
    planned = dry("push", "run", url, untouched=folder)
    done = json.loads(run("push", "run", url, "--json").stdout)
    assert planned["moved_pieces"] == done["moved_pieces"]
    pulled = dry("pull", url, "run", "--store", folder / "other", untouched=folder)
    fetched = json.loads(run("pull", url, "run", "--store", folder / "other", "--json").stdout)
    assert pulled["names"] == fetched["names"] == ["run@1", "run@2", "run@3"]
    assert pulled["moved_pieces"] == fetched["moved_pieces"]


def test_deleting(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    assert "Refusing" in run("remote", "delete", url, "base", status=2).stderr
    run("remote", "delete", url, "base", "--yes")
    assert "no checkpoints" in run("remote", "list", url).stdout
    young = run("remote", "gc", url).stdout.splitlines()
    assert young[0] == "Deleted: 0 objects, 0 B"
    assert re.fullmatch(r"Too young: 4 unused objects, .* less than 168 hours ago, .*", young[1])
    assert len(young) == 2
    plan = json.loads(run("remote", "gc", url, "--lease", "0", "--dry-run", "--json").stdout)
    assert plan["delete"]
    assert not plan["done"]
    run("remote", "gc", url, "--lease", "0", status=2)
    assert json.loads(run("remote", "gc", url, "--lease", "0", "--yes", "--json").stdout)["done"]
    assert not [*(folder / "remote" / "containers").rglob("*.pack")]


@pytest.mark.parametrize("lease", ["nan", "inf", "-1"])
def test_a_lease_is_a_number_of_hours(folder: Path, lease: str) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    assert "'--lease'" in run("remote", "gc", url, "--lease", lease, "--yes", status=2).stderr


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("push nope URL", 2, "no checkpoint 'nope'"),
        ("push ../x URL", 2, "cannot be the name"),
        ("push base s3://key:hidden-word@bucket/models", 2, "may be a secret"),
        ("push base ftp://host/models", 2, "ftp"),
        ("push base file://host/models", 2, "three slashes"),
        ("push base EMPTY", 2, "is empty"),
        ("pull EMPTY base", 2, "is empty"),
        ("push base ~/remote", 2, "in full"),
        ("pull URL base", 3, "there is no remote"),
        ("pull URL ../../x", 2, "cannot be the name"),
        ("remote list URL", 3, "there is no remote"),
        ("remote list STORE", 2, "is a store"),
        ("push base INSIDE", 2, "which is a remote or a store; push to an empty folder"),
        ("push base file:///dev/null/x", 2, "name another path"),
        ("remote delete URL base --yes", 3, "there is no remote"),
        ("pull OTHER tune", 2, "no checkpoint 'tune'"),
        ("pull OTHER tiny", 2, "--replace"),
        ("push tiny OTHER", 2, "--replace"),
        ("pull OTHER tiny --replace", 0, ""),
        ("push tiny OTHER --replace", 0, ""),
        ("pull s3://bucket/models base", 3, "AWS_ACCESS_KEY_ID"),
        ("pull URL", 2, "say which checkpoint"),
        ("push base oci://host/Team:v1", 2, "in lower case"),
        ("push base oci://key:hidden-word@host/team:v1", 2, "may be a secret"),
        ("remote list oci://host/team:v1", 2, "only push and pull take oci://"),
        ("remote list oci://key:hidden-word@host/team:v1", 2, "may be a secret"),
        ("remote gc oci://host/team:v1?token=hidden-word", 2, "it is no artifact"),
    ],
)
def test_exit_statuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, status: int, says: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    other = Store.open(folder / "another")
    other.import_(folder / "base", "tiny")  # another checkpoint of this name
    other.push(f"file://{folder}/others", "tiny")
    (folder / "cwd").mkdir()
    monkeypatch.chdir(folder / "cwd")
    places = {
        "EMPTY": "",
        "URL": f"file://{folder}/nothing",
        "OTHER": f"file://{folder}/others",
        "STORE": str(folder / "another"),
        "INSIDE": f"file://{folder}/others/inside",
    }
    if says == "AWS_ACCESS_KEY_ID":
        says = ""  # nobody answers here, with credentials or without
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-of-mine")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", noise(1, 9).hex())
    result = run(*(places.get(word, word) for word in words.split()), status=status)
    assert says in result.stderr
    assert "hidden-word" not in result.output
    assert "a-key-of-mine" not in result.output
    assert len(result.stderr.splitlines()) == (status != 0)
    assert not [*(folder / "cwd").iterdir()]


@pytest.mark.parametrize(
    ("module", "url", "extra"),
    [("obstore.store", "s3://bucket/models", "remote"), ("requests", "oci://host/a:b", "oci")],
)
def test_what_is_not_installed_is_installed_in_a_clone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, url: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    # Which other tests may have imported already.
    monkeypatch.delitem(sys.modules, "tensor_dedup.remote.server_bucket", raising=False)
    done = run("push", "base", url, status=2)
    assert done.stderr.endswith(
        f"is not installed; in your clone of tensor-dedup, run `pip install '.[{extra}]'`\n"
    )


@pytest.mark.parametrize("verb", ["analyze store://tune", "export tune OUT"])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_what_only_a_configured_remote_has_is_pulled_as_the_error_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, empty: bool, named: bool
) -> None:
    url = f"file://{folder}/a remote"
    run("push", "tune", url)
    where = ["--store", folder / "here"] if named else []
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(folder / ("another" if named else "here")))
    if not empty:
        run("import", folder / "base", *where)
    words = [*(str(folder / "out") if word == "OUT" else word for word in verb.split()), *where]
    assert "tensor-dedup pull" not in run(*words, status=2).stderr
    monkeypatch.setenv("TENSOR_DEDUP_REMOTE", url)
    said = run(*words, status=2).stderr
    [command] = re.findall("if the remote has it, run `tensor-dedup (.*)`\n", said)
    run(*shlex.split(command))
    run(*words)
    assert not (folder / "another").exists()
    for wrong in ("s3://key:hidden-word@bucket/models", "https://host/x;sig=hidden-word"):
        monkeypatch.setenv("TENSOR_DEDUP_REMOTE", wrong)
        said = run("export", "nope", folder / "x", status=2).stderr
        assert "may be a secret" in said
        assert "hidden-word" not in said


def test_hints_have_the_store_and_the_url_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, remote, nowhere = folder / "store", folder / "a remote", folder / "nowhere"
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(nowhere))
    where, url = ["--store", str(here)], f"file://{remote}"
    run("push", "base", url, *where)
    for words in (
        ["show", "nope", *where],
        ["remote", "show", url, "nope"],
        ["pull", url, "nope", *where],
        ["pull", str(here), "nope", "--store", str(folder / "other")],
    ):
        [command] = re.findall("see `tensor-dedup (.*)`\n", run(*words, status=2).stderr)
        assert "base" in run(*shlex.split(command)).stdout
    [command] = re.findall("`tensor-dedup (gc .*?)`", run("delete", "base", "--yes", *where).stdout)
    assert json.loads(run(*shlex.split(command), "--dry-run", "--json").stdout)["trash"]
    [command] = re.findall("`tensor-dedup (import .*?)`", run("list", *where[:1], nowhere).stdout)
    run(*shlex.split(command), str(folder / "base"))
    assert "base" in run("list").stdout
    # What another store lacks is no business of this one.
    run("push", "tune", str(nowhere), *where)
    for path in (nowhere / "manifests").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    said = run("pull", str(nowhere), "tune", "--store", str(folder / "other"), status=1).stderr
    assert "`tensor-dedup repair" in said
    assert "--store" not in said


def test_a_damaged_remote_is_said(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    for path in (folder / "remote" / "manifests").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in run("remote", "list", url, status=1).stdout
    found = run("remote", "verify", url, status=1).stdout
    assert f"affected: base\nto mend it, run `tensor-dedup push base {url}` from" in found
    assert "manifests/" in run("pull", url, "base", "--store", folder / "x", status=1).stderr
    assert Remote.open(url).names() == []


def test_what_gc_advises_on_a_lost_container_mends_it_and_a_dry_push_tells_what_it_sends(
    folder: Path,
) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    containers = folder / "remote" / "containers"
    (container,) = (each for each in containers.rglob("*") if each.is_file())
    container.unlink()
    said = run("remote", "gc", url, "--lease", "0", "--yes", status=1).stderr
    (advised,) = re.findall("`tensor-dedup (push .*?)`", said)
    words = shlex.split(advised.replace("NAME", "base"))
    planned = dry(*words, untouched=folder)
    done = json.loads(run(*words, "--json").stdout)
    assert planned["moved_pieces"] == done["moved_pieces"] == done["pieces"] > 0
    run("remote", "verify", url, "--full")


def test_what_verify_advises_on_a_damaged_name_mends_it(folder: Path) -> None:
    url = f"file://{folder}/remote"
    for name in ("base", "tune"):
        run("push", name, url)
    (folder / "remote" / layout.ref_key("base")).write_bytes(b"?")
    said = run("remote", "verify", url, status=1).stdout
    (advised,) = re.findall("to mend it, run `tensor-dedup (push .*?)`", said)
    run(*shlex.split(advised))
    assert Remote.open(url).verify().fine


def test_verify_names_the_tensors_that_no_container_holds(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    for part in ("containers", "tables"):
        (lost,) = (each for each in (folder / "remote" / part).rglob("*") if each.is_file())
        lost.unlink()
    said = run("remote", "verify", url, status=1).stdout
    shown = json.loads(run("remote", "show", url, "base", "--json").stdout)
    for tensor in shown["tensors"]:
        assert f"no container holds {tensor['digest']} ({tensor['name']})\n" in said


def test_a_run_is_one_row_however_many_steps_it_has(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run_ = CheckpointStore(folder / "store", "run")
    for step in range(30):
        run_.save({"frozen": np.ones(90_000), "head": np.full(9_000, step)}, step)
    run_.keep(3)
    run("push", "base", url)
    run("push", "run", url)
    for verb in ("list", "du"):
        lines = run("remote", verb, url).stdout.splitlines()
        rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
        assert [row[0].strip() for row in rows] == ["base", "run"]
        assert [row[1].strip() for row in rows] == ["-", "30"]
    before = json.loads(run("remote", "du", url, "--json").stdout)
    assert len(before["checkpoints"]) == 31
    for step in range(30):
        run("remote", "delete", url, f"run@{step}", "--yes")
    assert "run@" not in run("remote", "list", url, "--json").stdout  # nor the mark of a step
    after = json.loads(run("remote", "du", url, "--json").stdout)
    alone = before["run_unique_bytes"]
    assert alone == {"run": after["unused_bytes"] - before["unused_bytes"]}
    assert alone["run"] > sum(each["unique_bytes"] for each in before["checkpoints"][1:])
    assert after["run_unique_bytes"] == {}


def test_a_tensor_is_shown_as_the_store_shows_it(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    there = run("remote", "show", url, "base").stdout.splitlines()
    here = run("show", "base").stdout.splitlines()
    for name in ("a", "b", "c", "tail"):
        [one] = [line for line in there if line.startswith(f"│ {name} ")]
        [other] = [line for line in here if line.startswith(f"│ {name} ")]
        _, *cells, _ = map(str.strip, one.split("│"))
        assert len(cells) == 5
        assert {*cells} <= {*map(str.strip, other.split("│"))}


def test_where_there_is_nothing_to_get_no_store_is_made(folder: Path) -> None:
    other, url = folder / "other", f"file://{folder}/remote"
    run("push", "base", url)
    run("pull", f"file://{folder}/nothing", "base", "--store", other, status=3)
    run("pull", url, "nope", "--store", other, status=2)
    assert (
        "no checkpoint 'nope'"
        in run(*("pull", folder / "store", "nope", "--store", other), status=2).stderr
    )
    (folder / "empty").mkdir()
    for path, status in (("nope", 2), (folder / "empty", 1)):
        run("import", path, "--store", other, status=status)
    assert not other.exists()
    run("pull", url, "base", "--store", other)
    assert Store.open(other, create=False).names() == ["base"]


def test_what_was_not_read_is_said(folder: Path) -> None:
    url = f"file://{folder}/remote"
    run("push", "base", url)
    assert "only bookkeeping was checked" in run("remote", "verify", url).stdout
    assert "only bookkeeping" not in run("remote", "verify", url, "--full").stdout


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("push file:///remote base", "push NAME URL"),
        ("push ./remote base", "push NAME URL"),
        ("push s3://key:hunter2@bucket base", "push NAME URL"),
        ("pull base file:///remote", "pull URL NAME"),
        ("pull base ./remote", "pull URL NAME"),
        ("remote show base file:///remote", "remote show URL NAME"),
        ("remote delete base file:///remote --yes", "remote delete URL NAME"),
    ],
)
def test_arguments_the_other_way_round(folder: Path, words: str, usage: str) -> None:
    said = run(*words.split(), status=2).stderr
    assert f"the name stands where the URL belongs: tensor-dedup {usage}" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("words", ["push store://base URL", "pull URL store://base"])
def test_a_name_with_the_scheme_of_stores_is_told_from_arguments_the_other_way_round(
    folder: Path, words: str
) -> None:
    said = run(*words.replace("URL", f"file://{folder}/remote").split(), status=2).stderr
    assert "write the name without store://" in said
    assert "stands where" not in said


def test_a_run_is_shown_and_deleted_with_its_steps(folder: Path) -> None:
    url = f"file://{folder}/remote"
    for name in ("run-001", "other"):
        training = CheckpointStore(folder / "store", name)
        for step in (3, 20):
            training.save({"weight": np.arange(step)}, step)
        training.keep(3)
        run("push", name, url)
    run("push", "base", url)
    text = run("remote", "show", url, "run-001").stdout
    assert "run-001: 2 steps" in text
    assert text.index("run-001@3") < text.index("run-001@20")
    shown = json.loads(run("remote", "show", url, "run-001", "--json").stdout)
    assert [each["name"] for each in shown["checkpoints"]] == ["run-001@3", "run-001@20"]
    assert "run-001@20: " in run("remote", "show", url, "run-001@20").stdout
    run("remote", "delete", url, "run-001@20", "--yes")
    assert "run-001: 1 step" in run("remote", "show", url, "run-001").stdout
    said = run("remote", "delete", url, "run-001", status=2).output
    assert "Delete run-001 with 1 step from" in said
    assert "Refusing" in said
    run("remote", "delete", url, "run-001", "--yes")
    assert Remote.open(url).names() == ["base", "other@20", "other@3"]
    run("remote", "show", url, "run-001", status=2)
    run("remote", "delete", url, "run-001", "--yes", status=2)


@pytest.mark.parametrize("with_a_step", [True, False])
def test_a_run_is_deleted_with_the_marks_of_steps_that_are_gone(
    folder: Path, with_a_step: bool
) -> None:
    url, training = f"file://{folder}/remote", CheckpointStore(folder / "store", "run-001")
    for step in (3, 20):
        training.save({"weight": np.arange(step)}, step)
        training.keep(step)
    for name in ("run-001", "base"):
        run("push", name, url)
    for name in ("run-001@3", "run-001@20"):
        if name == "run-001@3" or not with_a_step:  # its mark stays, as after a crash
            (folder / "remote" / layout.ref_key(name)).write_bytes(layout.reference(name, None))
    run("remote", "delete", url, "run-001", "--yes")
    assert Remote.open(url).names() == ["base"]
    run("remote", "delete", url, "run-001", "--yes", status=2)


def test_what_only_differences_need_is_not_free(folder: Path) -> None:
    """A fine-tune that is stored as differences needs the base's tensors, deleted or not."""
    url, store = f"file://{folder}/remote", Store.open(folder / "fresh")
    for name in ("base", "tune"):
        store.import_(folder / name, name, compress="auto")
        store.push(url, name)
    whole = json.loads(run("remote", "du", url, "--json").stdout)
    unique = {each["name"]: each["unique_bytes"] for each in whole["checkpoints"]}
    run("remote", "delete", url, "base", "--yes")
    left = json.loads(run("remote", "du", url, "--json").stdout)
    assert left["stored_bytes"] == whole["stored_bytes"]
    freed = left["unused_bytes"] - whole["unused_bytes"]
    assert 0 <= freed - unique["base"] <= 16 << 10
    with store.checkpoint("tune") as checkpoint:
        records = [r for t in checkpoint for r in checkpoint.records(bytes.fromhex(t.digest))]
    bases = {record.base for record in records} - {None}
    assert bases - {record.digest for record in records}  # there is something to need


class Silent(BaseHTTPRequestHandler):
    """A server that takes requests, and answers none of them before the test is over."""

    asked: ClassVar[threading.Event] = threading.Event()
    over: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.over.wait()
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


# As it is, and with less patience for what has to be tidied up after Ctrl-C.
AS_IT_IS = ["-m", "tensor_dedup"]
SOON = [
    "-c",
    "from tensor_dedup.cli import main, remote; remote._PATIENCE_S = 0.3; main()",
]


@pytest.mark.parametrize("verb", ["remote show URL tune", "pull URL tune --store STORE"])
@pytest.mark.parametrize("program", [SOON, pytest.param(AS_IT_IS, marks=pytest.mark.long)])
def test_an_interrupt_ends_it_though_the_server_says_nothing(
    tmp_path: Path, verb: str, program: list[str]
) -> None:
    Silent.asked.clear()
    Silent.over.clear()
    with answered(Silent) as host:
        words = verb.replace("URL", f"http://{host}/x").replace("STORE", f"{tmp_path}/store")
        command = [sys.executable, *program, *words.split()]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert Silent.asked.wait(60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)  # a request may take 120 seconds
        finally:
            process.kill()
            process.wait()
            Silent.over.set()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted"


def test_full_is_not_advised_where_it_was_asked_for(folder: Path) -> None:
    """Though there is nothing to read."""
    run("push", "base", folder / "remote")
    run("remote", "delete", folder / "remote", "base", "--yes")
    for _ in range(2):
        run("remote", "gc", folder / "remote", "--lease", "0", "--yes")
    said = run("remote", "verify", folder / "remote", "--full").stdout
    assert "0 B read" in said
    assert "bookkeeping" not in said
    Store.open(folder / "empty")
    said = run("verify", "--full", "--store", folder / "empty").stdout
    assert "0 B read" in said
    assert "bookkeeping" not in said
