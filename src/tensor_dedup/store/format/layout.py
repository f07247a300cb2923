"""The file layout of a store's folder. No I/O."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MARKER = "FORMAT"
LOCK = "lock"
NAMES_LOCK = "names.lock"
PULL_LOCK = "pull.lock"
DRAIN_LOCK = "drain.lock"
INDEX = "index.sqlite"
INDEX_LOCK = "index.lock"
SEQUENCE = "sequence"
IDENTITY = "identity"
TIERS = "tiers"
DRAINS = "drains"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
FOLDERS = ("containers", "manifests", "refs", "quarantine", "trash", "tmp")
KNOWN = frozenset(
    {MARKER, LOCK, NAMES_LOCK, PULL_LOCK, DRAIN_LOCK, INDEX_LOCK, SEQUENCE, *INDEX_FILES, *FOLDERS}
)
MARKER_LINES = ["tensor-dedup store", "version 1"]

READABLE_KINDS = frozenset({"raw", "slab", "pack", "delta", "external"})
TABLE_SUFFIX = ".raw.table"
BAD_SUFFIX = ".bad"
_HEX = frozenset("0123456789abcdef")


def is_digest(text: str) -> bool:
    """Return whether `text` is a digest: 64 hex digits in lower case."""
    return len(text) == 64 and _HEX.issuperset(text)


@dataclass(frozen=True)
class StoreLayout:
    """The paths of the files and folders of the store at `root`."""

    root: Path

    @cached_property
    def marker(self) -> Path:
        """The file that marks the folder as a store and states the format version."""
        return self.root / MARKER

    @cached_property
    def lock(self) -> Path:
        """The lock file that sessions hold shared and garbage collection holds exclusively."""
        return self.root / LOCK

    @cached_property
    def names_lock(self) -> Path:
        """The lock file held exclusively while a reference is created, changed or removed."""
        return self.root / NAMES_LOCK

    @cached_property
    def pull_lock(self) -> Path:
        """The lock file held exclusively while a load pulls a checkpoint from a remote."""
        return self.root / PULL_LOCK

    @cached_property
    def drain_lock(self) -> Path:
        """The lock file held exclusively while steps are added to or deleted from a second tier."""
        return self.root / DRAIN_LOCK

    @cached_property
    def index_lock(self) -> Path:
        """The lock file held shared while the index is open, and exclusively to replace it."""
        return self.root / INDEX_LOCK

    @cached_property
    def sequence(self) -> Path:
        """The file with the last sequence number given to a step. It may be missing."""
        return self.root / SEQUENCE

    @cached_property
    def identity(self) -> Path:
        """The file with this store's random identity. It exists if this store was a second tier."""
        return self.root / IDENTITY

    @cached_property
    def tiers(self) -> Path:
        """The folder of notes, one for each run, about the second tier the run is drained to."""
        return self.root / TIERS

    @cached_property
    def drains(self) -> Path:
        """The folder of records, one for each run, of the steps seen on its second tiers."""
        return self.root / DRAINS

    @cached_property
    def index(self) -> Path:
        """The SQLite database of the index."""
        return self.root / INDEX

    @cached_property
    def refs(self) -> Path:
        """The folder of references: one text file for each checkpoint name."""
        return self.root / "refs"

    @cached_property
    def quarantine(self) -> Path:
        """The folder of damaged files, and of lists of damaged records in containers."""
        return self.root / "quarantine"

    @cached_property
    def trash(self) -> Path:
        """The folder of unused files, which are deleted after a grace period."""
        return self.root / "trash"

    @cached_property
    def tmp(self) -> Path:
        """The folder of temporary files, which are still being written."""
        return self.root / "tmp"

    @cached_property
    def containers(self) -> Path:
        """The folder of containers, in subfolders named by the first two digits of their names."""
        return self.root / "containers"

    @cached_property
    def _manifests(self) -> Path:
        return self.root / "manifests"

    def container(self, name: str, kind: str) -> Path:
        """Return the path of a container's data file."""
        return self.containers / f"{name[:2]}/{name}.{kind}"

    def table(self, name: str, kind: str) -> Path:
        """Return the path of the file with a container's table.

        For a `raw` container that is a file beside the data, for any other kind the container
        itself.
        """
        suffix = TABLE_SUFFIX if kind == "raw" else f".{kind}"
        return self.containers / f"{name[:2]}/{name}{suffix}"

    def manifest(self, name: str) -> Path:
        """Return the path of a manifest, or of a manifest's page, by its name."""
        return self._manifests / f"{name[:2]}/{name}"

    def bad(self, name: str) -> Path:
        """Return the path of the list of damaged records in a container."""
        return self.quarantine / f"{name}{BAD_SUFFIX}"

    def database_files(self) -> list[Path]:
        """Return the paths of all files of the index: the database and SQLite's side files."""
        return [self.root / name for name in INDEX_FILES]
