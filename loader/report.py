"""Report what every load of this process and of its workers read, shared and kept. No torch.

A worker process hands its reports over as files: with TENSOR_DEDUP_REPORT_DIR set, `add` also
writes the model's report there, and a process that calls `collect_from` merges them. One that may
start workers makes a directory of its own, below the one it inherited, for what it and its workers
load. Files, and not a pipe, because engines start workers in ways we do not control, and a worker
may be gone before anyone asks.
"""

import atexit
import itertools
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tensor_dedup.text_table import render

REPORT_DIR_VARIABLE: Final = "TENSOR_DEDUP_REPORT_DIR"
_FILE: Final = re.compile(r"\d+-\d+\.json")  # of a load: the process, and which of its loads
_OWN: Final = re.compile(r"\d+-[0-9a-f]{8}")  # of a process
_PHASES: Final = ("plan", "read", "hash", "process")
_log = logging.getLogger(__name__)


@dataclass
class ModelReport:
    """One load of one model by one process. Sizes in bytes.

    `total_bytes` is what the final tensors take, packed copies included; `shared_bytes` of it
    were resident already, `private_bytes` is the rest. `bytes_read` is all tensor data fetched,
    for hashing too: from files, or, as `bytes_from_store`, from a store; `header_bytes` the
    headers. `known`: were the digests remembered. `skipped` holds (name, reason) of what could not
    be shared. `collisions` counts hits that a comparison of bytes refused; `tokens_equal_plain` is
    for whoever compared outputs; `stored_as` the name under which the store has the checkpoint.
    """

    name: str = ""
    pid: int = field(default_factory=os.getpid)
    rank: int = 0
    known: bool = False
    total_bytes: int = 0
    shared_bytes: int = 0
    private_bytes: int = 0
    checkpoint_bytes: int = 0
    header_bytes: int = 0
    bytes_read: int = 0
    bytes_from_store: int = 0
    bytes_hashed: int = 0
    bytes_materialised: int = 0
    tensors_total: int = 0
    tensors_shared: int = 0
    source_tensors_total: int = 0
    source_tensors_shared: int = 0
    source_bytes_shared: int = 0
    collisions: int = 0
    tokens_equal_plain: bool | None = None
    stored_as: str | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    components: list[Any] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON would hold them."""
        return asdict(self) | {"skipped": [list(pair) for pair in self.skipped]}


@dataclass(frozen=True)
class Report:
    """All loads in the order of time, and what the residents and their table take now, in bytes.

    The two sizes include workers', as of each one's last load. `devices`: why memory of a device is
    shared less than it could be, as this process met it last.
    """

    models: list[ModelReport]
    registry_bytes: int
    resident_bytes: int
    devices: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: `models`, `registry_bytes`, `resident_bytes`, `devices`."""
        return {
            "models": [model.to_dict() for model in self.models],
            "registry_bytes": self.registry_bytes,
            "resident_bytes": self.resident_bytes,
            "devices": dict(self.devices),
        }

    def __str__(self) -> str:
        return render(self.to_dict())


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One report with the place it takes among others; also the content of a report file."""

    time_ns: int
    pid: int
    number: int
    model: ModelReport
    registry_bytes: int = 0
    resident_bytes: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """In the order of time. In containers numbers of processes come again and again."""
        return self.time_ns, self.pid, self.number


class _Collection:
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.directories: list[Path] = []
        self.refused: set[Path] = set()
        self.devices: dict[str, str] = {}
        self.gauges: tuple[Callable[[], int], Callable[[], int]] = (int, int)
        self.own: tuple[int, Path] | None = None  # whose workers write where
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()

    def renew_lock(self) -> None:
        # A thread that does not exist in the child may have held it.
        self.lock = threading.Lock()


_collection: Final = _Collection()
os.register_at_fork(after_in_child=_collection.renew_lock)


def measure_with(registry_bytes: Callable[[], int], resident_bytes: Callable[[], int]) -> None:
    """Say how to measure this process's table and residents (the registry does, when imported)."""
    _collection.gauges = (registry_bytes, resident_bytes)


