"""The steps of a run on two tiers as one run, and what draining does to a single step.

Steps are committed on a fast store, and copied ("drained") to a second tier, which is a store or a
remote and keeps the steps lastingly (`second_tier`). The manifest is copied byte for byte, so the
step has the same place in the order of saving, the same metrics and the same files on both tiers.
Then the retention rules delete steps from both tiers, and drained steps that are not among the last
ones are deleted from the fast tier.

Which steps are to be drained follows from the content of the two tiers (`plan`), so no list of
them is needed. The next process that opens the run with both tiers continues to drain. Versions of
a step are only ever copied from the fast tier to the second tier, and only by the run's writer
(`writer`).

Three operations change both tiers: draining, deleting and unkeeping a step. Each of them holds the
second tier's lock of names. A removal is durable on the second tier before it happens on the fast
tier. So a deleted step does not reappear, and a step whose deletion was interrupted is still
complete on the fast tier.
"""

import logging
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
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
    steps_text,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.training.errors import RunTakenError
from tensor_dedup.training.retention import RunRetention
from tensor_dedup.training.tiers.fast_space import FastSpace
from tensor_dedup.training.tiers.plan import (
    TierContent,
    TierPlan,
    counts,
    is_drained,
    is_stranded,
    is_undrained,
)
from tensor_dedup.training.tiers.second_tier import SecondTier, StoreTier, unlink
from tensor_dedup.training.tiers.tier_identity import TierBond
from tensor_dedup.training.tiers.writer import WriterToken

