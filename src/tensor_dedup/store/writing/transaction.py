"""Transactions: new files are made durable before a name refers to them.

Every addition to a store is a transaction within a session. The reference is written last. After a
crash, either the whole change exists or none of it. At most some unused files are left, which gc
removes. New manifests and their pages are decoded once as a check before anything refers to them.

`OrderedTransaction` serves imports and the merging of what several ranks saved. Its order is:

1. the containers, each of which is durable when it is complete
2. the index
3. a second look-up of all pieces that were found in the store
4. the pages and the manifest
5. the reference

`BatchTransaction` serves the steps that a run saves. To be faster, it syncs all new files together:
containers, pages, manifest, and the reference under a temporary name. Then come the index, the
second look-up and the rename of the reference.

Both hold the lock for changing references while they check the name for the last time and rename
the reference. So a step cannot be kept just before it is replaced, and a save and an import
cannot take the same name.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    ContradictoryManifestError,
    DamagedFileError,
    NameTakenError,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.format.references import ref_text
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.containers import ContainerWriter, SealedContainer, discard

_SLOW_S = 1e-3
_T = TypeVar("_T")
_Writer = TypeVar("_Writer", bound=ContainerWriter)


def _nothing() -> None:
    """Check nothing."""


class Transaction(ABC):
    """A change of a store. Use it as a context manager, from one thread.

    At the end, files that were not published are removed. Use it inside `with locks.session(...):`.
    `object_bytes` is the total size of the pages and manifests that were added.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._writers: list[ContainerWriter] = []
        self._undo = ExitStack()
        self.object_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def own(self, writer: _Writer) -> _Writer:
        """Make a container writer part of this change, and return it.

        Its container is completed by `OrderedTransaction.commit` or `BatchTransaction.seal`. If it
        was not completed, it is deleted at the end.
        """
        self._writers.append(writer)
        self._undo.callback(writer.abandon)
        return writer

    @abstractmethod
    def add_object(self, name: str, blob: bytes) -> None:
        """Add the frame of a manifest, or of one of its pages. Add pages before their manifest.

        Raises:
            ContradictoryManifestError: The frame is not valid.
        """

    @abstractmethod
    def commit(
        self,
        name: str,
        manifest: str,
        *,
        replace: bool = True,
        check_hits: Callable[[], None] = _nothing,
        check_name: Callable[[], None] = _nothing,
    ) -> None:
        """Make everything durable, and then let the checkpoint `name` refer to `manifest`.

        `check_hits` checks that the pieces found in the store still exist, and raises LostHitError
        otherwise. `check_name` is called just before the name changes, while the lock for changing
        references is held. If either raises, the name stays as it was.

        Raises:
            NameTakenError: The name exists, and `replace` is False.
            ContradictoryManifestError: The manifest or a page is not valid.
        """


@contextmanager
def _as_contradiction(path: Path) -> Iterator[None]:
    """Say of what this program has built that it contradicts itself: no file is damaged."""
    try:
        yield
    except DamagedFileError as error:
        what = str(error).removeprefix(f"{path}: ").removesuffix(f"; {error.advice}")
        raise ContradictoryManifestError.at(path, what) from error


class OrderedTransaction(Transaction):
    """A transaction whose files become durable one after the other.

    If `index` is None, containers cannot be added.
    """

    def __init__(self, objects: Objects, index: StoreIndex | None = None) -> None:
        super().__init__(objects)
        self._index = index
        self._pending: dict[str, bytes] = {}
        self.containers: list[ContainerId] = []

    def add_container(self, container: ContainerId) -> None:
        """Add a container that is already durable under its name."""
        self.containers.append(container)

    def settle(self, containers: Iterable[ContainerId]) -> None:
        """Make the names of `containers` durable, except those that this transaction added.

        Another process that created a container may have died before it synced the folder. Pass all
        containers that the new manifest relies on, after they were looked up for the last time.
        """
        layout, files = self._objects.layout, self._objects.files
        others = {*containers} - {*self.containers}
        folders = {layout.container(each.name, each.kind).parent for each in others}
        for folder in [*sorted(folders), *([layout.containers] if folders else [])]:
            files.sync_folder(folder)

    def add_object(self, name: str, blob: bytes) -> None:
        # docstring inherited; all parts are checked together, by `commit`
        self._pending[name] = blob

    def commit(
        self,
        name: str,
        manifest: str,
        *,
        replace: bool = True,
        check_hits: Callable[[], None] = _nothing,
        check_name: Callable[[], None] = _nothing,
    ) -> None:
        # docstring inherited
        objects = self._objects
        path = objects.layout.manifest(manifest)
        with _as_contradiction(path):
            manifests.check_built(manifest, self._pending, path)
        for writer in self._writers:
            container = writer.finish()
            if container is not None:
                self.containers.append(container)
        if self._index is not None:
            for container in self.containers:
                # One that had bad places may just have come back whole, under its old name.
                objects.set_bad_offsets(container.name, ())
            self._index.refresh(self.containers)
        check_hits()
        paths = {part: objects.layout.manifest(part) for part in self._pending}
        new = [part for part, path in paths.items() if objects.files.status(path) is None]
        self.object_bytes = sum(len(self._pending[part]) for part in new)
        for part, blob in self._pending.items():
            objects.publish(blob, paths[part])
        objects.set_ref(name, manifest, replace=replace, check_name=check_name)


