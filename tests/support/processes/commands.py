"""`tensor-dedup` as a user runs it, but for the second that its imports take.

One process imports the command line; each command is a fork of it, with the environment and in the
folder of its caller, and with files for its output.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click

_CLOSED = "a closed pipe"


def run(
    *arguments: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    reader_gone: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` of `tensor-dedup` with these arguments gives, with no input.

    With `reader_gone`, its output goes into a pipe that nobody reads any more.
    """
    return start(*arguments, environ=environ, cwd=cwd, reader_gone=reader_gone).end()


def start(
    *arguments: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    reader_gone: bool = False,
    constants: Sequence[tuple[str, str, object]] = (),
) -> "Started":
    """The same while it runs; the next can be started when `end` was called.

    `constants` are a module, a name in it and a value each, which the command finds there.
    """
    server = _server()
    assert server.stdin is not None
    command = [os.fspath(each) for each in arguments]
    out, err = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115 (`end` does)
    environment = dict(os.environ if environ is None else environ)
    where = _CLOSED if reader_gone else out.name
    order = [command, environment, str(cwd or Path.cwd()), where, err.name, [*constants]]
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    return Started(command, _answer(), (out, err))


class Started:
    """A command that runs, or has run until it was killed."""

    def __init__(self, command: Sequence[str], pid: int, files: Sequence[Any]) -> None:
        self._command, self._pid, self._files = command, pid, files

    def kill(self) -> None:
        """End it as kill -9 does."""
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> "subprocess.CompletedProcess[str]":
        """Wait until it ends, and return what `run` does."""
        status = _answer()
        texts = []
        for file in self._files:
            texts.append(Path(file.name).read_text())
            file.close()
        return subprocess.CompletedProcess(["tensor-dedup", *self._command], status, *texts)


def _answer() -> int:
    server = _server()
    assert server.stdout is not None
    return int(server.stdout.readline())


def document(*arguments: str | Path) -> dict[str, Any]:
    """The JSON document of a command that succeeds and says nothing else."""
    result = run(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


@cache
def _server() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_end, process)
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def _serve() -> None:
    """Answer orders with the process and then the status of each until there are no more."""
    from tensor_dedup.cli import VERBS, main
    from tensor_dedup.remote import transfer as transfer

    with suppress(ImportError):
        import obstore.store as obstore_store  # noqa: F401

    for verb in VERBS:
        main.get_command(click.Context(main), verb)  # which imports its module
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _obey(*json.loads(line))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _obey(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    out: str,
    err: str,
    constants: Sequence[tuple[str, str, object]],
) -> None:
    from tensor_dedup.cli import main

    for module, name, value in constants:
        setattr(import_module(module), name, value)

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate((os.devnull, out, err)):
        opened = _closed_pipe() if name == _CLOSED else os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w")  # noqa: SIM115
    sys.argv = ["tensor-dedup", *command]
    status = 99
    try:
        main(list(command), prog_name="tensor-dedup")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (a fork ends here, whatever it was)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


if __name__ == "__main__":
    _serve()
