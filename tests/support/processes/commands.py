"""`tensor-dedup` as a user runs it, but for the second that its imports take.

One process imports the command line; each command is a fork of it, with the environment and in the
folder of its caller, and with files for its output.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
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
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    command = [os.fspath(each) for each in arguments]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        environment = dict(os.environ if environ is None else environ)
        where = _CLOSED if reader_gone else out.name
        order = [command, environment, str(cwd or Path.cwd()), where, err.name]
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        texts = (Path(each.name).read_text() for each in (out, err))
        return subprocess.CompletedProcess(["tensor-dedup", *command], status, *texts)


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
    """Answer orders with the status of each command until there are no more."""
    from tensor_dedup.cli import VERBS, main

    for verb in VERBS:
        main.get_command(click.Context(main), verb)  # which imports its module
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _obey(*json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _obey(
    command: Sequence[str], environment: Mapping[str, str], folder: str, out: str, err: str
) -> None:
    from tensor_dedup.cli import main

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
