"""The options of a CheckpointStore, which are checked before anything is opened."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from tensor_dedup.store.steps.errors import BadOption, BadOptionError
from tensor_dedup.store.steps.retention import is_whole
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.writing.sources import small_files
from tensor_dedup.training.adapters import ModelAdapter
from tensor_dedup.training.encoding.decisions import Compress, checked_compress
from tensor_dedup.training.host_pool import HostPool, default_bytes

if TYPE_CHECKING:
    from tensor_dedup.remote.remote import Remote
    from tensor_dedup.types import StrPath


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a run saves its steps. `CheckpointStore` explains the fields, which are its arguments.

    `run` is the name of the run for error messages.

    Raises:
        BadOptionError: An option is invalid; `kind` says which.
    """

    run: InitVar[str]
    adapter: ModelAdapter | None
    compress: Compress
    base: str | None
    config: "StrPath | Mapping[str, str | bytes] | None"
    weights: str
    pool_bytes: int | HostPool | None
    in_flight: int

    def __post_init__(self, run: str) -> None:
        # Nothing else would notice some of these before a later save, or say what is wrong.
        where, pool = f"run {run!r}", self.pool_bytes
        nbytes = pool.capacity if isinstance(pool, HostPool) else pool
        if not is_whole(self.in_flight, 1) or not (nbytes is None or is_whole(nbytes, 0)):
            what = f"in_flight={self.in_flight!r}, pool_bytes={pool!r}"
            raise BadOptionError.of(BadOption.LIMIT, where, what)
        if not isinstance(self.config, str | PathLike | Mapping | None):
            raise BadOptionError.of(BadOption.FILES, where, f"config={self.config!r}")
        if not isinstance(self.weights, str):
            raise BadOptionError.of(BadOption.WEIGHTS, where, f"weights={self.weights!r}")
        checked_compress(self.compress)

    def pool(self) -> HostPool:
        """Return the pool for the copies that background saves make."""
        if isinstance(self.pool_bytes, HostPool):
            return self.pool_bytes
        return HostPool(default_bytes() if self.pool_bytes is None else self.pool_bytes)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Where a run is drained to, and how. `CheckpointStore` explains the fields.

    `run` is the name of the run for error messages.

    Raises:
        BadOptionError: An option is invalid, or needs a second tier; `kind` says which.
    """

    run: InitVar[str]
    drain: "StrPath | LocalStore | Remote | None"
    keep_fast: int | None
    drain_backlog: int
    direct: bool

    def __post_init__(self, run: str) -> None:
        where = f"run {run!r}"
        what = f"keep_fast={self.keep_fast!r}, drain_backlog={self.drain_backlog!r}"
        if self.drain is None:
            if (self.keep_fast, self.drain_backlog, self.direct) != (1, 8, False):  # the defaults
                raise BadOptionError.of(BadOption.FAST, where, f"{what} without `drain`")
            return
        if not isinstance(self.drain, str | PathLike | LocalStore):
            from tensor_dedup.remote.remote import Remote

            if not isinstance(self.drain, Remote):
                raise BadOptionError.of(BadOption.DRAIN, where, f"drain={self.drain!r}")
        keeps = self.keep_fast is None or is_whole(self.keep_fast, 1)
        if not keeps or not is_whole(self.drain_backlog, 1):
            raise BadOptionError.of(BadOption.FAST, where, what)


def read_files(
    store: LocalStore, given: "StrPath | Mapping[str, str | bytes] | None"
) -> dict[str, bytes]:
    """Return the content of small files by path; `given` has it already, or is their folder.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        CheckpointFilesError: A link leads out of the folder.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {
            path: data.encode() if isinstance(data, str) else bytes(data)
            for path, data in given.items()
        }
    with store.handle.translated():
        return small_files(store.handle.files, Path(given))
