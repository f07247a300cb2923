"""The memory manager as a process: its options, backend, budget, signals and log.

`tensor-dedup serve` runs it in the foreground; `__main__` runs it in the background.
"""

import json
import logging
import os
import resource
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from tensor_dedup.memory_manager.backends.base import Backend, Capabilities
from tensor_dedup.memory_manager.backends.ipc import Helper, IpcBackend
from tensor_dedup.memory_manager.backends.memfd import MemfdBackend
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.core import Settings
from tensor_dedup.memory_manager.cuda.nvidia import NvidiaDriver
from tensor_dedup.memory_manager.protocol.paths import device_socket
from tensor_dedup.memory_manager.server.acceptor import SocketFile
from tensor_dedup.memory_manager.server.metrics import LOOPBACK, MAX_DESCRIPTORS, Metrics
from tensor_dedup.memory_manager.server.server import Options, Server
from tensor_dedup.memory_manager.server.systemd_fdstore import inherit, notify
from tensor_dedup.settings import configured_budget
from tensor_dedup.text_table import human

_log = logging.getLogger(__name__)
MIN_BUDGET: Final = 1 << 20
_PACKAGE: Final = "tensor_dedup.memory_manager"  # the logger above those of its modules
_SHARE: Final = 0.8  # of a GPU: engines need the rest for what is theirs alone
_NO_SLABS: Final = 4096  # descriptors
_CGROUP: Final = Path("/sys/fs/cgroup")
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Start:
    """The options of `tensor-dedup serve`. Sizes are in bytes, times in seconds.

    * `device`: the UUID or ordinal of a GPU, or "" for host memory. A GPU's socket lies beside
      `socket`.
    * `backend`: "vmm" or "ipc". It is used for a GPU only.
    * `handle`: the sizes of CUDA handles are multiples of this. If it is 0, the smallest possible
      unit is used. Only "vmm" uses it.
    """

    socket: Path
    budget: int | None = None
    metrics_port: int | None = None
    idle_exit_s: float | None = None
    build_timeout_s: float = 30.0
    stall_timeout_s: float = 10.0
    device: str = ""
    backend: str = "vmm"
    handle: int = 0
    metrics_address: str = LOOPBACK
    dashboard: bool = False


def backend_for(start: Start) -> Backend:
    """Create the backend for these options.

    Raises:
        DeviceError: There is no such GPU, or no CUDA driver.
    """
    if not start.device:
        return MemfdBackend()
    if start.backend == "ipc":
        return IpcBackend(Helper(start.device))
    return VmmBackend(NvidiaDriver(), start.device, start.handle)


def serve(
    start: Start,
    ready: Callable[[], None] = lambda: None,
    make: Callable[[Start], Backend] = backend_for,
) -> None:
    """Run a memory manager until SIGTERM, SIGINT or a client's Stop. For the main thread only.

    `ready` is called as soon as clients can connect; `make` creates the backend.

    Raises:
        ManagerRunningError: Another manager owns the socket.
        UnsafeSocketError: The socket's folder does not belong to this user alone.
        NoMemoryError: The system cannot start the threads.
        OSError: The socket, or the port for metrics, is not available.
    """
    descriptors = raise_descriptor_limit()
    servers: list[Server] = []
    # Before the socket is there: whoever can connect can also rely on a clean end.
    before = {n: signal.signal(n, lambda *_: _end(servers)) for n in _ENDING}
    with ExitStack() as undo:
        undo.callback(_restore, before)
        backend = make(start)
        path = device_socket(start.socket, backend.capabilities.device)
        socket_file = SocketFile(path)
        undo.callback(socket_file.close)
        settings = _settings(start, backend, path, descriptors)
        port = 0 if start.metrics_port is None and start.dashboard else start.metrics_port
        if port is not None:
            descriptors = max(descriptors // 2, descriptors - MAX_DESCRIPTORS)
        options = Options(start.stall_timeout_s, start.idle_exit_s, descriptors, start.dashboard)
        server = Server(socket_file, backend, settings, options)
        undo.pop_all()
    servers.append(server)
    _warn_of(settings.budget, backend.capabilities)
    with Metrics(server, port, start.metrics_address, dashboard=start.dashboard) as metrics:
        _log.info(
            "serving socket=%s pid=%d budget=%d%s",
            path,
            os.getpid(),
            settings.budget,
            metrics.where,
        )
        server.inherit(inherit())
        ready()
        notify("READY=1")
        server.run()


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)


def _end(servers: list[Server]) -> None:
    if not servers:
        raise SystemExit(0)
    servers[0].stop()


def _settings(start: Start, backend: Backend, path: Path, descriptors: int) -> Settings:
    can = backend.capabilities
    return Settings(
        budget=max(start.budget or int(can.device_bytes * _SHARE) or own_budget(), MIN_BUDGET),
        pid=os.getpid(),
        name=str(path),
        backend=can.name,
        hardware_readonly=can.hardware_readonly,
        hashes_itself=can.hashes_itself,
        mappings_hold=can.outlives,
        device=can.device,
        layout=can.layout,
        build_timeout_s=start.build_timeout_s,
        # The others are for clients, and for what they send.
        max_slabs=descriptors - min(descriptors // 2, _NO_SLABS),
        # A put of an earlier manager is no put of this one.
        first_put=1 + secrets.randbits(48),
    )


class JsonFormatter(logging.Formatter):
    """A log formatter that writes one JSON object for each line.

    Its keys are `time` (UTC), `level`, `event`, `message` and `facts`, and `exception` if there is
    one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the log record as a JSON object."""
        facts = {k: v if isinstance(v, int | float) else str(v) for k, v in _facts(record).items()}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", ""),
            "message": record.getMessage().strip(),
            "facts": facts,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _facts(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, "facts", {})


def log_to(*, details: bool = False, as_json: bool = False) -> None:
    """Log to stderr, as text with the time or as JSON.

    With `details`, every put and every layer is logged, too.
    """
    handler = logging.StreamHandler()
    readable = logging.Formatter("%(asctime)s %(levelname).1s %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else readable)
    manager = logging.getLogger(_PACKAGE)
    manager.addHandler(handler)
    manager.setLevel(logging.DEBUG if details else logging.INFO)
    manager.propagate = False


def own_budget() -> int:
    """Return the budget in bytes from a configuration file, or else the default.

    Raises:
        ConfigError: The configuration file is not valid.
    """
    return configured_budget() or default_budget()


def default_budget() -> int:
    """Return half of the memory that this process may have, in bytes."""
    return memory_limit() // 2


def memory_limit() -> int:
    """Return how many bytes of memory the machine and its cgroups allow this process."""
    return min([psutil.virtual_memory().total, *_cgroup_limits()])


def _warn_of(budget: int, can: Capabilities) -> None:
    there = can.device_bytes or memory_limit()
    if budget > there:
        _log.warning(
            "budget=%d (%s) is more than the %s of memory that there are: when they are used up, "
            "puts fail, or the system ends a process; give a smaller --budget",
            budget,
            human(budget),
            human(there),
        )


def _cgroup_limits() -> list[int]:
    """Return the limits of the cgroups that this process is in (version 2), innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = _CGROUP / inside
    return [
        int(text)
        for place in (folder, *folder.parents)
        if place.is_relative_to(_CGROUP) and (text := _text(place / "memory.max")).isdigit()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files to the maximum; return the maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
