"""Where everything lies in the folder of a store. No I/O."""

from dataclasses import dataclass
from pathlib import Path

MARKER = "FORMAT"
LOCK = "lock"
NAMES_LOCK = "names.lock"
INDEX = "index.sqlite"
INDEX_LOCK = "index.lock"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
FOLDERS = ("containers", "manifests", "refs", "quarantine", "trash", "tmp")
KNOWN = frozenset({MARKER, LOCK, NAMES_LOCK, INDEX_LOCK, *INDEX_FILES, *FOLDERS})
MARKER_LINES = ["tensor-dedup store", "version 1"]

READABLE_KINDS = frozenset({"raw", "slab", "pack", "delta", "external"})
TABLE_SUFFIX = ".raw.table"
BAD_SUFFIX = ".bad"


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths of one store."""

    root: Path

    @property
    def marker(self) -> Path:
        """Says that this is a store, and of which version."""
        return self.root / MARKER

    @property
    def lock(self) -> Path:
        """Held shared by who reads or writes, alone by who sweeps."""
        return self.root / LOCK

    @property
    def names_lock(self) -> Path:
        """Held alone for the moment in which a reference appears, changes or goes."""
        return self.root / NAMES_LOCK

    @property
    def index_lock(self) -> Path:
        """Held shared while the index is open, alone by who replaces it."""
        return self.root / INDEX_LOCK

    @property
    def index(self) -> Path:
        """The SQLite file."""
        return self.root / INDEX

    @property
    def refs(self) -> Path:
        """One text file for each name."""
        return self.root / "refs"

    @property
    def quarantine(self) -> Path:
        """What was found damaged: whole files, and lists of bad places in containers."""
        return self.root / "quarantine"

    @property
    def trash(self) -> Path:
        """What no reference leads to, waiting for its grace to end."""
        return self.root / "trash"

    @property
    def tmp(self) -> Path:
        """Files that are being written."""
        return self.root / "tmp"

    def container(self, name: str, kind: str) -> Path:
        """The data of a container."""
        return self.root / "containers" / name[:2] / f"{name}.{kind}"

    def table(self, name: str, kind: str) -> Path:
        """The file that holds a container's table: its own, or the one beside it."""
        suffix = TABLE_SUFFIX if kind == "raw" else f".{kind}"
        return self.root / "containers" / name[:2] / f"{name}{suffix}"

    def manifest(self, name: str) -> Path:
        """A manifest, or a page of one."""
        return self.root / "manifests" / name[:2] / name

    def bad(self, name: str) -> Path:
        """The list of bad places in a container."""
        return self.quarantine / f"{name}{BAD_SUFFIX}"

    def database_files(self) -> list[Path]:
        """Everything the index consists of."""
        return [self.root / name for name in INDEX_FILES]
