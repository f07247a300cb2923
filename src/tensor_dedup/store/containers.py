"""The containers of a store as they lie on disk: their tables, and the files with their bytes."""

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    ChangedExternalError,
    DamagedFileError,
    NewerFormatError,
    unreadable_as_damage,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format import tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.layout import READABLE_KINDS, TABLE_SUFFIX, is_digest
from tensor_dedup.store.format.tables import Table

# Neither the process nor the machine may have another file open.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_FOLDER = "containers"


@dataclass(frozen=True, slots=True, order=True)
class ContainerId:
    """The identity of a container: its name (64 hex digits) and its kind."""

    name: str
    kind: str


class Containers:
    """The containers of one store; iterating gives all that have a table.

    Holds nothing open; safe from any thread and process.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder, self._files, self._layout = folder, folder.files, folder.layout

    def __iter__(self) -> Iterator[ContainerId]:
        for path in self._folder.tree(_FOLDER):
            container = container_in(path)
            if container is not None:
                yield container

    def aliens(self) -> Iterator[Path]:
        """Iterate over the files among them that no program of format version 1 makes."""
        for path in self._folder.tree(_FOLDER):
            if container_in(path) is None and not _is_data(path):
                yield path

    def orphans(self) -> Iterator[Path]:
        """Iterate over the data of `raw` containers whose table was never written."""
        for path in self._folder.tree(_FOLDER):
            table = path.with_name(path.stem + TABLE_SUFFIX)
            if _is_data(path) and self._files.status(table) is None:
                yield path

    def table(self, container: ContainerId, *, at: Path | None = None) -> Table:
        """Read the table of a container.

        `at` is the path of the file with its table, if it was moved from its place.

        Raises:
            MissingObjectError: the file does not exist.
            DamagedFileError: it is not a table of this container, or the disk cannot read it.
            NewerFormatError: it was written by a later version.
        """
        path = at or self._layout.table(container.name, container.kind)
        if container.kind not in READABLE_KINDS:
            # Not even its layout is known: it must not be taken for a damaged one.
            raise NewerFormatError.at(path, f"a container of the unknown kind {container.kind!r}")
        alone = container.kind in ("raw", EXTERNAL)
        blob = self._folder.read(path) if alone else self._trailer(path)
        return tables.decode(blob, container.name, container.kind, path)

    def _trailer(self, path: Path) -> bytes:
        with self._folder.opened(path) as handle:
            size = self._files.status_of(handle).size
            ending = bytearray(min(size, tables.TAIL_BYTES))
            self._files.pread(handle, memoryview(ending), size - len(ending))
            start = tables.table_start(bytes(ending), size, path)
            blob = bytearray(size - tables.TAIL_BYTES - start)
            self._files.pread(handle, memoryview(blob), start)
            return bytes(blob)

    def data_is_whole(self, container: ContainerId, table: Table) -> bool:
        """Return whether the file with the data exists and has the right size.

        For a container that indexes a file in place, return whether that file is unchanged.
        """
        origin = self.origin(container, table)
        status = None
        with suppress(DamagedFileError), unreadable_as_damage(self.data_path(container, table)):
            status = self._files.status(self.data_path(container, table))
        if origin is not None:
            return origin.is_still(status)
        if status is None or status.kind != "file":
            return False
        return status.size == table.data_bytes or container.kind != "raw"

    def origin(self, container: ContainerId, table: Table) -> ExternalFile | None:
        """Return the file that a container indexes in place, or None if it has its own data."""
        if container.kind != EXTERNAL:
            return None
        path = self._layout.table(container.name, container.kind)
        return ExternalFile.from_texts(table.origin, table.data_bytes, path)

    def data_path(self, container: ContainerId, table: Table) -> Path:
        """Return the path of the file with the bytes of a container."""
        origin = self.origin(container, table)
        own = self._layout.container(container.name, container.kind)
        return own if origin is None else origin.path

    def open_data(self, container: ContainerId, table: Table) -> Handle:
        """Open the bytes of a container.

        What the disk says against reading them is raised as it is.

        Raises:
            ChangedExternalError: a file that was indexed in place has changed.
            FileNotFoundError: a file of the store's own is gone.
        """
        return self.open_origin(container, self.origin(container, table))

    def open_origin(self, container: ContainerId, origin: ExternalFile | None) -> Handle:
        """Open the bytes of a container, given the file that it indexes in place, if it does.

        Raises the errors of `open_data`.
        """
        if origin is None:
            return self._files.open(self._layout.container(container.name, container.kind), "read")
        try:
            handle = self._files.open(origin.path, "read")
        except OSError as error:
            if error.errno in NO_ROOM:  # which says nothing about the file
                raise
            raise ChangedExternalError.at(origin.path, f"{error.strerror}") from error
        if not origin.is_still(self._files.status_of(handle)):
            self._files.close(handle)
            raise ChangedExternalError.at(origin.path, "it changed since it was indexed in place")
        return handle

    def changed_holding(self, digest: bytes) -> Path | None:
        """Return a file indexed in place that held these bytes and has changed since, or None."""
        for container in self:
            if container.kind == EXTERNAL:
                with suppress(StoreError):
                    table = self.table(container)
                    held = any(record.digest == digest for record in table.records)
                    if held and not self.data_is_whole(container, table):
                        return self.data_path(container, table)
        return None


def container_in(path: Path) -> ContainerId | None:
    """Return the container whose table belongs at this path, or None."""
    if path.name.endswith(TABLE_SUFFIX):
        name, kind = path.name.removesuffix(TABLE_SUFFIX), "raw"
    else:
        name, kind = path.stem, path.suffix[1:]
        if kind == "raw":
            return None
    if not is_digest(name) or path.parent.name != name[:2] or not kind:
        return None
    return ContainerId(name, kind)


def _is_data(path: Path) -> bool:
    return path.suffix == ".raw" and is_digest(path.stem) and path.parent.name == path.name[:2]
