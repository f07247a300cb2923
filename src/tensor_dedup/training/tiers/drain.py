"""Two tiers of a run: steps are committed on a fast store, and copied ("drained") to a second one.

The second tier is a store or a remote, and keeps the steps lastingly (`second_tier`). A thread
copies each step there in the order of saving. The manifest is copied byte for byte, so the step has
the same place in the order of saving, the same metrics and the same files on both tiers. Then the
retention rules delete steps from both tiers, and drained steps that are not among the last ones are
deleted from the fast tier.

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
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    StoreBusyError,
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
from tensor_dedup.store.steps.retention import Retention, is_whole
from tensor_dedup.store.steps.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_mark,
    check_not_kept,
    describe_all,
    in_save_order,
    keep_step,
    kept_steps,
    manifest_of,
    step_name,
    steps_text,
)
from tensor_dedup.store.store import LocalStore
from tensor_dedup.store.upkeep.gc import GcPlan, sweep_now
from tensor_dedup.training.errors import DivergedStepError, DivergedTierError, DrainError
from tensor_dedup.training.in_flight import BaseStep
from tensor_dedup.training.tiers.second_tier import (
    OutdatedError,
    SecondTier,
    StoreTier,
    TierContent,
    ahead,
    unlink,
)
from tensor_dedup.training.tiers.tier_identity import TierNotes, next_turn

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
# A sweep of the fast tier waits so long for those who have it open, and where the disk is full.
_SWEEP_WAIT_S, _FULL_WAIT_S = 2.0, 60.0
# How soon a pause ends when the program does.
_POLL_S = 0.5
# What is wrong with this step itself: those behind it are drained all the same.
_OF_THE_STEP = (
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


class Drain:
    """The two tiers of a CheckpointStore, and a thread that drains (copies) steps to the second.

    The thread ends when nothing is left to drain. A program ends only when its steps are drained,
    or when the last attempt to drain has failed. A forked child drains only the steps that it has
    saved itself. Safe from any thread.
    """

    def __init__(
        self,
        fast: LocalStore,
        second: SecondTier,
        order: StepOrder,
        retention: Retention,
        *,
        wait_for_encoding: Callable[[int, Callable[[], bool]], None],
        keep_fast: int | None,
        backlog: int,
    ) -> None:
        """Read the second tier, and start to drain the steps that are on the fast tier only.

        * `order` is the order of saving of the run on the fast tier.
        * `retention` has the rules by which steps are deleted.
        * `wait_for_encoding(step, enough)` waits until a step is encoded, or until `enough` returns
          True.
        * `keep_fast` and `backlog` are the arguments `keep_fast` and `drain_backlog` of
          `CheckpointStore`.

        Raises:
            OtherTierError: The second tier is not the one to which the run was drained.
            DivergedTierError: Another fast tier has continued the run, and this fast tier has later
                steps that are still to be drained.
            StoreError: A tier cannot be read.
        """
        with fast.handle.translated():
            _check_options(fast, second, keep_fast, backlog)
        self.second = second
        self._fast, self._run, self._order = fast, order.run, order
        self._retention, self._keep_fast, self._backlog = retention, keep_fast, backlog
        self._wait_for_encoding = wait_for_encoding
        # How many steps were let go of since the last sweep, and what all sweeps have freed.
        self._released = self._freed = 0
        self._notes = TierNotes(fast, second, order.run, lets_go=keep_fast is not None)
        self._seen = second.content()
        self._meet(self._seen)
        with suppress(StoreError), second.session():  # whoever drained them may have died then
            self._note_drained(self._seen)
        with fast.handle.locked():
            self._count_on()
        self._begin()
        _ALL.add(self)
        self.start()

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
        with self._fast.handle.locked():
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

    def _begin(self) -> None:
        self._changed = threading.Condition()
        # The steps to drain, in order, each with a mark of when it was saved.
        self._queue: dict[int, object] = {}
        self._broken: dict[int, StoreError] = {}
        self._thread: threading.Thread | None = None
        self._error: StoreError | None = None
        # Attempts are numbered: who waits is told of one that began after the wait.
        self._begun = self._failed = self._pauses = 0
        self._hurried = self._closing = self._forsaken = self._waited = False

    def forked(self) -> None:
        """Reset the state in a forked child, where the parent's threads do not exist."""
        self._begin()

    # What the two tiers have

    def places(self) -> dict[int, StepPlace]:
        """Return the steps on either tier, each with its place in the order of saving.

        If both tiers have a step, the place is that of the version that a load would use. If the
        second tier cannot be read, its last known content is used.
        """
        with self._fast.handle.locked():
            near = self._order.places()
        found = dict(self._look().places)
        for step, place in near.items():
            if self._notes.counts(place, found.get(step)):
                found[step] = place
        return {step: found[step] for step in sorted(found)}

    def numbers(self) -> set[int]:
        """Return the step numbers that were taken on the second tier when it was last read.

        Numbers taken by checkpoints that are not steps of this run are included.
        """
        return {*self._seen.places, *self._seen.taken}

    def described(self) -> list[Step]:
        """Return a description of each step on either tier, in the order of the step numbers.

        Raises:
            StoreError: The second tier cannot be read.
        """
        self._notes.check()
        there = self.second.content().places
        found = {each.step: each for each in self.second.described()}
        with self._fast.handle.locked():
            for each in describe_all(self._objects, self._run):
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
            raise UnknownStepError.of(self._fast.path, self._run, step, has)
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
        with self._fast.handle.locked():
            near = self._order.place(step)
        try:
            if near is not None and place.reference == near.reference:
                with suppress(UnknownNameError):  # drained and let go of just now
                    return self._read_near(step, near, read)
            return self.second.read(step, read, afresh=False)
        except UnknownNameError as error:  # deleted just now
            raise UnknownStepError.of(self._fast.path, self._run, step) from error

    def _read_near(self, step: int, near: StepPlace, read: Callable[[StoredCheckpoint], _T]) -> _T:
        try:
            name = step_name(self._run, step)
            with self._fast.checkpoint(name) as checkpoint, self._fast.handle.translated():
                return read(checkpoint)
        except _OF_THE_STEP as error:
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
        return self._fast.handle.objects

    # What changes both

    def check_replaceable(self, step: int) -> None:
        """Check that a step may be saved, according to the last known content of the second tier.

        Nothing is read from the second tier.

        Raises:
            KeptStepError: The step is kept on the second tier.
            NotATrainingError: The step's name stands for a checkpoint that is not a step of this
                run.
        """
        facts = {"run": self._run, "step": step}
        if step in self._seen.kept:
            what = f"the step {step} of {self._run!r} is kept"
            raise KeptStepError.at(self.second.where, what, **facts)
        if step in self._seen.taken:
            what = f"{step_name(self._run, step)!r} is no step of this run"
            raise NotATrainingError.at(self.second.where, what, **facts)

    def delete(self, step: int) -> None:
        """Delete a step from both tiers. The errors are those of `CheckpointStore.delete`."""
        with self.second.session(), self._naming():
            self.second.check_deletable(step)
            there = self.second.place(step)
            with self._fast.handle.locked():
                if there is None and self._order.status(step) is None:
                    raise UnknownStepError.of(self._fast.path, self._run, step)
                check_not_kept(self._objects, self._run, step)
                with suppress(DamagedFileError, MissingObjectError, UnknownStepError):
                    manifest_of(self._objects, self._run, step)
            if not self._remove(step):
                raise UnknownStepError.of(self._fast.path, self._run, step)
        with self._changed:
            self._queue.pop(step, None)
            self._broken.pop(step, None)
            self._changed.notify_all()

    def _remove(self, step: int, near: StepPlace | None = None) -> bool:
        """Remove a step from both, under the second tier's lock of names; whether any had it.

        Where the fast tier must have it as it was `near`, another state of it stays.
        """
        # The second one first: were it the last, a crash in between would leave an earlier state.
        removed = self.second.remove(step)
        self._seen.places.pop(step, None)
        with self._fast.handle.locked(), self._objects.naming():
            if near is None or self._order.status(step) == near.reference:
                gone = unlink(self._objects, [file_of(step_name(self._run, step))])
                self._released += gone
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
        with self._fast.handle.locked():
            near = kept_steps(self._objects, self._run)
        return near | self._look().kept

    def keep(self, step: int) -> None:
        """Keep a step on the tier from which it would be loaded.

        If that is the fast tier, the mark is copied to the second tier afterwards.
        """
        there = self._look().places.get(step)
        with suppress(UnknownStepError), self._fast.handle.locked():
            if self._notes.counts(self._order.place(step), there):
                keep_step(self._objects, self._run, step)
                self.add(step, saved=False)
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
            with self._fast.handle.locked():
                check_mark(self._objects, self._run, step)
            self.second.unkeep(step)
            self._seen.kept.discard(step)
            with self._fast.handle.locked(), self._objects.naming():
                unlink(self._objects, [file_of(step_name(self._run, step, kept=True))])

    # The work

    def undrained(self) -> list[int]:
        """Return the numbers of the steps that this object still has to drain, in order."""
        with self._changed:
            return [*self._queue, *self._broken]

    @property
    def error(self) -> StoreError | None:
        """The error of the last attempt to drain, or None if it succeeded."""
        with self._changed:
            return self._error or next(iter(self._broken.values()), None)

    def wait_for_room(self) -> None:
        """Wait until fewer than `backlog` steps are undrained, or `release` is called."""
        with self._changed:
            if len(self._queue) < self._backlog or self._closing:
                return
            self._run_thread()
            if not self._waited:  # a slow second tier makes every save wait: saying it once will do
                self._waited = True
                what = "%s: saves of the run %r wait while %s not drained to %s%s"
                many = "a step is" if self._backlog == 1 else f"{self._backlog} steps are"
                why = "" if self._error is None else f": {self._error}"
                _log.warning(what, self._fast.path, self._run, many, self.second.where, why)
            self._changed.wait_for(
                lambda: len(self._queue) < self._backlog or self._closing or self._thread is None
            )

    def add(self, step: int, *, saved: bool = True) -> None:
        """Queue a step that was saved or kept on the fast tier, and start to drain.

        If the step was `saved`, it is put at the end of the queue. If it was only kept and is in
        the queue already, it keeps its place there.
        """
        with self._changed:
            if saved:
                self._queue.pop(step, None)
            self._queue[step] = object()
            self._broken.pop(step, None)
            self._run_thread()

    def start(self) -> None:
        """Start to drain all undrained steps, including those that other processes have saved."""
        found = self._find_undrained()
        with self._changed:
            later = {step: mark for step, mark in self._queue.items() if step not in found}
            self._queue = {step: self._queue.get(step, object()) for step in found} | later
            self._broken.clear()
            if self._queue:
                self._run_thread()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all steps are drained.

        Raises:
            DrainError: An attempt that began after this call has failed, or `timeout` seconds have
                passed.
        """
        with self._changed:
            first = self._begun + 1
            if self._queue:
                self._run_thread()
            self._hurried = True
            self._changed.notify_all()
            in_time = self._changed.wait_for(
                lambda: not self._queue or self._failed >= first or self._thread is None, timeout
            )
            left = [*self._queue, *self._broken]
            cause = self._error or next(iter(self._broken.values()), None)
        if left:
            why = f"{cause}" if in_time else f"not drained in {timeout:g} s"
            many = f"{steps_text(len(left))} of the run {self._run!r}, from {left[0]},"
            are = "is" if len(left) == 1 else "are"
            what = f"{many} {are} not drained to {self.second.where}: {why}"
            facts = {"run": self._run, "steps": left, "second": self.second.where}
            raise DrainError.at(self._fast.path, what, **facts) from cause

    def release(self) -> None:
        """End the waits in `wait_for_room`, because the CheckpointStore is being closed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all steps are drained, and until the thread has ended.

        Raises:
            DrainError: A step could not be drained. The thread has ended all the same.
        """
        try:
            self.wait()
        finally:
            self.forsake()
            with self._changed:
                self._closing, thread = False, self._thread
            if thread is not None:
                thread.join()

    def forsake(self) -> None:
        """Make the thread end at its next failure, because no caller waits for it any more."""
        with self._changed:
            self._forsaken = True
            self._changed.notify_all()

    def _find_undrained(self) -> list[int]:
        seen = self._look()
        with self._fast.handle.locked():
            near, kept = self._order.places(), kept_steps(self._objects, self._run)
        return [
            step
            for step in in_save_order(near)
            if step not in seen.places
            or self._notes.undrained(near[step], seen.places[step])
            or (step in kept - seen.kept and self._notes.counts(near[step], seen.places[step]))
        ]

    def _run_thread(self) -> None:
        """Start the thread unless it runs. The caller holds the lock, as where it is ended."""
        self._forsaken = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tensor-dedup-drain")
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is ending
                self._thread = None
                _log.error(
                    "%s: %s is left to drain: %s", self._fast.path, [*self._queue], str(error)
                )

    def _work(self) -> None:
        """Drain step by step; the body of the thread."""
        try:
            while self.work_once():
                pass
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # nobody has started another
                    self._end()

    def _end(self) -> None:
        self._thread = None
        self._changed.notify_all()

    def work_once(self) -> bool:
        """Try to drain the first step in the queue; return whether the thread is to continue.

        Returns False if the queue is empty. After a failure, the method waits for a while before it
        returns.
        """
        with self._changed:
            if not self._queue:
                self._end()
                return False
            step, mark = next(iter(self._queue.items()))
            self._begun += 1
            self._hurried = False
        self._wait_for_encoding(step, lambda: 2 * len(self._queue) > self._backlog)
        broken: StoreError | None = None
        there: TierContent | None = None
        try:
            there = self._drain(step)
        except OutdatedError:
            return True
        except self.second.own_damage as error:
            return self._pause(step, error)
        except _OF_THE_STEP as error:
            _log.error("%s: the step %d is not drained: %s", self._fast.path, step, str(error))
            broken = error
        except StoreError as error:
            return self._pause(step, error)
        self._tidy(there)
        if self._released >= self._backlog:
            self._sweep(_SWEEP_WAIT_S)
        with self._changed:
            self._error, self._pauses = None, 0
            # If not, it was saved again, kept or deleted during the attempt.
            if self._queue.get(step) is mark:
                del self._queue[step]
                if broken is not None:
                    self._broken[step] = broken
            self._changed.notify_all()
        return True

    def _pause(self, step: int, error: StoreError) -> bool:
        with self._changed:
            if not self._pauses:
                what = "%s: the step %d of the run %r is not drained yet, trying again: %s"
                _log.warning(what, self._fast.path, step, self._run, str(error))
            self._error, self._failed = error, self._begun
            self._pauses += 1
            self._changed.notify_all()
            left = min(_FIRST_PAUSE_S * 2 ** min(self._pauses - 1, 10), _LONGEST_PAUSE_S)
            while left > 0 and not self._hurried:
                if self._forsaken or not threading.main_thread().is_alive():
                    what, many = "%s: %s of the run %r %s left to drain to %s: %s", len(self._queue)
                    steps, are = steps_text(many), "is" if many == 1 else "are"
                    second = self.second.where
                    _log.error(what, self._fast.path, steps, self._run, are, second, str(error))
                    self._end()
                    return False
                self._changed.wait(min(left, _POLL_S))
                left -= _POLL_S
        return True

    def _drain(self, step: int) -> TierContent:
        """Copy one step, as it is now, unless the second tier has it or a later state of it.

        Returns what the second tier has then.
        """
        self._notes.identify()
        with self.second.session():
            there = self._seen = self.second.content()
            self._meet(there)
            try:
                with self._fast.handle.locked():
                    manifest, _, _ = manifest_of(self._objects, self._run, step)
                    near = self._order.place(step)
            except (UnknownStepError, NotATrainingError):
                return there
            place = self.second.place(step)
            if near is not None and place is not None and self._notes.diverged(near, place):
                if near.sequence > place.sequence:
                    raise DivergedTierError.of(
                        self._fast.path, self._run, [step], self.second.where, [step]
                    )
                what = f"the step {step} of {self._run!r} is another one in {self.second.where}"
                raise DivergedStepError.at(self._fast.path, what, run=self._run, step=step)
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
                with self._fast.handle.locked():
                    self._order.at_least(place.sequence)
            if self.second.copy_mark(step, manifest):
                there.kept.add(step)
            self._seen = there
            return there

    def _tidy(self, there: TierContent | None = None) -> None:
        """Apply the retention rules to both tiers, and let go on the fast one of what is drained

        `there` is what the second tier has, if that was looked at just now.
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
            _log.warning("%s: no drained step was let go of: %s", self._fast.path, str(error))

    def _drained_up_to(self, there: TierContent) -> int:
        """The place up to which every step of the fast tier is drained; later ones may be, too."""
        with self._fast.handle.locked():
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
        with self._fast.handle.locked():
            kept = there.kept | kept_steps(self._objects, self._run)
        dropped = self._retention.dropped(metrics, kept, order[-1], order)
        return [s for s in dropped if s in places and not self._is_base(s)]

    def _drop(self, step: int, place: StepPlace) -> None:
        """Delete a step from both, unless it was kept or saved again."""
        with self._naming():
            now = self.second.place(step)
            if now is None or now.reference != place.reference:
                return
            with suppress(KeptStepError):
                self.second.check_deletable(step)
                with self._fast.handle.locked():
                    check_not_kept(self._objects, self._run, step)
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
        with self._fast.handle.locked():
            near = self._order.places()
        drained = [s for s in in_save_order(near) if self._is_drained(near[s], there.places.get(s))]
        return [s for s in drained[: -self._keep_fast] if not self._is_base(s)]

    def _let_go(self, step: int) -> None:
        files = [file_of(step_name(self._run, step))]
        with self._naming():
            there, kept = self.second.place(step), self.second.is_kept(step)
            with self._fast.handle.locked(), self._objects.naming():
                if step in kept_steps(self._objects, self._run):
                    if not kept:
                        return  # the mark is still to be drained
                    files.insert(0, file_of(step_name(self._run, step, kept=True)))
                if self._is_drained(self._order.place(step), there):
                    self._released += unlink(self._objects, files)

    def _is_base(self, step: int) -> bool:
        """Whether a save in flight counts on what the fast tier has of a step, which stays then.

        It goes after a later step, which that save adds.
        """
        name = step_name(self._run, step)
        return any(each.name == name for each in self._bases())

    def _bases(self) -> list[BaseStep]:
        """The steps of the fast tier, of any run, that saves in flight count on."""
        return [each for each in BaseStep.all() if self._is_here(each.root)]

    def _is_here(self, root: Path) -> bool:
        """Whether a path leads to the fast tier, by whatever name."""
        files, mine = self._objects.files, self._objects.layout.root
        if root == mine:
            return True
        with suppress(OSError):
            one, other = files.status(root), files.status(mine)
            if one is not None and other is not None:
                return (one.device, one.inode) == (other.device, other.inode)
        return False

    def free_space(self) -> bool:
        """Free the space of steps deleted from the fast tier; return whether any was freed.

        If no space can be freed at first, the method waits and tries once more. It waits until all
        steps are drained, or until an attempt to drain fails.
        """
        before = self._freed
        self._sweep(_FULL_WAIT_S)
        if self._freed == before:
            with suppress(DrainError):
                self.wait()
            self._sweep(_FULL_WAIT_S)
        return self._freed > before

    def _sweep(self, wait_s: float) -> None:
        """Delete what nothing on the fast tier uses.

        There is no grace: what was let go of is on the second tier. Where others have the fast tier
        open for longer than a while, or a step was deleted or replaced that a save in flight counts
        on, that comes after the next step.
        """
        try:
            self._freed += self._sweep_now(wait_s).freed_bytes
            self._released = 0
        except StoreBusyError:
            pass
        except StoreError as error:
            what = "%s: the space of what was let go of is not freed: %s"
            _log.warning(what, self._fast.path, str(error))

    def _sweep_now(self, wait_s: float) -> GcPlan:
        with self._fast.handle.translated():
            return sweep_now(self._objects, wait_s, self._check_bases)

    def _check_bases(self) -> None:
        """Check that every step is there that saves in flight count on: it keeps what they need.

        Raises:
            StoreBusyError: One was deleted or replaced.
        """
        for base in self._bases():
            if not base.is_there():
                what = f"a save counts on {base.name}, which was deleted or replaced"
                raise StoreBusyError.at(self._fast.path, what)


def _check_options(
    fast: LocalStore, second: SecondTier, keep_fast: int | None, backlog: int
) -> None:
    where = f"drain {second.where}"
    if isinstance(second, StoreTier):
        one, two = (fast.handle.objects.files.status(path) for path in (fast.path, second.path))
        ids = [(each.device, each.inode) for each in (one, two) if each is not None]
        if len(ids) == 2 and ids[0] == ids[1]:
            raise BadOptionError.of(BadOption.DRAIN, where, "that is the store itself")
    if not is_whole(backlog, 1) or not (keep_fast is None or is_whole(keep_fast, 1)):
        what = f"keep_fast={keep_fast!r}, drain_backlog={backlog!r}"
        raise BadOptionError.of(BadOption.FAST, where, what)


_ALL: "weakref.WeakSet[Drain]" = weakref.WeakSet()


def _forked() -> None:
    for each in list(_ALL):
        each.forked()


os.register_at_fork(after_in_child=_forked)
