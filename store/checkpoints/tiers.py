"""What lasts behind a fast tier: the interface of a second tier, and a store as one.

A remote is the other one (`tensor_dedup.store.remote.tier`). Two states of a step are compared by
their places in the order of saving alone, so this is the same for both.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final, Protocol, TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints.errors import (
    NotATrainingError,
    OtherTierError,
    UnknownStepError,
)
from tensor_dedup.store.checkpoints.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_not_kept,
    check_pin,
    check_replaceable,
    describe_all,
    kept_steps,
    manifest_of,
    pin_step,
    step_name,
    step_numbers,
)
from tensor_dedup.store.checkpoints.transfer import Transfer
from tensor_dedup.store.errors import (
    DamagedFileError,
    MissingObjectError,
    NoStoreError,
    UnknownNameError,
)
from tensor_dedup.store.format.identity import (
    TEXT_BYTES,
    TierNote,
    identity_in,
    new_text,
    note_in,
    note_text,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.reading.reader import StoredCheckpoint, StoredPieces
from tensor_dedup.store.store import Store
from tensor_dedup.store.writing.hashing import Hasher

_LOG = logging.getLogger("tensor_dedup")
_T = TypeVar("_T")
# So many places are one fast tier's, from when it goes on from another one's last.
_TURN: Final = 1 << 20


class OutdatedError(Exception):
    """The step was deleted or saved again while it was copied."""


@dataclass(frozen=True, slots=True)
class TierContent:
    """What a second tier has of a run: its steps, pins, and other names that look like steps."""

    places: dict[int, StepPlace]
    kept: set[int]
    taken: set[int]


class SecondTier(Protocol):
    """Where the steps of one run are drained to.

    A name that both tiers have is changed within `naming`, which holds in all handles of either
    tier that drain; `session` is held around several calls. All methods raise the tier's
    StoreErrors; `own_damage` are those that are about it alone, and about no step in particular.
    """

    where: str
    own_damage: tuple[type[StoreError], ...]

    def identity(self, *, make: bool = False) -> str | None:
        """Return what tells this tier from others; None if there is none, and it is not to `make`.

        An empty place of the same address has none, or another one. None is made there.
        """

    def session(self) -> AbstractContextManager[None]:
        """Hold the tier open, so that what is seen of it can be read."""

    def naming(self) -> AbstractContextManager[None]:
        """Hold the lock under which a step appears on this tier, or goes from both."""

    def content(self) -> TierContent:
        """Return what it has of the run."""

    def place(self, step: int) -> StepPlace | None:
        """Return the place of a step as it is now, or None if there is none."""

    def described(self) -> list[Step]:
        """Describe each step that can be read, in order."""

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T], *, afresh: bool) -> _T:
        """Return what `read` makes of a step; with `afresh`, of nothing that the fast tier has.

        Raises:
            UnknownNameError: there is no such step.
        """

    def check_deletable(self, step: int) -> None:
        """Raise PinnedStepError or NotATrainingError if it may not be deleted."""

    def is_kept(self, step: int) -> bool:
        """Return whether a step is pinned here."""

    def remove(self, step: int) -> bool:
        """Remove a step durably, in `naming`; return whether it was there."""

    def copy(self, step: int, place: StepPlace | None) -> None:
        """Copy the fast tier's state of a step, the one at `place` being an earlier one.

        Raises:
            OutdatedError: meanwhile either tier has got another state.
        """

    def copy_pin(self, step: int, manifest: str) -> bool:
        """Pin a step if the fast tier does, and both have this state; return whether it is so."""

    def pin(self, step: int) -> None:
        """Pin a step that is here. Raises UnknownStepError and NotATrainingError."""

    def check_pin(self, step: int) -> None:
        """Raise NotATrainingError if something else has the name that pins a step."""

    def unpin(self, step: int) -> None:
        """Remove a step's pin durably, in `naming`."""

    def settle(self) -> None:
        """Make durable what others may have named just before they died."""


