"""The exit status of every verb of `runs` and of `tensorcas`; a failure prints no document."""

import signal
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from processes import prompts
from tensor_dedup.cli import main
from tensor_dedup.cli.runs import command as runs_command
from tensor_dedup.cli.tensorcas import main as tensorcas
from tensor_dedup.store.steps.errors import KeptStepError
from tensor_dedup.training import CheckpointStore

# Arguments behind `runs`: a store has the run r with the steps 4, 5 and 6, of which 4 is kept.
WITH_RUN = [
    ("list", 0),
    ("show r", 0),
    ("show nope", 2),
    ("show r --run r", 2),
    ("stats", 0),
    ("stats r --tensors", 0),
    ("stats nope", 2),
    ("stats --tensors", 2),
    ("best r loss", 0),
    ("best r nometric", 2),
    ("best r speed", 2),
    ("best r loss --mode most", 2),
    ("best nope loss", 2),
    ("diff r@4 r@5", 0),
    ("diff r@4 r@99", 2),
    ("diff r@4 m", 2),
    ("diff nope@1 r@4", 2),
    ("delete r --step 77 --yes", 2),
    ("delete r --step 77", 2),
    ("delete r --step -1 --yes", 2),
    ("delete r --step 4 --yes", 2),
    ("delete r --step 5", 2),
    ("delete r --step 5 --yes", 0),
    ("delete nope --all --yes", 2),
    ("drain r second", 0),
    ("drain r store", 2),
    ("drain nope second", 2),
    ("prune r --keep-last 1 --dry-run", 0),
    ("prune r --keep-last 1", 2),
    ("prune r --keep-last 1 --yes", 0),
    ("prune r --keep-last 9", 0),
    ("prune r --keep-best nometric --yes", 2),
    ("prune r --keep-every 0 --yes", 2),
    ("prune r", 2),
    ("prune nope --keep-last 1 --yes", 2),
    ("keep r 5", 0),
    ("keep r 4 --remove", 0),
    ("keep r 77", 2),
    ("keep nope 4", 2),
    ("compare r r", 0),
    ("compare r nope", 2),
    ("plot r", 0),
    ("plot r --output x.gif", 2),
    ("plot nope", 2),
]
WITHOUT_STORE = [
    ("list", 0),
    ("stats", 0),
    *((f"{verb} r", 2) for verb in ("show", "stats", "compare", "plot")),
    ("best r loss", 2),
    ("diff r@1 r@2", 2),
    ("delete r --all --yes", 2),
    ("drain r second", 2),
    ("prune r --keep-last 1 --yes", 2),
    ("keep r 1", 2),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    return tmp_path


@pytest.fixture
def run(here: Path) -> CheckpointStore:
    with CheckpointStore(here / "store", "r") as run:
        for step in (4, 5, 6):
            run.save({"w": np.full(9, step)}, step, {"loss": 1 / step, "speed": 1.0})
        run.keep(4)
    return run


def invoked(arguments: str) -> Result:
    done = CliRunner().invoke(main, ["runs", *arguments.split()])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if done.exit_code:
        assert done.stdout == ""
        assert done.stderr.strip()
    return done


@pytest.mark.parametrize(("arguments", "expected"), WITH_RUN)
def test_with_a_run(run: CheckpointStore, arguments: str, expected: int) -> None:
    before = run.steps()
    assert invoked(arguments).exit_code == expected
    if expected:
        assert run.steps() == before


@pytest.mark.parametrize("arguments", ["delete r@4", "delete r@4 --yes"])
def test_a_kept_step_is_not_deleted_as_a_checkpoint(run: CheckpointStore, arguments: str) -> None:
    done = CliRunner().invoke(main, arguments.split())
    assert done.exit_code == 2
    assert "runs keep RUN STEP --remove" in done.stderr
    assert run.steps() == [4, 5, 6]
    with pytest.raises(KeptStepError):
        run.store.delete("r@4")
    run.unkeep(4)
    run.store.delete("r@4")
    assert run.steps() == [5, 6]


@pytest.mark.parametrize(("arguments", "expected"), WITHOUT_STORE)
def test_without_a_store(here: Path, arguments: str, expected: int) -> None:
    done = invoked(arguments)
    assert done.exit_code == expected
    assert not (here / "store").exists()
    if expected == 0:
        assert "no store yet at" in done.stdout


def test_damage_is_one(run: CheckpointStore) -> None:
    for path in (run.store.path / "refs").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    done = CliRunner().invoke(main, ["runs", "list"])
    assert done.exit_code == 1
    assert invoked("diff r@4 r@5").exit_code == 1
    done = CliRunner().invoke(main, ["runs", "stats"])
    assert done.exit_code == 1
    assert "not known: " in done.stdout


@pytest.mark.parametrize(("answer", "expected"), [("n\n", 4), ("y\n", 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("verb", ["delete r --step 5", "prune r --keep-last 1"])
def test_at_a_prompt(
    run: CheckpointStore, verb: str, answer: str | signal.Signals, expected: int
) -> None:
    assert prompts.answered(["runs", *verb.split()], answer) == expected
    assert run.steps() == ([4, 6] if expected == 0 else [4, 5, 6])


def test_every_verb_of_runs_is_tried() -> None:
    tried = {arguments.split()[0] for arguments, _ in WITH_RUN}
    assert tried == {arguments.split()[0] for arguments, _ in WITHOUT_STORE}
    assert tried == {*getattr(runs_command, "commands", {})}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("list", 0),
        ("list --run nope", 2),
        ("stats --run r", 0),
        ("stats --run nope", 2),
        ("gc --yes", 0),
        ("delete --run r --step 77 --yes", 2),
        ("delete --run r --step 4 --yes", 2),
        ("delete --run r --step 5", 2),
        ("delete --run r --step 5 --yes", 0),
        ("--root nowhere list", 2),
    ],
)
def test_the_verbs_of_tensorcas(arguments: str, expected: int) -> None:
    words = arguments.split()
    root = [] if words[0] == "--root" else ["--root", "store"]
    assert CliRunner().invoke(tensorcas, [*root, *words]).exit_code == expected
