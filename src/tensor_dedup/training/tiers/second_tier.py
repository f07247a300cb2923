"""The interface of a second tier, which keeps a run's steps lastingly, and a store as second tier.

The module `remote_tier` has a remote as second tier. What is done with the steps follows from the
rules in `plan`, for stores and remotes alike.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.containers import ContainerId
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    StoreIOError,
    UnknownNameError,
)
from tensor_dedup.store.format.identity import (
    TEXT_BYTES,
    identity_in,
    new_text,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.hashing import Hasher
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.steps.errors import (
    NotATrainingError,
    UnknownStepError,
)
from tensor_dedup.store.steps.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_mark,
    check_not_kept,
    check_replaceable,
    describe_all,
    keep_step,
    kept_steps,
    manifest_of,
    step_name,
    step_numbers,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.writing.transfer import Transfer
from tensor_dedup.training.tiers.plan import TierContent, ahead

_T = TypeVar("_T")


class OutdatedError(Exception):
    """A step was deleted or saved again while it was copied."""


class SecondTier(Protocol):
    """The tier to which the steps of one run are copied (drained) from a fast tier.

    Change a name that is on both tiers only inside `with tier.naming():`, which holds a lock. If
    the tier is a store, the lock excludes every other CheckpointStore that drains to it. If the
    tier is a remote, the lock excludes only those with the same fast tier. Use `with
    tier.session():` around several calls.

    All methods raise StoreErrors. An error of a type in `own_damage` means that the tier itself is
    damaged, and not a particular step.
    """

    where: str
    own_damage: tuple[type[StoreError], ...]

    def identity(self, *, make: bool = False) -> str | None:
        """Return the identifier of this tier, or None if the tier does not have one.

        With `make`, an identifier is written if the tier exists and does not have one. The
        identifier serves to detect that another tier, perhaps an empty one, has appeared at the
        same address.
        """

    def writer(self) -> tuple[bytes, str] | None:
        """Return the content of the file that names the run's writer, and its tag, or None.

        The tag changes with the content.
        """

    def put_writer(self, text: bytes, tag: str | None) -> bool:
        """Write the file that names the run's writer if it still has this tag, durably.

        If `tag` is None, the file is written only if it does not exist. Returns whether the write
        certainly succeeded. Do not call this method inside `with self.naming():`.
        """

    def session(self) -> AbstractContextManager[None]:
        """Return a context manager; while it is active, the tier stays open.

        Content that was seen on the tier then stays readable.
        """

    def naming(self) -> AbstractContextManager[None]:
        """Return a context manager; while it is active, it holds the tier's lock of names.

        A step appears on this tier, or disappears from both tiers, only under this lock.
        """

    def content(self) -> TierContent:
        """Return the run's steps and marks, and the step numbers taken by other checkpoints."""

    def place(self, step: int) -> StepPlace | None:
        """Return the place of a step in the order of saving, or None if the tier lacks the step."""

    def described(self) -> list[Step]:
        """Return a description of each step that can be read, in the order of the step numbers."""

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T], *, afresh: bool) -> _T:
        """Open a step, call `read` with the open checkpoint, and return its result.

        With `afresh`, no data on the fast tier is used, because it may be damaged.

        Raises:
            UnknownNameError: This tier does not have the step.
        """

    def check_deletable(self, step: int) -> None:
        """Check that a step may be deleted.

        Raises:
            KeptStepError: The step is kept.
            NotATrainingError: The step's name stands for a checkpoint that is not a step of this
                run.
        """

    def is_kept(self, step: int) -> bool:
        """Return whether a step is kept on this tier."""

    def remove(self, step: int, check_writer: Callable[[], None]) -> bool:
        """Remove a step durably; return whether this tier had it.

        `check_writer` is called before the step disappears, as in `copy`. Call this method inside
        `with self.naming():`.
        """

    def copy(
        self,
        step: int,
        manifest: str,
        place: StepPlace | None,
        check_writer: Callable[[], None],
    ) -> None:
        """Copy a step from the fast tier, where it has the manifest `manifest`, to this tier.

        If the copy replaces a step, `place` is the place that `self.place(step)` has returned for
        it. Otherwise `place` is None. `check_writer` is called just before the step appears, while
        the lock of names is held. If it raises, nothing appears.

        Raises:
            OutdatedError: The step was meanwhile deleted or saved again on one of the tiers.
        """

    def copy_mark(self, step: int, manifest: str, check_writer: Callable[[], None]) -> bool:
        """Keep a step if it is kept on the fast tier and both tiers have it with this manifest.

        `check_writer` is called before the mark appears, as in `copy`. Returns whether both
        conditions hold.
        """

    def keep(self, step: int, check_writer: Callable[[], None]) -> None:
        """Keep a step on this tier. `check_writer` is called before the mark appears.

        Raises:
            UnknownStepError: This tier does not have the step.
            NotATrainingError: The name of the step or of its mark stands for another checkpoint.
        """

    def check_mark(self, step: int) -> None:
        """Check that the name for the mark of a step is not taken by another checkpoint.

        Raises:
            NotATrainingError: Another checkpoint has the name.
        """

    def unkeep(self, step: int, check_writer: Callable[[], None]) -> None:
        """Remove the mark of a step durably; do nothing if the step is not kept.

        `check_writer` is called before the mark disappears, as in `copy`. Call this method inside
        `with self.naming():`.
        """

    def settle(self) -> None:
        """Make names durable that a process may have written just before it died."""


