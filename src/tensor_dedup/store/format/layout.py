"""The layout of a store's folder. No I/O."""

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


@dataclass(frozen=True)
class StoreLayout:
    """The paths of one store. Those that are always the same are made once."""

    root: Path

    @cached_property
    def marker(self) -> Path:
        """The file that says that this is a store, and of which version."""
        return self.root / MARKER

    @cached_property
    def lock(self) -> Path:
        """The lock that sessions hold shared and a sweep holds exclusively."""
        return self.root / LOCK

    @cached_property
    def names_lock(self) -> Path:
        """The lock held exclusively while a reference appears, changes or is removed."""
        return self.root / NAMES_LOCK

    @cached_property
    def pull_lock(self) -> Path:
        """The lock held exclusively while a checkpoint is pulled because somebody loads it."""
        return self.root / PULL_LOCK

    @cached_property
    def drain_lock(self) -> Path:
        """The lock held exclusively while a step appears on a remote behind, or goes from both."""
        return self.root / DRAIN_LOCK

    @cached_property
    def index_lock(self) -> Path:
        """The lock held shared while the index is open, and exclusively to replace it."""
        return self.root / INDEX_LOCK

    @cached_property
    def sequence(self) -> Path:
        """The file with the number that a step was last given; may be gone while nobody saves."""
        return self.root / SEQUENCE

    @cached_property
    def identity(self) -> Path:
        """The file that tells this store from others; there once it was a second tier."""
        return self.root / IDENTITY

    @cached_property
    def tiers(self) -> Path:
        """The folder of notes, one for each run, of the second tier that it is drained to."""
        return self.root / TIERS

    @cached_property
    def drains(self) -> Path:
        """The folder of notes, one for each run, of what was seen on second tiers of it."""
        return self.root / DRAINS

    @cached_property
    def index(self) -> Path:
        """The SQLite file of the index."""
        return self.root / INDEX

    @cached_property
    def refs(self) -> Path:
        """The folder of references: one text file for each name."""
        return self.root / "refs"

    @cached_property
    def quarantine(self) -> Path:
        """The folder of damaged files, and of lists of the bad places in containers."""
        return self.root / "quarantine"

    @cached_property
    def trash(self) -> Path:
        """The folder of what no reference leads to, until its grace period ends."""
        return self.root / "trash"

    @cached_property
    def tmp(self) -> Path:
        """The folder of files that are being written."""
        return self.root / "tmp"

    @cached_property
    def containers(self) -> Path:
        """The folder of containers, in folders by the first digits of their names."""
        return self.root / "containers"

    @cached_property
    def _manifests(self) -> Path:
        return self.root / "manifests"

    def container(self, name: str, kind: str) -> Path:
        """Return the path of a container's data."""
        return self.containers / f"{name[:2]}/{name}.{kind}"

    def table(self, name: str, kind: str) -> Path:
        """Return the path of the file with a container's table: its own, or one beside it."""
        suffix = TABLE_SUFFIX if kind == "raw" else f".{kind}"
        return self.containers / f"{name[:2]}/{name}{suffix}"

    def manifest(self, name: str) -> Path:
        """Return the path of a manifest, or of a page of one."""
        return self._manifests / f"{name[:2]}/{name}"

    def bad(self, name: str) -> Path:
        """Return the path of the list of bad places in a container."""
        return self.quarantine / f"{name}{BAD_SUFFIX}"

    def database_files(self) -> list[Path]:
        """Return the paths of all files that the index consists of."""
        return [self.root / name for name in INDEX_FILES]