class StoreTier:
    """A store behind a fast one."""

    own_damage: tuple[type[StoreError], ...] = ()

    def __init__(self, second: Store, fast: Store, order: StepOrder) -> None:
        self.where = str(second.path)
        self._second, self._fast, self._order = second, fast, order
        self._run = order.run
        self._there = StepOrder(second._objects, order.run)
        self._settled = set[ContainerId]()

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self._second.path

    @property
    def _objects(self) -> Objects:
        return self._second._objects

    def identity(self, *, make: bool = False) -> str | None:
        # docstring inherited
        with self._second._translated():
            found = self._identity()
        return self._make_identity() if found is None and make else found

    def _make_identity(self) -> str | None:
        objects = self._objects
        Store.open(self.path, create=False, files=objects.files)  # raises if it is gone
        with self._second._locked():
            new = objects.tmp_path()
            objects.publish(new_text(), new)  # not in the lock, which others wait for
            with objects.naming():
                if self._identity() is None:
                    objects.place(new, objects.layout.identity)
                else:  # another fast tier was faster
                    objects.files.unlink(new)
            return self._identity()

    def _identity(self) -> str | None:
        text = _read(self._objects, self._objects.layout.identity)
        return None if text is None else identity_in(text)

    def session(self) -> AbstractContextManager[None]:
        # docstring inherited
        return self._second._locked()

    @contextmanager
    def naming(self) -> Iterator[None]:
        # docstring inherited
        with self._second._locked(), self._objects.naming():
            yield

    def content(self) -> TierContent:
        # docstring inherited
        with self._second._locked():
            places = self._there.places()
            taken = {*step_numbers(self._objects, self._run)} - places.keys()
            return TierContent(places, kept_steps(self._objects, self._run), taken)

    def place(self, step: int) -> StepPlace | None:
        # docstring inherited
        with self._second._locked():
            return self._there.place(step)

    def described(self) -> list[Step]:
        # docstring inherited
        with self._second._locked():
            return describe_all(self._objects, self._run)

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T], *, afresh: bool) -> _T:
        # docstring inherited; nothing of it is on the fast tier
        with (
            self._second.checkpoint(step_name(self._run, step)) as checkpoint,
            self._second._translated(),
        ):
            return read(checkpoint)

    def check_deletable(self, step: int) -> None:
        # docstring inherited
        check_not_kept(self._objects, self._run, step)
        with suppress(DamagedFileError, MissingObjectError, UnknownStepError):
            manifest_of(self._objects, self._run, step)

    def is_kept(self, step: int) -> bool:
        # docstring inherited
        with self._second._locked():
            return step in kept_steps(self._objects, self._run)

    def remove(self, step: int) -> bool:
        # docstring inherited
        return unlink(self._objects, [file_of(step_name(self._run, step))])

    def copy(self, step: int, place: StepPlace | None) -> None:
        # docstring inherited
        with self._second._session() as (index, hasher):
            self._copy(step, index, hasher)

    def _copy(self, step: int, index: StoreIndex, hasher: Hasher) -> None:
        objects, name = self._fast._objects, step_name(self._run, step)
        with Transfer(self._objects, index, hasher, self._settled) as transfer:
            with self._fast._session(update=False) as (near, _):
                try:
                    manifest, content, _ = manifest_of(objects, self._run, step)
                except (UnknownStepError, NotATrainingError) as error:
                    raise OutdatedError from error
                pieces = objects.pieces(manifest, content)
                parts = [*dict.fromkeys(page.hex() for page in content.pages), manifest]
                blobs = {part: objects.read(objects.layout.manifest(part)) for part in parts}
                missing = transfer.missing({piece.digest: piece.nbytes for piece in pieces})
                # From here on gc may come: what is open can be read.
                source = StoredPieces(objects, near, set(missing), name)
            with source:
                transfer.send(source, missing)
            transfer.publish(name, manifest, blobs, lambda: self._check_copy(step, manifest))

    def _check_copy(self, step: int, manifest: str) -> None:
        """Check that a copy is to appear; nobody deletes the step meanwhile."""
        try:
            now = self._fast._objects.ref(step_name(self._run, step))
        except UnknownNameError as error:
            raise OutdatedError from error
        if now != manifest or not ahead(self._order.place(step), self._there.place(step)):
            raise OutdatedError
        check_replaceable(self._objects, self._run, step)

    def copy_pin(self, step: int, manifest: str) -> bool:
        # docstring inherited
        near, name = self._fast._objects, step_name(self._run, step)

        def is_to_be() -> bool:
            held = None
            with suppress(StoreError):
                held = self._objects.ref(name)
            # A pin of an earlier state than this tier's is a pin of nothing that counts.
            return step in kept_steps(near, self._run) and held == manifest

        def check() -> None:
            if not is_to_be():
                raise OutdatedError

        with self._second._locked():
            if not is_to_be():
                return False
            check_pin(self._objects, self._run, step)
            pin = step_name(self._run, step, kept=True)
            self._objects.set_ref(pin, manifest, replace=True, check_name=check)
            return True

    def pin(self, step: int) -> None:
        # docstring inherited
        with self._second._locked():
            pin_step(self._objects, self._run, step)

    def check_pin(self, step: int) -> None:
        # docstring inherited
        check_pin(self._objects, self._run, step)

    def unpin(self, step: int) -> None:
        # docstring inherited
        unlink(self._objects, [file_of(step_name(self._run, step, kept=True))])

    def settle(self) -> None:
        # docstring inherited
        with self._second._locked():
            self._objects.files.sync_folder(self._objects.layout.refs)


