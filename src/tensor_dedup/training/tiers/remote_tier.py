"""A remote as the second tier of a run, behind a fast store.

A step is drained by a push and read by a pull. A remote has no locks. So changes that
concern both tiers are protected by a lock on the fast tier (`drain.lock`), which saves do not use.
This lock does not exclude other fast tiers, but only one fast tier at a time is the writer of a run
(`writer`). Names are written conditionally: the write fails if another program has changed the
name. So the token is read between the two: then no writer before can change what a later one has
written.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.remote import layout, step_deltas, transfer
from tensor_dedup.remote.conditions import check_remote, prepare
from tensor_dedup.remote.errors import (
    CorruptRemoteTensorError,
    DamagedRemoteError,
    MissingRemoteError,
    RemoteNameTakenError,
)
from tensor_dedup.remote.pull import open_pulled
from tensor_dedup.remote.push import NameGuard, refer
from tensor_dedup.remote.remote import Remote
from tensor_dedup.remote.results import SilentTransfer
from tensor_dedup.remote.run_steps import RemoteSteps
from tensor_dedup.store.errors import (
    BadNameError,
    CorruptTensorError,
    MissingObjectError,
    NoStoreError,
    UnknownNameError,
)
from tensor_dedup.store.format.identity import TEXT_BYTES, TierNote, identity_in, new_text
from tensor_dedup.store.locks import draining, pulling
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.steps.errors import (
    KeptStepError,
    NotATrainingError,
    UnknownStepError,
)
from tensor_dedup.store.steps.runs import (
    Step,
    StepOrder,
    StepPlace,
    in_save_order,
    kept_steps,
    step_name,
    step_numbers,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.tiers.plan import TierContent
from tensor_dedup.training.tiers.second_tier import OutdatedError, SecondTier, StoreTier
from tensor_dedup.training.tiers.tier_identity import other_tier, tier_note
from tensor_dedup.types import is_url

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RemoteTier:
    """A remote as the second tier of a run. Safe from any thread."""

    own_damage: tuple[type[StoreError], ...] = (
        CorruptRemoteTensorError,
        DamagedRemoteError,
        MissingRemoteError,
    )

    def __init__(
        self,
        remote: Remote,
        fast: LocalStore,
        order: StepOrder,
        note: TierNote | None = None,
        *,
        direct: bool = False,
    ) -> None:
        """Check that the remote can be written to, or make a remote if the place is empty.

        `note` is the fast tier's note about the second tier to which the run was drained, or None.
        With `direct`, steps get direct differences, too (`step_deltas`).

        Raises:
            OtherTierError: The run was drained according to `note`, but the place is empty now.
            NoConditionsError: The server ignores conditions of writes, so names could be lost.
            RemoteError: The remote cannot be reached or written to, or the place holds something
                else.
        """
        self._bucket, self._fast, self._run = remote.bucket, fast, order.run
        self._order, self._direct = order, direct
        self.where = remote.url
        self._there = RemoteSteps(self._bucket, order.run)
        # Where its marker alone is lost, it is that tier, and `prepare` says what to do.
        if (
            note is not None
            and self._bucket.get(layout.MARKER, layout.TEXT_BYTES) is None
            and self._bucket.head(layout.HEAD) is None
        ):
            raise other_tier(fast, self._run, note, self.where)
        prepare(self._bucket)

    def identity(self, *, make: bool = False) -> str | None:
        # docstring inherited
        found = self._bucket.get(layout.IDENTITY, TEXT_BYTES)
        if make and (found is None or identity_in(found[0]) is None):
            check_remote(self._bucket)
            # Whoever was first, that is it.
            self._bucket.put_if(layout.IDENTITY, new_text(), None if found is None else found[1])
            found = self._bucket.get(layout.IDENTITY, TEXT_BYTES)
        return None if found is None else identity_in(found[0])

    def writer(self) -> tuple[bytes, str] | None:
        # docstring inherited
        return self._bucket.get(layout.writer_key(self._run), TEXT_BYTES)

    def put_writer(self, text: bytes, tag: str | None) -> bool:
        # docstring inherited
        return self._bucket.put_if(layout.writer_key(self._run), text, tag)

    def session(self) -> AbstractContextManager[None]:
        # docstring inherited; a remote has nothing to hold
        return nullcontext()

    @contextmanager
    def naming(self) -> Iterator[None]:
        # docstring inherited; outside of a session of the fast store, so that it stops no gc
        objects = self._fast.handle.objects
        with self._fast.handle.translated(), draining(objects.files, objects.layout):
            yield

    # What is there

    def content(self) -> TierContent:
        # docstring inherited
        found = self._there.content()
        return TierContent(found.places, found.refs.kept, found.taken)

    def place(self, step: int) -> StepPlace | None:
        # docstring inherited
        return self._there.place(step)

    def described(self) -> list[Step]:
        # docstring inherited
        refs, found = self._there.listed(), []
        for step, ref in sorted(refs.steps.items()):
            place, described = self._there.place_of(step, ref), self._there.known(ref.state)
            if place is not None and described is not None and described.notes is not None:
                notes = described.notes
                found.append(
                    Step(
                        self._run,
                        step,
                        step_name(self._run, step),
                        ref.state,
                        notes.adapter,
                        dict(notes.metrics),
                        described.nbytes,
                        step in refs.kept,
                        notes.saved or int(ref.modified),
                        notes.goals,
                    )
                )
        return found

    def is_kept(self, step: int) -> bool:
        # docstring inherited
        try:
            name = step_name(self._run, step, kept=True)
        except BadNameError:  # too long a name for any file: nothing can keep the step
            return False
        return self._there.ref(name) is not None

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T], *, afresh: bool) -> _T:
        # docstring inherited; a name on the fast tier could come back after it was deleted there
        objects, name = self._fast.handle.objects, step_name(self._run, step)
        with self._fast.handle.translated():
            with (
                pulling(objects.files, objects.layout),
                self._fast.handle.session() as (index, hasher),
            ):
                here = objects, index, hasher
                opened = open_pulled(self._bucket, name, here, SilentTransfer(), afresh=afresh)
            with opened as checkpoint:
                return read(checkpoint)

    # What changes

    def copy(
        self,
        step: int,
        manifest: str,
        place: StepPlace | None,
        check_writer: Callable[[], None],
    ) -> None:
        # docstring inherited
        fast, name = self._fast, step_name(self._run, step)
        try:
            with fast.handle.locked():
                outgoing = transfer.outgoing(fast.handle.objects, name)
                content = fast.handle.objects.manifest(outgoing.manifest)
        except UnknownNameError as error:
            raise OutdatedError from error
        if outgoing.manifest != manifest:
            raise OutdatedError
        guard = _StepGuard(self, step, manifest, place, check_writer)
        if self._direct:
            self._send_direct(step, manifest)
        try:
            # One that cannot be read there may be the same: then what is gone of it is sent again.
            transfer.push_to(
                *(fast, self._bucket, [outgoing], SilentTransfer()),
                replace=place is not None,
                guard=guard,
            )
        except RemoteNameTakenError as error:
            raise OutdatedError from error
        except self.own_damage:
            raise
        except (CorruptTensorError, MissingObjectError):
            guard.check_near()  # else it was deleted, and gc has taken what it was
            raise
        self._there.learn(outgoing.manifest, content)

    def _send_direct(self, step: int, manifest: str) -> None:
        """Send what changed since the step that was saved before, if the fast tier has that step.

        It saves others a part of the download, so an error is logged, and the step is sent anyway.
        """
        fast = self._fast.handle
        try:
            with fast.session() as (index, hasher):
                places = self._order.places()
                order = in_save_order(places)
                number = order.index(step) if step in places else 0
                before = places[order[number - 1]].manifest if number else None
                if before is None or before == manifest:
                    return
                found = step_deltas.step_delta(fast.objects, index, hasher, before, manifest)
            if found is not None:
                found.put(self._bucket, manifest)
        except Exception as error:  # noqa: BLE001  # whatever it is, the step itself is sent
            what = "%s: what changed in the step %d since the one before is not sent: %s"
            trace = None if isinstance(error, StoreError) else error
            _log.warning(what, self.where, step, str(error) or repr(error), exc_info=trace)

    def copy_mark(self, step: int, manifest: str, check_writer: Callable[[], None]) -> bool:
        # docstring inherited
        if not self._is_kept_near(step):
            return False
        with self.naming():
            place = self.place(step)
            # A mark of an earlier state than this tier's is a mark of nothing that counts.
            if not self._is_kept_near(step) or place is None or place.manifest != manifest:
                return False
            self._mark(step, manifest, check_writer)
            return True

    def _is_kept_near(self, step: int) -> bool:
        with self._fast.handle.locked():
            return step in kept_steps(self._fast.handle.objects, self._run)

    def keep(self, step: int, check_writer: Callable[[], None]) -> None:
        # docstring inherited
        with self.naming():
            place = self.place(step)
            if place is None or place.manifest is None:
                raise UnknownStepError.of(self._fast.path, self._run, step)
            self._mark(step, place.manifest, check_writer)

    def _mark(self, step: int, manifest: str, check_writer: Callable[[], None]) -> None:
        """Let the mark lead to what the step leads to, in `naming`.

        No push is needed: all that it leads to is there, and in use.
        """
        self.check_mark(step)
        mark = step_name(self._run, step, kept=True)
        refer(self._bucket, mark, manifest, lambda _: check_writer())

    def check_mark(self, step: int) -> None:
        # docstring inherited
        name = step_name(self._run, step, kept=True)
        ref = self._there.ref(name)
        described = None if ref is None or ref.damaged else self._there.described(ref.state)
        if described is not None and (described.notes is None or described.notes.run != self._run):
            what = f"{name!r} keeps no step of the run {self._run!r}"
            raise NotATrainingError.at(self.where, what, name=name, run=self._run, step=step)

    def unkeep(self, step: int, check_writer: Callable[[], None]) -> None:
        # docstring inherited
        if not self.is_kept(step):
            check_writer()
            return
        refer(self._bucket, step_name(self._run, step, kept=True), None, lambda _: check_writer())

    def check_deletable(self, step: int) -> None:
        # docstring inherited
        facts = {"run": self._run, "step": step}
        if self.is_kept(step):
            what = f"the step {step} of {self._run!r} is kept"
            raise KeptStepError.at(self.where, what, **facts)
        name = step_name(self._run, step)
        ref = self._there.ref(name)
        if ref is not None and self._there.place_of(step, ref) is None:
            raise NotATrainingError.at(self.where, f"{name!r} is no step of this run", **facts)

    def remove(self, step: int, check_writer: Callable[[], None]) -> bool:
        # docstring inherited
        there: list[str | None] = []

        def check(state: str | None) -> None:
            check_writer()
            there.append(state)

        # It says so also where nothing was: what a drain that was killed has sent may come yet.
        refer(self._bucket, step_name(self._run, step), None, check)
        if not there:  # it says so already
            check_writer()
        for manifest in filter(None, there) if self._direct else ():
            try:
                step_deltas.delete(self._bucket, manifest)
            except StoreError as error:  # a gc deletes them later
                what = "%s: what changed in the step %d is not deleted: %s"
                _log.warning(what, self.where, step, str(error))
        return any(there)

    def settle(self) -> None:
        # docstring inherited; all names lie in one folder, where they lie in folders
        self._bucket.settle(layout.ref_key(self._run))


class _StepGuard(NameGuard):
    """Lets the writer's push change the name of a step while both tiers have it as it was seen."""

    def __init__(
        self,
        tier: RemoteTier,
        step: int,
        manifest: str,
        place: StepPlace | None,
        check_writer: Callable[[], None],
    ) -> None:
        self._tier, self._step, self._manifest = tier, step, manifest
        self._place, self._check_writer = place, check_writer

    def lock(self) -> AbstractContextManager[None]:
        # docstring inherited
        return self._tier.naming()

    def check(self, there: str | None) -> None:
        # docstring inherited
        self._check_writer()
        self.check_near()
        if there is None or there == self._manifest:
            return
        self._tier.check_deletable(self._step)
        if self._place is None or there != self._place.reference:
            raise OutdatedError

    def check_near(self) -> None:
        """Check that the fast tier has the step as it was when the push began."""
        fast = self._tier._fast
        try:
            with fast.handle.locked():
                now = fast.handle.objects.ref(step_name(self._tier._run, self._step))
        except UnknownNameError as error:
            raise OutdatedError from error
        if now != self._manifest:
            raise OutdatedError


