"""The bookkeeping of a store, read and published: tables, manifests, pages, references.

Nothing is written in place, except the number that a step was given. A file appears under its name
by a rename, after its bytes are durable, and its folder is synced before anything refers to it.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    ChangedExternalError,
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    NewerFormatError,
    UnknownNameError,
    unreadable_as_damage,
)
from tensor_dedup.store.files import Files, Handle
from tensor_dedup.store.format import frames, manifests, tables
from tensor_dedup.store.format.external import EXTERNAL, ExternalFile
from tensor_dedup.store.format.layout import BAD_SUFFIX, READABLE_KINDS, TABLE_SUFFIX, StoreLayout
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import file_of, name_in
from tensor_dedup.store.format.tables import Table
from tensor_dedup.store.locks import naming

# Neither the process nor the machine may have another file open.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_BAD = b"badl"
_REF_BYTES = 1 << 12
_HEX = frozenset("0123456789abcdef")
_REF_TITLE = "tensor-dedup reference"
_SEQUENCE_TITLE = "tensor-dedup sequence"
_LAST = "last "


def _nothing() -> None:
    """Check nothing."""


@dataclass(frozen=True, slots=True, order=True)
class ContainerId:
    """The identity of a container: its name (64 hex digits) and its kind."""

    name: str
    kind: str


class Objects:
    """The bookkeeping of one store. Holds nothing open; safe from any thread and process."""

    def __init__(self, files: Files, layout: StoreLayout) -> None:
        self.files = files
        self.layout = layout

    def read(self, path: Path, limit: int = frames.MAX_FRAME_BYTES) -> bytes:
        """Read a whole file.

        Raises:
            MissingObjectError: the file does not exist.
            DamagedFileError: it is larger than `limit`, or the disk cannot read it.
        """
        with self._opened(path) as handle:
            size = self.files.status_of(handle).size
            if size > limit:
                raise DamagedFileError.at(path, f"{size} bytes, the limit is {limit}", size=size)
            blob = bytearray(size)
            return bytes(blob[: self.files.pread(handle, memoryview(blob), 0)])

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Handle]:
        with unreadable_as_damage(path):
            try:
                handle = self.files.open(path, "read")
            except FileNotFoundError as error:
                raise MissingObjectError.at(path, "this file of the store is gone") from error
            try:
                yield handle
            finally:
                self.files.close(handle)

    def tmp_path(self) -> Path:
        """Return a new path in the folder of files that are being written."""
        return self.layout.tmp / self.files.token()

    def publish(self, blob: bytes, target: Path) -> None:
        """Make `target` a durable file with these bytes.

        An equal file that already exists is kept.
        """
        if self.holds(target, blob):
            self._sync_place(target)
            return
        tmp = self.tmp_path()
        handle = self.files.open(tmp, "create")
        try:
            self.files.pwrite(handle, blob, 0)
            self.files.fsync(handle)
        finally:
            self.files.close(handle)
        self.place(tmp, target)

    def holds(self, path: Path, blob: bytes) -> bool:
        """Return whether there is a readable file with these bytes."""
        with suppress(DamagedFileError), unreadable_as_damage(path):
            status = self.files.status(path)
            return status is not None and status.size == len(blob) and self.read(path) == blob
        return False

    def place(self, tmp: Path, target: Path) -> None:
        """Move a file whose bytes are durable to `target`, durably."""
        self.files.mkdir(target.parent)
        self.files.rename(tmp, target)
        self._sync_place(target)

    def _sync_place(self, target: Path) -> None:
        self.files.sync_folder(target.parent)
        # Whoever made the folder may have died before it synced the one above.
        if target.parent != self.layout.root:
            self.files.sync_folder(target.parent.parent)

    # Containers

    def containers(self) -> Iterator[ContainerId]:
        """Iterate over all containers that have a table."""
        for path in self._tree("containers"):
            container = container_in(path)
            if container is not None:
                yield container

    def manifest_names(self) -> Iterator[str]:
        """Iterate over the names of all manifests and pages."""
        return (path.name for path in self._tree("manifests") if _is_object(path))

    def aliens(self) -> Iterator[Path]:
        """Iterate over the files that no program of format version 1 makes.

        While there are any, reading continues and deletion is refused.
        """
        for path in self._tree("containers"):
            if container_in(path) is None and not _is_data(path):
                yield path
        yield from (path for path in self._tree("manifests") if not _is_object(path))
        for file in self.files.listdir(self.layout.refs):
            if name_in(file) is None:
                yield self.layout.refs / file

    def orphans(self) -> Iterator[Path]:
        """Iterate over the data of `raw` containers whose table was never written."""
        for path in self._tree("containers"):
            table = path.with_name(path.stem + TABLE_SUFFIX)
            if _is_data(path) and self.files.status(table) is None:
                yield path

    def _tree(self, folder: str) -> Iterator[Path]:
        root = self.layout.root / folder
        for part in self.files.listdir(root):
            for file in self.files.listdir(root / part):
                yield root / part / file

    def table(self, container: ContainerId, *, at: Path | None = None) -> Table:
        """Read the table of a container.

        `at` is the path of the file with its table, if it was moved from its place.

        Raises:
            MissingObjectError: the file does not exist.
            DamagedFileError: it is not a table of this container, or the disk cannot read it.
            NewerFormatError: it was written by a later version.
        """
        path = at or self.layout.table(container.name, container.kind)
        if container.kind not in READABLE_KINDS:
            # Not even its layout is known: it must not be taken for a damaged one.
            raise NewerFormatError.at(path, f"a container of the unknown kind {container.kind!r}")
        alone = container.kind in ("raw", EXTERNAL)
        blob = self.read(path) if alone else self._trailer(path)
        return tables.decode(blob, container.name, container.kind, path)

    def _trailer(self, path: Path) -> bytes:
        with self._opened(path) as handle:
            size = self.files.status_of(handle).size
            ending = bytearray(min(size, tables.TAIL_BYTES))
            self.files.pread(handle, memoryview(ending), size - len(ending))
            start = tables.table_start(bytes(ending), size, path)
            blob = bytearray(size - tables.TAIL_BYTES - start)
            self.files.pread(handle, memoryview(blob), start)
            return bytes(blob)

    def data_is_whole(self, container: ContainerId, table: Table) -> bool:
        """Return whether the file with the data exists and has the right size.

        For a container that indexes a file in place, return whether that file is unchanged.
        """
        origin = self.origin(container, table)
        status = None
        with suppress(DamagedFileError), unreadable_as_damage(self.data_path(container, table)):
            status = self.files.status(self.data_path(container, table))
        if origin is not None:
            return origin.is_still(status)
        if status is None or status.kind != "file":
            return False
        return status.size == table.data_bytes or container.kind != "raw"

    def origin(self, container: ContainerId, table: Table) -> ExternalFile | None:
        """Return the file that a container indexes in place, or None if it has its own data."""
        if container.kind != EXTERNAL:
            return None
        path = self.layout.table(container.name, container.kind)
        return ExternalFile.from_texts(table.origin, table.data_bytes, path)

    def data_path(self, container: ContainerId, table: Table) -> Path:
        """Return the path of the file with the bytes of a container."""
        origin = self.origin(container, table)
        own = self.layout.container(container.name, container.kind)
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
            return self.files.open(self.layout.container(container.name, container.kind), "read")
        try:
            handle = self.files.open(origin.path, "read")
        except OSError as error:
            if error.errno in NO_ROOM:  # which says nothing about the file
                raise
            raise ChangedExternalError.at(origin.path, f"{error.strerror}") from error
        if not origin.is_still(self.files.status_of(handle)):
            self.files.close(handle)
            raise ChangedExternalError.at(origin.path, "it changed since it was indexed in place")
        return handle

    def changed_holding(self, digest: bytes) -> Path | None:
        """Return a file indexed in place that held these bytes and has changed since, or None."""
        for container in self.containers():
            if container.kind == EXTERNAL:
                with suppress(StoreError):
                    table = self.table(container)
                    held = any(record.digest == digest for record in table.records)
                    if held and not self.data_is_whole(container, table):
                        return self.data_path(container, table)
        return None

    def bad_offsets(self, container: str) -> frozenset[int]:
        """Return the offsets of the records of a container that were found damaged."""
        path = self.layout.bad(container)
        if self.files.status(path) is None:
            return frozenset()
        return frozenset(frames.decode(self.read(path), _BAD, list[int], path))

    def set_bad_offsets(self, container: str, offsets: Sequence[int]) -> None:
        """Replace the list of the damaged records of a container."""
        path = self.layout.bad(container)
        if offsets:
            self.publish(frames.encode(_BAD, sorted(offsets)), path)
        elif self.files.status(path) is not None:
            self.files.unlink(path)
            self.files.sync_folder(path.parent)

    def add_bad_offset(self, container: str, offset: int) -> None:
        """Add a record to the list of damaged ones: its bytes are never returned again."""
        with self.naming():
            self.set_bad_offsets(container, sorted(self.bad_offsets(container) | {offset}))

    def bad_containers(self) -> list[str]:
        """Return the names of the containers that have damaged records."""
        found = [Path(name) for name in self.files.listdir(self.layout.quarantine)]
        return [p.stem for p in found if p.suffix == BAD_SUFFIX and _is_digest(p.stem)]

    # Manifests

    def manifest(self, name: str) -> Manifest:
        """Read the manifest of this name.

        Raises:
            MissingObjectError, DamagedFileError, NewerFormatError: the manifest cannot be read.
        """
        path = self.layout.manifest(name)
        return manifests.decode_manifest(self.read(path), name, path)

    def page(self, name: str) -> manifests.ManifestPage:
        """Read the page of this name.

        Raises:
            MissingObjectError, DamagedFileError, NewerFormatError: the page cannot be read.
        """
        path = self.layout.manifest(name)
        return manifests.decode_page(self.read(path), name, path)

    def pieces(self, name: str, manifest: Manifest) -> list[Piece]:
        """Read all pieces of a manifest, in order. Raises the errors of `page`."""
        # A page that is there a thousand times is read and held once.
        pages = {page: self.page(page.hex()).pieces for page in dict.fromkeys(manifest.pages)}
        found = [piece for page in manifest.pages for piece in pages[page]]
        manifests.check_pieces(manifest, found, self.layout.manifest(name))
        return found

    # References

    def names(self) -> list[str]:
        """Return the names of all checkpoints, sorted."""
        found = [name_in(file) for file in self.files.listdir(self.layout.refs)]
        return sorted(name for name in found if name is not None)

    def ref(self, name: str) -> str:
        """Return the name of the manifest that a checkpoint's name refers to.

        Raises:
            UnknownNameError: no checkpoint has this name.
            DamagedFileError, NewerFormatError: its reference cannot be read.
        """
        path = self.layout.refs / file_of(name)
        try:
            blob = self.read(path, _REF_BYTES)
        except MissingObjectError:  # never there, or deleted just now: the same to a reader
            raise UnknownNameError.at(
                self.layout.root, f"no checkpoint {name!r}", name=name
            ) from None
        lines = frames.decode_text(blob, path)
        manifest = lines[-1].rpartition(" ")[2] if lines else ""
        if lines[:1] == [_REF_TITLE] and not _is_digest(manifest):
            raise NewerFormatError.at(path, "a reference of another form")
        if blob != ref_text(name, manifest):
            raise DamagedFileError.at(path, "the reference is that of another name", name=name)
        return manifest

    def set_ref(
        self, name: str, manifest: str, *, replace: bool, check_name: Callable[[], None] = _nothing
    ) -> None:
        """Commit: make a name refer to a manifest, durably.

        `check_name` runs under the lock of names, just before; if it raises, nothing changes.

        Raises:
            NameTakenError: the name exists, and `replace` is off.
        """
        path = self.layout.refs / file_of(name)
        with self.naming():
            check_name()
            if not replace and self.files.status(path) is not None:
                raise NameTakenError.at(self.layout.root, f"{name!r} is there already", name=name)
            self.publish(ref_text(name, manifest), path)

    def drop_ref(self, name: str, *, check_name: Callable[[], None] = _nothing) -> None:
        """Remove a name, durably.

        `check_name` runs under the lock of names, just before; if it raises, nothing changes.

        Raises:
            UnknownNameError: no checkpoint has this name.
        """
        path = self.layout.refs / file_of(name)
        with self.naming():
            check_name()
            try:
                self.files.unlink(path)
            except FileNotFoundError as error:
                raise UnknownNameError.at(
                    self.layout.root, f"no checkpoint {name!r}", name=name
                ) from error
            self.files.sync_folder(path.parent)

    def move_ref(
        self, name: str, new_name: str, *, check_name: Callable[[], None] = _nothing
    ) -> None:
        """Give what a name refers to another name, durably: a crash may leave both, never none.

        `check_name` runs under the lock of names, just before; if it raises, nothing changes.

        Raises:
            UnknownNameError: no checkpoint has the first name.
            NameTakenError: the second one exists.
        """
        path, target = (self.layout.refs / file_of(each) for each in (name, new_name))
        with self.naming():
            check_name()
            manifest = self.ref(name)
            if self.files.status(target) is not None:
                what = f"{new_name!r} is there already"
                raise NameTakenError.at(self.layout.root, what, name=new_name)
            self.publish(ref_text(new_name, manifest), target)
            self.files.unlink(path)
            self.files.sync_folder(path.parent)

    def next_sequence(self, above: int, greatest: Callable[[], int]) -> int:
        """Return a number greater than `above` and than every number returned before.

        That holds for all processes until the machine stops. Where the file with the number is gone
        or not whole, `greatest` says which is the greatest of the steps that are there.
        """
        with self.naming():
            last = self._last_given()
            given = max(above, greatest() if last is None else last) + 1
            self._write_given(frames.encode_text([_SEQUENCE_TITLE, f"{_LAST}{given}"]))
        return given

    def _last_given(self) -> int | None:
        path = self.layout.sequence
        with suppress(MissingObjectError, DamagedFileError, ValueError):
            title, last = frames.decode_text(self.read(path, _REF_BYTES), path)
            if title == _SEQUENCE_TITLE:
                return int(last.removeprefix(_LAST))
        return None

    def _write_given(self, text: bytes) -> None:
        """Write the number where the last one stands, unsynced.

        A rename over it took longer than all else that a step without changes needs: file systems
        first write the bytes of what takes the place of a file.
        """
        files, path = self.files, self.layout.sequence
        try:
            handle = files.open(path, "modify")
        except (FileNotFoundError, PermissionError):  # the file may be another user's
            handle = files.open(self.tmp_path(), "create")
        try:
            files.pwrite(handle, text, 0)
            if handle.path != path:
                files.rename(handle.path, path)
            elif files.status_of(handle).size > len(text):
                files.truncate(handle, len(text))
        except BaseException:
            if handle.path != path:
                files.unlink(handle.path)
            raise
        finally:
            files.close(handle)

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move a file to the trash or the quarantine; its new name begins with the time."""
        target = folder / f"{self.files.now()}.{path.name}"
        self.files.rename(path, target)
        self.files.sync_folder(folder)
        self.files.sync_folder(path.parent)
        return target

    def naming(self) -> AbstractContextManager[None]:
        """Hold the lock under which references change; hold it for a moment only.

        Raises:
            StoreBusyError: another process has held it for a minute.
        """
        return naming(self.files, self.layout)