def ahead(one: StepPlace | None, other: StepPlace | None) -> bool:
    """Whether one state of a step counts rather than another: it is there, whole and later."""
    if one is None or not one.readable:
        return False
    if other is not None and one.manifest == other.manifest:
        return False  # the same, whatever clocks say of steps of earlier versions
    return other is None or not other.readable or one.sequence > other.sequence


def diverged(one: StepPlace | None, other: StepPlace | None, drained: int) -> bool:
    """Whether a fast tier's state of a step is none that the other one was made after.

    That tier has drained what has a place up to `drained`: whatever is later there replaced it.

    A fast tier may die before its last steps are drained: another one that goes on from the second
    tier does not know of them. It has later places (`next_turn`) and is what counts; the first one
    is not to be lost, and not to be drained either. Both have one place where each of them counted
    on from the second tier without that, as earlier versions do.
    """
    if one is None or other is None or not (one.readable and other.readable):
        return False
    if one.manifest == other.manifest:
        return False
    earlier = one.sequence // _TURN < other.sequence // _TURN
    return (earlier and one.sequence > drained) or one.sequence == other.sequence


def next_turn(last: int) -> int:
    """Return a place behind all that whoever gave this one may have given without draining them."""
    return (last // _TURN + 1) * _TURN


def counts(near: StepPlace | None, there: StepPlace | None) -> bool:
    """Whether the fast tier's state of a step counts: the second one has it too, or none later."""
    return not ahead(there, near) and not diverged(near, there, 0)


def undrained(near: StepPlace | None, there: StepPlace | None, drained: int) -> bool:
    """Whether the fast tier's state of a step is on that tier only, and not to be lost."""
    return ahead(near, there) or diverged(near, there, drained)


def unlink(objects: Objects, files: Iterable[str]) -> bool:
    """Remove references durably, under the lock of names; return whether any was there."""
    found = False
    for file in files:
        with suppress(FileNotFoundError):
            objects.files.unlink(objects.layout.refs / file)
            found = True
    # Also where another process has removed them: it may have died before that was durable.
    objects.files.sync_folder(objects.layout.refs)
    return found


def _read(objects: Objects, path: Path) -> bytes | None:
    """Read a text; None if it is not there or cannot be read."""
    with suppress(MissingObjectError, DamagedFileError):
        return objects.read(path, TEXT_BYTES)
    return None


def tier_note(fast: Store, run: str) -> TierNote | None:
    """Return the fast tier's note of the second tier that it has drained a run to.

    None if it has drained nothing yet, or by an earlier version.
    """
    with fast._translated():
        text = _read(fast._objects, note_path(fast, run))
    return None if text is None else note_in(text, run)


def set_tier_note(fast: Store, run: str, note: TierNote) -> None:
    """Note durably on the fast tier which second tier it drains a run to."""
    with fast._locked(), fast._objects.naming():
        fast._objects.publish(note_text(run, note), note_path(fast, run))


def note_path(fast: Store, run: str) -> Path:
    """Return the path of a run's note."""
    return fast._objects.layout.tiers / file_of(run)


def other_tier(fast: Store, run: str, note: TierNote, where: str) -> OtherTierError:
    """Return the error about a second tier that is not the one of the note."""
    return OtherTierError.of(fast.path, run, note.where, where, note_path(fast, run))


def second_store(
    folder: str | PathLike[str], fast: Store, order: StepOrder, note: TierNote | None
) -> Store:
    """Open the store of a second tier, or make it, which for a run that has steps is said.

    Raises:
        OtherTierError: the run was drained, as the `note` says, and nothing is there now.
    """
    try:
        return Store.open(folder, create=False)
    except NoStoreError as error:
        if note is not None:
            raise other_tier(fast, order.run, note, str(Path(folder))) from error
        made = Store.open(folder)
    with fast._translated():
        if step_numbers(fast._objects, order.run):
            what = "%s: the run %r has steps here, and a new store is made in %s; if they had been "
            what += "drained there before, end this, and mount that disk"
            _LOG.warning(what, fast.path, order.run, made.path)
    return made