_log = logging.getLogger(__name__)
# What is wrong with a step itself: those behind it are drained all the same.
OF_THE_STEP = (
    CorruptTensorError,
    MissingObjectError,
    DamagedFileError,
    NewerFormatError,
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
        retention: RunRetention,
        *,
        keep_fast: int | None,
    ) -> None:
        """Become the writer of the run on the second tier, and read it.

        * `order` is the order of saving of the run on the fast tier.
        * `retention` has the rules by which steps are deleted.
        * `keep_fast` is the argument of this name of `CheckpointStore`.

        Raises:
            BadOptionError: Both tiers are the same store.
            OtherTierError: The second tier is not the one to which the run was drained.
            StoreError: A tier cannot be read or written to.
        """
        with fast.handle.translated():
            _check_apart(fast, second)
        self.fast, self.second, self.run, self._order = fast, second, order.run, order
        self.space = FastSpace(fast)
        self.on_keep: Callable[[int], None] = _ignore
        self.on_delete: Callable[[int], None] = _ignore
        self._retention, self._keep_fast = retention, keep_fast
        self._bond = TierBond(fast, second, order.run, lets_go=keep_fast is not None)
        self._token = WriterToken(fast, second, order)
        self._seen = second.content()
        self._named = set[int]()
        with fast.handle.locked():
            self._give_later_places()
        self._warn_if_taken()

    def _give_later_places(self) -> None:
        """See that steps saved from now on come after all that are on the second tier."""
        last = max((place.sequence for place in self._seen.places.values()), default=0)
        here = max((place.sequence for place in self._order.places().values()), default=0)
        self._order.at_least(max(last, self._token.start))
        if here < self._token.start:
            self._order.next()  # so that the fast tier knows it, and with it its other users

    def _warn_if_taken(self) -> None:
        """Say from which writer the run was taken, and which steps here are stranded by that."""
        if not self._token.was_taken:
            return
        if (previous := self._token.previous) is not None:
            what = "%s: this is the writer of the run %r on %s now, in place of %s (generation %d);"
            what += " steps that were not drained from there stay there"
            where = previous.where or "one that its damaged token does not name"
            given = self.fast.path, self.run, self.second.where, where, previous.generation
            _log.warning(what, *given)
        self._name_stranded(self.stranded())

    def _name_stranded(self, steps: Sequence[int]) -> None:
        """Say once of each step that it is stranded, and what can be done about it."""
        new = [step for step in steps if step not in self._named]
        self._named.update(new)
        if not new:
            return
        store, second = shlex.quote(str(self.fast.path)), shlex.quote(self.second.where)
        replace = " --replace" if any(step in self._seen.places for step in new) else ""
        push = f"tensor-dedup push {shlex.quote(f'{self.run}@{new[0]}')} {second}{replace}"
        delete = f"tensor-dedup runs delete {shlex.quote(self.run)} --step {new[0]}"
        what = "%s: %s of the run %r here will not be drained (%s), because %s has gone on without;"
        what += " to copy one all the same, `%s --store %s`; to delete one, `%s --store %s`"
        numbers = ", ".join(map(str, new))
        given = self.fast.path, steps_text(len(new)), self.run, numbers, self.second.where
        _log.warning(what, *given, push, store, delete, store)

    # The writer

    @property
    def is_taken(self) -> bool:
        """Whether another fast tier was the writer of the run when that was looked at last.

        Nothing is read for it.
        """
        return self._token.other is not None

    def taken_error(self) -> RunTakenError | None:
        """Return the error that says who is the writer, or None if `is_taken` is False."""
        writer = self._token.other
        if writer is None:
            return None
        return RunTakenError.of(
            self.fast.path,
            self.run,
            second=self.second.where,
            where=writer.where,
            generation=writer.generation,
            steps=self._plan(self._seen).not_drained(),
        )

    def check_not_taken(self) -> None:
        """Check `is_taken`, without reading the second tier.

        Raises:
            RunTakenError: Another fast tier is the writer of the run.
        """
        if (error := self.taken_error()) is not None:
            raise error

    def check_writer(self) -> None:
        """Check on the second tier that this fast tier is the writer of the run.

        Raises:
            RunTakenError: Another fast tier is.
            StoreError: The second tier cannot be read.
        """
        start = self._token.start
        if not self._token.is_held():
            self.check_not_taken()
        if self._token.start != start:  # taken back by another handle of this fast tier
            with self.fast.handle.locked():
                self._order.at_least(self._token.start)

    def look_again(self) -> None:
        """Check on the second tier that it is the right one, and that this is the run's writer.

        Raises:
            OtherTierError: The second tier is another one than before.
            RunTakenError: Another fast tier is the writer of the run.
            StoreError: The second tier cannot be read.
        """
        self._bond.check()
        self.check_writer()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Hold the lock under which a name goes from both; the second tier is the right one."""
        with self.second.naming():
            self._bond.check()
            yield

    def _plan(self, there: TierContent) -> TierPlan:
        """Return what is to be done if `there` is what the second tier had just before."""
        return TierPlan(*self._near(), there, self._token.start)

    def _near(self) -> tuple[dict[int, StepPlace], set[int]]:
        with self.fast.handle.locked():
            return self._order.places(), kept_steps(self._objects, self.run)

    # The steps

    def places(self) -> dict[int, StepPlace]:
        """Return the steps on either tier, each with its place in the order of saving.

        If both tiers have a step, the place is that of the version that a load would use. If the
        second tier cannot be read, its last known content is used.
        """
        near, kept = self._near()  # first: what leaves the fast tier then is on the second one
        return TierPlan(near, kept, self._look(), self._token.start).places()

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
        self._bond.check()
        with self.fast.handle.locked():  # first, as for `places`
            described = describe_all(self._objects, self.run)
            near = {each.step: self._order.place(each.step) for each in described}
        there = self.second.content().places
        found = {each.step: each for each in self.second.described()}
        for each in described:
            if counts(near[each.step], there.get(each.step), self._token.start):
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

        If the tiers have different versions of the step, the one that counts is opened (`plan`). If
        both have the same version, it is opened on the fast tier. If it is damaged there, it is
        opened on the second tier instead, and `read` may be called twice. Errors of `read` are
        passed on.

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
                self._bond.check()
            self._seen = content
        except StoreError as error:
            _log.warning("going by what was known of %s: %s", self.second.where, str(error))
        return self._seen

    @property
    def _objects(self) -> Objects:
        return self.fast.handle.objects

    # What changes both

    def check_replaceable(self, step: int) -> None:
        """Check that a step may be saved, according to what is known of the second tier.

        Nothing is read from the second tier.

        Raises:
            RunTakenError: Another fast tier is the writer of the run.
            KeptStepError: The step is kept on a tier.
            NotATrainingError: The step's name stands for a checkpoint that is not a step of this
                run.
        """
        self.check_not_taken()
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
        removed = self.second.remove(step, self.check_writer)
        self._seen.places.pop(step, None)
        with self.fast.handle.naming():
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
        self._bond.check()
        with self.second.session():
            there = self.second.content()
            dropped = [s for s in self._dropped(self._plan(there)) if among is None or s in among]
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

        Raises:
            RunTakenError: Another fast tier is the writer of the run.
        """
        self.check_not_taken()
        there = self._look().places.get(step)
        with suppress(UnknownStepError), self.fast.handle.locked():
            if counts(self._order.place(step), there, self._token.start):
                keep_step(self._objects, self.run, step)
                self.on_keep(step)
                return
        self.second.keep(step, self.check_writer)
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
            self.second.unkeep(step, self.check_writer)
            self._seen.kept.discard(step)
            with self.fast.handle.naming():
                unlink(self._objects, [file_of(step_name(self.run, step, kept=True))])

    # What draining does

    def undrained(self) -> list[int]:
        """Return the steps of the fast tier that are to be drained, in the order of saving.

        A step of which only the mark is to be drained is one of them. If the second tier cannot be
        read, its last known content is used.
        """
        return self._plan(self._look()).to_drain()

    def stranded(self) -> list[int]:
        """Return the steps of the fast tier that are neither drained nor to be drained, by number.

        Nothing is read from the second tier.
        """
        return self._plan(self._seen).stranded()

    def copy(self, step: int) -> TierContent:
        """Copy a step, as it is now, unless the second tier has it or a later version of it.

        Returns what the second tier has then.

        Raises:
            OutdatedError: The step was meanwhile deleted or saved again on one of the tiers.
            StoreError: The step could not be copied. If the error is of a type in `OF_THE_STEP` and
                not in `second.own_damage`, something is wrong with this step alone.
        """
        self._bond.identify()
        with self.second.session():
            self.check_writer()
            self._token.renew()
            there = self._seen = self.second.content()
            try:
                with self.fast.handle.locked():
                    manifest, _, _ = manifest_of(self._objects, self.run, step)
                    near = self._order.place(step)
            except (UnknownStepError, NotATrainingError):
                return there
            place = self.second.place(step)
            if is_undrained(near, place, self._token.start):
                self.second.copy(step, manifest, place, self.check_writer)
                self._bond.check()  # the disk may have gone away just before the copy
                place = self.second.place(step)
            if place is not None:
                self._bond.bind()
                there.places[step] = place
                with self.fast.handle.locked():
                    self._order.at_least(place.sequence)
            if is_stranded(near, place, self._token.start):
                self._name_stranded([step])
            if self.second.copy_mark(step, manifest, self.check_writer):
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
                plan = self._plan(there)
                dropped, left = self._dropped(plan), self._left_behind(plan)
                if dropped or left:
                    # Who gave a name there may have died before it was durable.
                    self.second.settle()
                for step in dropped:
                    self._drop(step, there.places[step])
                for step in left:
                    self._let_go(step)
        except StoreError as error:  # the step is drained: what was to go goes after the next one
            _log.warning("%s: no drained step was let go of: %s", self.fast.path, str(error))

    def _dropped(self, plan: TierPlan) -> list[int]:
        """The steps that no rule keeps, by what is in the second tier: that is what lasts.

        A step stays while the fast tier has another version of it, which would take its place.
        """
        kept, others = {*plan.kept, *plan.there.kept}, {*plan.not_drained()}
        found = self._retention.unretained(plan.there.places, kept, self._metrics)
        return [step for step in found if step not in others]

    def _metrics(self) -> dict[int, dict[str, float]]:
        return {each.step: each.metrics for each in self.second.described()}

    def _left_behind(self, plan: TierPlan) -> list[int]:
        """The drained steps that are to leave the fast tier; what a save counts on stays."""
        left = plan.left_behind(self._keep_fast)
        return [step for step in left if not self.space.is_base(self.run, step)]

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
                start = self._token.start
                if near is None or not near.readable or is_drained(near, place, start):
                    self._remove(step, near)

    def _let_go(self, step: int) -> None:
        files = [file_of(step_name(self.run, step))]
        with self._naming():
            self.check_writer()
            there, kept = self.second.place(step), self.second.is_kept(step)
            with self.fast.handle.naming():
                if step in kept_steps(self._objects, self.run):
                    if not kept:
                        return  # the mark is still to be drained
                    files.insert(0, file_of(step_name(self.run, step, kept=True)))
                near = self._order.place(step)
                is_there = is_drained(near, there, self._token.start)
                if is_there and not self.space.is_base(self.run, step):
                    self.space.released += unlink(self._objects, files)


def _check_apart(fast: LocalStore, second: SecondTier) -> None:
    """Check that the second tier is not the fast one, by whatever name."""
    if isinstance(second, StoreTier):
        one, two = (fast.handle.objects.files.status(path) for path in (fast.path, second.path))
        ids = [(each.device, each.inode) for each in (one, two) if each is not None]
        if len(ids) == 2 and ids[0] == ids[1]:
            where, what = f"drain {second.where}", "that is the store itself"
            raise BadOptionError.of(BadOption.DRAIN, where, what)
