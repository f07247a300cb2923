"""The verbs that look into a store, and the tables of a store with models and a run."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from store_runs.stores import KIB, memory_folder, noise, safetensors, size_on_disk, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.training import CheckpointStore

STEPS = 1000
WIDTHS = [60, 80, 140]
SIZE = re.compile(r"\d (B|KiB|MiB) *$")
LONG = "meta-llama/Llama-3.2-1B-Instruct-sql-lora-merged@0e9e39f249a16976918f6564b8830bc894c89659"


def said(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.output


def document(*arguments: str, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == status, done.output
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    store = Store.open(tmp_path / "store")
    for number, name in enumerate(("base", "tuned", LONG)):
        tensors = u8(**{"model.embed_tokens.weight": noise(1, 90 * KIB), "own": bytes([number])})
        folder = write(tmp_path / str(number), {"model.safetensors": safetensors(tensors)})
        store.import_(folder, name)
    return store


def narrowed(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    narrow = Console(width=width, force_terminal=True, color_system=None)
    for module in ("store", "terminal"):
        monkeypatch.setattr(f"tensor_dedup.cli.{module}.console", lambda: narrow)


def cells(table: str, column: int = 1) -> list[str]:
    """The cells of a column, without what separates them."""
    rows = [line for line in table.splitlines() if line.startswith("│")]
    return [row.split("│")[column] for row in rows]


def unbroken(lines: Sequence[str], name: str) -> bool:
    """Does the name stand in these lines, broken after punctuation only?"""
    ends = [line.strip() for line in lines if line.strip()]
    return name in "".join(ends) and all(
        end[-1] in "./_@+=-" or name.endswith(end) or end not in name for end in ends
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_fit_and_break_no_word(
    store: Store, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    narrowed(monkeypatch, width)
    digest = store.find(store_digest(store))[0].digest
    for verb in ("list", "du", f"find {digest}", "show base"):
        shown = said(*verb.split())
        assert max(map(len, shown.splitlines()[1:])) <= width, shown
        assert "…" not in shown
        if verb in ("list", "du"):  # there is no room for a whole revision
            assert unbroken(cells(shown), LONG[:-28]), shown
        found = [cell for row in shown.splitlines() for cell in row.split("│") if SIZE.search(cell)]
        assert found or verb.startswith("find"), shown
        assert all(cell.endswith("B ") for cell in found), shown


def test_the_beginning_of_a_revision_is_enough(store: Store, tmp_path: Path) -> None:
    begun = LONG[:-28]
    assert document("show", begun)["name"] == LONG
    assert document("du", f"store://{begun}")["name"] == LONG
    assert document("diff", "base", begun)["unchanged"]["tensors"] == 1
    said("export", begun, str(tmp_path / "out"))
    assert document("delete", begun, "--yes")["deleted"] == LONG
    assert "no checkpoint" in said("show", begun, status=2)


def test_the_beginning_of_two_revisions_is_of_none(store: Store) -> None:
    store.rename("base", LONG[:-1] + "0")
    assert "no checkpoint" in said("show", LONG[:-28], status=2)
    assert document("show", LONG)["name"] == LONG


def test_du_of_a_folder_says_what_importing_it_would_add(store: Store, tmp_path: Path) -> None:
    tensors = u8(**{"embed": noise(1, 90 * KIB), "new": noise(7, 10 * KIB)})
    folder = write(tmp_path / "other", {"model.safetensors": safetensors(tensors)})
    found = document("du", str(folder))
    assert (found["nbytes"], found["shared_bytes"], found["unique_bytes"]) == (
        *(100 * KIB, 90 * KIB, 10 * KIB),
    )
    before = store.usage()
    store.import_(folder)
    after = store.usage()
    stored = [each.unique_bytes + each.shared_bytes for each in (before, after)]
    added = stored[1] - stored[0]
    assert found["unique_bytes"] <= added < found["unique_bytes"] + KIB  # and its header
    assert document("du", str(folder))["unique_bytes"] == 0


def test_each_thing_has_its_own_word_and_what_does_not_add_up_says_so(
    store: Store, tmp_path: Path
) -> None:
    assert headings("list")[3:5] == ["size", "gives back"]
    assert headings("du") == ["name", "size", "alone", "shared", "gives back"]
    counted_once = "What several need counts in each of their rows, and once in these sums."
    assert counted_once in said("du")
    assert counted_once not in said("du", "base")
    files = {"model.safetensors": safetensors(u8(a=noise(3, 999)))}
    folder = write(tmp_path / "by itself", files)
    assert "new     999 B that `tensor-dedup import" in said("du", str(folder))
    own = str(tmp_path / "another")
    said("import", str(folder), "--store", own)
    shown = said("du", "--store", own)
    assert re.search(r"^needed .* alone, 0 B shared$", shown, re.M)
    assert counted_once not in shown
    for verb in ("list", "du", "list --help", "du --help", "remote du --help"):
        assert "unique" not in said(*verb.split())


def headings(verb: str) -> list[str]:
    """The headings of the table that a verb prints."""
    [row] = [line for line in said(verb).splitlines() if line.startswith("┃")]
    return [cell.strip() for cell in row.strip("┃").split("┃")]


def store_digest(store: Store) -> str:
    with store.checkpoint("base") as checkpoint:
        return checkpoint["model.embed_tokens.weight"].digest


def test_tables_are_words_and_bytes_where_there_is_no_unicode(store: Store, tmp_path: Path) -> None:
    files = {"model.safetensors": safetensors(u8(**{"gewächs": b"x"}))}
    store.import_(write(tmp_path / "accents", files))
    for verb in ("list", "du", "show accents", "stats"):
        done = subprocess.run(
            [sys.executable, "-m", "tensor_dedup", *verb.split()],
            capture_output=True,
            check=False,
            env={
                "PATH": "/usr/bin",
                "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
                "TENSOR_DEDUP_STORE": str(store.path),
                "PYTHONIOENCODING": "ascii",
                "NO_COLOR": "1",
                "LC_ALL": "C",
            },
        )
        assert (done.returncode, done.stderr) == (0, b""), verb
        assert done.stdout.isascii()
        assert b"\x1b" not in done.stdout
        assert verb != "show accents" or rb"gew\xe4chs" in done.stdout


def test_a_thousand_steps_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_folder() as folder:
        monkeypatch.setenv("TENSOR_DEDUP_STORE", str(folder / "store"))
        store = Store.open(folder / "store")
        for number in range(3):
            files = {"model.safetensors": safetensors(u8(a=noise(number, 50)))}
            store.import_(write(folder / f"m{number}", files))
        run = CheckpointStore(store, "run")
        for step in range(STEPS):
            run.save({"w": np.array([step % 7])}, step=step, metrics={})
        narrowed(monkeypatch, 80)
        shown = said("list").splitlines()
        assert len(shown) <= 24
        [row] = [line for line in shown if line.startswith("│ run ")]
        assert re.search(rf"│ run +│ +{STEPS} │", row)
        found = {each.name: each for each in store.usage().checkpoints}
        assert found["run"].steps == STEPS


REVISIONS = ["a" * 40, "b" * 40]


def of_files(folder: Path) -> int:
    """What the files below a folder take, each once."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def of_objects(store: Path) -> int:
    """The same without the index, which is remade from the others and grows as it likes."""
    return of_files(store) - sum(path.stat().st_size for path in store.glob("index*"))


