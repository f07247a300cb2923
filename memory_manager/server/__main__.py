"""The command `python -m tensor_dedup.memory_manager.server`, by which clients start a manager.

With `--detach` the manager runs in the background, detached from its parent. The parent exits with
status 0 when the manager accepts connections, 3 if another manager owns the socket, and 1 if it
could not start; the reason is on stderr.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tensor_dedup.errors import TensorDedupError
from tensor_dedup.memory_manager.backends.base import Backend
from tensor_dedup.memory_manager.errors import ManagerRunningError
from tensor_dedup.memory_manager.protocol import paths
from tensor_dedup.memory_manager.server.main import Start, backend_for, log_to, serve
from tensor_dedup.memory_manager.server.metrics import LOOPBACK

RUNNING: Final = 3
_MAX_LOG: Final = 8 << 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tensor-dedup-manager")
    parser.add_argument("--socket")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--metrics", type=int)
    parser.add_argument("--metrics-address", default=LOOPBACK)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("--idle-exit", type=float)
    parser.add_argument("--build-timeout", type=float, default=30.0)
    parser.add_argument("--stall-timeout", type=float, default=10.0)
    parser.add_argument("--device", default="")
    parser.add_argument("--backend", default="vmm", choices=("vmm", "ipc"))
    parser.add_argument("--handle", type=int, default=0)
    parser.add_argument("--detach", action="store_true")
    return parser.parse_args()


def main(make: Callable[[Start], Backend] = backend_for) -> int:
    """Run a manager, or start one in the background; return the exit status.

    `make` creates the backend.
    """
    given = _arguments()
    try:
        start = Start(
            paths.socket_path(given.socket),
            given.budget,
            given.metrics,
            given.idle_exit,
            given.build_timeout,
            given.stall_timeout,
            given.device,
            given.backend,
            given.handle,
            given.metrics_address,
            given.dashboard,
        )
        if given.detach:
            return _detached(start)
        log_to()
        serve(start, make=make)
    except (TensorDedupError, OSError) as error:
        return _explain(error)
    return 0


def _explain(error: Exception) -> int:
    sys.stderr.write(f"{error}\n")
    return RUNNING if isinstance(error, ManagerRunningError) else 1


def _detached(start: Start) -> int:
    paths.make_folder(start.socket.parent)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        if said == b"+":
            return 0
        sys.stderr.write(said[1:].decode("utf-8", "replace"))
        return said[0] if said else 1
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    _leave_terminal(start.socket.parent / "manager.log")
    _run(lambda: serve(start, lambda: _say_ready(writer)), writer)
    return 0


def _say_ready(writer: int) -> None:
    os.write(writer, b"+")
    os.close(writer)


def _run(body: Callable[[], None], writer: int) -> None:
    log_to()
    try:
        body()
    except (TensorDedupError, OSError) as error:
        status = RUNNING if isinstance(error, ManagerRunningError) else 1
        os.write(writer, bytes([status]) + f"{error}\n".encode())
        raise SystemExit(status) from error


def _leave_terminal(log_file: Path) -> None:
    """Go to a daemon's folder, and send the output to a file that only this user can read."""
    os.chdir("/")
    fresh = log_file.exists() and log_file.stat().st_size > _MAX_LOG
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else os.O_APPEND)
    out = os.open(log_file, flags, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out)


if __name__ == "__main__":
    sys.exit(main())
