"""The command line at a terminal of so many columns, or piped, in an ASCII locale without colours.

One process has that environment and imports the command line once; each command is a fork of it,
with a real terminal, or with pipes.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What a progress bar wipes away: a line and, before it, what stood on that line.
_WIPED = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\x1b\[1A\x1b\[2K|[^\n]*\x1b\[2K")
_COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|10[0-7]|38|48)[;m]")
# Python is told nothing about the encoding: what it makes of the locale is what is tested.
_LOCALE = {"LC_ALL": "C", "NO_COLOR": "1", "TERM": "xterm"}
STRICT = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


@dataclass(frozen=True)
class Shown:
    """What a command wrote, without escapes; whether any of those was a colour."""

    status: int
    out: str
    err: str
    coloured: bool

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


class Terminal:
    """A process that runs commands, each in a fork of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, *arguments: str | Path, width: int | None = None, keys: str = "") -> Shown:
        """Run `tensor-dedup` with these arguments; at a terminal if there is a width.

        `keys` are pressed, again and again, until it ends.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        encoded = [os.fsencode(each).hex() for each in arguments]
        self._process.stdin.write(json.dumps([encoded, width, keys]) + "\n")
        self._process.stdin.flush()
        status, *streams = json.loads(self._process.stdout.readline())
        out, err = (bytes.fromhex(each) for each in streams)
        for each in (out, err):
            # Whatever a terminal of that locale cannot show would be here.
            assert each.isascii(), (arguments, each)
        text, said = (_WIPED.sub("", each.decode().replace("\r", "")) for each in (out, err))
        coloured = bool(_COLOUR.search(text + said))
        return Shown(status, _ESCAPE.sub("", text), _ESCAPE.sub("", said), coloured)


@contextmanager
def terminal(folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Commands run in a folder, in an ASCII locale and this environment."""
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **_LOCALE,
        **environment,
    }
    with subprocess.Popen(
        [sys.executable, __file__],
        cwd=folder,
        env=own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Terminal(process)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    """Answer requests until there are no more: status, stdout and stderr of each command."""
    from tensor_dedup.cli import VERBS, main

    for verb in VERBS:
        main.get_command(click.Context(main), verb)  # which imports its module
    for line in sys.stdin:
        encoded, width, keys = json.loads(line)
        arguments = [os.fsdecode(bytes.fromhex(each)) for each in encoded]
        status, out, err = _forked(arguments, width, keys.encode())
        sys.stdout.write(json.dumps([status, out.hex(), err.hex()]) + "\n")
        sys.stdout.flush()


def _forked(arguments: Sequence[str], width: int | None, keys: bytes) -> tuple[int, bytes, bytes]:
    from tensor_dedup.cli import main

    ends = [_ends(width) for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        (_, out), (_, err) = ends
        source = os.open(os.devnull, os.O_RDONLY) if width is None else out
        for number, fd in enumerate((source, out, err)):
            os.dup2(fd, number)
        os.closerange(3, 1 << 10)
        # Those that there are have noted what the old files could do.
        encoding = sys.stdout.encoding
        sys.stdin = open(0, encoding=encoding)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding=encoding, errors=sys.stdout.errors)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding=encoding, errors=sys.stderr.errors)  # noqa: SIM115
        status = 99
        try:
            main(list(arguments), prog_name="tensor-dedup")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 (a fork ends here, whatever it was)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for _, theirs in ends:
        os.close(theirs)
    shown = _read([ours for ours, _ in ends], keys)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *shown


def _ends(width: int | None) -> tuple[int, int]:
    """Our end, and the command's: of a terminal so wide, or of a pipe."""
    if width is None:
        return os.pipe()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    return ours, theirs


def _read(ours: Sequence[int], keys: bytes) -> tuple[bytes, bytes]:
    found = dict.fromkeys(ours, b"")
    left = set(ours)
    while left:
        readable, _, _ = select.select(left, [], [], 0.2)
        for fd in readable:
            data = b""
            with suppress(OSError):  # the other end of a terminal has gone
                data = os.read(fd, 1 << 16)
            found[fd] += data
            if not data:
                left.remove(fd)
                os.close(fd)
        if keys and not readable and ours[0] in left:
            os.write(ours[0], keys)
    return found[ours[0]], found[ours[1]]


if __name__ == "__main__":
    _serve()