def test_of_a_hub_cache_all_numbers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, snapshots = tmp_path / "store", tmp_path / "hub/models--org--name/snapshots"
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(root))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    common, sizes = noise(1, 300 * KIB), {}
    for number, revision in enumerate(REVISIONS):
        tensors = u8(embed=common, head=noise(9 + number, (100 + number) * KIB))
        write(snapshots / revision, {"model.safetensors": safetensors(tensors)})
        sizes[f"org/name@{revision}"] = of_files(snapshots / revision)
    found = document("import", "--hub-cache")
    first, second = (each["name"] for each in found["imported"])
    assert [first, second] == list(sizes)
    with Store.open(root).checkpoint(first) as held:
        assert held.nbytes == sizes[first]

    # What lies in the cache is in no number of what the store takes itself.
    listed = {each["name"]: each for each in document("list")["usage"]}
    usage, stats = document("du"), document("stats")
    in_place = (300 + 100 + 101) * KIB
    assert {name: each["nbytes"] for name, each in listed.items()} == sizes
    assert usage["checkpoints"] == document("list")["usage"]
    assert [each["external_bytes"] for each in usage["checkpoints"]] == [
        *(each["external_bytes"] for each in listed.values()),
    ]
    headers = usage["external_bytes"] - in_place
    assert 0 < headers < KIB
    assert stats["unique_bytes"] == usage["external_bytes"]
    assert stats["logical_bytes"] == sum(sizes.values())
    assert usage["disk_bytes"] == stats["disk_bytes"] == of_files(root)
    difference = document("diff", first[:20], second[:20])
    assert difference["unchanged"] == {"tensors": 1, "bytes": 300 * KIB}
    assert [each["name"] for each in difference["changed"]] == ["head"]

    # A run beside them: its own bytes, and those that others have, are in the same sums.
    run = CheckpointStore(root, "run")
    for step in range(3):
        run.save({"w": np.arange(50_000 + step)}, step=step, metrics={})
    of_run = document("runs", "stats", "run")
    usage, stats = document("du"), document("stats")
    [as_usage] = [each for each in usage["checkpoints"] if each["name"] == "run"]
    assert of_run["logical_bytes"] == as_usage["nbytes"]
    for key in ("unique_bytes", "shared_bytes", "reclaimable_bytes"):
        assert of_run[key] == as_usage[key], key
    disk = of_files(root)
    assert usage["disk_bytes"] == stats["disk_bytes"] == of_run["store_bytes"] == disk

    # What du promises of a deletion is what gc gives back, and the cache is left alone.
    for name in (first, "run"):
        [promised] = [e for e in document("du")["checkpoints"] if e["name"] == name]
        before = of_objects(root)
        if name == "run":
            document("runs", "delete", name, "--all", "--yes")
        else:
            document("delete", name, "--yes")
        document("gc", "--grace", "0", "--yes")
        assert before - of_objects(root) == promised["reclaimable_bytes"], name
    assert document("verify", "--full")["faults"] == []
    assert document("list")["usage"][0]["name"] == second
    assert of_files(snapshots) == sum(sizes.values())


