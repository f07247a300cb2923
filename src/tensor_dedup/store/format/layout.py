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
WRITERS = "writers"
RENAMING = "renaming"
RENAMED = "renamed"
FOLLOWED = "followed"
PUBLISHERS = "publishers"
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
        """The lock file that is held exclusively to create, change or remove a reference."""
        return self.root / NAMES_LOCK

    @cached_property
    def pull_lock(self) -> Path:
        """The lock file that is held exclusively while a load pulls a checkpoint from a remote."""
        return self.root / PULL_LOCK

    @cached_property
    def drain_lock(self) -> Path:
        """The lock file that is held exclusively to change drained steps on a remote.

        A step is drained when it is copied from this store to a remote or another store.
        """
        return self.root / DRAIN_LOCK

    @cached_property
    def index_lock(self) -> Path:
        """The lock file that is held shared while the index is open.

        It is held exclusively to delete a broken index.
        """
        return self.root / INDEX_LOCK

    @cached_property
    def sequence(self) -> Path:
        """The file with the last sequence number given to a step. It may be missing.

        Sequence numbers order the steps of a run by the time of saving.
        """
        return self.root / SEQUENCE

    @cached_property
    def identity(self) -> Path:
        """The file with the random identity of this store.

        It exists if this store was used as one of two tiers: steps of a run were copied to it from
        another store, or from it to another store or a remote.
        """
        return self.root / IDENTITY

    @cached_property
    def tiers(self) -> Path:
        """The folder of notes about second tiers, one file for each run that has one.

        A note tells to which other store or remote the steps of the run are copied.
        """
        return self.root / TIERS

    @cached_property
    def writers(self) -> Path:
        """The folder that says who writes, one file for each run that is drained to this store.

        A file names the fast tier that may drain the run to this store.
        """
        return self.root / WRITERS

    @cached_property
    def renaming(self) -> Path:
        """The list of the references that change while a run is renamed; else it is not there."""
        return self.root / RENAMING

    @cached_property
    def renamed(self) -> Path:
        """The folder of notes about renamed runs, one file for each old name."""
        return self.root / RENAMED

    @cached_property
    def followed(self) -> Path:
        """The folder of notes about steps that were pulled as the latest of their run."""
        return self.root / FOLLOWED

    @cached_property
    def publishers(self) -> Path:
        """The folder of files that are locked by processes that publish a run, one for each run."""
        return self.root / PUBLISHERS

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
        """The folder of damaged files, and of the lists of damaged pieces in containers."""
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
        """The folder of containers.

        A container lies in the subfolder that is named by the first two digits of the container's
        name.
        """
        return self.root / "containers"

    @cached_property
    def _manifests(self) -> Path:
        return self.root / "manifests"

    def container(self, name: str, kind: str) -> Path:
        """Return the path of the file that holds the data of a container inside the store.

        For an `external` container, which has no data in the store, it is the file of its table.
        """
        return self.containers / f"{name[:2]}/{name}.{kind}"

    def table(self, name: str, kind: str) -> Path:
        """Return the path of the file with the table of the container `name`, which is of `kind`.

        A `raw` container has a separate file for its table. A container of any other kind is a
        single file.
        """
        suffix = TABLE_SUFFIX if kind == "raw" else f".{kind}"
        return self.containers / f"{name[:2]}/{name}{suffix}"

    def manifest(self, name: str) -> Path:
        """Return the path of the manifest `name`, or of the page of a manifest with that name.

        A page lists up to 256 of the manifest's pieces.
        """
        return self._manifests / f"{name[:2]}/{name}"

    def bad(self, name: str) -> Path:
        """Return the path of the list of the damaged pieces in the container `name`."""
        return self.quarantine / f"{name}{BAD_SUFFIX}"

    def database_files(self) -> list[Path]:
        """Return the paths of all files of the index: the database and the side files of SQLite."""
        return [self.root / name for name in INDEX_FILES]