class BatchTransaction(Transaction):
    """A transaction whose files are synced together, after the last file was written."""

    def __init__(
        self, objects: Objects, index: StoreIndex, hasher: Hasher, synced: "SyncedFolders"
    ) -> None:
        super().__init__(objects)
        self._index = index
        self._batch = self._undo.enter_context(PublishBatch(objects, hasher, synced))
        self.sealed: list[SealedContainer] = []

    def seal(self) -> int:
        """Complete the containers of the writers passed to `own`; return their total size."""
        added = 0
        for writer in self._writers:
            each = writer.seal()
            if each is not None:
                target = self._objects.layout.container(each.container.name, each.container.kind)
                self._batch.take(each.handle, target)
                self.sealed.append(each)
                added += each.file_bytes
        return added

    def add_object(self, name: str, blob: bytes) -> None:
        # docstring inherited; the other pages are those of steps that were committed before
        path = self._objects.layout.manifest(name)
        with _as_contradiction(path):
            manifests.check_object(name, blob, path)
        self._batch.write(blob, path)
        self.object_bytes += len(blob)

    def settle(self, paths: Iterable[Path]) -> None:
        """Make the names of the files at `paths` durable.

        Other processes created the files, and may have died before they synced the folder.
        """
        self._batch.settle(paths)

    def publish(self) -> None:
        """Make all files durable and add the containers to the index. No reference is changed."""
        self._batch.publish()
        for each in self.sealed:
            # One that had bad places may just have come back whole, under its old name.
            self._objects.set_bad_offsets(each.container.name, ())
            self._index.add(each.container, each.table, each.file_bytes)

    def commit(
        self,
        name: str,
        manifest: str,
        *,
        replace: bool = True,
        check_hits: Callable[[], None] = _nothing,
        check_name: Callable[[], None] = _nothing,
    ) -> None:
        # docstring inherited
        objects, text = self._objects, ref_text(name, manifest)
        reference = self._batch.write(text, None)
        self.object_bytes += len(text)
        self.publish()
        check_hits()
        with objects.naming():
            check_name()
            target = objects.layout.refs / file_of(name)
            if not replace and objects.files.status(target) is not None:
                what = f"{name!r} is there already"
                raise NameTakenError.at(objects.layout.root, what, name=name)
            objects.files.rename(reference, target)
            objects.files.sync_folder(objects.layout.refs)


class SyncedFolders:
    """Folders whose own names are known to be durable, so their parents need no further sync."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()


class PublishBatch:
    """A batch of new files that are made durable together.

    Use it as a context manager. At the end, files that were not published are removed.
    """

    def __init__(self, objects: Objects, hasher: Hasher, synced: SyncedFolders) -> None:
        self._objects, self._hasher, self._synced = objects, hasher, synced
        self._waiting: list[tuple[Handle, Path | None]] = []
        self._there: list[Path] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def take(self, handle: Handle, target: Path | None) -> None:
        """Add an open file to the batch. `publish` moves it to `target`.

        If `target` is None, the file keeps its path.
        """
        self._waiting.append((handle, target))
        self._undo.callback(discard, self._objects, handle)

    def write(self, blob: bytes, target: Path | None) -> Path:
        """Write a new file with the content `blob` and add it to the batch; return its path.

        The path is temporary. If `target` is not None, `publish` moves the file there. If the file
        `target` has this content already, no file is written, and `target` is returned.
        """
        files = self._objects.files
        if target is not None and self._objects.holds(target, blob):
            self._there.append(target)
            return target
        handle = files.open(self._objects.tmp_path(), "create")
        self.take(handle, target)
        files.pwrite(handle, blob, 0)
        return handle.path

    def publish(self) -> None:
        """Make all files of the batch durable under their final names."""
        files = self._objects.files
        for handle, _ in self._waiting:  # then the first sync has the disk write them all
            files.begin_writing(handle, 0, 0)
        self._sync(files.fsync, [handle for handle, _ in self._waiting])
        folders = dict.fromkeys(folder for path in self._there for folder in self._above(path))
        for handle, target in self._waiting:
            files.close(handle)
            if target is not None:
                folders |= dict.fromkeys(self._place(handle.path, target))
        self._sync(files.sync_folder, list(folders))
        self._synced.folders.update(folders)

    def settle(self, paths: Iterable[Path]) -> None:
        """Make the names of the files at `paths` durable.

        Other processes created the files, and may have died before they synced the folder.
        """
        folders = dict.fromkeys(folder for path in paths for folder in self._above(path))
        self._sync(self._objects.files.sync_folder, list(folders))
        self._synced.folders.update(folders)

    def _above(self, path: Path) -> list[Path]:
        """The folders to sync for a name; whoever made the lower one may not have got so far."""
        if path.parent in self._synced.folders:
            return [path.parent]
        return [path.parent, path.parent.parent]

    def _sync(self, sync: Callable[[_T], None], things: Sequence[_T]) -> None:
        """Sync all, together where the disk takes its time: else threads cost more than that."""
        for number, thing in enumerate(things):
            began = time.monotonic()
            sync(thing)
            if time.monotonic() - began > _SLOW_S:
                for _ in self._hasher.each(sync, things[number + 1 :]):
                    pass
                return

    def _place(self, path: Path, target: Path) -> list[Path]:
        """Give a file its name; the folders to sync."""
        if self._objects.files.mkdir(target.parent):
            self._synced.folders.discard(target.parent)
        self._objects.files.rename(path, target)
        return self._above(target)
