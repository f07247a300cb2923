"""Engines in processes of their own, and the memory manager they use.

with manager(folder) as running, fleet(folder) as engines:
    first = engines.start(checkpoint, {"memory_manager": str(running.socket)})
    first.loaded["outputs"]
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from processes import forked
from tensor_dedup.loader.report import REPORT_DIR_VARIABLE
from tensor_dedup.memory_manager.client.admin import Admin
from vllm_runs import plain

SLAB = "/memfd:tensor-dedup"
# A worker extension that can say what its weights are: `looks` of the engine that has it.
LOOKING = "vllm_runs.looking.Looking"


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
            held = self.leases()
            if held >= count:
                return
            assert time.monotonic() < until, f"{held} of {count} leases"
            time.sleep(0.2)

    def leases(self) -> int:
        """How many leases are held."""
        with Admin(self.socket) as admin:
            return admin.totals().leases

    def charged(self) -> int:
        """The bytes that count towards its budget."""
        with Admin(self.socket) as admin:
            return admin.totals().charged

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

    process: BaseProcess
    answers: Connection
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _answer(self) -> Any:
        try:
            return self.answers.recv()
        except (EOFError, OSError):
            self.process.join(60)
            ended = f"the engine ended with {self.process.exitcode}"
            raise AssertionError(f"{ended}:\n{self.log.read_text()[-6000:]}") from None

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """What it said when it had loaded: `outputs`, `reports` by rank, `anonymous` bytes.

        And `looks` by rank, of an engine that was started with `LOOKING`.
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
        self.answers.send("again")
        return self._answer()

    def read(self) -> int:
        """Have it read every page of its weights; the number of their bytes."""
        self.answers.send("read")
        return int(self._answer())

    def end(self) -> None:
        """Let the process end by itself."""
        self.answers.close()
        self.process.join(120)
        assert self.process.exitcode is not None, self.log.read_text()[-6000:]


@dataclass
class Fleet:
    """Engines that share one index of hints; whatever still runs at the end is killed."""

    hints: Path
    _engines: list[Engine] = field(default_factory=list)

    def start(
        self,
        path: str | Path,
        config: dict[str, Any] | None,
        environ: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> Engine:
        """Begin to load `path` in a new process; `config` None is plain vLLM.

        `options` are the engine's.
        """
        environment = _environment({"TENSOR_DEDUP_HINTS": str(self.hints), **environ})
        mine, its = multiprocessing.Pipe()
        log = self.hints.with_name(f"engine-{len(self._engines)}.log")
        arguments = (its, str(path), config, options)
        process = forked.start(_serve, *arguments, environ=environment, log=log)
        its.close()
        self._engines.append(Engine(process, mine, log))
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


def _serve(
    caller: Connection, path: str, config: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    from tensor_dedup import report

    llm = plain.engine(path, tensor_dedup=False if config is None else config, **options)
    outputs = _outputs(llm)
    reports = [] if config is None else [model.to_dict() for model in report().models]
    answer = {"outputs": outputs, "reports": reports, "anonymous": anonymous(os.getpid())}
    if options.get("worker_extension_cls") == LOOKING:
        answer["looks"] = llm.collective_rpc("look")
    caller.send(answer)
    with suppress(EOFError):
        while asked := caller.recv():
            caller.send(_read(llm) if asked == "read" else _outputs(llm))


def _read(llm: Any) -> int:
    """Read every page of its weights; the number of their bytes."""
    read = 0
    for each in plain.model(llm).parameters():
        each.view(torch.uint8).max()
        read += each.nbytes
    return read


def _outputs(llm: Any) -> list[Any]:
    """What it answers to one prompt after the other.

    An engine in a process of its own begins with the first before it has the second: whether it
    computes both in one batch, which may change the last bits, is a matter of time.
    """
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in plain.PROMPTS]
    return [plain.outputs(llm, prompts=[prompt]) for prompt in prompts]
