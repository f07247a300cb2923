"""Older code of this repository's own history, and memory managers of any version.

code = checkout(tmp_path)     # skips the test where the clone does not reach so far back
with serving(code, folder / "m.sock"): ...
"""

import contextlib
import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import managers
import package_source
from compatible import Code

COMMIT = "ead6e99"
_PARTS = ("src", "loader", "store", "memory_manager", "patches")


def checkout(folder: Path) -> Code:
    """The package as it was at COMMIT, below this folder."""
    command = ["git", "-C", str(package_source.ROOT), "archive", "--format=tar", COMMIT, *_PARTS]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no git here to take older code from")
    if done.returncode != 0:
        pytest.skip(f"this clone has no commit {COMMIT}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    code = Code(folder / "src")
    where = "import json, tensor_dedup.errors as e; print(json.dumps(e.__file__))"
    assert Path(code.call(where)).is_relative_to(folder)
    return code


@contextlib.contextmanager
def serving(code: Code, path: Path) -> Iterator[None]:
    """A memory manager of this code at a socket, which answers when the context begins."""
    command = [*code.command, "serve", "--socket", str(path), "--budget", "256M", "--json"]
    process = subprocess.Popen(
        command, env=code.environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), f"it ended with {process.wait()}"
        yield
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


# What systemd does before it starts a service: descriptors from 3 on, and who they are for.
_LAUNCH = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[1], sys.argv[1:])
"""


class Systemd:
    """Keeps the descriptors of a service while one manager ends and another, of other code, starts.

    As in `test_handing_over`, and only what its ordinary course needs.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "m.sock"
        self.store: list[tuple[str, int]] = []
        self._said: set[str] = set()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._door.bind(str(folder / "notify"))
        self._door.setblocking(False)
        self._service: subprocess.Popen[bytes] | None = None

    def start(self, code: Code) -> None:
        """Start a manager of this code with what is kept; it has said that it is ready."""
        self._said.clear()
        environ = {
            "NOTIFY_SOCKET": str(self.path.with_name("notify")),
            "FDSTORE": "100",
            "LISTEN_FDS": str(len(self.store)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in self.store),
        }
        # Out of the way of 3, 4, ..., where systemd puts them; whatever is free there.
        spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for _, fd in self.store]

        def arrange() -> None:
            for offset, fd in enumerate(spare):
                os.dup2(fd, 3 + offset)

        serve = [*code.command, "serve", "--socket", str(self.path), "--budget", "64M"]
        self._service = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *serve],
            env=code.environ(**environ),
            pass_fds=range(3, 3 + len(self.store)),
            preexec_fn=arrange,
            stderr=subprocess.DEVNULL,
        )
        for fd in spare:
            os.close(fd)
        managers.until(self._ready)

    def stop(self) -> None:
        """End it as systemd does; what it leaves is kept."""
        assert self._service is not None
        self._service.send_signal(signal.SIGTERM)
        self._service.wait(60)
        self._listen()

    def close(self) -> None:
        if self._service is not None and self._service.poll() is None:
            self.stop()
        for _, fd in self.store:
            os.close(fd)
        self._door.close()

    def _ready(self) -> bool:
        assert self._service is not None
        assert self._service.poll() is None
        self._listen()
        return "READY" in self._said

    def _listen(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._door, 4096, 4)
            except BlockingIOError:
                return
            said = dict(line.split("=", 1) for line in data.decode().splitlines())
            self._said |= said.keys()
            if "FDSTORE" in said:
                self.store += [(said["FDNAME"], fd) for fd in fds]
            if "FDSTOREREMOVE" in said:
                for name, fd in [each for each in self.store if each[0] == said["FDNAME"]]:
                    self.store.remove((name, fd))
                    os.close(fd)