class StoreTier:
    """A store as the second tier of a run."""

    own_damage: tuple[type[StoreError], ...] = ()

    def __init__(self, second: LocalStore, fast: LocalStore, order: StepOrder) -> None:
        self.where = str(second.path)
        self._second, self._fast, self._order = second, fast, order
        self._run = order.run
        self._there = StepOrder(second.handle.objects, order.run)
        self._settled = set[ContainerId]()

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self._second.path

    @property
    def _objects(self) -> Objects:
        return self._second.handle.objects

    def identity(self, *, make: bool = False) -> str | None:
        # docstring inherited
        found = _identity(self._second)
        if found is None and make:
            LocalStore.open(self.path, create=False, files=self._objects.files)  # raises if gone
            found = own_identity(self._second)
        return found

    def writer(self) -> tuple[bytes, str] | None:
        # docstring inherited
        with self._second.handle.translated():
            text = text_at(self._objects, self._writer_path)
        return None if text is None else (text, text.hex())

    def put_writer(self, text: bytes, tag: str | None) -> bool:
        # docstring inherited
        with self.naming():
            found = self.writer()
            if (None if found is None else found[1]) != tag:
                return False
            self._objects.publish(text, self._writer_path)
            return True

    @property
    def _writer_path(self) -> Path:
        return self._objects.layout.writers / file_of(self._run)

    def session(self) -> AbstractContextManager[None]:
        # docstring inherited
        return self._second.handle.locked()

    @contextmanager
    def naming(self) -> Iterator[None]:
        # docstring inherited
        with self._second.handle.naming():
            yield

    def content(self) -> TierContent:
        # docstring inherited
        with self._second.handle.locked():
            places = self._there.places()
            taken = {*step_numbers(self._objects, self._run)} - places.keys()
            return TierContent(places, kept_steps(self._objects, self._run), taken)

    def place(self, step: int) -> StepPlace | None:
        # docstring inherited
        with self._second.handle.locked():
            return self._there.place(step)

    def described(self) -> list[Step]:
        # docstring inherited
        with self._second.handle.locked():
            return describe_all(self._objects, self._run)

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T], *, afresh: bool) -> _T:
        # docstring inherited; nothing of it is on the fast tier
        with (
            self._second.checkpoint(step_name(self._run, step)) as checkpoint,
            self._second.handle.translated(),
        ):
            return read(checkpoint)

    def check_deletable(self, step: int) -> None:
        # docstring inherited
        check_not_kept(self._objects, self._run, step)
        with suppress(DamagedFileError, MissingObjectError, UnknownStepError):
            manifest_of(self._objects, self._run, step)

    def is_kept(self, step: int) -> bool:
        # docstring inherited
        with self._second.handle.locked():
            return step in kept_steps(self._objects, self._run)

    def remove(self, step: int, check_writer: Callable[[], None]) -> bool:
        # docstring inherited
        check_writer()
        return unlink(self._objects, [file_of(step_name(self._run, step))])

    def copy(
        self,
        step: int,
        manifest: str,
        place: StepPlace | None,
        check_writer: Callable[[], None],
    ) -> None:
        # docstring inherited
        def check() -> None:
            check_writer()
            self._check_copy(step, manifest, place)

        with self._second.handle.session() as (index, hasher):
            self._copy(step, manifest, check, index, hasher)

    def _copy(
        self,
        step: int,
        manifest: str,
        check: Callable[[], None],
        index: StoreIndex,
        hasher: Hasher,
    ) -> None:
        objects, name = self._fast.handle.objects, step_name(self._run, step)
        with Transfer(self._objects, index, hasher, self._settled) as transfer:
            with self._fast.handle.session(update=False) as (near, _):
                try:
                    now, content, _ = manifest_of(objects, self._run, step)
                except (UnknownStepError, NotATrainingError) as error:
                    raise OutdatedError from error
                if now != manifest:
                    raise OutdatedError
                pieces = objects.pieces(manifest, content)
                parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
                blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
                missing = transfer.missing({piece.digest: piece.nbytes for piece in pieces})
                # From here on gc may come: what is open can be read.
                source = StoredPieces(objects, near, set(missing), name)
            with source:
                transfer.send(source, missing)
            transfer.publish(name, manifest, blobs, check)

    def _check_copy(self, step: int, manifest: str, place: StepPlace | None) -> None:
        """Check that a copy is to appear; nobody deletes the step meanwhile.

        What it replaces is what was looked at: somebody may have saved the step here since.
        """
        try:
            now = self._fast.handle.objects.ref(step_name(self._run, step))
        except UnknownNameError as error:
            raise OutdatedError from error
        there = self._there.place(step)
        if now != manifest or there != place or not ahead(self._order.place(step), there):
            raise OutdatedError
        check_replaceable(self._objects, self._run, step)

    def copy_mark(self, step: int, manifest: str, check_writer: Callable[[], None]) -> bool:
        # docstring inherited
        near, name = self._fast.handle.objects, step_name(self._run, step)

        def is_to_be() -> bool:
            held = None
            with suppress(StoreError):
                held = self._objects.ref(name)
            # A mark of an earlier state than this tier's is a mark of nothing that counts.
            return step in kept_steps(near, self._run) and held == manifest

        def check() -> None:
            check_writer()
            if not is_to_be():
                raise OutdatedError

        with self._second.handle.locked():
            if not is_to_be():
                return False
            check_mark(self._objects, self._run, step)
            mark = step_name(self._run, step, kept=True)
            self._objects.set_ref(mark, manifest, replace=True, check_name=check)
            return True

    def keep(self, step: int, check_writer: Callable[[], None]) -> None:
        # docstring inherited; a mark that a replaced writer sets just then does no harm
        with self._second.handle.locked():
            check_writer()
            keep_step(self._objects, self._run, step)

    def check_mark(self, step: int) -> None:
        # docstring inherited
        check_mark(self._objects, self._run, step)

    def unkeep(self, step: int, check_writer: Callable[[], None]) -> None:
        # docstring inherited
        check_writer()
        unlink(self._objects, [file_of(step_name(self._run, step, kept=True))])

    def settle(self) -> None:
        # docstring inherited
        with self._second.handle.locked():
            self._objects.files.sync_folder(self._objects.layout.refs)