def add(model: ModelReport) -> None:
    """Enter the report of a finished load. Safe from any thread; never fails the load."""
    registry_bytes, resident_bytes = (gauge() for gauge in _collection.gauges)
    with _collection.lock:
        entry = _Entry(
            time_ns=time.time_ns(),
            pid=os.getpid(),
            number=next(_collection.numbers),
            model=model,
            registry_bytes=registry_bytes,
            resident_bytes=resident_bytes,
        )
        _collection.entries.append(entry)
    directory = os.environ.get(REPORT_DIR_VARIABLE)
    if directory:
        _hand_over(entry, Path(directory))


def note(device: str, reason: str) -> None:
    """Say why memory of a device is shared less than it could be. Safe from any thread."""
    if _collection.devices.get(device) != reason:
        _collection.devices[device] = reason
        _log.warning("%s: %s", device, reason)


def _hand_over(entry: _Entry, directory: Path) -> None:
    name = f"{entry.pid}-{entry.number}.json"
    unfinished = directory / f".{name}"  # of this process alone, and not what readers look for
    try:
        unfinished.write_bytes(msgspec.json.encode(entry))
        unfinished.replace(directory / name)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        _log.warning(
            "the report of %s stays in process %d: %s", entry.model.name, entry.pid, str(error)
        )


def collect_from(directory: str | os.PathLike[str]) -> None:
    """From now on `report` also takes what other processes write into this directory, or below."""
    path = Path(directory).absolute()
    with _collection.lock:
        if path not in _collection.directories:
            _collection.directories.append(path)


def share_with_workers() -> Path | None:
    """Make workers started from now on report to this process; return the directory.

    It lies in the one that the variable names, if it does, where an outer process, or the user,
    finds what is in it; else among temporary files, until this process ends. None, with a warning:
    there is no room for one.
    """
    given = os.environ.get(REPORT_DIR_VARIABLE)
    if given and _collection.own == (os.getpid(), Path(given)) and Path(given).is_dir():
        return Path(given)
    try:
        path = (_directory_in(Path(given)) if given else None) or _directory()
    except OSError as error:
        _log.warning("loads of worker processes will not be in the report: %s", str(error))
        return None
    os.environ[REPORT_DIR_VARIABLE] = str(path)
    _collection.own = os.getpid(), path
    collect_from(path)
    return path


def _directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="tensor-dedup-reports-"))
    atexit.register(_remove, os.getpid(), path, shutil.rmtree)
    return path


def _directory_in(outer: Path) -> Path | None:
    """Where whoever collects in `outer` looks, too; None when it is gone."""
    path = outer.absolute() / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir()  # readable for whom files there are
    except OSError as error:  # its process has ended, perhaps
        _log.warning("whoever collects reports in %s does not get these: %s", outer, str(error))
        return None
    atexit.register(_remove, os.getpid(), path, os.rmdir)  # unless there are reports in it
    return path


def _remove(pid: int, path: Path, remove: Callable[[Path], object]) -> None:
    if os.getpid() == pid:  # and not in a forked worker
        with suppress(OSError):
            remove(path)


def report() -> Report:
    """All loads of this process and of those it collects from. Safe from any thread."""
    with _collection.lock:
        entries = {entry.place: entry for entry in _collection.entries}
        directories = list(_collection.directories)
    for directory in directories:
        for path in _files_in(directory):
            entry = _read(path)
            if entry is not None:
                entries.setdefault(entry.place, entry)
    ordered = [entries[place] for place in sorted(entries)]
    last = {entry.pid: entry for entry in ordered if entry.pid != os.getpid()}
    registry_bytes, resident_bytes = (gauge() for gauge in _collection.gauges)
    return Report(
        models=[entry.model for entry in ordered],
        registry_bytes=registry_bytes + sum(entry.registry_bytes for entry in last.values()),
        resident_bytes=resident_bytes + sum(entry.resident_bytes for entry in last.values()),
        devices=dict(_collection.devices),
    )


def _files_in(directory: Path) -> Iterator[Path]:
    """The reports there, and in the directories of processes that collect for themselves."""
    for folder, below, names in os.walk(directory, onerror=_unreadable):
        below[:] = sorted(filter(_OWN.fullmatch, below))
        yield from (Path(folder, name) for name in sorted(filter(_FILE.fullmatch, names)))


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        _skip(Path(error.filename), error)


def _read(path: Path) -> _Entry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Entry)
    except (OSError, msgspec.MsgspecError) as error:
        _skip(path, error)
        return None


def _skip(path: Path, error: Exception) -> None:
    if path not in _collection.refused:
        _collection.refused.add(path)
        _log.warning("skipped the report %s: %s", path, str(error))
