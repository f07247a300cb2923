"""The thread that drains a run: it copies step after step from the fast tier to the second one.

What it does to a step is in `two_tiers`. Here is when: the queue of the steps that are to be
drained, the pauses after a failure, and what waits for the thread.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from tensor_dedup.errors import StoreError
from tensor_dedup.store.steps.runs import steps_text
from tensor_dedup.training.errors import DrainError, RunTakenError
from tensor_dedup.training.tiers.second_tier import OutdatedError
from tensor_dedup.training.tiers.two_tiers import OF_THE_STEP, TwoTiers

if TYPE_CHECKING:
    from tensor_dedup.training.tiers.plan import TierContent

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
# A sweep of the fast tier waits so long for those who have it open, and where the disk is full.
_SWEEP_WAIT_S, _FULL_WAIT_S = 2.0, 60.0
# How soon a pause ends when the program does.
_POLL_S = 0.5


class Drain:
    """A thread that drains (copies) the steps of a run to its second tier.

    The thread ends when nothing is left to drain. A program ends only when its steps are drained,
    or when the last attempt to drain has failed. When another fast tier has become the writer of
    the run, the thread ends, and nothing is drained until `start` finds that this one is it again.
    A forked child drains only the steps that it has saved itself. Safe from any thread.
    """

    def __init__(
        self,
        tiers: TwoTiers,
        *,
        wait_for_encoding: Callable[[int, Callable[[], bool]], None],
        backlog: int,
    ) -> None:
        """Start to drain the steps that are on the fast tier only.

        * `wait_for_encoding(step, enough)` waits until a step is encoded, or until `enough` returns
          True.
        * `backlog` is the argument `drain_backlog` of `CheckpointStore`.
        """
        self._tiers, self._fast, self._run = tiers, tiers.fast, tiers.run
        self._backlog, self._wait_for_encoding = backlog, wait_for_encoding
        self._begin()
        tiers.on_keep, tiers.on_delete = self._keep, self._forget
        _ALL.add(self)
        self._start()

    def _keep(self, step: int) -> None:
        self.add(step, saved=False)

    def _forget(self, step: int) -> None:
        with self._changed:
            self._queue.pop(step, None)
            self._broken.pop(step, None)
            self._changed.notify_all()

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

    def undrained(self) -> list[int]:
        """Return the numbers of the steps that this object still has to drain, in order."""
        with self._changed:
            return [*self._queue, *self._broken]

    def is_coming(self, step: int) -> bool:
        """Return whether `step` is queued, and nothing has to be looked at anew for it.

        If another step could not be drained, or another fast tier is the writer, that is so.
        """
        with self._changed:
            return step in self._queue and not self._broken and not self._tiers.is_taken

    def stranded(self) -> list[int]:
        """Return the numbers of the steps on the fast tier that are never drained, sorted."""
        return self._tiers.stranded()

    @property
    def error(self) -> StoreError | None:
        """The error of the last attempt to drain, or None if it succeeded.

        If another fast tier is the writer of the run, it is the RunTakenError about that.
        """
        if (taken := self._tiers.taken_error()) is not None:
            return taken
        with self._changed:
            return self._error or next(iter(self._broken.values()), None)

    def wait_for_room(self) -> None:
        """Wait until fewer than `backlog` steps are undrained, or `release` is called.

        Raises:
            RunTakenError: Another fast tier is the writer of the run.
        """
        self._tiers.check_not_taken()
        with self._changed:
            if len(self._queue) < self._backlog or self._closing:
                return
            self._run_thread()
            if not self._waited:  # a slow second tier makes every save wait: saying it once will do
                self._waited = True
                what = "%s: saves of the run %r wait while %s not drained to %s%s"
                many = "a step is" if self._backlog == 1 else f"{self._backlog} steps are"
                why = "" if self._error is None else f": {self._error}"
                _log.warning(what, self._fast.path, self._run, many, self._tiers.second.where, why)
            self._changed.wait_for(
                lambda: len(self._queue) < self._backlog or self._closing or self._thread is None
            )
        self._tiers.check_not_taken()

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
        """Start to drain all undrained steps, including those that other processes have saved.

        Raises:
            RunTakenError: Another fast tier is the writer of the run. Each call looks at that anew.
        """
        try:
            self._tiers.look_again()
        except RunTakenError:
            raise
        except StoreError as error:  # the second tier is away: what was known of it counts
            self._tiers.check_not_taken()
            _log.warning("going by what was known of the second tier: %s", str(error))
        self._start()

    def _start(self) -> None:
        found = self._tiers.undrained()
        with self._changed:
            later = {step: mark for step, mark in self._queue.items() if step not in found}
            self._queue = {step: self._queue.get(step, object()) for step in found} | later
            self._broken.clear()
            if self._queue:
                self._run_thread()

    def wait(self, timeout: float | None = None, step: int | None = None) -> None:
        """Wait until all steps are drained or, if `step` is given, until this one is.

        Raises:
            DrainError: An attempt that began after this call has failed, or `timeout` seconds have
                passed.
            RunTakenError: Another fast tier is the writer of the run.
        """

        def left_in(steps: Iterable[int]) -> list[int]:
            return [each for each in steps if step in (None, each)]

        self._tiers.check_not_taken()
        with self._changed:
            first = self._begun + 1
            if self._queue:
                self._run_thread()
            self._hurried = True
            self._changed.notify_all()
            in_time = self._changed.wait_for(
                lambda: not left_in(self._queue) or self._failed >= first or self._thread is None,
                timeout,
            )
            left = left_in([*self._queue, *self._broken])
            cause = self._error or next(iter(self._broken.values()), None)
        self._tiers.check_not_taken()
        if left:
            why = f"{cause}" if in_time else f"not drained in {timeout:g} s"
            many = f"{steps_text(len(left))} of the run {self._run!r}, from {left[0]},"
            are = "is" if len(left) == 1 else "are"
            what = f"{many} {are} not drained to {self._tiers.second.where}: {why}"
            facts = {"run": self._run, "steps": left, "second": self._tiers.second.where}
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
            RunTakenError: Another fast tier is the writer of the run. The same holds.
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

    def _run_thread(self) -> None:
        """Start the thread unless it runs. The caller holds the lock, as where it is ended."""
        self._forsaken = False
        if self._thread is None and not self._tiers.is_taken:
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

        Returns False if the queue is empty, or if another fast tier is the writer of the run. After
        another failure, the method waits for a while before it returns.
        """
        with self._changed:
            if not self._queue or self._tiers.is_taken:
                self._end()
                return False
            step, mark = next(iter(self._queue.items()))
            self._begun += 1
            self._hurried = False
        self._wait_for_encoding(step, lambda: 2 * len(self._queue) > self._backlog)
        broken: StoreError | None = None
        there: TierContent | None = None
        try:
            there = self._tiers.copy(step)
        except OutdatedError:
            return True
        except RunTakenError as error:
            _log.error("%s", str(error))
            with self._changed:
                self._end()
            return False
        except self._tiers.second.own_damage as error:
            return self._pause(step, error)
        except OF_THE_STEP as error:
            _log.error("%s: the step %d is not drained: %s", self._fast.path, step, str(error))
            broken = error
        except StoreError as error:
            return self._pause(step, error)
        self._tiers.tidy(there)
        if self._tiers.space.released >= self._backlog:
            self._tiers.space.sweep(_SWEEP_WAIT_S)
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
                    second = self._tiers.second.where
                    _log.error(what, self._fast.path, steps, self._run, are, second, str(error))
                    self._end()
                    return False
                self._changed.wait(min(left, _POLL_S))
                left -= _POLL_S
        return True

    def free_space(self) -> bool:
        """Free the space of steps deleted from the fast tier; return whether any was freed.

        If no space can be freed at first, the method waits and tries once more. It waits until all
        steps are drained, or until an attempt to drain fails.
        """
        space = self._tiers.space
        before = space.freed
        space.sweep(_FULL_WAIT_S)
        if space.freed == before:
            with suppress(DrainError):
                self.wait()
            space.sweep(_FULL_WAIT_S)
        return space.freed > before


_ALL: "weakref.WeakSet[Drain]" = weakref.WeakSet()


def _forked() -> None:
    for each in list(_ALL):
        each.forked()


os.register_at_fork(after_in_child=_forked)