def ref_text(name: str, manifest: str) -> bytes:
    """Return the text of a reference from this name to this manifest."""
    return frames.encode_text([_REF_TITLE, f"name {name}", f"manifest {manifest}"])


def _is_digest(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def container_in(path: Path) -> ContainerId | None:
    """Return the container whose table belongs at this path, or None."""
    if path.name.endswith(TABLE_SUFFIX):
        name, kind = path.name.removesuffix(TABLE_SUFFIX), "raw"
    else:
        name, kind = path.stem, path.suffix[1:]
        if kind == "raw":
            return None
    if not _is_digest(name) or path.parent.name != name[:2] or not kind:
        return None
    return ContainerId(name, kind)


def _is_data(path: Path) -> bool:
    return path.suffix == ".raw" and _is_digest(path.stem) and path.parent.name == path.name[:2]


def _is_object(path: Path) -> bool:
    return _is_digest(path.name) and path.parent.name == path.name[:2]


def files_below(files: Files, folder: Path) -> Iterator[Path]:
    """Iterate over the files in a folder and in the folders below it."""
    for name in files.listdir(folder):
        status = files.status(folder / name)
        if status is not None and status.kind == "folder":
            yield from files_below(files, folder / name)
        else:
            yield folder / name


def remove_folder(files: Files, path: Path) -> None:
    """Remove a folder and what is in it, if there is one."""
    status = files.status(path)
    if status is None or status.kind != "folder":
        return
    for name in files.listdir(path):
        inner = files.status(path / name)
        if inner is not None and inner.kind == "folder":
            remove_folder(files, path / name)
        else:
            files.unlink(path / name)
    files.rmdir(path)


def make_folders(files: Files, path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = []
    while files.status(path) is None:
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        files.mkdir(folder)
        files.sync_folder(folder.parent)
