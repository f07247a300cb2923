"""The verbs of the store as a user runs them."""

import contextlib
import fcntl
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from manager_runs import managers
from processes import commands
from store_runs.stores import (
    KIB,
    content,
    noise,
    safetensors,
    size_on_disk,
    tuned,
    u8,
    weights,
    write,
)
from tensor_dedup.cli import main
from tensor_dedup.cli.tensorcas import main as tensorcas
from tensor_dedup.store.format.layout import StoreLayout
from tensor_dedup.text_table import human

COMMAND = Path(sys.executable).with_name("tensor-dedup")


class Shell:
    """Runs verbs on one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"

    def run(self, verb: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return commands.run(verb, *arguments, "--store", self.store)

    def document(self, verb: str, *arguments: str | Path, status: int = 0) -> dict[str, Any]:
        result = self.run(verb, *arguments, "--json")
        assert (result.returncode, result.stderr) == (status, "")
        loaded: dict[str, Any] = json.loads(result.stdout)
        return loaded


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    tensors = u8(a=noise(1, 90 * KIB), b=noise(2, 50))
    files = {"model.safetensors": safetensors(tensors), "config.json": b"{}"}
    write(tmp_path / "m", files)
    return Shell(tmp_path)


def test_a_checkpoint_goes_in_and_out(shell: Shell) -> None:
    first = shell.document("import", shell.root / "m")
    assert (first["name"], first["new_tensors"], first["known_bytes"]) == ("m", 2, 0)
    again = shell.document("import", shell.root / "m", "--name", "org/again")
    assert (again["new_bytes"], again["stored_bytes"]) == (0, 0)
    listed = shell.document("list")["checkpoints"]
    assert [each["name"] for each in listed] == ["m", "org/again"]
    shown = shell.document("show", "m")
    assert [tensor["name"] for tensor in shown["tensors"]] == ["a", "b"]
    assert shell.document("stats")["checkpoints"] == 2
    exported = shell.document("export", "m", shell.root / "out")
    assert len(exported["files"]) == 2
    assert content(shell.root / "out") == content(shell.root / "m")


def test_files_that_are_left_out_are_named_with_the_reason(shell: Shell) -> None:
    folder = shell.root / "m"
    write(folder, {"optimizer.pt": b"state", "sub/model.bin": b"no weights", "tf_model.h5": b"."})
    write(folder, {"m.gguf.part": b"its beginning"})
    state = "left out, state of a training: optimizer.pt; keep the folder to resume"
    for verb in ("import", "import", "analyze"):  # the second one finds it unchanged
        said = shell.run(verb, folder).stdout
        assert "left out: sub/model.bin, tf_model.h5\n" in said
        assert "left out, a download that is not finished: m.gguf.part\n" in said
        more = ", or import it with --all-files" if verb == "import" else ""
        assert f"{state}{more}\n" in said
    expected = [
        {"path": "m.gguf.part", "reason": "a download that is not finished"},
        {"path": "optimizer.pt", "reason": "state of a training"},
        {"path": "sub/model.bin", "reason": "not weights"},
        {"path": "tf_model.h5", "reason": "another form or copy of the weights"},
    ]
    imported = shell.document("import", folder, "--name", "again")
    assert imported["left_out"] == expected
    assert imported["skipped"] == [each["path"] for each in expected]
    assert shell.document("analyze", folder)["checkpoints"][0]["left_out"] == expected
    both = shell.run("analyze", folder, "store://m").stdout
    assert f"m: {state}\n" in both
    assert both.count("left out") == 3


def test_all_files_of_a_folder_go_in_and_out(shell: Shell) -> None:
    folder = shell.root / "m"
    write(folder, {"optimizer.pt": noise(1, 3 * KIB), "sub/.hidden/x": b"x", ".metadata": b"."})
    write(folder, {"original/model.safetensors": safetensors(u8(z=b"z")), "empty.bin": b""})
    result = shell.run("import", folder, "--all-files")
    assert "left out" not in result.stdout
    assert result.stdout.startswith("m: 2 tensors in 7 files\n")
    document = shell.document("import", folder, "--all-files")
    assert (document["unchanged"], document["left_out"]) == (True, [])
    assert len(shell.document("export", "m", shell.root / "out")["files"]) == 7
    assert content(shell.root / "out") == content(folder)
    assert [each["name"] for each in shell.document("show", "m")["tensors"]] == ["a", "b"]
    wrong = shell.run("import", folder / "model.safetensors", "--all-files")
    assert (wrong.returncode, "is a file" in wrong.stderr) == (2, True)
    assert shell.run("import", "--hub-cache", "--all-files").returncode == 2


def test_a_replacement_loses_no_files_that_only_all_files_keeps(shell: Shell) -> None:
    folder = write(shell.root / "m", {"optimizer.pt": noise(1, KIB), ".hidden": b"x"})
    shell.run("import", folder, "--all-files")
    before = shell.document("show", "m")
    (folder / "config.json").write_text("{}")
    for more in ([], ["--dry-run"]):
        refused = shell.run("import", folder, "--replace", *more)
        assert refused.returncode == 2
        assert "'m' holds 2 files of an import with --all-files" in refused.stderr
        assert ": .hidden, optimizer.pt; add --all-files" in refused.stderr
    assert shell.document("show", "m") == before
    assert shell.run("import", folder, "--replace", "--all-files").returncode == 0
    shell.run("export", "m", shell.root / "out")
    assert content(shell.root / "out") == content(folder)
    shell.run("delete", "m", "--yes")
    assert shell.run("import", folder).returncode == 0
    assert shell.run("import", folder, "--replace").returncode == 0  # where nothing is lost


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)],
            "1 of 3 numbered files; give the folder for the whole model\n",
        ),
        (
            [f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)],
            "1 of 2 files of vLLM's load format sharded_state; only an engine",
        ),
        (
            [f"model-rank-0-part-{part}.safetensors" for part in (0, 1)],
            "1 of 2 files of vLLM's load format sharded_state; give the folder",
        ),
        (["model-00001-of-00001.safetensors"], ""),
        (["model-rank-0-part-0.safetensors"], ""),
    ],
)
def test_one_file_of_several_is_called_that(shell: Shell, files: list[str], said: str) -> None:
    each = {name: safetensors(u8(**{f"t{at}": noise(at, KIB)})) for at, name in enumerate(files)}
    folder = write(shell.root / "whole", each)
    for verb in ("import", "analyze"):
        found = shell.run(verb, folder / files[-1]).stdout
        assert said in found
        assert ("give the" in found) == bool(said)
    one = files[-1].removesuffix(".safetensors")
    own = "whole" if one == "model-00001-of-00001" else one
    assert [each["name"] for each in shell.document("list")["checkpoints"]] == [own]
    if "give the folder" in said:
        assert shell.run("import", folder).stdout.startswith("whole: ")
        assert "give the folder" not in shell.run("analyze", folder, "store://whole").stdout


def test_copies_that_the_index_does_not_name_are_said(shell: Shell) -> None:
    first, overlay = "model-00001-of-00001.safetensors", "overlay.safetensors"
    where = {"a": first, "norm": overlay}
    files = {
        first: safetensors(u8(a=noise(1, KIB), norm=noise(2, KIB))),
        overlay: safetensors(u8(norm=noise(3, KIB))),
        "model.safetensors.index.json": json.dumps({"weight_map": where}).encode(),
    }
    folder = write(shell.root / "overlay", files)
    line = f"1 tensor that the index does not name, in {first}; it differs from what the index"
    for arguments in (["import", folder], ["analyze", folder], ["show", "overlay"]):
        assert f"{line} names: norm\n" in shell.run(*arguments).stdout
    copies = [{"tensor": "norm", "file": first, "differs": True}]
    assert shell.document("import", folder)["not_indexed"] == copies
    found = shell.document("analyze", folder, "store://overlay")
    assert [each["not_indexed"] for each in found["checkpoints"]] == [copies, copies]
    shown = shell.document("show", "overlay")
    assert [each["name"] for each in shown["tensors"]] == ["a", "norm"]
    assert shown["not_indexed"] == copies
    assert shell.document("diff", folder, "overlay")["changed"] == []
    command = [str(COMMAND), "cat", "overlay", "norm", "--store", str(shell.store)]
    assert noise(3, KIB) in subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    "options", [(), ("--external",), ("--compress", "auto"), ("--all-files",)], ids=" ".join
)
def test_a_dry_import_says_what_an_import_does_and_writes_nothing(
    shell: Shell, options: tuple[str, ...]
) -> None:
    tensors = u8(a=noise(1, 90 * KIB), b=noise(3, 60), c=noise(3, 60))
    write(shell.root / "tune", {"t.safetensors": safetensors(tensors), "more.json": b"[1, 2]"})
    told = [*("name", "manifest", "files", "tensors", "new_bytes", "known_bytes", "new_tensors")]
    told += ["external_bytes", "unchanged"]
    for model in ("m", "tune", "tune"):
        before = content(shell.store) if model == "tune" else {}
        planned = shell.document("import", shell.root / model, *options, "--dry-run")
        said = shell.run("import", shell.root / model, *options, "--dry-run").stdout
        assert shell.store.exists() == (model == "tune")
        assert content(shell.store) == before
        assert not planned["done"]
        done = shell.document("import", shell.root / model, *options)
        assert done["done"]
        assert {key: planned[key] for key in told} == {key: done[key] for key in told}
        assert said.endswith("; nothing was written\n") != done["unchanged"]
    assert done["unchanged"]
    write(shell.root / "another" / "m", {"t.safetensors": safetensors(tensors)})
    taken = shell.run("import", shell.root / "another" / "m", "--dry-run")
    assert taken.returncode == 2  # as without the option
    assert "--replace" in taken.stderr


def test_a_dry_deletion_says_what_it_frees_and_changes_nothing(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    before = content(shell.store)
    document = shell.document("delete", "m", "--dry-run")
    (usage,) = shell.document("list")["usage"]
    assert document == {"deleted": "m", "done": False, "freed_bytes": usage["reclaimable_bytes"]}
    assert document["freed_bytes"] > 90 * KIB
    said = shell.run("delete", "m", "--dry-run")  # it asks nothing
    assert said.returncode == 0
    freed = human(document["freed_bytes"])
    assert said.stdout.startswith("m would be deleted; `tensor-dedup gc")
    assert said.stdout.endswith(f" could then free {freed}; nothing was changed\n")
    assert shell.run("delete", "nope", "--dry-run").returncode == 2
    assert content(shell.store) == before


def test_people_get_text(shell: Shell) -> None:
    cases: list[tuple[str, list[str | Path], str]] = [
        ("import", [shell.root / "m"], "new 90."),
        ("list", [], "90."),
        ("show", ["m"], "config.json"),
        ("stats", [], "1 with 2 tensors"),
        ("verify", ["--full"], "0 faults"),
        ("gc", ["--dry-run"], "To the trash: 0 files"),
        ("repair", [], "nothing to restore"),
        ("export", ["m", shell.root / "out"], "2 files"),
    ]
    for verb, arguments, expected in cases:
        result = shell.run(verb, *arguments)
        assert (result.returncode, result.stderr) == (0, ""), verb
        assert expected in result.stdout


def test_a_fine_tune_is_stored_as_what_differs(shell: Shell) -> None:
    base = weights(1, 200 * KIB)
    for name, data in (("base", base), ("tune", tuned(base, 2))):
        tensor = ("BF16", (len(data) // 2,), data)
        write(shell.root / name, {"model.safetensors": safetensors({"w": tensor})})
    shell.document("import", shell.root / "base")
    options = ("--compress", "auto", "--base", "base")
    result = shell.document("import", shell.root / "tune", *options)
    assert (result["encoded_tensors"], result["base"]) == (1, "base")
    shown = shell.document("show", "tune")
    (stored,) = shown["tensors"]
    assert (stored["codec"], stored["bytes"]) == ("nibble2", 200 * KIB)
    assert stored["stored_bytes"] == shown["stored_bytes"]
    assert stored["stored_bytes"] == 200 * KIB - result["saved_bytes"]
    assert shell.document("stats")["codecs"]["nibble2"]["pieces"] == 1
    assert "encoded       200.0 KiB as " in shell.run("stats").stdout
    shell.document("export", "tune", shell.root / "out")
    assert content(shell.root / "out") == content(shell.root / "tune")


@pytest.mark.parametrize("verb", ["import", "analyze"])
def test_links_out_of_a_folder_are_followed_when_asked_for(shell: Shell, verb: str) -> None:
    elsewhere = write(shell.root / "elsewhere", {"x.safetensors": safetensors(u8(z=b"z"))})
    (shell.root / "m" / "more").symlink_to(elsewhere)
    refused = shell.run(verb, shell.root / "m")
    assert (refused.returncode, refused.stdout) == (1, "")
    link = f"{shell.root / 'm' / 'more'}: a link to {elsewhere}"
    assert re.search(f"{link}, .*--follow-links", refused.stderr)
    assert refused.stderr.count("\n") == 1
    found = shell.document(verb, shell.root / "m", "--follow-links")
    assert found["tensors" if verb == "import" else "total_bytes"] == (
        3 if verb == "import" else 90 * KIB + 51
    )


def test_deleting_asks_first(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    refused = shell.run("delete", "m")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--yes" in refused.stderr
    deleted = shell.document("delete", "m", "--yes")
    assert deleted["deleted"] == "m"
    planned = shell.document("gc", "--dry-run", "--grace", "0")
    assert (deleted["reclaimable_bytes"], deleted["grace_hours"]) == (planned["trash_bytes"], 24)
    assert (planned["done"], planned["freed_bytes"]) == (False, 0)
    assert planned["trash_bytes"] > 90 * KIB
    assert shell.run("gc", "--grace", "0").returncode == 2
    assert shell.document("gc", "--grace", "0", "--yes")["freed_bytes"] == planned["trash_bytes"]


def said(command: click.Command, *arguments: str | Path) -> str:
    """What it says in this process: one of its own takes a second to start."""
    done = CliRunner().invoke(command, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_deleting_gives_back_and_when_is_said(shell: Shell) -> None:
    here = ("--store", shell.store)
    for name in ("m", "twin"):
        said(main, "import", shell.root / "m", "--name", name, *here)
    assert "no space to give back" in said(main, "delete", "m", "--yes", *here)
    text = said(main, "delete", "twin", "--yes", *here)
    assert re.search(
        r"gc --store \S+` moves \d{2}\.\d KiB .* to the trash.*24 hours later.*--grace 0", text
    )
    assert "a gc 24 hours later deletes" in said(main, "gc", "--yes", *here)
    text = said(main, "gc", "--grace", "0", "--dry-run", *here)
    assert re.search(r"To delete: [1-9]\d* files, \d{2}\.\d KiB", text)
    assert re.search(r"\nDeleted: [1-9]", said(main, "gc", "--grace", "0", "--yes", *here))


def test_what_is_empty_says_where_it_looked(shell: Shell) -> None:
    here = ("--store", shell.store)
    said(main, "import", shell.root / "m", *here)
    assert f"store {shell.store}\n" in said(main, "list", *here)
    text = said(main, "runs", "list", *here)
    assert f"{shell.store} holds no training runs" in text
    assert "--store DIR or TENSOR_DEDUP_STORE" in text
    said(main, "delete", "m", "--yes", *here)
    assert f"{shell.store} holds no checkpoints" in said(main, "list", *here)
    text = said(tensorcas, "--root", shell.store, "list")
    assert text == f"{shell.store} holds no training runs; --root names another folder\n"


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_shows_whole_names_and_numbers(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    name = "language_model.transformer.encoder.layers.0.self_attention.q_proj.weight"
    write(shell.root / "long", {"model.safetensors": safetensors(u8(**{name: noise(1, 300)}))})
    said(main, "import", shell.root / "long", "--store", shell.store)
    narrow = Console(width=width, force_terminal=True, color_system=None)
    for module in ("store", "terminal"):
        monkeypatch.setattr(f"tensor_dedup.cli.{module}.console", lambda: narrow)
    shown = said(main, "show", "long", "--store", shell.store)
    table = shown[shown.index("tensor ") :]
    cells = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    assert "".join(cells) == name
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("No room for: codec" in shown) == (width < 120)


def test_what_stays_in_containers_of_others_is_said(shell: Shell) -> None:
    here = ("--store", shell.store)
    small = u8(a=noise(1, 4 * KIB), b=noise(2, 50))
    write(shell.root / "both", {"model.safetensors": safetensors(small)})
    write(shell.root / "one", {"model.safetensors": safetensors({"a": small["b"]})})
    for name in ("both", "one"):
        said(main, "import", shell.root / name, *here)
    text = said(main, "delete", "both", "--yes", *here)
    assert "; 4.1 KiB that nobody uses lie in files that others need" in text
    assert "4.1 KiB in containers" in said(main, "stats", *here)


def test_a_name_that_is_not_there_is_said_with_the_nearest(shell: Shell) -> None:
    said(main, "import", shell.root / "m", "--name", "org/base", "--store", shell.store)
    for verb in ("show org/bse", "delete org/bse --yes", "delete org/bse", "export orgbase x"):
        arguments = verb.split()
        done = CliRunner().invoke(main, [*arguments, "--store", str(shell.store)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"no checkpoint {arguments[1]!r}, perhaps 'org/base'; see" in done.stderr


@pytest.mark.parametrize("verb", [["import", "m"], ["export", "m", "out"], ["verify", "--full"]])
def test_an_interrupted_verb_ends_with_130_and_leaves_nothing(
    shell: Shell, verb: list[str]
) -> None:
    here = ("--store", shell.store)
    said(main, "import", shell.root / "m", *here)
    if verb[0] == "import":
        verb = [*verb, "--name", "again"]
    command = [str(COMMAND), *verb, "--store", str(shell.store)]
    with StoreLayout(shell.store).lock.open("rb") as sweep:
        fcntl.flock(sweep, fcntl.LOCK_EX)  # as a gc that takes its time
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=shell.root
        )
        with process:
            managers.until(lambda: has_open(process.pid, StoreLayout(shell.store).lock))
            process.send_signal(signal.SIGINT)
            shown, errors = process.communicate(timeout=managers.PATIENCE_S)
    assert (process.returncode, shown, errors) == (130, "", "interrupted\n")
    assert not (shell.root / "out").exists()
    listed = json.loads(said(main, "list", "--json", *here))["checkpoints"]
    assert [each["name"] for each in listed] == ["m"]


def has_open(pid: int, path: Path) -> bool:
    """Does a process have this file open?"""
    with contextlib.suppress(OSError):
        return path in {link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()}
    return False


def test_damage_is_status_1_until_it_is_repaired(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    (path,) = shell.store.glob("containers/*/*.slab")
    data = bytearray(path.read_bytes())
    data[77] ^= 1
    path.write_bytes(data)
    assert shell.document("verify")["fine"]
    assert "only bookkeeping was checked: --sample P and --full" in shell.run("verify").stdout
    found = shell.document("verify", "--full", status=1)
    [fault] = found["faults"]
    assert fault["kind"] == "tensor"
    step = "run `tensor-dedup repair --from PATH` with a path that holds them"
    assert fault["what"].endswith(f"; {step}")
    [again] = shell.document("verify", status=1)["faults"]
    assert again["kind"] == "lost"
    assert again["what"].endswith(f"; {step}")
    assert shell.run("export", "m", shell.root / "out").returncode == 1
    assert shell.document("repair", status=1)["missing"]
    assert shell.run("repair").stdout.startswith("nothing was restored\nmissing: ")
    assert "restored: 1 piece (" in shell.run("repair", "--from", shell.root / "m").stdout
    assert shell.document("repair")["pieces"] == 0
    assert shell.document("verify", "--full")["fine"]


def test_each_fault_is_a_sentence_with_the_next_step(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    (path,) = shell.store.glob("containers/*/*.slab")
    path.write_bytes(bytes(path.stat().st_size))
    foreign = shell.store / "containers" / "ab" / "notes.txt"
    write(foreign.parent, {foreign.name: b"mine"})
    *faults, _, last = shell.run("verify", "--full").stdout.splitlines()
    repair = f"run `tensor-dedup repair --from PATH --store {shell.store}`"
    assert faults[:2] == [
        f"{foreign}: nothing in a store has such a name; move it out of the store",
        f"{path}: its last bytes do not lead to its table; {repair}",
    ]
    assert faults[2:]
    for line in faults[2:]:
        assert line.startswith(f"{shell.store}: ")
        assert line.endswith(f"are in no container; {repair} with a path that holds them")
    assert last.startswith(f"{len(faults)} faults (full: ")


def test_weights_are_indexed_where_they_are(shell: Shell) -> None:
    imported = shell.document("import", shell.root / "m", "--external")
    assert imported["external_bytes"] > 90 * KIB
    assert imported["stored_bytes"] < 20 * KIB
    told = shell.run("import", shell.root / "m", "--external", "--name", "told").stdout
    outside = human(imported["external_bytes"])
    assert f"\nin place      {outside} of weights stay where they are\nin the store  " in told
    assert "new " not in told
    shell.run("export", "m", shell.root / "out")
    assert content(shell.root / "out") == content(shell.root / "m")
    (shell.root / "m" / "model.safetensors").write_bytes(b"something else")
    assert shell.run("export", "m", shell.root / "again").returncode == 1
    [fault, *_] = shell.document("verify", status=1)["faults"]
    assert fault["path"] == str(shell.root / "m" / "model.safetensors")
    assert "--external --replace" in fault["what"]


def test_a_hub_cache_is_indexed_in_place(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shell.root / "hub"
    repo = cache / "models--org--name"
    blob = write(repo / "blobs", {"f00": (shell.root / "m" / "model.safetensors").read_bytes()})
    for revision in ("abc", "def"):
        snapshot = write(repo / "snapshots" / revision, {"config.json": revision.encode()})
        (snapshot / "model.safetensors").symlink_to(blob / "f00")
    write(cache / "models--org--old" / "snapshots" / "abc", {"pytorch_model.h5": b"weights"})
    bad = write(cache / "models--org--bad" / "snapshots" / "abc", {"model.safetensors": b"no"})
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    dry = shell.run("import", "--hub-cache", "--dry-run", "--json")
    assert not shell.store.exists()
    assert json.loads(dry.stdout)["twice_bytes"] is None
    assert "twice on disk" not in shell.run("import", "--hub-cache", "--dry-run").stdout
    run = shell.run("import", "--hub-cache", "--json")
    document = json.loads(run.stdout)
    planned = json.loads(dry.stdout)
    for key in ("left_out", "failed"):
        assert planned[key] == document[key]
    for done, was in zip(document["imported"], planned["imported"], strict=True):
        assert (was["name"], was["external_bytes"]) == (done["name"], done["external_bytes"])
    assert run.returncode == 1
    assert "org/bad@abc" in run.stderr
    assert [result["name"] for result in document["imported"]] == ["org/name@abc", "org/name@def"]
    assert list(document["failed"]) == ["org/bad@abc"]
    assert list(document["left_out"]) == ["org/old@abc"]
    assert size_on_disk(shell.store / "containers") < 30 * KIB
    (bad / "model.safetensors").unlink()
    planned = shell.document("import", "--hub-cache", "--dry-run")
    again = shell.document("import", "--hub-cache")
    assert planned["twice_bytes"] == again["twice_bytes"] > 0
    assert again["imported"] == []
    assert "it is in the store already" in again["left_out"]["org/name@abc"]
    shell.run("export", "org/name@def", shell.root / "out")
    assert content(shell.root / "out")["config.json"] == b"def"
    assert content(shell.root / "out")["model.safetensors"] == (blob / "f00").read_bytes()


def test_a_name_that_is_not_the_folder_s_is_said_with_the_option_for_another(shell: Shell) -> None:
    here = ("--store", shell.store)
    (shell.root / "m").rename(shell.root / "模型甲")
    told = said(main, "import", shell.root / "模型甲", *here)
    name = told.partition(":")[0]
    assert f"'模型甲' cannot be the name of a checkpoint, so it is {name}; --name gives" in told
    assert json.loads(said(main, "import", shell.root / "模型甲", "--json", *here))["name"] == name
    assert "--name" not in said(main, "import", shell.root / "模型甲", "--name", "other", *here)
    assert [each["name"] for each in shell.document("list")["checkpoints"]] == [name, "other"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "m", "--compress", "most"], "--compress"),
        (["import", "m", "--base", "x"], "give both"),
        (["import", "m", "--external", "--compress", "auto"], "leave them in place"),
        (["import", "m", "--hub-cache"], "no PATH, no --name"),
        (["import", "--hub-cache"], "set HF_HUB_CACHE"),
        (["import"], "Missing argument 'PATH'"),
        (["verify", "--full", "--sample", "5"], "exclude each other"),
        (["verify", "--sample", "500"], "--sample"),
        (["gc", "--grace", "-1"], "--grace"),
    ],
)
def test_wrong_use_is_status_2(shell: Shell, arguments: list[str], said: str) -> None:
    result = shell.run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert not shell.store.exists()


def test_a_path_that_leads_nowhere_is_wrong_use(shell: Shell) -> None:
    result = shell.run("import", "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert "nowhere: no such file or folder" in result.stderr


def test_where_nothing_was_imported_yet_is_said(shell: Shell) -> None:
    result = shell.run("export", "m", "out")
    assert (result.returncode, result.stdout) == (2, "")
    makes = f"`tensor-dedup import --store {shell.store}` makes one; to use another, name it"
    assert f"there is no store yet; {makes}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    for verb in ("list", "stats", "gc", "du"):
        assert said(main, verb, "--store", shell.store).startswith(f"no store yet at {shell.store}")
        json.loads(said(main, verb, "--json", "--store", shell.store))
    assert not shell.store.exists()


def test_a_path_through_a_file_is_wrong_use(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    shell.store = shell.root / "m" / "config.json" / "x"
    result = shell.run("import", shell.root / "m")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{shell.store}: Not a directory; a part of this path is a file: name" in result.stderr
    for option in ("--html", "--write-markers"):
        below = shell.root / "m" / "config.json" / "x.html"
        result = shell.run("analyze", shell.root / "m", shell.root / "m", option, below)
        assert (result.returncode, result.stdout) == (2, "")
        assert "or a part of this path is a file; name" in result.stderr


def test_a_damaged_marker_is_mended(shell: Shell) -> None:
    shell.document("import", shell.root / "m")
    marker = shell.store / "FORMAT"
    marker.write_bytes(marker.read_bytes().replace(b"version 1", b"version 3"))
    assert "repair" in shell.run("list").stderr
    assert shell.document("repair")["whole"]
    assert shell.document("list")["checkpoints"]


def test_a_damaged_manifest_hides_no_other_checkpoint(shell: Shell) -> None:
    for name in ("one", "two"):
        shell.document("import", shell.root / "m", "--name", name)
    manifest = shell.document("show", "one")["manifest"]
    assert shell.document("show", "two")["manifest"] == manifest
    reference = shell.store / "refs" / "two"
    reference.write_bytes(reference.read_bytes().replace(b"two", b"owt"))
    result = shell.run("list", "--json")
    document = json.loads(result.stdout)
    assert (result.returncode, [each["name"] for each in document["checkpoints"]]) == (1, ["one"])
    assert [each["name"] for each in document["damaged"]] == ["two"]
    assert "repair" in document["damaged"][0]["what"]
    text = shell.run("list")
    assert text.returncode == 1
    assert "two cannot be read: " in text.stdout
    assert "one" in text.stdout.split("two")[0]
