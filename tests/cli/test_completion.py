"""Completion in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from processes import core_only
from store_runs.stores import noise, safetensors, u8, write
from tensor_dedup import Store
from tensor_dedup.cli import VERBS, main
from tensor_dedup.training import CheckpointStore

BASH = """
PATH={folder}:$PATH
eval "$(tensor-dedup completion bash)"
COMP_WORDS=({words} "{last}")
COMP_CWORD={count}
_tensor_dedup_completion tensor-dedup
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSOR_DEDUP_STORE", str(tmp_path / "store"))
    store = Store.open(tmp_path / "store")
    for name in ("base", "best"):
        store.import_(write(tmp_path / name, {"a.safetensors": safetensors(u8(a=noise(1, 50)))}))
    CheckpointStore(store, "run").save({"w": np.zeros(3)}, step=17, metrics={})
    return store


def completed(words: str, last: str) -> list[str]:
    script = BASH.format(
        folder=Path(sys.executable).parent, words=words, last=last, count=len(words.split())
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("tensor-dedup", "ren", ["rename"]),
        ("tensor-dedup verify", "--f", ["--full"]),
        ("tensor-dedup show", "b", ["base", "best"]),
        ("tensor-dedup delete", "run@1", ["run@17"]),
        ("tensor-dedup du", "ru", ["run", "run@17"]),
        ("tensor-dedup show --store /nowhere", "b", []),
    ],
)
def test_bash_completes_verbs_options_and_names(words: str, last: str, expected: list[str]) -> None:
    assert completed(words, last) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tensor-dedup", ""], list(VERBS)),
        (["tensor-dedup", "su"], ["substitute"]),
        (["tensor-dedup", "substitute", "--lay"], ["--layers"]),
        (["tensor-dedup", "help", "runs", "pr"], ["prune"]),
    ],
)
def test_completion_works_where_no_extra_is_installed(
    words: list[str], expected: list[str]
) -> None:
    done = core_only.completed(words)
    assert (done.status, done.err) == (0, "")
    assert [line.partition(",")[2] for line in done.out.splitlines()] == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_ones_of_their_shells(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    assert "_TENSOR_DEDUP_COMPLETE" in script
    if shell == "bash":
        assert "COMP_WORDBREAKS" in script
    if path := shutil.which(shell):
        subprocess.run([path, "-n", "/dev/stdin"], input=script, text=True, check=True)


def test_nothing_but_the_script_is_printed() -> None:
    assert (
        "tensor-dedup completion fish | source"
        in CliRunner().invoke(main, ["completion", "--help"]).stdout
    )
    assert os.environ.get("_TENSOR_DEDUP_COMPLETE") is None
