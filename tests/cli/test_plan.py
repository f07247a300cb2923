"""The command `tensor-dedup plan` as a user runs it."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from models import gallery
from processes import chromium, commands
from project import package_source
from tensor_dedup.analyze import analyze
from tensor_dedup.cli import main

ROOM = 100_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return gallery.make(tmp_path_factory.mktemp("gallery"))


@pytest.fixture
def fleet(models: list[Path], tmp_path: Path) -> Path:
    """A base twice, its fine-tunes once, by paths that begin where the file is."""
    lines = [f"room = {ROOM}"]
    for number, path in enumerate(models):
        (tmp_path / path.name).symlink_to(path)
        lines += [f"[models.model-{number}]", f'path = "{path.name}"']
    lines[3:3] = ["replicas = 2"]
    file = tmp_path / "models.toml"
    file.write_text("\n".join(lines))
    return file


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("plan", *arguments)


def planned(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_node_takes_what_analyze_counts(fleet: Path, models: list[Path]) -> None:
    found = planned("--models", fleet, "--nodes", "3", "--memory", "1GiB")
    assert found["schema"] == 1
    by_name = {f"model-{number}": path for number, path in enumerate(models)}
    for node in found["nodes"]:
        held = [by_name[each["model"]] for each in node["models"]]
        unique = analyze(held).unique_bytes if held else 0
        assert node["used_bytes"] == unique + ROOM * len(held)
    assert analyze(models).shared_bytes > 0
    assert len(found["nodes"][0]["models"]) == len(models)  # all are kin, and fit one node
    holders = [
        n["name"] for n in found["nodes"] if any(m["model"] == "model-0" for m in n["models"])
    ]
    assert len(holders) == 2


def test_people_see_where_and_why(fleet: Path) -> None:
    done = run("--models", fleet, "--nodes", "3", "--memory", "1GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "node-1: " in done.stdout
    assert re.search(r"model-1 .* are there, most with model-", done.stdout)
    assert re.search(r"\d+ models, \d+ replicas on 2 of 3 nodes: .*; without sharing ", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_plan_is_kept_and_added_to(fleet: Path, tmp_path: Path) -> None:
    before = tmp_path / "plan.json"
    before.write_text(json.dumps(planned("--models", fleet, "--nodes", "3", "--memory", "1GiB")))
    with fleet.open("a") as file:
        file.write('\n[models.another]\npath = "Qwen2-tiny"\n')
    added = planned("--models", fleet, "--from", before)
    [move] = added["moves"]
    assert (move["model"], move["source"], move["loads_bytes"]) == ("another", None, 0)
    done = run("--models", fleet, "--from", before)
    assert f"another is new: {move['target']} loads 0 B." in done.stdout
    rebalanced = planned("--models", fleet, "--from", before, "--rebalance")
    assert rebalanced["used_bytes"] <= added["used_bytes"]
    before.write_text(json.dumps(rebalanced))
    page = tmp_path / "plan.html"
    done = run("--models", fleet, "--from", before, "--rebalance", "--html", page)
    assert "There is nothing to move." in done.stdout
    assert f"Wrote {page}." in " ".join(done.stdout.split())


def test_the_same_input_gives_the_same_plan(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in ("1", "2", "3"):  # by which sets of strings are ordered
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(planned("--models", fleet, "--nodes", "6", "--memory", "700KiB"))
    assert found[0] == found[1] == found[2]
    assert sum(bool(node["models"]) for node in found[0]["nodes"]) > 2


def test_the_machines_of_a_plan_may_be_given_anew(fleet: Path, tmp_path: Path) -> None:
    before = tmp_path / "plan.json"
    before.write_text(json.dumps(planned("--models", fleet, "--nodes", "3", "--memory", "1GiB")))
    grown = planned("--models", fleet, "--from", before, "--memory", "2GiB")
    assert {node["memory_bytes"] for node in grown["nodes"]} == {2 << 30}
    assert grown["moves"] == []
    fleet.write_text("host = 1000\n" + fleet.read_text())
    done = run("--models", fleet, "--from", before, "--host-memory", "999")
    assert (done.returncode, done.stdout) == (2, "")
    assert "of host memory, of which 999 B are left on node-" in " ".join(done.stderr.split())
    done = run("--models", fleet, "--from", before, "--nodes", "4")
    assert (done.returncode, done.stdout) == (2, "")
    said = "--nodes 4 takes the place of the machines that --from names: say how much memory each"
    assert said in " ".join(done.stderr.split())


def test_pods_of_the_manifest_go_where_the_plan_says(fleet: Path, tmp_path: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    file = tmp_path / "affinity.yaml"
    names = ("gpu-a", "gpu-b")
    machines = ("--nodes", ",".join(names), "--memory", "1GiB")
    found = planned("--models", fleet, *machines, "--kubernetes", file)
    documents = [*yaml.safe_load_all(file.read_text())]
    placed = {(each["model"], n["name"]) for n in found["nodes"] for each in n["models"]}
    engine = package_source.ROOT / "docs" / "deploy" / "kubernetes" / "engine.yaml"
    told = set()
    for document in documents:
        [term] = document["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        [node] = term["matchExpressions"][0]["values"]
        told.add((document["metadata"]["name"].rpartition("-")[0], node))
        pod = yaml.safe_load(engine.read_text())
        pod["metadata"]["name"] = document["metadata"]["name"]
        pod["spec"]["affinity"] = document["spec"]["affinity"]
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(pod, version, strict=True)
    assert told == placed
    assert {node for _, node in told} == {*names}


def test_a_solver_says_what_the_least_is(fleet: Path) -> None:
    pytest.importorskip("ortools")
    machines = ("--nodes", "3", "--memory", "1GiB", "--exact", "20")
    found = planned("--models", fleet, *machines)
    assert found["least_bytes"] == found["used_bytes"]
    assert "; this takes 0.0 % more." in run("--models", fleet, *machines).stdout


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_is_for_everybody(fleet: Path, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "plan.html"
    found = planned("--models", fleet, "--nodes", "3", "--memory", "20MiB", "--html", page)
    text = page.read_text()
    assert "<script" not in text
    assert text.count('class="bar"') == sum(1 for node in found["nodes"] if node["models"])
    with chromium.browser() as shown:
        shown.show(page.as_uri(), width, dark=dark)
        assert shown.ask("document.documentElement.scrollWidth") <= width
        assert "model-1" in str(shown.ask("document.body.innerText"))
        assert shown.accessibility() == []


@pytest.mark.parametrize(
    ("text", "arguments", "code", "said"),
    [
        (None, ["--nodes", "1", "--memory", "1GiB"], 2, "2 replicas on different nodes"),
        (None, ["--nodes", "3", "--memory", "100KiB"], 2, "the largest node has 100.0 KiB"),
        (None, ["--nodes", "0", "--memory", "1GiB"], 2, "give a number of 1 or more"),
        (None, ["--nodes", "a,a", "--memory", "1GiB"], 2, "different names"),
        (None, ["--nodes", "3"], 2, "--nodes 3: say how much memory each has, with --memory"),
        (None, ["--memory", "1GiB"], 2, "which machines there are: --nodes"),
        (None, ["--nodes", "3", "--memory", "1G", "--rebalance"], 2, "--from"),
        (None, ["--from", "models.toml"], 2, "is no plan"),
        (None, ["--from", "models.toml", "--exact", "1"], 2, "leave out --from"),
        (None, ["--nodes", "3", "--memory", "1G", "--html", "x.pdf"], 2, "end in .html"),
        ("", [], 2, "names no model"),
        (None, ["--models", "missing.toml", "--nodes", "1", "--memory", "1G"], 2, r"d: No such"),
        ("[models.a]", [], 2, "path is missing"),
        ('[models.a]\npath = "nowhere"', [], 2, "nowhere"),
        ('[models.a]\npath = "a"\nroom = "much"', [], 2, "'4GiB'|\"4GiB\""),
        ('[models.a]\npath = "a"\nreplicas = 0', [], 2, "replicas is 0"),
        ('[models.a]\npath = "a"\nreplica = 2', [], 2, "perhaps 'replicas'"),
        ('rooms = 1\n[models.a]\npath = "a"', [], 2, "perhaps 'room'"),
        ("[models", [], 2, "no TOML"),
        ('[models.a]\npath = "a"\npath = "b"', [], 2, "no TOML"),
        ('[models.a]\npath = "a"\nroom = "99999999999999999999TiB"', [], 2, "at most 1024TiB"),
        ("a = " + "[" * 100_000 + "]" * 100_000, [], 2, "nests too deeply"),
        ("room = " + "9" * 5000, [], 2, "thousands of digits"),
        (None, ["--nodes", "9" * 5000, "--memory", "1GiB"], 2, "give a number of 1 or more"),
        (None, ["--nodes", "99999999999", "--memory", "1GiB"], 2, "at most 100000"),
        (None, ["--nodes", "1", "--memory", "9" * 30], 2, "is not a size; .* at most 1024TiB"),
        (None, ["--nodes", "9000", "--memory", "1024TiB"], 2, "at most 2305843009213693952 in all"),
        (None, ["--nodes", "1", "--memory", "1GiB", "--exact", "nan"], 2, "not a finite number"),
    ],
)
def test_wrong_use_says_what_would_be_right(
    fleet: Path, text: str | None, arguments: list[str], code: int, said: str
) -> None:
    if text is not None:
        fleet.write_text(text)
        arguments = ["--nodes", "1", "--memory", "1GiB"]
    given = [str(fleet) if each == "models.toml" else each for each in arguments]
    done = run("--models", fleet, *given)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.search(said, " ".join(done.stderr.split()))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"nodes": [{"name": "a", "memory_bytes": Infinity, "models": []}]}',
        '{"nodes": [{"name": "a", "memory_bytes": 1e400, "models": []}]}',
        '{"nodes": [{"name": "a", "memory_bytes": 99999999999999999999, "models": []}]}',
        '{"nodes": [{"name": "a", "memory_bytes": -1, "models": []}]}',
        '{"nodes": [{"name": ["a"], "memory_bytes": 1000, "models": []}]}',
        '{"nodes": [{"name": "a", "memory_bytes": 1000, "models": [1]}]}',
        '{"nodes": [' + ", ".join(['{"name": "a", "memory_bytes": 1000, "models": []}'] * 2) + "]}",
        '{"nodes": "\udcff"}',
    ],
)
def test_an_earlier_plan_that_none_has_written_is_wrong_use(
    fleet: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode(errors="surrogateescape"))
    arguments = ["plan", "--models", str(fleet), "--from", str(tmp_path / "plan.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.exception
    assert "is no plan of `tensor-dedup plan --json`" in done.stderr
    assert done.stdout == ""


def test_a_name_that_is_no_pod_s(fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(fleet.read_text().replace("model-1", "Model_1"))
    arguments = ("--nodes", "3", "--memory", "1GiB", "--kubernetes", tmp_path / "x.yaml")
    done = run("--models", fleet, *arguments)
    assert done.returncode == 2
    assert "cannot be the name of a Pod" in " ".join(done.stderr.split())
    assert not (tmp_path / "x.yaml").exists()
