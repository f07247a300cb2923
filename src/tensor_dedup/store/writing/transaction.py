"""Transactions: making what is new durable, and only then letting a name refer to it.

Everything that is added to a store is added by a transaction in a session. Nothing refers to a file
before the file and its name are durable, and the reference comes last: a crash leaves the whole
change or none of it, and at most some files that gc removes. There are two orders.

Before anything refers to a manifest, it and its new pages are decoded as a reader does it: a name
never leads to what every reader refuses.

`OrderedTransaction`, for imports and for merging what several ranks have saved: containers, each
durable when it is complete; the index; a second look at everything that was found in the store and
is only referred to; pages and manifest; the reference.

`BatchTransaction`, for the steps that a run saves: containers, pages, manifest and a reference that
has no name yet are synced together, because a file system's journal commits for all waiting callers
at once: many concurrent syncs cost about as much as one. Then come the index and the second look.

In both, the last check of the name and the rename that gives the reference its name happen under
the lock of names: nobody can pin a step before it is replaced, or save one where an import is about
to be.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

from tensor_dedup.store.errors import (
    ContradictoryManifestError,
    DamagedFileError,
    NameTakenError,
)
from tensor_dedup.store.files import Handle
from tensor_dedup.store.format import manifests
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import ContainerId, Objects, ref_text
from tensor_dedup.store.writing.containers import ContainerWriter, SealedContainer, discard

_SLOW_S = 1e-3
_T = TypeVar("_T")
_Writer = TypeVar("_Writer", bound=ContainerWriter)


def _nothing() -> None:
    """Check nothing."""


class Transaction(ABC):
    """One change of a store, in a session. On exit, whatever was not published is removed.

    Use it from one thread. `object_bytes` counts the bytes of the pages and manifests that it has
    added.
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
        """Take over a writer: what it writes is part of this change, or is removed."""
        self._writers.append(writer)
        self._undo.callback(writer.abandon)
        return writer

    @abstractmethod
    def add_object(self, name: str, blob: bytes) -> None:
        """Add a page or a manifest; add the pages before the manifest that names them.

        Raises:
            ContradictoryManifestError: it is nothing that a reader accepts.
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
        """Make everything durable in the stated order; last, let `name` refer to `manifest`.

        `check_hits` looks up again what was found in the store and is only referred to; it raises
        LostHitError if something is gone. `check_name` runs under the lock of names, just before
        the name changes; if it raises, the name stays as it was.

        Raises:
            NameTakenError: the name exists, and `replace` is off.
            ContradictoryManifestError: the manifest is nothing that a reader accepts.
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
    """A change whose files become durable one after the other, each before the next begins.

    A transaction without an index cannot add containers.
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
        """Make the names of containers durable that others gave: who did so may have died before.

        Call it for all that is only referred to, when it was looked up for the last time.
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
    """A change whose files are synced together, as soon as the last of them is written."""

    def __init__(
        self, objects: Objects, index: StoreIndex, hasher: Hasher, synced: "SyncedFolders"
    ) -> None:
        super().__init__(objects)
        self._index = index
        self._batch = self._undo.enter_context(PublishBatch(objects, hasher, synced))
        self.sealed: list[SealedContainer] = []

    def seal(self) -> int:
        """Seal the owned writers' containers; return the bytes they will take on disk."""
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
        """Make names of files durable that others created, perhaps a moment ago."""
        self._batch.settle(paths)

    def publish(self) -> None:
        """Make everything durable and known to the index; no name refers to it yet."""
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
    """The folders that one handle knows to be durable themselves, because it synced them."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()


class PublishBatch:
    """Files that become durable together.

    Use it as a context manager: files that were not published are removed.
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
        """Take over an open, unsynced file to publish at `target`, or under its own name."""
        self._waiting.append((handle, target))
        self._undo.callback(discard, self._objects, handle)

    def write(self, blob: bytes, target: Path | None) -> Path:
        """Write a file of these bytes; return its path until it is published.

        An equal file that already exists is kept.
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
        """Make all files durable under their names."""
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
        """Make names of files durable that others created, perhaps a moment ago."""
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
