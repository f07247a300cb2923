"""Engines in processes of their own, and the memory manager they use.

with manager(folder) as running, fleet(folder) as engines:
    first = engines.start(checkpoint, {"memory_manager": str(running.socket)})
    first.loaded["outputs"]
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensor_dedup.loader.report import REPORT_DIR_VARIABLE
from tensor_dedup.memory_manager.client.admin import Admin

SLAB = "/memfd:tensor-dedup"


@dataclass
class Manager:
    """A running `tensor_dedup.memory_manager.server`, and what it writes."""

    socket: Path
    process: "subprocess.Popen[bytes]"
    log: Path

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def wait_for(self, text: str) -> None:
        """Return when the log has this text."""
        until = time.monotonic() + 300
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)

    def wait_for_leases(self, count: int) -> None:
        """Return when so many leases are held."""
        until = time.monotonic() + 120
        while True:
            with Admin(self.socket) as admin:
                held = admin.totals().leases
            if held >= count:
                return
            assert time.monotonic() < until, f"{held} of {count} leases"
            time.sleep(0.2)

    def built(self) -> list[str]:
        """The layer keys that were built, as often as they were."""
        lines = self.log.read_text().splitlines()
        return [line.split("key=")[1].split()[0] for line in lines if " published key=" in line]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours and `more`, but engines there do not report to this process, as those in it do."""
    kept = {name: each for name, each in os.environ.items() if name != REPORT_DIR_VARIABLE}
    return {**kept, **more}


@contextmanager
def manager(
    folder: Path, *options: str, environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Manager]:
    """`tensor-dedup serve` at a socket in `folder`; ended at the end."""
    home = folder / "socket"
    home.mkdir(mode=0o700, exist_ok=True)
    path, log = home / "manager.sock", folder / f"manager-{time.monotonic_ns()}.log"
    command = Path(sys.executable).with_name("tensor-dedup")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [command, "serve", "--verbose", "--socket", path, *options],
            stderr=out,
            env=_environment(environ),
        )
    try:
        running = Manager(path, process, log)
        running.wait_for("serving socket=")
        yield running
    finally:
        process.terminate()
        process.wait(60)


@dataclass(eq=False)
class Engine:
    """A vLLM engine in a process of its own."""

    process: "subprocess.Popen[str]"

    @property
    def pid(self) -> int:
        return self.process.pid

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the engine ended with {self.process.wait()}")

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """What it said when it had loaded: `outputs`, `reports` by rank, `anonymous` bytes.

        And `looks` by rank, of an engine that was started with `looking`.
        """
        found: dict[str, Any] = self._answer()
        return found

    @property
    def report(self) -> dict[str, Any]:
        """What the only process that loaded reported."""
        [report] = self.loaded["reports"]
        found: dict[str, Any] = report
        return found

    def outputs(self) -> Any:
        """What it answers to the prompts now."""
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Let the process end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(120)
        self.process.stdout.close()


@dataclass
class Fleet:
    """Engines that share one index of hints; whatever still runs at the end is killed."""

    hints: Path
    _engines: list[Engine] = field(default_factory=list)

    def start(
        self,
        path: Path,
        config: dict[str, Any] | None,
        environ: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> Engine:
        """Begin to load `path` in a new process; `config` None is plain vLLM.

        `options` are the engine's.
        """
        environment = _environment({"TENSOR_DEDUP_HINTS": str(self.hints), **environ})
        command = [sys.executable, __file__, json.dumps([str(path), config, options])]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True
        )
        self._engines.append(Engine(process))
        return self._engines[-1]

    def close(self) -> None:
        for engine in self._engines:
            # vLLM's own processes, too: they do not end when the one that started them is killed.
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.end()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Engines for a test, unknown checkpoints first."""
    engines = Fleet(folder / "hints.sqlite")
    try:
        yield engines
    finally:
        engines.close()


def smaps(pid: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Every mapping of a process: its line, and its numbers in bytes."""
    head, numbers = "", dict[str, int]()
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            if head:
                yield head, numbers
            head, numbers = line, {}
        elif words[-1] == "kB":
            numbers[words[0][:-1]] = int(words[1]) << 10
    yield head, numbers


def slab_pss(pid: int) -> int:
    """This process's share of the slabs that it maps."""
    return sum(numbers.get("Pss", 0) for head, numbers in smaps(pid) if SLAB in head)


def anonymous(pid: int) -> int:
    """Memory that is this process's own."""
    return sum(numbers.get("Anonymous", 0) for _, numbers in smaps(pid))


def _serve(path: str, config: dict[str, Any] | None, options: dict[str, Any]) -> None:
    import plain
    from tensor_dedup import report

    llm = plain.engine(path, tensor_dedup=False if config is None else config, **options)
    outputs = _outputs(llm)
    reports = [] if config is None else [model.to_dict() for model in report().models]
    answer = {"outputs": outputs, "reports": reports, "anonymous": anonymous(os.getpid())}
    if options.get("worker_extension_cls") == "looking.Looking":
        answer["looks"] = llm.collective_rpc("look")
    _say(answer)
    for _ in sys.stdin:
        _say(_outputs(llm))


def _outputs(llm: Any) -> list[Any]:
    """What it answers to one prompt after the other.

    An engine in a process of its own begins with the first before it has the second: whether it
    computes both in one batch, which may change the last bits, is a matter of time.
    """
    import plain

    prompts = [{"prompt_token_ids": list(prompt)} for prompt in plain.PROMPTS]
    return [plain.outputs(llm, prompts=[prompt]) for prompt in prompts]


def _say(answer: object) -> None:
    sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
