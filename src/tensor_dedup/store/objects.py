"""The metadata of a store: manifests and their pages, references, lists of damaged pieces.

A reference is a small text file that maps the name of a checkpoint to the name of its manifest. A
page lists up to 256 pieces of a manifest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tensor_dedup.store import locks, rename_journal
from tensor_dedup.store.containers import Containers
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NameTakenError,
    NewerFormatError,
    StoreBusyError,
    UnknownNameError,
)
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import StoreFolder
from tensor_dedup.store.format import frames, manifests
from tensor_dedup.store.format.layout import BAD_SUFFIX, StoreLayout, is_digest
from tensor_dedup.store.format.manifests import Manifest, Piece
from tensor_dedup.store.format.names import file_of, marked_by, name_in
from tensor_dedup.store.format.references import REFERENCE, ref_text
from tensor_dedup.store.locks import SWEEP_WAIT_S

_BAD = b"badl"
_REF_BYTES = 1 << 12


def _nothing() -> None:
    """Check nothing."""


class Objects(StoreFolder):
    """Access to the metadata of one store, for reading and writing, and to its `containers`.

    No file stays open between calls. Safe from any thread and process.
    """

    def __init__(self, files: Files, layout: StoreLayout) -> None:
        super().__init__(files, layout)
        self.containers = Containers(StoreFolder(files, layout))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Context manager: while it is active, the store's main lock is held shared.

        No garbage collection runs meanwhile, and no run is half renamed.

        Raises:
            StoreBusyError: A garbage collection did not end within two minutes.
        """
        with ExitStack() as held:
            held.enter_context(locks.session(self.files, self.layout))
            while rename_journal.is_cut_short(self):
                held.close()
                try:
                    with self.sweep():
                        pass
                except StoreBusyError:  # by those who use the store since another made it whole
                    if rename_journal.is_cut_short(self):
                        raise
                held.enter_context(locks.session(self.files, self.layout))
            yield

    @contextmanager
    def sweep(self, wait_s: float = SWEEP_WAIT_S) -> Iterator[None]:
        """Context manager: while it is active, the store's main lock is held exclusively.

        No session is open meanwhile, so files can be deleted. No run is half renamed.

        Raises:
            StoreBusyError: Open sessions did not end within `wait_s` seconds.
        """
        with locks.sweep(self.files, self.layout, wait_s=wait_s):
            rename_journal.go_on(self)
            yield

    def aliens(self) -> Iterator[Path]:
        """Iterate over the alien files, which are files that format version 1 does not define.

        While a store has alien files, it can be read, but garbage collection deletes nothing.
        """
        yield from self.containers.aliens()
        yield from (path for path in self.tree("manifests") if not _is_object(path))
        for file in self.files.listdir(self.layout.refs):
            if name_in(file) is None:
                yield self.layout.refs / file

    # Lists of damaged records

    def bad_offsets(self, container: str) -> frozenset[int]:
        """Return the offsets of the damaged pieces in the container with the name `container`."""
        path = self.layout.bad(container)
        if self.files.status(path) is None:
            return frozenset()
        return frozenset(frames.decode(self.read(path), _BAD, list[int], path))

    def set_bad_offsets(self, container: str, offsets: Sequence[int]) -> None:
        """Replace the list of the damaged pieces in a container.

        `container` is the container's name, and `offsets` are the offsets of the pieces. If there
        are none, the file with the list is deleted.
        """
        path = self.layout.bad(container)
        if offsets:
            self.publish(frames.encode(_BAD, sorted(offsets)), path)
        elif self.files.status(path) is not None:
            self.files.unlink(path)
            self.files.sync_folder(path.parent)

    def add_bad_offset(self, container: str, offset: int) -> None:
        """Mark the piece at `offset` in a container as damaged, so that it is not read again.

        `container` is the container's name.
        """
        with self.naming():
            self.set_bad_offsets(container, sorted(self.bad_offsets(container) | {offset}))

    def bad_containers(self) -> list[str]:
        """Return the names of the containers with damaged pieces."""
        found = [Path(name) for name in self.files.listdir(self.layout.quarantine)]
        return [p.stem for p in found if p.suffix == BAD_SUFFIX and is_digest(p.stem)]

    # Manifests

    def manifest_names(self) -> Iterator[str]:
        """Iterate over the names of all stored manifests and of their pages (lists of pieces)."""
        return (path.name for path in self.tree("manifests") if _is_object(path))

    def manifest(self, name: str) -> Manifest:
        """Read the manifest that is called `name`.

        Raises:
            MissingObjectError, DamagedFileError, NewerFormatError: The manifest cannot be read.
        """
        path = self.layout.manifest(name)
        return manifests.decode_manifest(self.read(path), name, path)

    def page(self, name: str) -> manifests.ManifestPage:
        """Read the page that is called `name`. A page lists up to 256 pieces of a manifest.

        Raises:
            MissingObjectError, DamagedFileError, NewerFormatError: The page cannot be read.
        """
        path = self.layout.manifest(name)
        return manifests.decode_page(self.read(path), name, path)

    def pieces(self, name: str, manifest: Manifest) -> list[Piece]:
        """Read all pages of `manifest`; return its pieces, in order. `name` is the manifest's name.

        Raises:
            MissingObjectError, DamagedFileError, NewerFormatError: A page cannot be read.
        """
        # A page that is there a thousand times is read and held once.
        pages = {page: self.page(page.hex()).pieces for page in dict.fromkeys(manifest.pages)}
        found = [piece for page in manifest.pages for piece in pages[page]]
        manifests.check_pieces(manifest, found, self.layout.manifest(name))
        return found

    # References

    def names(self) -> list[str]:
        """Return the names of all checkpoints, sorted. The marks of kept steps are left out."""
        return [name for name in self.references() if marked_by(name) is None]

    def references(self) -> list[str]:
        """Return the names of all references, sorted: of the checkpoints, and of kept steps' marks.

        Whatever decides what is in use has to read all of them.
        """
        found = [name_in(file) for file in self.files.listdir(self.layout.refs)]
        return sorted(name for name in found if name is not None)

    def ref(self, name: str) -> str:
        """Return the name of the manifest to which the reference of the checkpoint `name` points.

        Raises:
            UnknownNameError: No checkpoint has this name.
            DamagedFileError, NewerFormatError: The reference cannot be read.
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
        if lines[:1] == [REFERENCE] and not is_digest(manifest):
            raise NewerFormatError.at(path, "a reference of another form")
        if blob != ref_text(name, manifest):
            raise DamagedFileError.at(path, "the reference is that of another name", name=name)
        return manifest

    def set_ref(
        self, name: str, manifest: str, *, replace: bool, check_name: Callable[[], None] = _nothing
    ) -> None:
        """Make the checkpoint `name` refer to the manifest called `manifest`, durably.

        `check_name` is called just before the change, while the lock for changing references is
        held. If it raises, nothing changes.

        Raises:
            NameTakenError: The name exists, and `replace` is False.
        """
        path = self.layout.refs / file_of(name)
        with self.naming():
            check_name()
            if not replace and self.files.status(path) is not None:
                raise NameTakenError.at(self.layout.root, f"{name!r} is there already", name=name)
            self.publish(ref_text(name, manifest), path)

    def drop_ref(self, name: str, *, check_name: Callable[[], None] = _nothing) -> None:
        """Remove the name of a checkpoint, durably.

        `check_name` is called just before the change, while the lock for changing references is
        held. If it raises, nothing changes.

        Raises:
            UnknownNameError: No checkpoint has this name.
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
        """Rename the checkpoint `name` to `new_name`, durably.

        After a crash, at least one of the two names exists, perhaps both. `check_name` is called
        just before the change, while the lock for changing references is held. If it raises,
        nothing changes.

        Raises:
            UnknownNameError: No checkpoint is called `name`.
            NameTakenError: A checkpoint is called `new_name` already.
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


def _is_object(path: Path) -> bool:
    return is_digest(path.name) and path.parent.name == path.name[:2]