def test_list_says_what_each_is_and_whether_it_is_there(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "ext", {"model.safetensors": safetensors(u8(x=noise(9, 50 * KIB)))})
    store.import_(folder, external=True)
    kinds = {each["name"]: each["kind"] for each in document("list")["usage"]}
    assert kinds == {"base": "stored", "tuned": "stored", LONG: "stored", "ext": "external"}
    (folder / "model.safetensors").unlink()
    assert "changed" in said("list", status=1)
    [damaged] = document("list", status=1)["damaged"]
    assert damaged["name"] == "ext"
    assert str(folder) in damaged["what"]


def test_what_du_says_is_what_deleting_gives_back(store: Store) -> None:
    said_bytes = document("du", "base")["reclaimable_bytes"]
    parts = [store.path / part for part in ("containers", "manifests", "refs")]
    before = sum(map(size_on_disk, parts))
    said("delete", "base", "--yes")
    said("gc", "--grace", "0", "--yes")
    assert said_bytes == before - sum(map(size_on_disk, parts))
    stats, whole = document("stats"), document("du")
    assert whole["disk_bytes"] == stats["disk_bytes"] == size_on_disk(store.path)
    assert document("du", f"store://{LONG}") in whole["checkpoints"]


def test_a_hub_cache_with_two_revisions_is_counted_alike_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--name"
    shared, own = safetensors(u8(a=noise(1, 90 * KIB))), safetensors(u8(b=noise(2, 30 * KIB)))
    blobs = write(repo / "blobs", {"f00": shared, "f01": own})
    for revision, files in (("abc", {"a": "f00"}), ("def", {"a": "f00", "b": "f01"})):
        snapshot = write(repo / "snapshots" / revision, {"config.json": revision.encode()})
        for name, blob in files.items():
            (snapshot / f"{name}.safetensors").symlink_to(blobs / blob)
    said("import", "--hub-cache")
    store = Store.open(tmp_path / "store")
    found = store.usage()
    assert [each.kind for each in found.checkpoints] == ["external", "external"]
    assert found.external_bytes == len(shared) + len(own)
    stored = found.unique_bytes + found.shared_bytes
    assert stored + found.external_bytes == store.stats().unique_bytes
    said("gc", "--grace", "0", "--yes")  # the shared file was indexed twice
    parts = [store.path / part for part in ("containers", "manifests", "refs")]
    before = sum(map(size_on_disk, parts))
    gives_back = document("du", "org/name@def")["reclaimable_bytes"]
    said("delete", "org/name@def", "--yes")
    said("gc", "--grace", "0", "--yes")
    assert gives_back == before - sum(map(size_on_disk, parts))
    left = document("du")
    assert left["external_bytes"] == len(shared)
    assert left["disk_bytes"] == document("stats")["disk_bytes"] == size_on_disk(store.path)
    assert "0 faults" in said("verify", "--full")
    assert content_of(blobs) == {"f00": shared, "f01": own}  # nobody else's file was touched


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_tensor_is_found_by_the_beginning_of_its_digest(store: Store) -> None:
    run = CheckpointStore(store, "run")
    for step in (1, 2):
        tensor = np.frombuffer(noise(1, 90 * KIB), np.uint8)
        run.save({"w": tensor}, step=step, metrics={})
    digest = store_digest(store)
    found = document("find", digest[:8].upper())["tensors"]
    places = {(each["checkpoint"], each["tensor"]) for each in found}
    named = "model.embed_tokens.weight"
    assert places == {
        *((name, named) for name in ("base", "tuned", LONG)),
        *((f"run@{step}", "w") for step in (1, 2)),
    }
    shown = said("find", digest)
    assert "run@1 to @2 (2 steps)" in shown
    assert digest[:12] in said("show", "base")
    assert digest not in said("show", "base")
    assert digest in said("show", "base", "--digests")