def unlink(objects: Objects, files: Iterable[str]) -> bool:
    """Remove the references in `files` durably; return whether any of them existed.

    The caller must hold the store's lock of names.
    """
    found = False
    for file in files:
        with suppress(FileNotFoundError):
            objects.files.unlink(objects.layout.refs / file)
            found = True
    # Also where another process has removed them: it may have died before that was durable.
    objects.files.sync_folder(objects.layout.refs)
    return found


def text_at(objects: Objects, path: Path) -> bytes | None:
    """Return the content of a small text file, or None if it does not exist.

    A file that is too large has no valid content, so the result is empty.

    Raises:
        OSError: The disk cannot read the file. That may pass, so the file does not count as lost.
    """
    try:
        return objects.read(path, TEXT_BYTES)
    except MissingObjectError:
        return None
    except DamagedFileError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return b""


def own_identity(store: LocalStore) -> str:
    """Return the identity of a store that is a tier of a run; make one if it has none.

    Raises:
        StoreError: The identity cannot be read or written.
    """
    if (found := _identity(store)) is not None:
        return found
    objects = store.handle.objects
    with store.handle.locked():
        new = objects.tmp_path()
        objects.publish(new_text(), new)  # not in the lock, which others wait for
        with objects.naming():
            if _identity(store) is None:
                objects.place(new, objects.layout.identity)
            else:  # another process was faster
                objects.files.unlink(new)
    made = _identity(store)
    if made is None:
        raise StoreIOError.at(store.path, "the identity that was written cannot be read")
    return made


def _identity(store: LocalStore) -> str | None:
    with store.handle.translated():
        text = text_at(store.handle.objects, store.handle.objects.layout.identity)
    return None if text is None else identity_in(text)
