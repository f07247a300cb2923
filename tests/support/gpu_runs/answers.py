"""Processes of the tests that do one function after another, as they are told by the test.

They read [name, arguments] line by line, and answer each. `Worker` is such a process as the test
sees it. A fresh interpreter: forks of a process that has used CUDA cannot.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manager_runs import managers


class Worker:
    """A process that does the functions of a module of this package by name."""

    def __init__(self, module: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(f"{module}.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
            },
        )
        self.pid = self._process.pid

    def do(self, name: str, *arguments: Any) -> Any:
        """What it returned. AssertionError with what it raised."""
        self.tell(name, *arguments)
        return self.value()

    def value(self) -> Any:
        """What the function that it was told last returned: several processes can be at work."""
        answer = self._answer()
        assert answer is not None, "the process has ended"
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def attempt(self, name: str, *arguments: Any) -> dict[str, Any] | None:
        """{"value": ...} or {"error": ...}; None when that ended the process."""
        self.tell(name, *arguments)
        return self._answer()

    def tell(self, name: str, *arguments: Any) -> None:
        """Let it begin with a function; `value` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(timeout=managers.PATIENCE_S)


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Be such a process, until the other side has hung up."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": functions[name](*arguments)}
        except Exception as error:  # noqa: BLE001  # told to the test, which expects it or not
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
