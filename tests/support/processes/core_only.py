"""The command line in an environment where only its core dependencies are installed.

In a new interpreter, every package is hidden that no core dependency needs, directly or not: torch,
vLLM, the packages of the extras and those of the tests.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

from click.testing import CliRunner

from processes import interpreters

_OWN = {"tensor_dedup", "tensorcas"}
_COMPLETES = "_TENSOR_DEDUP_COMPLETE"


class Outcome(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def run(*commands: Sequence[str]) -> list[Outcome]:
    """What each of these commands of `tensor-dedup` (or, named first, `tensorcas`) gives."""
    done = subprocess.run(
        interpreters.command(__name__, main.__name__),
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*each) for each in json.loads(done.stdout)]


def completed(words: Sequence[str]) -> Outcome:
    """What a shell gets and shows when TAB is pressed behind the last of these words."""
    asked = {_COMPLETES: "bash_complete", "COMP_WORDS": " ".join(words)}
    done = subprocess.run(
        interpreters.command(__name__, complete.__name__),
        env={**os.environ, **asked, "COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def main() -> None:
    """Be the new process: commands on stdin, outcomes on stdout."""
    _hide()
    from tensor_dedup.cli import main as tensor_dedup
    from tensor_dedup.cli.tensorcas import main as tensorcas

    outcomes = []
    for command in json.load(sys.stdin):
        named = command[:1] == ["tensorcas"]
        program, arguments = (tensorcas, command[1:]) if named else (tensor_dedup, command)
        done = CliRunner().invoke(program, arguments)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        outcomes.append([done.exit_code, done.stdout, done.stderr])
    json.dump(outcomes, sys.stdout)


def complete() -> None:
    """Be the new process of a completion."""
    _hide()
    from tensor_dedup.cli import main as tensor_dedup

    tensor_dedup(prog_name="tensor-dedup")


def _hide() -> None:
    core = _core()
    hidden = {
        package
        for package, distributions in metadata.packages_distributions().items()
        if package not in _OWN and core.isdisjoint(map(_normal, distributions))
    }
    sys.meta_path[:] = [_Hiding(finder, hidden) for finder in sys.meta_path]


class _Hiding:
    """A finder that does not find some top-level packages."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._hidden:
            return None
        return self._finder.find_spec(name, path, target)


def _core() -> set[str]:
    """The distributions that the core needs, directly or not."""
    found, left = set[str](), ["tensor-dedup"]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform or version of Python
            continue
        found.add(name)
        left += [_normal(re.split(r"[^\w.-]", each)[0]) for each in needs if "extra ==" not in each]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
