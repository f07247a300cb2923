"""The steps of a run on two tiers as one run, and what draining does to a single step.

Steps are committed on a fast store, and copied ("drained") to a second tier, which is a store or a
remote and keeps the steps lastingly (`second_tier`). The manifest is copied byte for byte, so the
step has the same place in the order of saving, the same metrics and the same files on both tiers.
Then the retention rules delete steps from both tiers, and drained steps that are not among the last
ones are deleted from the fast tier.

A step on the fast tier is undrained if the second tier lacks it, or has it with an earlier place in
the order of saving. A mark is undrained if the second tier lacks it. All of this follows from the
content of the two tiers, so no list of undrained steps is needed. The next process that opens the
run with both tiers continues to drain.

A step that is saved again gets a later place. If the tiers have different versions of a step, the
version with the later place counts. Versions are only ever copied from the fast tier to the second
tier. If another fast tier has saved the step independently, the later place does not decide.
`tensor_dedup.training.tiers.tier_identity` detects this case.

Three operations change both tiers: draining, deleting and unkeeping a step. Each of them holds the
second tier's lock of names. A removal is durable on the second tier before it happens on the fast
tier. So a deleted step does not reappear, and a step whose deletion was interrupted is still
complete on the fast tier.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnknownNameError,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.reading.checkpoint import StoredCheckpoint
from tensor_dedup.store.steps.errors import (
    BadOption,
    BadOptionError,
    KeptStepError,
    NotATrainingError,
    UnknownStepError,
)
from tensor_dedup.store.steps.retention import Retention
from tensor_dedup.store.steps.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_mark,
    check_not_kept,
    check_replaceable,
    describe_all,
    in_save_order,
    keep_step,
    kept_steps,
    manifest_of,
    step_name,
    step_numbers,
    steps_text,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.errors import DivergedStepError, DivergedTierError
from tensor_dedup.training.tiers.fast_space import FastSpace
from tensor_dedup.training.tiers.second_tier import (
    SecondTier,
    StoreTier,
    TierContent,
    ahead,
    unlink,
)
from tensor_dedup.training.tiers.tier_identity import TierNotes, next_turn

_log = logging.getLogger(__name__)
# What is wrong with a step itself: those behind it are drained all the same.
OF_THE_STEP = (
    CorruptTensorError,
    MissingObjectError,
    DamagedFileError,
    NewerFormatError,
    DivergedStepError,
    DivergedTierError,
    KeptStepError,
    NotATrainingError,
)
_T = TypeVar("_T")


def _ignore(step: int) -> None:
    """Do nothing."""


class TwoTiers:
    """The steps of a run on a fast store and a second tier, as one run. Safe from any thread.

    * `fast` is the fast tier, `run` the name of the run, and `second` the second tier.
    * `space` is the space on the fast tier.
    * `on_keep` is called with a step whose mark is still to be drained, and `on_delete` with a step
      that was deleted. Both do nothing until a `Drain` sets them.
    """

    def __init__(
        self,
        fast: LocalStore,
        second: SecondTier,
        order: StepOrder,
        retention: Retention,
        *,
        keep_fast: int | None,
    ) -> None:
        """Read the second tier.

        * `order` is the order of saving of the run on the fast tier.
        * `retention` has the rules by which steps are deleted.
        * `keep_fast` is the argument of this name of `CheckpointStore`.

        Raises:
            BadOptionError: Both tiers are the same store.
            OtherTierError: The second tier is not the one to which the run was drained.
            DivergedTierError: Another fast tier has continued the run, and this fast tier has later
                steps that are still to be drained.
            StoreError: A tier cannot be read.
        """
        with fast.handle.translated():
            _check_apart(fast, second)
        self.fast, self.second, self.run, self._order = fast, second, order.run, order
        self.space = FastSpace(fast)
        self.on_keep: Callable[[int], None] = _ignore
        self.on_delete: Callable[[int], None] = _ignore
        self._retention, self._keep_fast = retention, keep_fast
        self._notes = TierNotes(fast, second, order.run, lets_go=keep_fast is not None)
        self._seen = second.content()
        self._meet(self._seen)
        with suppress(StoreError), second.session():  # whoever drained them may have died then
            self._note_drained(self._seen)
        with fast.handle.locked():
            self._count_on()

    def _count_on(self) -> None:
        """See that no step gets a place that was given elsewhere, drained or not.

        Where the second tier has later steps than the fast one, that was emptied, or another one
        was used: it may have died with steps that nobody here knows of.
        """
        self._order.at_least(self._notes.drained)
        last = max((place.sequence for place in self._seen.places.values()), default=0)
        if last > max((place.sequence for place in self._order.places().values()), default=0):
            self._order.at_least(next_turn(last))
            self._order.next()  # so that the fast tier knows it, and with it its other users

    def _meet(self, there: TierContent) -> None:
        """See what the second tier has, before anything is drained to it.

        Raises:
            DivergedTierError: It has gone on without steps that are still to be drained.
        """
        with self.fast.handle.locked():
            near = self._order.places()
        self._notes.meet(near, there)

    def _note_drained(self, there: TierContent, *, settle: bool = False) -> None:
        """Note up to which place all is in the second tier, durably; `settle` that in any case."""
        drained = self._drained_up_to(there)
        if settle or drained > self._notes.drained:
            # Who gave a name in the second tier may have died before it was durable.
            self.second.settle()
        self._notes.note_drained(drained)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Hold the lock under which a name goes from both; the second tier is the right one."""
        with self.second.naming():
            self._notes.check()
            yield

    # The steps

    def places(self) -> dict[int, StepPlace]:
        """Return the steps on either tier, each with its place in the order of saving.

        If both tiers have a step, the place is that of the version that a load would use. If the
        second tier cannot be read, its last known content is used.
        """
        with self.fast.handle.locked():
            near = self._order.places()
        found = dict(self._look().places)
        for step, place in near.items():
            if self._notes.counts(place, found.get(step)):
                found[step] = place
        return {step: found[step] for step in sorted(found)}

    def numbers(self) -> set[int]:
        """Return the step numbers that are taken on the fast tier, or were on the second one.

        The second tier counts as it was when it was last read. Numbers taken by checkpoints that
        are not steps of this run are included.
        """
        with self.fast.handle.locked():
            near = step_numbers(self._objects, self.run)
        return {*near, *self._seen.places, *self._seen.taken}

    def described(self) -> list[Step]:
        """Return a description of each step on either tier, in the order of the step numbers.

        Raises:
            StoreError: The second tier cannot be read.
        """
        self._notes.check()
        there = self.second.content().places
        found = {each.step: each for each in self.second.described()}
        with self.fast.handle.locked():
            for each in describe_all(self._objects, self.run):
                if self._notes.counts(self._order.place(each.step), there.get(each.step)):
                    found[each.step] = each
        return [found[step] for step in sorted(found)]

    def manifest(self, step: int) -> str:
        """Return the name of a step's manifest.

        The errors are those of `CheckpointStore.manifest`.
        """
        place = self._place(step)
        return place.manifest or self.read(step, lambda checkpoint: checkpoint.manifest)

    def _place(self, step: int) -> StepPlace:
        places = self.places()
        if step not in places:
            has = f"{steps_text(len(places))} on both tiers" if places else "none"
            raise UnknownStepError.of(self.fast.path, self.run, step, has)
        return places[step]

    def read(self, step: int, read: Callable[[StoredCheckpoint], _T]) -> _T:
        """Open a step, call `read` with the open checkpoint, and return its result.

        If the tiers have different versions of the step, the later one that can be read is opened,
        or that on the second tier if they were saved independently. If both have the same version,
        it is opened on the fast tier. If it is damaged there, it is opened on the second tier
        instead, and `read` may be called twice. Errors of `read` are passed on.

        Raises:
            UnknownStepError: Neither tier has the step.
        """
        place = self._place(step)
        with self.fast.handle.locked():
            near = self._order.place(step)
        try:
            if near is not None and place.reference == near.reference:
                with suppress(UnknownNameError):  # drained and let go of just now
                    return self._read_near(step, near, read)
            return self.second.read(step, read, afresh=False)
        except UnknownNameError as error:  # deleted just now
            raise UnknownStepError.of(self.fast.path, self.run, step) from error

    def _read_near(self, step: int, near: StepPlace, read: Callable[[StoredCheckpoint], _T]) -> _T:
        try:
            name = step_name(self.run, step)
            with self.fast.checkpoint(name) as checkpoint, self.fast.handle.translated():
                return read(checkpoint)
        except OF_THE_STEP as error:
            there = None
            with suppress(StoreError):
                there = self.second.place(step)
            if there is None or there.manifest is None or there.manifest != near.manifest:
                raise
            _log.warning("read %s from %s: %s", name, self.second.where, str(error))
            return self.second.read(step, read, afresh=True)

    def _look(self) -> TierContent:
        """What the second tier has now, or had when it could be read last."""
        try:
            content = self.second.content()
            if not self._seen.places.keys() <= content.places.keys():  # deleted, or unmounted
                self._notes.check()
            self._seen = content
        except StoreError as error:
            _log.warning("going by what was known of %s: %s", self.second.where, str(error))
        return self._seen

    @property
    def _objects(self) -> Objects:
        return self.fast.handle.objects

    # What changes both

    def check_replaceable(self, step: int) -> None:
        """Check that a step may be saved, according to the last known content of the second tier.

        Nothing is read from the second tier.

        Raises:
            KeptStepError: The step is kept on a tier.
            NotATrainingError: The step's name stands for a checkpoint that is not a step of this
                run.
        """
        with self.fast.handle.translated():
            check_replaceable(self._objects, self.run, step)
        facts = {"run": self.run, "step": step}
        if step in self._seen.kept:
            what = f"the step {step} of {self.run!r} is kept"
            raise KeptStepError.at(self.second.where, what, **facts)
        if step in self._seen.taken:
            what = f"{step_name(self.run, step)!r} is no step of this run"
            raise NotATrainingError.at(self.second.where, what, **facts)

    def delete(self, step: int) -> None:
        """Delete a step from both tiers. The errors are those of `CheckpointStore.delete`."""
        with self.second.session(), self._naming():
            self.second.check_deletable(step)
            there = self.second.place(step)
            with self.fast.handle.locked():
                if there is None and self._order.status(step) is None:
                    raise UnknownStepError.of(self.fast.path, self.run, step)
                check_not_kept(self._objects, self.run, step)
                with suppress(DamagedFileError, MissingObjectError, UnknownStepError):
                    manifest_of(self._objects, self.run, step)
            if not self._remove(step):
                raise UnknownStepError.of(self.fast.path, self.run, step)
        self.on_delete(step)

    def _remove(self, step: int, near: StepPlace | None = None) -> bool:
        """Remove a step from both, under the second tier's lock of names; whether any had it.

        Where the fast tier must have it as it was `near`, another state of it stays.
        """
        # The second one first: were it the last, a crash in between would leave an earlier state.
        removed = self.second.remove(step)
        self._seen.places.pop(step, None)
        with self.fast.handle.locked(), self._objects.naming():
            if near is None or self._order.status(step) == near.reference:
                gone = unlink(self._objects, [file_of(step_name(self.run, step))])
                self.space.released += gone
                return gone or removed
        return removed

    def prune(self, *, dry_run: bool, among: Collection[int] | None) -> list[int]:
        """Delete from both tiers the drained steps that no rule keeps; return their numbers.

        The arguments are those of `CheckpointStore.prune`.

        Raises:
            StoreError: The second tier cannot be reached.
        """
        self._notes.check()
        with self.second.session():
            there = self.second.content()
            dropped = [s for s in self._dropped(there) if among is None or s in among]
            for step in dropped if not dry_run else ():
                self._drop(step, there.places[step])
        return dropped

    def kept(self) -> set[int]:
        """Return the numbers of the steps that are kept on either tier."""
        with self.fast.handle.locked():
            near = kept_steps(self._objects, self.run)
        return near | self._look().kept

    def keep(self, step: int) -> None:
        """Keep a step on the tier from which it would be loaded.

        If that is the fast tier, the mark is copied to the second tier afterwards.
        """
        there = self._look().places.get(step)
        with suppress(UnknownStepError), self.fast.handle.locked():
            if self._notes.counts(self._order.place(step), there):
                keep_step(self._objects, self.run, step)
                self.on_keep(step)
                return
        self.second.keep(step)
        self._seen.kept.add(step)

    def unkeep(self, step: int) -> None:
        """Remove the mark of a step from both tiers.

        Raises:
            StoreError: The second tier cannot be reached.
        """
        with self.second.session(), self._naming():
            self.second.check_mark(step)
            with self.fast.handle.locked():
                check_mark(self._objects, self.run, step)
            self.second.unkeep(step)
            self._seen.kept.discard(step)
            with self.fast.handle.locked(), self._objects.naming():
                unlink(self._objects, [file_of(step_name(self.run, step, kept=True))])

    # What draining does

    def undrained(self) -> list[int]:
        """Return the steps of the fast tier that are to be drained, in the order of saving.

        A step of which only the mark is to be drained is one of them. If the second tier cannot be
        read, its last known content is used.
        """
        seen = self._look()
        with self.fast.handle.locked():
            near, kept = self._order.places(), kept_steps(self._objects, self.run)
        return [
            step
            for step in in_save_order(near)
            if step not in seen.places
            or self._notes.undrained(near[step], seen.places[step])
            or (step in kept - seen.kept and self._notes.counts(near[step], seen.places[step]))
        ]

    def copy(self, step: int) -> TierContent:
        """Copy a step, as it is now, unless the second tier has it or a later version of it.

        Returns what the second tier has then.

        Raises:
            OutdatedError: The step was meanwhile deleted or saved again on one of the tiers.
            StoreError: The step could not be copied. If the error is of a type in `OF_THE_STEP` and
                not in `second.own_damage`, something is wrong with this step alone.
        """
        self._notes.identify()
        with self.second.session():
            there = self._seen = self.second.content()
            self._meet(there)
            try:
                with self.fast.handle.locked():
                    manifest, _, _ = manifest_of(self._objects, self.run, step)
                    near = self._order.place(step)
            except (UnknownStepError, NotATrainingError):
                return there
            place = self.second.place(step)
            if near is not None and place is not None and self._notes.diverged(near, place):
                if near.sequence > place.sequence:
                    raise DivergedTierError.of(
                        self.fast.path, self.run, [step], self.second.where, [step]
                    )
                what = f"the step {step} of {self.run!r} is another one in {self.second.where}"
                raise DivergedStepError.at(self.fast.path, what, run=self.run, step=step)
            if near is not None and ahead(near, place):
                self._notes.sending(near)
                self.second.copy(step, manifest, place)
                self._notes.check()  # the disk may have gone away just before the copy
                place = self.second.place(step)
            if place is not None:
                if place.manifest == manifest:
                    self._notes.copied(place.sequence)
                self._notes.bind()
                there.places[step] = place
                with self.fast.handle.locked():
                    self._order.at_least(place.sequence)
            if self.second.copy_mark(step, manifest):
                there.kept.add(step)
            self._seen = there
            return there

    def tidy(self, there: TierContent | None = None) -> None:
        """Apply the retention rules to both tiers, and let go on the fast one of what is drained.

        `there` is the content of the second tier, if that was read just now. Errors are logged.
        """
        try:
            with self.second.session():
                if there is None:
                    there = self._seen = self.second.content()
                dropped, left = self._dropped(there), self._left_behind(there)
                self._note_drained(there, settle=bool(dropped or left))
                for step in dropped:
                    self._drop(step, there.places[step])
                for step in left:
                    self._let_go(step)
        except StoreError as error:  # the step is drained: what was to go goes after the next one
            _log.warning("%s: no drained step was let go of: %s", self.fast.path, str(error))

    def _drained_up_to(self, there: TierContent) -> int:
        """The place up to which every step of the fast tier is drained; later ones may be, too."""
        with self.fast.handle.locked():
            near = self._order.places()
        drained = self._notes.drained
        for step in in_save_order(near):
            if not near[step].readable or not self._is_drained(near[step], there.places.get(step)):
                break
            drained = max(drained, near[step].sequence)
        return drained

    def _dropped(self, there: TierContent) -> list[int]:
        """The steps that no rule keeps, by what is in the second tier: that is what lasts."""
        places = {step: place for step, place in there.places.items() if place.readable}
        if not self._retention.any or not places:
            return []
        order = in_save_order(places)
        metrics: Mapping[int, Mapping[str, float]] = {step: {} for step in order}
        if self._retention.best is not None:
            metrics = {each.step: each.metrics for each in self.second.described()}
        with self.fast.handle.locked():
            kept = there.kept | kept_steps(self._objects, self.run)
        dropped = self._retention.dropped(metrics, kept, order[-1], order)
        return [s for s in dropped if s in places and not self.space.is_base(self.run, s)]

    def _drop(self, step: int, place: StepPlace) -> None:
        """Delete a step from both, unless it was kept or saved again."""
        with self._naming():
            now = self.second.place(step)
            if now is None or now.reference != place.reference:
                return
            with suppress(KeptStepError):
                self.second.check_deletable(step)
                with self.fast.handle.locked():
                    check_not_kept(self._objects, self.run, step)
                    near = self._order.place(step)
                if not self._notes.undrained(near, place):
                    self._remove(step, near)

    def _is_drained(self, near: StepPlace | None, there: StepPlace | None) -> bool:
        if there is None or not there.readable:
            return False
        return not self._notes.undrained(near, there)

    def _left_behind(self, there: TierContent) -> list[int]:
        """The drained steps on the fast tier that are not among its last."""
        if self._keep_fast is None:
            return []
        with self.fast.handle.locked():
            near = self._order.places()
        drained = [s for s in in_save_order(near) if self._is_drained(near[s], there.places.get(s))]
        return [s for s in drained[: -self._keep_fast] if not self.space.is_base(self.run, s)]

    def _let_go(self, step: int) -> None:
        files = [file_of(step_name(self.run, step))]
        with self._naming():
            there, kept = self.second.place(step), self.second.is_kept(step)
            with self.fast.handle.locked(), self._objects.naming():
                if step in kept_steps(self._objects, self.run):
                    if not kept:
                        return  # the mark is still to be drained
                    files.insert(0, file_of(step_name(self.run, step, kept=True)))
                if self._is_drained(self._order.place(step), there):
                    self.space.released += unlink(self._objects, files)


def _check_apart(fast: LocalStore, second: SecondTier) -> None:
    """Check that the second tier is not the fast one, by whatever name."""
    if isinstance(second, StoreTier):
        one, two = (fast.handle.objects.files.status(path) for path in (fast.path, second.path))
        ids = [(each.device, each.inode) for each in (one, two) if each is not None]
        if len(ids) == 2 and ids[0] == ids[1]:
            where, what = f"drain {second.where}", "that is the store itself"
            raise BadOptionError.of(BadOption.DRAIN, where, what)
