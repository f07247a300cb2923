"""Reports on all loads of this process and its workers: the bytes read, shared and private.

Worker processes pass their reports on as files, which works however an engine starts its workers:

1. `share_with_workers` creates a directory and names it in `TENSOR_DEDUP_REPORT_DIR`, which workers
   inherit.
2. `add`, called in a worker, also writes the report to that directory.
3. `report` reads the files, even if the worker has ended.

This module does not import torch.
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
from typing import Any, Final, Protocol

import msgspec

from tensor_dedup.text_table import render

REPORT_DIR_VARIABLE: Final = "TENSOR_DEDUP_REPORT_DIR"
_FILE: Final = re.compile(r"\d+-\d+\.json")  # of a load: the process, and which of its loads
_OWN: Final = re.compile(r"\d+-[0-9a-f]{8}")  # of a process
_PHASES: Final = ("plan", "read", "hash", "process")
_log = logging.getLogger(__name__)


class LiveDigests(Protocol):
    """The digests of a loaded model, computed when they are asked for. Safe from any thread."""

    @property
    def known_checkpoint(self) -> str | None:
        """The digest of the checkpoint that was loaded, or None if it is not known yet."""

    def checkpoint(self) -> str | None:
        """Return the digest of the checkpoint that was loaded, or None if it cannot be known."""

    def weights(self) -> str | None:
        """Return the digest of the model's weights now, or None if it cannot be known."""


