"""The verbs of training checkpoints, as a user runs them."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner, Result

from project import package_source
from store_runs.stores import handle, network, size_on_disk, train
from tensor_dedup import Store
from tensor_dedup.cli import main
from tensor_dedup.cli.tensorcas import main as tensorcas
from tensor_dedup.remote import Remote
from tensor_dedup.text_table import human
from tensor_dedup.training import CheckpointStore


class Runs:
    """A store with two runs, and its verbs."""

    def __init__(self, root: Path) -> None:
        self.store = root / "store"
        for name, steps in (("a/one", 4), ("two", 1)):
            run, model = handle(self.store, name), network(1)
            for step in range(steps):
                train(model, step, "layer0.bias")
                run.save(model, step * 10, {"loss": 1.0 / (step + 1), "bad": float("nan")})
            run.close()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["runs", *arguments, "--store", str(self.store)])

    def text(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    def document(self, *arguments: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text(*arguments, "--json"))
        return loaded


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def at_url(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["runs", "show", *arguments])


def test_a_run_at_a_url_is_shown_with_what_each_step_costs(runs: Runs) -> None:
    url = (runs.store.parent / "remote").as_uri()
    Store.open(runs.store).push(url, "a/one")
    document = json.loads(at_url(url, "--run", "a/one", "--json").stdout)
    assert (document["url"], document["run"], document["damaged"]) == (url, "a/one", [])
    here = runs.document("show", "a/one")["steps"]
    assert [{key: each[key] for key in here[0]} for each in document["steps"]] == here
    assert {each["kind"] for each in document["steps"]} == {"whole"}
    assert [each["direct_bytes"] for each in document["steps"]] == [None] * 4
    text = at_url(url, "--run", "a/one").stdout
    assert {"stored", "direct", "anchor", "loss", "itself"} <= {*re.findall(r"\w+", text)}
    (runs.store.parent / "remote" / "refs" / "a%2Fone@20").write_text("?")
    damaged = at_url(url, "--run", "a/one", "--json")
    assert damaged.exit_code == 1
    found = json.loads(damaged.stdout)
    assert [each["step"] for each in found["steps"]] == [0, 10, 30]
    assert [each["name"] for each in found["damaged"]] == ["a/one@20"]
    assert "a/one@20 cannot be read: " in at_url(url, "--run", "a/one").stdout


def test_where_a_run_at_a_url_cannot_be_shown(runs: Runs, tmp_path: Path) -> None:
    url = (runs.store.parent / "remote").as_uri()
    Store.open(runs.store).push(url, "two")
    (tmp_path / "other").mkdir()
    for arguments, status, said in (
        ((url,), 2, f"no step of a run 'remote'; see `tensor-dedup remote list {url}`"),
        ((url, "--run", "two", "--store", "store"), 2, "give one of them"),
        (("two", "--run", "two"), 2, "give a URL in place of RUN"),
        ((runs.store.as_uri(),), 2, "is a store"),
        (((tmp_path / "other").as_uri(),), 3, "there is no remote"),
        (("oci://host/team:v1",), 2, "only push and pull take oci:// URLs"),
    ):
        result = at_url(*arguments)
        assert (result.exit_code, result.stdout) == (status, "")
        assert said in result.stderr


def test_runs_and_steps_are_listed(kept: Runs) -> None:
    found = kept.document("list")["runs"]
    assert [(each["run"], each["steps"]) for each in found] == [
        ("a/one", [0, 10, 20, 30]),
        ("two", [0]),
    ]
    assert "a/one" in kept.text("list")
    shown = kept.document("show", "a/one")["steps"]
    assert [step["metrics"]["loss"] for step in shown] == [1.0, 0.5, 1 / 3, 0.25]
    assert shown[0]["metrics"]["bad"] is None
    table = kept.text("show", "a/one")
    assert re.search(r" loss .*\n.*\n", table)
    assert re.search(r"^│ +30 │.* 0\.25 │", table, re.MULTILINE)


def test_show_says_what_each_step_cost(kept: Runs) -> None:
    first, *others = kept.document("show", "a/one")["steps"]
    assert first["stored_bytes"] > 0.8 * first["nbytes"]
    assert others
    for each in others:  # of which each has changed one small tensor
        assert each["new_tensors"] >= 1
        assert 0 < each["stored_bytes"] < 0.1 * each["nbytes"]
    table = kept.text("show", "a/one")
    assert " stored " in table
    assert human(others[-1]["stored_bytes"]) in table


def test_a_run_is_drained_to_another_store(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    assert runs.document("drain", "a/one", str(folder))["steps"] == [0, 10, 20, 30]
    assert "4 steps of a/one" in runs.text("drain", "a/one", str(folder))
    second, first = Store.open(folder, create=False), Store.open(runs.store)
    assert second.runs() == ["a/one"]
    assert second.steps("a/one")[0].manifest == first.steps("a/one")[0].manifest
    assert len(first.steps("a/one")) == 4
    assert runs.run("drain", "none", str(folder)).exit_code == 2
    itself = runs.run("drain", "a/one", str(runs.store))
    assert itself.exit_code == 2
    assert itself.stderr.endswith(
        "that is the store itself; drain to a folder or a remote of its own\n"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    full = runs.run("drain", "a/one", str(tmp_path / "full"))
    assert full.exit_code == 2
    assert "holds other files, and no store; name a folder that is new or empty" in full.stderr
    assert runs.run("drain", "a/one", str(tmp_path / "full" / "note.txt")).exit_code == 2
    remote = (tmp_path / "remote").as_uri()
    assert runs.document("drain", "a/one", remote)["steps"] == [0, 10, 20, 30]
    assert Remote.open(remote).names() == [f"a/one@{step}" for step in (0, 10, 20, 30)]
    assert runs.run("drain", "a/one", "ftp://host/x").exit_code == 2


def test_a_damaged_step_hides_no_other(runs: Runs) -> None:
    for name in ("two@0", "a%2Fone@10"):
        reference = runs.store / "refs" / name
        reference.write_bytes(reference.read_bytes()[:-9])
    result = runs.run("list", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(e["run"], e["steps"]) for e in document["runs"]] == [("a/one", [0, 20, 30])]
    assert [each["name"] for each in document["damaged"]] == ["a/one@10", "two@0"]
    text = runs.run("list")
    assert text.exit_code == 1
    assert "two@0 cannot be read: " in text.stdout


def test_the_latest_step_is_the_one_that_was_saved_last(runs: Runs) -> None:
    run = handle(runs.store, "a/one")
    os.utime(runs.store / "refs" / "a%2Fone@30", (3000, 3000))
    run.save(network(1), 5)
    os.utime(runs.store / "refs" / "a%2Fone@5", (2000, 2000))  # the clock went back
    assert runs.document("list")["runs"][0]["steps"] == [0, 5, 10, 20, 30]
    [line] = [line for line in runs.text("list").splitlines() if "a/one" in line]
    assert [word for word in line.split() if word.isdecimal()] == ["5", "0", "5"]


def test_an_import_takes_no_step_s_name(runs: Runs, tmp_path: Path) -> None:
    store = Store.open(runs.store)
    store.export("two@0", tmp_path / "out")
    for name in ("two@0", "two@0@keep"):
        command = ["import", str(tmp_path / "out"), "--name", name, "--replace"]
        result = CliRunner().invoke(main, [*command, "--store", str(runs.store)])
        assert result.exit_code == 2
        assert f"{name!r} is " in result.stderr
        assert "step 0 of the run 'two'" in result.stderr
    assert [step.step for step in store.steps("two")] == [0]


def test_stats_of_one_run_and_of_all(kept: Runs) -> None:
    one, all_ = kept.document("stats", "a/one"), kept.document("stats")
    assert (one["run_id"], one["checkpoints"], one["total_chunks"]) == ("a/one", 4, 24)
    assert one["unique_chunks"] == 5 + 4
    assert one["dedup_ratio"] == round(9 / 24, 4)
    # The first step of both is the same.
    assert (all_["run_id"], all_["total_chunks"], all_["unique_chunks"]) == (None, 30, 9)
    assert one["logical_bytes"] == sum(
        step["nbytes"] for step in kept.document("show", "a/one")["steps"]
    )
    lines = dict(line.split(maxsplit=1) for line in kept.text("stats", "a/one").splitlines())
    size, disk = human(one["logical_bytes"] // 4), human(one["disk_bytes"])
    saved = round(100 * (1 - one["disk_bytes"] / one["logical_bytes"]))
    whole = human(one["logical_bytes"])
    assert lines["checkpoints"] == f"4 x {size} = {whole} kept in {disk} ({saved} % saved)"


def test_a_run_of_nothing_shared_takes_no_less_than_it_is(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "run", compress=None) as run:
        for step in range(2):
            run.save({"w": numpy.full(9000 + 900 * step, step)}, step)
    arguments = ["runs", "stats", "run", "--store", str(tmp_path)]
    assert ", with what differences are from" not in CliRunner().invoke(main, arguments).stdout
    assert "2 x (" in CliRunner().invoke(main, arguments).stdout
    empty = CliRunner().invoke(
        main, ["runs", "stats", "--store", str(Store.open(tmp_path / "x").path)]
    )
    assert (empty.exit_code, "checkpoints   none" in empty.stdout) == (0, True)


def test_one_number_for_the_disk_everywhere(kept: Runs) -> None:
    one = kept.document("stats", "a/one")
    assert one["disk_bytes"] == one["unique_bytes"] + one["shared_bytes"]
    stats = json.loads(
        CliRunner().invoke(main, ["stats", "--json", "--store", str(kept.store)]).stdout
    )
    assert one["store_bytes"] == stats["disk_bytes"] == size_on_disk(kept.store)
    # Of all runs nothing is shared with others, and bases count: it is what the pieces take.
    everything = kept.document("stats")
    stored = sum(codec["stored_bytes"] for codec in stats["codecs"].values())
    assert (everything["shared_bytes"], everything["disk_bytes"]) == (0, stored)


def test_stats_of_each_tensor(kept: Runs) -> None:
    plain, found = kept.document("stats", "a/one"), kept.document("stats", "a/one", "--tensors")
    assert found == plain | {name: found[name] for name in ("tensors", "identical_percent")}
    tensors = {each["name"]: each for each in found["tensors"]}
    assert tensors["layer0.bias"] == {
        "name": "layer0.bias",
        "identical": 0,
        "changed": 3,
        "identical_percent": 0.0,
    }
    assert tensors["layer0.weight"]["identical_percent"] == 100.0
    assert found["identical_percent"] == round(100 * 15 / 18, 1)
    rows = [
        re.findall(r"[^\s┃│|]+", line)
        for line in kept.text("stats", "a/one", "--tensors").splitlines()
    ]
    assert ["layer0.bias", "0", "3", "0.0"] in rows
    assert ["all", "tensors,", "all", "steps", "15", "3", "83.3"] in rows
    alone = kept.document("stats", "two", "--tensors")
    assert {each["identical_percent"] for each in alone["tensors"]} == {None}
    result = kept.run("stats", "--tensors")
    assert result.exit_code == 2
    assert "say which run's tensors" in result.stderr


def test_stats_say_what_a_run_costs(runs: Runs) -> None:
    one, two, all_ = (runs.document("stats", *name) for name in (["a/one"], ["two"], []))
    # The first step of both is the same.
    assert one["shared_bytes"] == two["shared_bytes"] == two["total_bytes"] > 0
    assert 0 < two["reclaimable_bytes"] < one["reclaimable_bytes"] < all_["reclaimable_bytes"]
    assert all_["shared_bytes"] == 0
    assert "if deleted    gc gives back" in runs.text("stats", "two")
    for path in (runs.store / "containers").rglob("*.pack"):
        path.unlink()
    lost, told = (runs.run("stats", "two", *more) for more in (["--json"], []))
    assert (lost.exit_code, told.exit_code) == (1, 1)
    assert json.loads(lost.stdout)["reclaimable_bytes"] is None
    assert "on disk       not known: " in told.stdout


def test_the_best_step(kept: Runs) -> None:
    assert kept.document("best", "a/one", "loss")["step"] == 30
    assert kept.document("best", "a/one", "loss", "--mode", "max")["value"] == 1.0
    assert kept.text("best", "a/one", "loss") == "a/one@30: loss 0.25, the least\n"
    unknown = kept.run("best", "a/one", "lost")
    assert unknown.exit_code == 2
    assert "no step has the metric 'lost', perhaps 'loss'; they have bad, loss" in unknown.stderr


def test_the_direction_of_best_is_known_or_asked_for(tmp_path: Path) -> None:
    for name, rule in (("plain", None), ("ruled", ("speed", 9, "max"))):
        with CheckpointStore(tmp_path, name, keep_best=rule) as run:  # type: ignore[arg-type]
            for step, value in enumerate([1.0, 3.0, 2.0]):
                run.save(network(step), step, {"speed": value, "acc": value})

    def best(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["runs", "best", *arguments, "--store", str(tmp_path)])

    assert best("plain", "acc").stdout == "plain@1: acc 3, the greatest\n"
    assert json.loads(best("ruled", "speed", "--json").stdout)["step"] == 1
    asked = best("plain", "speed")
    assert (asked.exit_code, asked.stdout) == (2, "")
    assert "whether the least or the greatest 'speed' is best" in asked.stderr
    assert "--mode" in asked.stderr
    assert best("plain", "speed", "--mode", "min").stdout.startswith("plain@0: ")


def test_what_differs_between_steps(kept: Runs) -> None:
    found = kept.document("diff", "a/one@0", "a/one@30")
    assert (found["changed"], found["unchanged"]) == (["layer0.bias"], 5)
    assert found["metrics"] == {"loss": [1.0, 0.25], "bad": [None, None]}
    assert "layer0.bias" in kept.text("diff", "a/one@0", "a/one@30")
    assert "is not a training step; name one as RUN@STEP" in kept.run("diff", "a/one", "x").stderr
    for wrong in (["a/one", "two@0"], ["a/one@0", "two@7"], ["a/one@0", "three@0"]):
        assert kept.run("diff", *wrong).exit_code == 2
    hint = kept.run("diff", "a/one@0", "two@7").stderr
    assert f"see `tensor-dedup runs show two --store {kept.store}`" in hint
    for name in ("a/one@10", "store://a/one@10"):
        told = kept.run("show", name)
        assert (told.exit_code, told.stdout) == (2, "")
        shows = f"tensor-dedup show a/one@10 --store {kept.store}"
        assert f"{name!r} is a step; give its run, 'a/one'; `{shows}` shows" in told.stderr
    assert "no run 'b@10'" in kept.run("show", "b@10").stderr


def test_tensors_under_other_names_are_renamed(tmp_path: Path) -> None:
    bare = {f"{n}.{part}": numpy.full(4, n) for n in range(3) for part in ("weight", "bias")}
    with CheckpointStore(tmp_path, "run") as run:
        run.save(bare, 0)
        run.save({"model": bare | {"1.bias": numpy.ones(5)}, "more": numpy.zeros(7)}, 1)
    arguments = ["runs", "diff", "run@0", "run@1", "--store", str(tmp_path)]
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    # Weight and bias of a layer are equal: names decide which is which.
    assert found["renamed"] == {name: f"model.{name}" for name in bare if name != "1.bias"}
    assert (found["added"], found["removed"]) == (["model.1.bias", "more"], ["1.bias"])
    text = CliRunner().invoke(main, arguments).stdout
    assert "renamed       5 tensors\n  0.bias -> model.0.bias\n" in text


def test_tensors_that_differ_stand_in_their_order(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "run") as run:
        for step in (0, 1):
            weights = {f"layer.{n}": numpy.full(4, 100 * step + n) for n in (10, 9, 2)}
            run.save({**weights, "lr": step}, step)
    arguments = ["runs", "diff", "run@0", "run@1", "--store", str(tmp_path)]
    text = CliRunner().invoke(main, arguments).stdout
    assert re.findall(r"^  (\S+)$", text, re.MULTILINE) == ["layer.2", "layer.9", "layer.10"]
    assert "changed       3 tensors" in text
    assert "plain values" in text


def test_steps_are_deleted_but_for_kept_ones(runs: Runs) -> None:
    assert runs.run("delete", "a/one", "--step", "0").exit_code == 2  # nobody to ask
    # Not even the first goes where another one cannot.
    wrong = runs.run("delete", "a/one", "--step", "10", "--step", "77")
    assert wrong.exit_code == 2
    assert "no step 77; it has 4 steps, from 0 to 30; see `tensor-dedup runs sho" in wrong.stderr
    assert runs.document("delete", "a/one", "--step", "0", "--yes")["deleted"] == [0]
    handle(runs.store, "a/one").keep(20)
    kept = runs.run("delete", "a/one", "--step", "10", "--step", "20", "--yes")
    assert kept.exit_code == 2
    assert "runs keep RUN STEP --remove" in kept.stderr
    assert runs.document("delete", "a/one", "--all", "--yes")["deleted"] == [10, 30]
    found = runs.document("list")["runs"]
    assert [(each["run"], each["steps"]) for each in found] == [("a/one", [20]), ("two", [0])]
    assert runs.run("delete", "a/one", "--yes").exit_code == 2
    assert runs.run("delete", "three", "--all", "--yes").exit_code == 2
    unknown = runs.run("show", "a/ona")
    assert unknown.exit_code == 2
    assert (
        f"no run 'a/ona', perhaps 'a/one'; see `tensor-dedup runs list --store {runs.store}`"
        in (unknown.stderr)
    )


def test_steps_that_no_rule_keeps_are_pruned(runs: Runs) -> None:
    assert runs.run("keep", "a/one", "0").stdout == "a/one@0 is kept\n"
    before = Store.open(runs.store).stats().disk_bytes
    planned = runs.document("prune", "a/one", "--keep-last", "1", "--dry-run")
    assert planned == {"run": "a/one", "done": False, "deleted": [10, 20], "kept": [0, 30]}
    assert "2 steps (10, 20) would be deleted" in runs.text(
        "prune", "a/one", "--keep-last", "1", "--dry-run"
    )
    asked = runs.run("prune", "a/one", "--keep-last", "1")
    assert asked.exit_code == 2  # nobody to ask
    assert "Delete 2 steps (10, 20) of a/one" in asked.stderr
    assert Store.open(runs.store).stats().disk_bytes == before
    done = runs.document("prune", "a/one", "--keep-last", "1", "--keep-every", "20", "--yes")
    assert (done["done"], done["deleted"], done["kept"]) == (True, [10], [0, 20, 30])
    assert CheckpointStore(runs.store, "a/one").steps() == [0, 20, 30]
    assert "the rules keep every step" in runs.text("prune", "a/one", "--keep-last", "9")


def test_pruning_goes_by_the_best_of_a_metric(runs: Runs) -> None:
    def planned(rule: str) -> Any:
        return runs.document("prune", "a/one", "--keep-best", rule, "--dry-run")["kept"]

    assert planned("loss") == planned("loss:min:1") == [30]
    assert planned("loss:2") == [20, 30]
    assert planned("loss:max") == [0, 30]  # the latest stays
    with handle(runs.store, "three") as run:
        for step in range(3):
            run.save(network(step), step, {"a:b": float(step), "speed:1": 1.0})
    for rule, kept in (("a:b:min", [0, 2]), ("speed:1:max:1", [0, 2])):
        found = runs.document("prune", "three", "--keep-best", rule, "--dry-run")
        assert found["kept"] == kept
    for wrong, told in (
        (["--keep-best", "lose"], "no step has the metric 'lose', perhaps 'loss'"),
        (["--keep-best", "loss:0"], "keep one step or more"),
        (["--keep-last", "0"], "--keep-last"),
        ([], "say what stays: --keep-last N"),
    ):
        result = runs.run("prune", "a/one", *wrong, "--yes")
        assert (result.exit_code, result.stdout) == (2, "")
        assert told in result.stderr
    unsaid = runs.run("prune", "three", "--keep-best", "a:b", "--yes")
    assert unsaid.exit_code == 2
    assert "say --keep-best a:b:min or a:b:max" in unsaid.stderr
    assert runs.run("prune", "four", "--keep-last", "1", "--yes").exit_code == 2
    assert len(Store.open(runs.store).steps("a/one")) == 4


def test_only_what_was_asked_about_is_pruned(runs: Runs) -> None:
    run = handle(runs.store, "a/one", keep_last=1)
    planned = run.prune(dry_run=True)
    assert planned == [0, 10, 20]
    handle(runs.store, "a/one").save(network(7), 40)
    handle(runs.store, "a/one").save(network(8), 10)  # saved again: now it is the latest
    assert run.prune(among=planned) == [0, 20]
    assert run.steps() == [10, 30, 40]


def test_pruning_holds_for_both_tiers(runs: Runs, tmp_path: Path) -> None:
    with handle(runs.store, "a/one", drain=tmp_path / "second", keep_fast=None) as run:
        run.drain()
    with handle(runs.store, "a/one", drain=tmp_path / "second", keep_last=2) as run:
        run.drain()
        assert run.prune(dry_run=True) == [0, 10]
        assert run.steps() == [0, 10, 20, 30]
        assert run.prune(among=[0]) == [0]
        assert run.steps() == [10, 20, 30]
    assert [step.step for step in Store.open(tmp_path / "second").steps("a/one")] == [10, 20, 30]


def test_a_step_is_kept_until_it_is_not(runs: Runs) -> None:
    assert runs.document("keep", "a/one", "10") == {"run": "a/one", "step": 10, "kept": True}
    assert CheckpointStore(runs.store, "a/one").kept() == {10}
    assert runs.text("keep", "a/one", "10", "--remove") == "a/one@10 is no longer kept\n"
    assert CheckpointStore(runs.store, "a/one").kept() == set()
    for wrong in (["a/one", "11"], ["a/one", "11", "--remove"], ["b", "1"], ["a/one", "x"]):
        assert runs.run("keep", *wrong).exit_code == 2


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("delete {} --yes", "`tensor-dedup runs delete {} --all --store {store}`"),
        ("delete store://{} --yes", "`tensor-dedup runs delete {} --all --store {store}`"),
        ("show {}", "`tensor-dedup runs show {} --store {store}`"),
        *((f"{verb} {{}} {{out}}", "") for verb in ("export", "cat")),
        *((f"{verb} {{}} two@0", "") for verb in ("diff", "analyze")),
        ("diff store://{} two@0", ""),
        ("rename {}@30 new", None),
        ("push {} oci://localhost:1/x:y", ""),
    ],
)
def test_the_name_of_a_run_is_told_from_one_that_is_not_there(
    kept: Runs, tmp_path: Path, command: str, typed: str | None
) -> None:
    words = command.format("a/one", out=tmp_path / "out").split()
    result = CliRunner().invoke(main, [*words, "--store", str(kept.store)])
    assert (result.exit_code, result.stdout) == (2, "")
    if typed is not None:
        said = "'a/one' is a training run with 4 steps, and no checkpoint; name a step, as in "
        assert f"{said}'a/one@30'" in result.stderr
        assert typed.format("a/one", store=kept.store) in result.stderr
    assert Store.open(kept.store).steps("a/one")[-1].step == 30


def test_what_is_typed_then_works(runs: Runs, tmp_path: Path) -> None:
    words = ["export", "a/one@30", str(tmp_path / "out"), "--store", str(runs.store)]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert runs.run("delete", "a/one", "--all", "--yes").exit_code == 0
    assert Store.open(runs.store).runs() == ["two"]


def test_a_deletion_says_what_it_frees_and_not_what_others_did(runs: Runs) -> None:
    store, where = Store.open(runs.store), ["--store", str(runs.store)]

    def unused() -> int:
        return sum(item.nbytes for item in store.gc(dry_run=True).trash)

    def delete(*words: str) -> tuple[dict[str, Any], int]:
        before = unused()
        result = CliRunner().invoke(main, [*words, "--yes", "--json", *where])
        assert (result.exit_code, result.stderr) == (0, "")
        return json.loads(result.stdout), unused() - before

    one, freed = delete("delete", "a/one@0")
    assert one["freed_bytes"] == freed
    two, freed = delete("delete", "two@0")
    assert two["freed_bytes"] == freed > 0
    assert two["reclaimable_bytes"] == one["freed_bytes"] + two["freed_bytes"] == unused()
    three, freed = delete("runs", "delete", "a/one", "--step", "10")
    assert three["freed_bytes"] == freed
    four, freed = delete("runs", "prune", "a/one", "--keep-last", "1")
    assert four["freed_bytes"] == freed
    dry = CliRunner().invoke(main, ["delete", "a/one@30", "--dry-run", "--json", *where])
    assert json.loads(dry.stdout)["freed_bytes"] > 0  # of a step as well
    others = human(unused())
    text = CliRunner().invoke(main, ["runs", "delete", "a/one", "--all", "--yes", *where]).stdout
    assert f"{others} more were not used before" in text


def test_runs_are_compared_side_by_side(kept: Runs) -> None:
    found = kept.document("compare", "a/one", "two")["runs"]
    one, two = found
    assert (one["run"], one["steps"], one["latest"], two["steps"]) == ("a/one", 4, 30, 1)
    assert one["metrics"]["loss"] == {"mode": "min", "best": 0.25, "step": 30, "latest": 0.25}
    assert two["metrics"]["bad"] == {"mode": None, "best": None, "step": None, "latest": None}
    stats = kept.document("stats", "a/one")
    for key in ("disk_bytes", "unique_bytes", "reclaimable_bytes", "logical_bytes"):
        assert one[key] == stats[key]
    rows = [line.split() for line in kept.text("compare", "a/one", "two").splitlines()]
    assert any(row[1:3] == ["a/one", "│"] and "4" in row for row in rows)
    assert kept.run("compare", "a/one", "three").exit_code == 2
    assert kept.run("compare").exit_code == 2


def test_a_plot_is_a_page_of_its_own(kept: Runs, tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    [found] = kept.document("plot", "a/one", "--output", str(target))["runs"]
    assert [step["new_tensors"] for step in found["steps"]] == [6, 1, 1, 1]
    # What the curve ends at is the number of `runs stats`.
    stats = kept.document("stats", "a/one")
    assert sum(step["stored_bytes"] for step in found["steps"]) == stats["disk_bytes"]
    text = target.read_text()
    assert not re.search(r"https?:|//|<script|<link|<img|@import|url\(", text)
    assert "prefers-color-scheme:dark" in text
    assert text.count("<polyline") == 3  # plain files, the store, the loss; NaN is nowhere
    assert text.count("<polygon") == 1  # the best loss is starred
    saved = round(100 * (1 - stats["disk_bytes"] / stats["logical_bytes"]))
    assert f"kept in 0.3 MiB, {saved} % saved" in text
    assert kept.run("plot", "a/one", "--output", str(tmp_path / "run.gif")).exit_code == 2
    both = tmp_path / "both.html"
    kept.text("plot", "a/one", "two", "--output", str(both))
    assert "Steps of a/one" in both.read_text()
    assert "Steps of two" in both.read_text()
    assert kept.run("plot", "a/one", "none", "--output", str(both)).exit_code == 2


def cas(runs: Runs, *arguments: str) -> Result:
    return CliRunner().invoke(tensorcas, ["--root", str(runs.store), *arguments])


def test_the_verbs_of_tensorcas(runs: Runs) -> None:
    assert cas(runs, "list").stdout == "a/one: 0, 10, 20, 30\ntwo: 0\n"
    assert cas(runs, "list", "--run", "two").stdout == "two: 0\n"
    assert "checkpoints   5" in cas(runs, "stats").stdout
    found = json.loads(cas(runs, "stats", "--run", "a/one", "--format", "json").stdout)
    assert list(found) == [
        "run_id",
        "checkpoints",
        "total_chunks",
        "unique_chunks",
        "dedup_ratio",
        "total_bytes",
    ]
    assert json.loads(cas(runs, "stats", "--run", "a/one", "--json").stdout) == found
    listed = json.loads(cas(runs, "list", "--json").stdout)
    assert listed["runs"][0] == {"run": "a/one", "steps": [0, 10, 20, 30]}
    assert cas(runs, "delete", "--run", "a/one", "--step", "10").exit_code == 2
    assert cas(runs, "delete", "--run", "a/one", "--step", "11", "--yes").exit_code == 2
    deleted = cas(runs, "delete", "--run", "a/one", "--step", "30", "--yes", "--json").stdout
    assert json.loads(deleted) == {"run": "a/one", "deleted": [30]}
    assert cas(runs, "delete", "--run", "a/one", "--step", "10", "--yes").exit_code == 0
    assert json.loads(cas(runs, "gc", "--grace", "0", "--yes", "--json").stdout)["done"]
    assert cas(runs, "list", "--run", "a/one").stdout == "a/one: 0, 20\n"
    assert Store.open(runs.store).verify(full=True).fine
    assert cas(runs, "list", "--run", "three").exit_code == 2


def test_tensorcas_is_a_command_of_its_own() -> None:
    scripts = tomllib.loads((package_source.ROOT / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    assert scripts["tensorcas"] == "tensor_dedup.cli.tensorcas:main"
