"""Answering the questions of a command at a terminal."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from manager_runs import managers
from tensor_dedup.cli import main

_QUESTION = "[y/N]"
_AGAIN_S = 10


def answered(arguments: Sequence[str], answer: str | signal.Signals) -> int:
    """Run `tensor-dedup`, answer its question by a text or a signal, and return the exit status.

    A signal needs a process of its own.
    """
    if isinstance(answer, signal.Signals):
        return _interrupted(arguments, answer)
    return _typed(arguments, answer)


def _typed(arguments: Sequence[str], answer: str) -> int:
    ours, theirs = pty.openpty()
    shown, status = io.StringIO(), None
    try:
        os.write(ours, answer.encode())
        with (
            os.fdopen(theirs) as terminal,
            patch.object(sys, "stdin", terminal),
            redirect_stdout(io.StringIO()),
            redirect_stderr(shown),
        ):
            try:
                main(list(arguments), prog_name="tensor-dedup")
            except SystemExit as end:
                status = end.code
    finally:
        os.close(ours)
    assert _QUESTION in shown.getvalue()
    assert isinstance(status, int)
    return status


def _interrupted(arguments: Sequence[str], answer: signal.Signals) -> int:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensor_dedup", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while _QUESTION.encode() not in shown:
            shown += os.read(ours, 1 << 10)
        # A signal between Python's look at signals and its read of the terminal is seen only after
        # that. So it is sent to a process that waits, and where that waited for something else,
        # somebody presses Ctrl-C again.
        while process.returncode is None:
            _until_it_waits(process.pid)
            process.send_signal(answer)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_AGAIN_S)
        status = process.wait(managers.PATIENCE_S)
    os.close(ours)
    return status


def _until_it_waits(pid: int) -> None:
    """Let a process come to where it sleeps, twice in a row."""
    end, waits = time.monotonic() + _AGAIN_S, 0
    while waits < 2 and time.monotonic() < end:
        time.sleep(0.01)
        # Behind the name, which may have spaces and parentheses.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        waits = waits + 1 if state == "S" else 0