@dataclass
class ModelReport:
    """The report on one load of one model by one process. Sizes are in bytes.

    - `total_bytes`: the size of the final tensors (weights as the engine uses them), packed copies
      included. It is the sum of `shared_bytes` and `private_bytes`.
    - `shared_bytes`: the size of the tensors and packed copies that were in shared memory, as a
      whole, before the load.
    - `private_bytes`: the rest of `total_bytes`, including tensors that this load put into shared
      memory.
    - `leaf_shared_bytes`: the part of `private_bytes` that lies in leaves (parts of 2 MiB) of
      tensors that were in shared memory before the load.
    - `bytes_read`: the size of all tensor data that was read, including data that was only hashed.
    - `bytes_from_store`: the part of `bytes_read` that came from a store.
    - `header_bytes`: the size of the headers of the files.
    - `known`: whether the digests of all source tensors (tensors of the checkpoint) were
      remembered.
    - `known_reads`: what was read of source tensors whose digests were remembered, by reason: the
      `reason`, the number of `tensors`, their `bytes`, and the `largest` of them, at most eight
      pairs of a name and its bytes.
    - `skipped`: the name of each tensor that could not be shared, with the reason.
    - `collisions`: the number of shared tensors that a comparison of bytes rejected.
    - `tokens_equal_plain`: whether the model's output equals its output without sharing. Only
      programs that compare outputs set it.
    - `stored_as`: the name under which the load stored the checkpoint in the store.
    - `frozen_base`: the `base` and the `layers` that replaced layers of the checkpoint, with the
      number and total size of the tensors in those layers.
    - `marked`: for each marker of the checkpoint (a list of tensors that are equal to those of a
      base), its `base` and `digest`, the number of its `tensors`, and how many were `shared`.
    - `known_checkpoint_digest`: the checkpoint's digest, if the load knew it.
    """

    name: str = ""
    pid: int = field(default_factory=os.getpid)
    rank: int = 0
    known: bool = False
    total_bytes: int = 0
    shared_bytes: int = 0
    private_bytes: int = 0
    leaf_shared_bytes: int = 0
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
    frozen_base: dict[str, Any] | None = None
    marked: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    components: list[Any] = field(default_factory=list)
    known_reads: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    known_checkpoint_digest: str | None = None

    def follow(self, digests: LiveDigests) -> None:
        """Let the digests of this report be those of a model in memory."""
        # No field: it is nothing that could be written to a file, or copied.
        self.__dict__["_live"] = digests
        self.known_checkpoint_digest = digests.known_checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model's memory, which a copy elsewhere does not have."""
        return {name: value for name, value in vars(self).items() if name != "_live"}

    @property
    def live(self) -> LiveDigests | None:
        """The digests of the model in memory; None if another process loaded it."""
        found: LiveDigests | None = self.__dict__.get("_live")
        return found

    @property
    def checkpoint_digest(self) -> str | None:
        """The digest of the checkpoint that was loaded: of all of its tensors.

        It is a fact of the load, and later changes of the weights do not change it. What the load
        did not hash is hashed now, from the files, and remembered. The value is None if it cannot
        be known: a file has changed since, or another process loaded the model and has not hashed
        everything.
        """
        live = self.live
        found = None if live is None else live.checkpoint()
        return self.known_checkpoint_digest if found is None else found

    @property
    def weights_digest(self) -> str | None:
        """The digest of the weights that the model has now: of all parameters and kept buffers.

        Shared tensors are known, unless they were written to; all others are hashed anew each time.
        The value is None if it cannot be known: the model no longer exists, another process has it,
        or some weights are packed in a way that hides their bytes.
        """
        return None if self.live is None else self.live.weights()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object. Nothing is hashed for it.

        `checkpoint_digest` is null if it is not known yet.
        """
        fields = asdict(self)
        known = fields.pop("known_checkpoint_digest")
        if self.live is not None:
            known = self.live.known_checkpoint or known
        return fields | {
            "checkpoint_digest": known,
            "skipped": [list(pair) for pair in self.skipped],
        }


@dataclass(frozen=True)
class Report:
    """The reports of all loads in chronological order, and the current memory use in bytes.

    - `resident_bytes` is the size of the shared tensors of this process and its workers.
    - `registry_bytes` is the size of the tables that list these tensors.
    - `devices` maps a device to the last reason why this process shares less of the device's memory
      than it could.

    For workers, the sizes are those after the worker's last load.
    """

    models: list[ModelReport]
    registry_bytes: int
    resident_bytes: int
    devices: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object of `models`, `registry_bytes`, `resident_bytes` and `devices`."""
        return {
            "models": [model.to_dict() for model in self.models],
            "registry_bytes": self.registry_bytes,
            "resident_bytes": self.resident_bytes,
            "devices": dict(self.devices),
        }

    def __str__(self) -> str:
        return render(self.to_dict())


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One report with its position among the others; also the content of a report file."""

    time_ns: int
    pid: int
    number: int
    model: ModelReport
    registry_bytes: int = 0
    resident_bytes: int = 0
    largest: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int, int]:
        """The position in chronological order; in containers process numbers are reused."""
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
    """Set the functions that measure the memory use of this process for reports."""
    _collection.gauges = (registry_bytes, resident_bytes)


def add(model: ModelReport, largest: tuple[str, ...] = ()) -> None:
    """Add `model`, the report of a finished load. Safe from any thread.

    `largest` are digests of its largest source tensors, for `loaded_beside` in other processes.
    If `TENSOR_DEDUP_REPORT_DIR` is set, the report is also written to that directory. A write error
    is logged and not raised.
    """
    registry_bytes, resident_bytes = (gauge() for gauge in _collection.gauges)
    with _collection.lock:
        # A clock that was set back must not put a load before the one that it came after.
        last_ns = max((each.time_ns for each in _collection.entries), default=0)
        entry = _Entry(
            time_ns=max(time.time_ns(), last_ns),
            pid=os.getpid(),
            number=next(_collection.numbers),
            model=model,
            registry_bytes=registry_bytes,
            resident_bytes=resident_bytes,
            largest=largest,
        )
        _collection.entries.append(entry)
    directory = os.environ.get(REPORT_DIR_VARIABLE)
    if directory:
        _hand_over(entry, Path(directory))


def loaded_beside(rank: int, largest: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the name of a model with some of these tensors in another worker, and its process.

    `largest` are the digests that were given to `add`. Only workers of the process that started
    this one count, if they still run and have the same rank. Otherwise, and in a process that
    collects reports itself, the result is None.
    """
    directory = os.environ.get(REPORT_DIR_VARIABLE)
    collects = _collection.own is not None and _collection.own[0] == os.getpid()
    if not directory or collects:
        return None
    for path in _files_in(Path(directory)):
        entry = _read(path)
        if entry is None or entry.pid == os.getpid() or entry.model.rank != rank:
            continue
        if set(largest) & set(entry.largest) and Path(f"/proc/{entry.pid}").exists():
            return entry.model.name, entry.pid
    return None


def note(device: str, reason: str) -> None:
    """Record `reason`, which tells why less memory of `device` is shared than could be.

    The last reason for each device is kept, and a reason that differs from the previous one is
    logged. Safe from any thread.
    """
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
    """Make `report` include the reports that other processes write to `directory` or below it.

    A second call for the same directory has no effect.
    """
    path = Path(directory).absolute()
    with _collection.lock:
        if path not in _collection.directories:
            _collection.directories.append(path)


def share_with_workers() -> Path | None:
    """Make workers started from now on report to this process; return their report directory.

    Workers find the directory by the environment variable `TENSOR_DEDUP_REPORT_DIR`, which is set
    here. If the parent process has set it already, the new directory is made inside the parent's if
    possible, so that the parent finds the reports, too. Otherwise it is a temporary directory,
    which is removed when this process ends. A second call returns the same directory.

    Returns None, after a warning, if no directory can be created.
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
    """Return a directory where the collector of `outer` looks too, or None if `outer` is gone."""
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
    """Return the reports of this process and of the processes from which it collects reports.

    A report file that cannot be read is skipped with a warning. Safe from any thread.
    """
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
    """Yield the report files there and in the directories of processes that collect themselves."""
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
