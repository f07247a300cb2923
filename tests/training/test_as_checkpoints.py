"""A step is a checkpoint like any other: for every verb, and for engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import load_file

from store_runs.stores import Model, assert_same, content, handle, network, shares, train
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.loader.checkpoint_io.stub_folder import check_out
from tensor_dedup.store import LocalStore
from tensor_dedup.store.format.manifests import STATE, WEIGHTS
from tensor_dedup.training import CheckpointStore
from tensor_dedup.training.state import NamedValue


def model() -> dict[str, Any]:
    """Weights of several widths, some of a type that numpy lacks, and state of the training."""
    found: dict[str, Any] = dict(network(1, layers=2))
    found["half"] = np.arange(7, dtype=np.float16)
    found["bf16"] = NamedValue("bf16", "BF16", (2, 2), b"\x01\x3f\x02\x3f\x03\x3f\x04\x3f")
    found["größe"] = np.array([1, 2], np.int64)
    found["#skeleton"] = np.frombuffer(b'{"a": 1}', np.uint8)
    found["#complex"] = NamedValue("#complex", "C128", (1,), bytes(16))
    return found


def saved(root: Path) -> LocalStore:
    run, state = handle(root, config={"config.json": "{}"}), model()
    run.save(state, 1)
    state["layer0.bias"] = state["layer0.bias"] + 1
    run.save(state, 2)
    assert shares(run)
    return run.store


def verb(store: LocalStore, *arguments: str) -> dict[str, Any]:
    command = [*arguments, "--json", "--store", str(store.path)]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_an_export_is_what_every_reader_of_safetensors_reads(tmp_path: Path) -> None:
    store, expected = saved(tmp_path / "store"), model()
    store.export("run@1", tmp_path / "out")
    assert set(content(tmp_path / "out")) == {"config.json", WEIGHTS, STATE}
    with safe_open(tmp_path / "out" / WEIGHTS, "np") as file:
        names = set(file.keys())
        assert names == {name for name in expected if not name.startswith("#")}
        found = {name: file.get_tensor(name) for name in sorted(names - {"bf16"})}
    weights: Model = {name: expected[name] for name in sorted(names - {"bf16"})}
    assert_same(found, weights)
    state = load_file(tmp_path / "out" / STATE)
    assert state["#skeleton"].tobytes() == b'{"a": 1}'
    assert state["#complex"].tobytes() == bytes(16)
    opened = open_checkpoint(tmp_path / "out")
    assert opened.tensor_count == len(expected)


def test_exports_are_the_same_every_time_and_share_on_import(tmp_path: Path) -> None:
    store = saved(tmp_path / "store")
    for name in ("one", "two"):
        store.export("run@1", tmp_path / name)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    before = store.stats().unique_pieces
    store.import_(tmp_path / "one", "copy")
    # Nothing but the two headers is new, and the type that safetensors lacks is other bytes.
    assert store.stats().unique_pieces == before + 2
    assert store.verify(full=True).fine


def test_wide_elements_lie_at_multiples_of_their_size(tmp_path: Path) -> None:
    saved(tmp_path / "store").export("run@1", tmp_path / "out")
    for file in open_checkpoint(tmp_path / "out").files:
        for tensor in file.header.tensors:
            width = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(tensor.dtype, 1)
            assert tensor.start % width == 0


def test_the_verbs_of_the_store_know_steps(tmp_path: Path) -> None:
    store = saved(tmp_path / "store")
    assert [each["name"] for each in verb(store, "list")["checkpoints"]] == ["run@1", "run@2"]
    shown = verb(store, "show", "run@2")
    assert [tensor["name"] for tensor in shown["tensors"]] == list(model())
    assert [file["path"] for file in shown["files"]] == ["config.json", WEIGHTS, STATE]
    analyzed = verb(store, "analyze", "store://run@1", "store://run@2")
    assert analyzed["pairs"][0]["shared_tensors"] == len(model()) - 1
    verb(store, "delete", "run@1", "--yes")
    verb(store, "gc", "--grace", "0", "--yes")
    assert [each["name"] for each in verb(store, "list")["checkpoints"]] == ["run@2"]
    assert verb(store, "verify", "--full")["fine"]
    state = model()
    state["layer0.bias"] = state["layer0.bias"] + 1
    found = handle(tmp_path / "store").load(2)
    assert bytes(found.pop("bf16").data) == bytes(state.pop("bf16").data)
    assert bytes(found.pop("#complex").data) == bytes(state.pop("#complex").data)
    assert_same(found, state)


def test_an_engine_is_shown_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_DEDUP_CACHE", str(tmp_path / "cache"))
    store = saved(tmp_path / "store")
    found = check_out(store, "store://run@2")
    assert found.weights == (WEIGHTS,)
    assert (Path(found.folder) / "config.json").read_bytes() == b"{}"
    header = (Path(found.folder) / WEIGHTS).read_bytes()
    store.export("run@2", tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes().startswith(header)


def test_damage_to_a_step_is_found_and_mended(tmp_path: Path) -> None:
    run, state = handle(tmp_path / "store", compress=None), network(1)
    run.save(state, 0)
    train(state, 1, "layer0.bias")
    run.save(state, 1)
    assert shares(run)
    run.store.export("run@1", tmp_path / "out")
    for path in (tmp_path / "store" / "containers").rglob("*.slab"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    assert not run.store.verify(full=True).fine
    assert run.store.repair([tmp_path / "out"]).whole
    assert_same(run.load(1), state)
    run.save(state, 2)
    assert_same(run.load(2), state)


def test_a_handle_does_not_rely_on_what_is_known_to_be_damaged(tmp_path: Path) -> None:
    run, state = handle(tmp_path / "store", compress=None), network(1)
    run.save(state, 0)
    for path in (tmp_path / "store" / "containers").rglob("*.slab"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    assert not handle(tmp_path / "store").store.verify(full=True).fine
    assert run.save(state, 1).new_tensors == 1
    assert_same(run.load(1), state)
    assert_same(run.load(0), state)
    assert run.save(state, 2).new_tensors == 0
    assert shares(run)


def test_an_engine_gets_the_model_and_not_the_optimizer(tmp_path: Path) -> None:
    state = {f"model.{name}": array for name, array in network(1).items()}
    state |= {"optimizer.moment": np.ones(5), "modelling": np.ones(2)}
    run = handle(tmp_path / "store", weights="model")
    run.save(state, 0)
    run.save(state, 1)
    assert shares(run)
    run.store.export("run@1", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / WEIGHTS), network(1))
    assert set(load_file(tmp_path / "out" / STATE)) == {"optimizer.moment", "modelling"}
    assert_same(run.load(1), state)


# --- kept steps


def marked(root: Path) -> Store:
    """A store with four steps of ten tensors, two of them kept."""
    run, state = handle(root), network(1, layers=5)
    for step in range(4):
        train(state, step, "layer0.bias")
        run.save(state, step)
    for step in (1, 3):
        run.keep(step)
    assert len(state) == 10
    assert {file.name for file in (root / "refs").iterdir()} == {
        *(f"run@{step}" for step in range(4)),
        *("run@1@keep", "run@3@keep"),
    }
    return Store.open(root)


def test_a_kept_step_is_one_checkpoint_to_every_reader(tmp_path: Path) -> None:
    store, url = marked(tmp_path / "store"), str(tmp_path / "remote")
    names = [f"run@{step}" for step in range(4)]
    sizes = {each.name: each.nbytes for each in store.list()}
    assert [*sizes] == store.names() == names
    assert (store.stats().checkpoints, store.stats().tensors) == (4, 40)
    assert verb(store, "stats")["logical_bytes"] == sum(sizes.values())
    listed = verb(store, "list")
    assert [each["name"] for each in listed["checkpoints"]] == names
    assert [(each["name"], each["steps"]) for each in listed["usage"]] == [("run", 4)]
    assert verb(store, "verify")["checkpoints"] == 4
    assert [each["name"] for each in verb(store, "du")["checkpoints"]] == ["run"]
    with store.checkpoint("run@1") as checkpoint:
        digest = checkpoint["layer1.weight"].digest
    assert [each["checkpoint"] for each in verb(store, "find", digest)["tensors"]] == names
    pushed = verb(store, "push", "run", f"file://{url}")
    assert pushed["names"] == names
    for sub in ("list", "du"):
        found = json.loads(CliRunner().invoke(main, ["remote", sub, url, "--json"]).stdout)
        assert [each["name"] for each in found["checkpoints"]] == names
    assert json.loads(CliRunner().invoke(main, ["remote", "verify", url, "--json"]).stdout)[
        "checkpoints"
    ] == len(names)
    other = Store.open(tmp_path / "other")
    assert verb(other, "pull", url, "run")["names"] == names
    assert CheckpointStore(other, "run").kept() == {1, 3}


def test_a_kept_step_takes_no_more_than_its_mark(tmp_path: Path) -> None:
    store = marked(tmp_path / "store")
    [step] = (each for each in store.usage("run@1").checkpoints if each.name == "run@1")
    freed = store.usage().checkpoints[0].reclaimable_bytes
    assert step.reclaimable_bytes is not None
    assert step.reclaimable_bytes > 0  # once it is kept no more
    assert step.nbytes == store.steps("run")[1].nbytes
    assert freed == store.run_cost("run").reclaimable_bytes


@pytest.mark.parametrize(
    "command",
    [
        *("show {}", "export {} {out}", "delete {} --yes", "rename {} new", "cat {} layer0.bias"),
        *("push {} {out}", "remote show {url} {}", "remote delete {url} {} --yes", "du {}"),
        *("diff store://{} run@1", "pull {url} {}", "analyze store://{}"),
    ],
)
def test_a_mark_is_the_name_of_no_checkpoint(tmp_path: Path, command: str) -> None:
    store, url = marked(tmp_path / "store"), f"file://{tmp_path}/remote"
    store.push(url, "run")
    words = command.format("run@1@keep", out=tmp_path / "out", url=url).split()
    where = [] if words[0] == "remote" else ["--store", str(store.path)]
    result = CliRunner().invoke(main, [*words, *where])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'run@1@keep'" in result.stderr
    assert "it is what keeps the step 'run@1'; name that" in result.stderr
    assert CheckpointStore(store, "run").kept() == {1, 3}
    assert CheckpointStore(Store.open(tmp_path / "other"), "run").kept() == set()
    other = Store.open(tmp_path / "other")
    other.pull(url, "run")
    assert CheckpointStore(other, "run").kept() == {1, 3}


def test_no_mark_is_completed_or_suggested(tmp_path: Path) -> None:
    store = marked(tmp_path / "store")
    ask = ShellComplete(main, {}, "tensor-dedup", "_X")
    where = ["--store", str(store.path)]
    for words in (["show"], ["export"], ["delete"], ["du"], ["push"], ["runs", "diff"]):
        found = {each.value for each in ask.get_completions([*words, *where], "run@")}
        assert found == {f"run@{step}" for step in range(4)}
    result = CliRunner().invoke(main, ["show", "run@1@kee", *where])
    assert "perhaps 'run@1';" in result.stderr


def test_what_a_mark_leads_to_stays(tmp_path: Path) -> None:
    """The step's own reference is gone, as another program may leave it: the mark keeps it all."""
    store = marked(tmp_path / "store")
    before = content(store.path / "containers")
    (store.path / "refs" / "run@1").unlink()
    assert store.names() == ["run@0", "run@2", "run@3"]
    store.gc(0)
    assert content(store.path / "containers") == before
    where = ["--store", str(store.path)]
    result = CliRunner().invoke(main, ["runs", "keep", "run", "1", "--remove", *where])
    assert (result.exit_code, result.stderr) == (0, "")
    store.gc(0)
    assert content(store.path / "containers") != before
    assert store.verify(full=True).fine


def test_a_damaged_mark_is_said_of_its_step(tmp_path: Path) -> None:
    store = marked(tmp_path / "store")
    (store.path / "refs" / "run@1@keep").write_bytes(b"?")
    assert store.stats().checkpoints == 4
    [fault] = store.verify().faults
    assert (fault.kind, fault.affected) == ("reference", ("run@1",))
    with pytest.raises(StoreError, match=r"broken: run@1$|broken: run@1;"):
        store.gc(0)