def test_cat_writes_the_bytes(store: Store) -> None:
    name = "model.embed_tokens.weight"
    done = CliRunner().invoke(main, ["cat", "base", name])
    assert (done.exit_code, done.stdout_bytes) == (0, noise(1, 90 * KIB))
    described = document("cat", "base", name)
    assert (described["dtype"], described["bytes"]) == ("U8", 90 * KIB)


def test_cat_refuses_a_terminal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_dedup.cli.contents.is_terminal", lambda: True)
    text = said("cat", "base", "own", status=2)
    assert "> FILE" in text


def test_a_renamed_checkpoint_is_the_same(store: Store, tmp_path: Path) -> None:
    with store.checkpoint("base") as before:
        manifest = before.manifest
    said("rename", "base", "org/new")
    assert [each.name for each in store.list()] == sorted([LONG, "org/new", "tuned"])
    with store.checkpoint("org/new") as after:
        assert after.manifest == manifest
    assert store.verify(full=True).fine
    assert "is there already" in said("rename", "tuned", "org/new", status=2)
    CheckpointStore(store, "run").save({"w": np.zeros(3)}, step=1, metrics={})
    for names in (("run@1", "x"), ("tuned", "run@1@keep")):
        assert "runs delete" in said("rename", *names, status=2)
    assert "is there already" in said("rename", "tuned", "tuned", status=2)


def test_a_file_that_is_called_as_everywhere_is_named_after_its_folder(
    store: Store, tmp_path: Path
) -> None:
    blob = safetensors(u8(a=b"a"))
    names = ("model.safetensors", "model-00001-of-00001.safetensors", "my-model.safetensors")
    folder = write(tmp_path / "llama", dict.fromkeys(names, blob))
    found = [document("import", str(folder / name), "--replace")["name"] for name in names]
    assert found == ["llama", "llama", "my-model"]
    assert "unchanged, 1 tensor\n" in said("import", str(folder / names[1]))
