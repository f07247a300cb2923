"""Memory managers in processes of their own, and clients that stop where a test wants them to."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil

from manager_runs import spawned_managers
from tensor_dedup.digest import digest
from tensor_dedup.memory_manager.client import Client, Lease, connect
from tensor_dedup.memory_manager.client.admin import Admin, Overview

PATIENCE_S = 60.0
_FORK = multiprocessing.get_context("fork")


class Manager:
    """A manager that runs, as the command line starts it."""

    command: tuple[str, ...] = ("-m", "tensor_dedup.memory_manager.server")

    def __init__(self, path: Path, *options: str, limit: int | None = None) -> None:
        self.socket = self.served(path)
        self.log = path.with_suffix(".log")
        words = [*self.command, "--socket", str(path), *options]
        self._process: subprocess.Popen[bytes] | spawned_managers.ForkedManager
        if spawned_managers.knows(words):
            self._process = spawned_managers.start(words, self.log, limit)
        else:
            prefix = ["prlimit", f"--nofile={limit}:{limit}"] if limit else []
            with self.log.open("a") as log:
                self._process = subprocess.Popen([*prefix, sys.executable, *words], stderr=log)
        until(self._answers)
        self.pid = self._process.pid

    def served(self, path: Path) -> Path:
        """Where it listens when it is told this path."""
        return path

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), contextlib.closing(raw_socket()) as probe:
            probe.connect(str(self.socket))
            return True
        return False

    def client(self, name: str = "test") -> Client:
        """A client in this process that does not reconnect by itself."""
        return connect(self.socket, name=name, keep_connected=False)

    def overview(self) -> Overview:
        with Admin(self.socket) as admin:
            return admin.overview()

    def descriptors(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def threads(self) -> int:
        return psutil.Process(self.pid).num_threads()

    def lines(self, event: str) -> list[str]:
        """What it has logged of that kind."""
        return [line for line in self.log.read_text().splitlines() if f" I {event} " in line]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """SIGTERM; the exit status."""
        self._process.terminate()
        return self._process.wait(timeout=10)

    def wait(self) -> int:
        """The exit status, when it ends by itself."""
        return self._process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def running(
    folder: Path, *options: str, limit: int | None = None, kind: type[Manager] = Manager
) -> Iterator[Manager]:
    """A manager with its socket in this folder, for the length of the context."""
    # The last of two --budget counts.
    manager = kind(folder / "m.sock", "--budget", str(256 << 20), *options, limit=limit)
    try:
        yield manager
    finally:
        manager.close()


def raw_socket() -> socket.socket:
    """A socket of the right kind with none of our manners."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait until something holds; it is a failure when it does not for very long."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def steady(number: Callable[[], int]) -> int:
    """A number that has stopped to change: what was hung up is closed a moment later.

    On a busy machine that moment is long, for the manager has to get its turn first.
    """
    found = [number()]

    def is_steady() -> bool:
        found.append(number())
        return len(found) > 49 and len(set(found[-50:])) == 1

    until(is_steady)
    return found[-1]


def open_files() -> set[Path]:
    """What the descriptors of this process lead to."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            found.add(link.readlink())
    return found


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that depend on the seed."""
    unit = bytes((seed * 31 + index * 7) % 251 for index in range(251))
    return (unit * (nbytes // 251 + 1))[:nbytes]


def build(client: Client, key: str, *tensors: bytes, checkpoint: str = "base") -> list[Lease]:
    """Reserve, write, seal, publish; leases on the tensors."""
    put = client.reserve([key], checkpoint).put
    assert put is not None
    with put:
        put.allocate([len(data) for data in tensors], [digest(data) for data in tensors])
        for index, data in enumerate(tensors):
            put.write(index, data)
        leases = put.seal()
        put.publish(key, b"record of " + key.encode(), [lease.digest for lease in leases])
    return leases


def bytes_of(lease: Lease) -> bytes:
    """What a lease gives the right to read."""
    return os.pread(lease.slab.fileno, lease.nbytes, lease.offset)


class Actor:
    """Another process, that does one thing after another when it is told to."""

    def __init__(self, path: Path, *steps: Callable[[dict[str, object]], object]) -> None:
        self._ours, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
            target=_act, args=(path, steps, theirs, self._ours), daemon=True
        )
        with warnings.catch_warnings():
            # Of Python 3.12 on: this process may have threads. The child uses none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def step(self) -> object:
        """Do the next thing; what it returned."""
        self.begin()
        return self.result()

    def begin(self) -> None:
        self._ours.send("go")

    def result(self) -> object:
        assert self._ours.poll(PATIENCE_S), "the other process is stuck"
        return self._ours.recv()

    def done(self, patience_s: float = 0.0) -> bool:
        return self._ours.poll(patience_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def ended(self) -> int:
        """Do the next thing, which ends the process; its exit status, or minus the signal."""
        self.begin()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, "the other process is stuck"
        return self._process.exitcode

    def join(self) -> None:
        self._ours.close()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None


def _act(
    path: Path, steps: tuple[Callable[[dict[str, object]], object], ...], pipe: Pipe, other: Pipe
) -> None:
    other.close()
    state: dict[str, object] = {"path": path}
    with contextlib.suppress(EOFError):
        for step in steps:
            pipe.recv()
            try:
                pipe.send(step(state))
            except Exception as error:  # noqa: BLE001  # told to the test, which expects it or not
                pipe.send(error)
        pipe.recv()