def second_tier(
    drain: str | PathLike[str] | LocalStore | Remote,
    fast: LocalStore,
    order: StepOrder,
    *,
    lets_go: bool,
    direct: bool = False,
) -> SecondTier:
    """Open `drain`, the store or remote that is the second tier of a run on the fast tier `fast`.

    `order` is the order of saving of the run's steps. `lets_go` says whether drained steps may be
    deleted from the fast tier. With `direct`, a remote also gets what changed in each step since
    the one before.

    Raises:
        OtherTierError: The second tier is not the one to which the run was drained.
        StoreError: The second tier cannot be opened.
    """
    if isinstance(drain, LocalStore):
        return StoreTier(drain, fast, order)
    # What lets go of nothing may be drained anywhere, as to a second copy.
    note = tier_note(fast, order.run) if lets_go else None
    if not isinstance(drain, Remote) and not is_url(str(drain)):
        return StoreTier(_second_store(drain, fast, order, note), fast, order)
    remote = drain if isinstance(drain, Remote) else Remote.open(drain)
    folder = remote.store_folder()
    if folder is not None:
        return StoreTier(LocalStore.open(folder, create=False), fast, order)
    return RemoteTier(remote, fast, order, note, direct=direct)


def _second_store(
    folder: str | PathLike[str], fast: LocalStore, order: StepOrder, note: TierNote | None
) -> LocalStore:
    """Open the store of a second tier, or make it, which for a run that has steps is said.

    Raises:
        OtherTierError: The run was drained, as the `note` says, and nothing is there now.
    """
    try:
        return LocalStore.open(folder, create=False)
    except NoStoreError as error:
        if note is not None:
            raise other_tier(fast, order.run, note, str(Path(folder))) from error
        made = LocalStore.open(folder)
    with fast.handle.translated():
        if step_numbers(fast.handle.objects, order.run):
            what = "%s: the run %r has steps here, and a new store is made in %s; if they had been "
            what += "drained there before, end this, and mount that disk"
            _log.warning(what, fast.path, order.run, made.path)
    return made
