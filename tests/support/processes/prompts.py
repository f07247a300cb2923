"""Answering the questions of a command at a terminal."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from manager_runs import managers

_AGAIN_S = 10


def answered(arguments: Sequence[str], answer: str | signal.Signals) -> int:
    """Run `tensor-dedup`, answer its question by a text or a signal, and return the exit status."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensor_dedup", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 1 << 10)
        if isinstance(answer, str):
            os.write(ours, answer.encode())
        # A signal between Python's look at signals and its read of the terminal is seen only after
        # that: then somebody presses Ctrl-C again.
        while isinstance(answer, signal.Signals) and process.returncode is None:
            process.send_signal(answer)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_AGAIN_S)
        status = process.wait(managers.PATIENCE_S)
    os.close(ours)
    return status
