"""The containers of a store on disk: their tables, and the files that hold their data.

A container is an immutable file of pieces (tensors, file headers, small files) with a table of
their places and digests. The kinds `slab`, `pack` and `delta` have the table at their end. A `raw`
container has the bytes of an imported file, with the table in a file beside it. An `external`
container is a table only, which indexes a file outside the store.
"""

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
    """The containers of one store.

    Iteration yields the identity of each container that has a table. No file stays open between
    calls. Safe from any thread and process.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder, self._files, self._layout = folder, folder.files, folder.layout

    def __iter__(self) -> Iterator[ContainerId]:
        for path in self._folder.tree(_FOLDER):
            container = container_in(path)
            if container is not None:
                yield container

    def aliens(self) -> Iterator[Path]:
        """Iterate over the alien files in the containers' folder.

        A file is alien if format version 1 does not define it.
        """
        for path in self._folder.tree(_FOLDER):
            if container_in(path) is None and not _is_data(path):
                yield path

    def orphans(self) -> Iterator[Path]:
        """Iterate over the orphans: data files of `raw` containers whose table file is missing."""
        for path in self._folder.tree(_FOLDER):
            table = path.with_name(path.stem + TABLE_SUFFIX)
            if _is_data(path) and self._files.status(table) is None:
                yield path

    def table(self, container: ContainerId, *, at: Path | None = None) -> Table:
        """Read the table of a container.

        If the container was moved (to the trash, for example), `at` is the file to read instead.

        Raises:
            MissingObjectError: The file does not exist.
            DamagedFileError: The file holds no table of this container, or the disk cannot read it.
            NewerFormatError: A later version of this program wrote the container.
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
        """Return whether the file with the container's data exists.

        `table` is the container's table. Two kinds of container have a further condition:

        - `raw`: The file has the size that `table` states.
        - `external`: The file, which lies outside the store, was not changed since it was indexed.
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
        """Return the file that an `external` container indexes, or None for any other kind.

        `table` is the container's table.

        Raises:
            DamagedFileError: The table describes the indexed file in a malformed way.
        """
        if container.kind != EXTERNAL:
            return None
        path = self._layout.table(container.name, container.kind)
        return ExternalFile.from_texts(table.origin, table.data_bytes, path)

    def data_path(self, container: ContainerId, table: Table) -> Path:
        """Return the path of the file with the container's data. `table` is the container's table.

        The data of an `external` container is in the file that the container indexes.
        """
        origin = self.origin(container, table)
        own = self._layout.container(container.name, container.kind)
        return own if origin is None else origin.path

    def open_data(self, container: ContainerId, table: Table) -> Handle:
        """Open the file with the container's data for reading. `table` is the container's table.

        Raises:
            ChangedExternalError: The container is `external`, and the file that it indexes was
                changed or cannot be opened.
            OSError: Any other file cannot be opened, or no descriptor or memory is free.
        """
        return self.open_origin(container, self.origin(container, table))

    def open_origin(self, container: ContainerId, origin: ExternalFile | None) -> Handle:
        """Open the file with the container's data for reading, without reading the table.

        `origin` is the file that an `external` container indexes, and None for any other kind.

        Raises:
            ChangedExternalError: The file `origin` was changed or cannot be opened.
            OSError: Any other file cannot be opened, or no descriptor or memory is free.
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
        """Return the path of a file outside the store that had a piece, but was changed or removed.

        `digest` is the digest of the piece. Return None if there is no such file.
        """
        for container in self:
            if container.kind == EXTERNAL:
                with suppress(StoreError):
                    table = self.table(container)
                    held = any(record.digest == digest for record in table.records)
                    if held and not self.data_is_whole(container, table):
                        return self.data_path(container, table)
        return None


def container_in(path: Path) -> ContainerId | None:
    """Return the container whose table is stored at `path`.

    Return None if `path` is not the path of a table.
    """
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
