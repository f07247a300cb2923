"""Managers in processes that are forked from one that has imported what they need.

To import it takes longer than most of what is tested of a manager. The process that forks,
which runs `serve`, has done nothing else. Of each manager another process waits for its end,
and says how it ended, as a shell does of its commands.
"""

import atexit
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from processes import interpreters

_STATUS_BYTES = 4
_MANAGER = "tensor_dedup.memory_manager.server"
_FAKE = "fake_gpu_manager.py"


class _Order(NamedTuple):
    program: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    log: str
    limit: int | None


class ForkedManager:
    """A manager, as subprocess.Popen has it."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """How it ended, or None."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has.

        Raises:
            TimeoutExpired: it has not yet.
        """
        found = self._look(timeout)
        if found is None:
            raise subprocess.TimeoutExpired("the manager", timeout or 0.0)
        return found

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = _received(self._ended)
            os.close(self._ended)
        return self.returncode


class _Server:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                interpreters.command(__name__, serve.__name__, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._pid = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()

    def start(self, order: _Order) -> ForkedManager:
        assert os.getpid() == self._pid, "two processes would hear each other's answers"
        reading, writing = os.pipe()
        socket.send_fds(self._link, [pickle.dumps(order)], [writing])
        os.close(writing)
        return ForkedManager(_received(reading), reading)


_servers: dict[int, _Server] = {}


def knows(words: Sequence[str]) -> bool:
    """Whether these words after `python` start a manager that can be forked."""
    return [*words[:2]] == ["-m", _MANAGER] or Path(words[0]).name == _FAKE


def start(words: Sequence[str], log: Path, limit: int | None) -> ForkedManager:
    """Run what `python` would with these words, in the environment of this process.

    `log` is what it says on stderr; `limit` the number of descriptors that it may have.
    """
    program, arguments = (words[1], words[2:]) if words[0] == "-m" else (_FAKE, words[1:])
    server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), _Server())
    return server.start(_Order(program, arguments, dict(os.environ), str(log), limit))


def _received(pipe: int) -> int:
    return int.from_bytes(os.read(pipe, _STATUS_BYTES), "little", signed=True)


def _say(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(_STATUS_BYTES, "little", signed=True))


def _main_of(program: str) -> Callable[[], int]:
    from tensor_dedup.memory_manager.server.__main__ import main

    if program == _FAKE:
        from gpu_runs import fake_gpu_manager

        return lambda: main(fake_gpu_manager.make)
    return main


def _serve(link: socket.socket) -> Callable[[], int] | None:
    """Fork managers until nobody can ask for one; in such a process, what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait end by themselves
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 1)
        if not data:
            return None
        [pipe] = descriptors
        order: _Order = pickle.loads(data)
        main = _main_of(order.program)  # imported here, for those that come later, too
        if os.fork():
            os.close(pipe)
            continue
        link.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid:
            _say(pipe, pid)
            _say(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        os.close(pipe)
        log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        os.environ.clear()
        os.environ.update(order.environ)
        if order.limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (order.limit, order.limit))
        sys.argv = [order.program, *order.arguments]
        return main


def serve() -> int:
    """Be the process that forks, or one of its managers: its argument is a socket's descriptor."""
    main = _serve(socket.socket(fileno=int(sys.argv[1])))
    return main() if main else 0
