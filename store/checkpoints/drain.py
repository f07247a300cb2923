"""Two tiers of a run: steps are committed on a fast one, and drained to a second one behind it.

The second tier is a store like any other, and the one that lasts. A thread copies each step there
in the order in which they were saved (`tensor_dedup.store.checkpoints.transfer`), with its
manifest byte for byte, so its place in the order of saving, its metrics and its files are the same
in both. Then the retention rules delete what they do not keep from both tiers, and the fast one
lets go of what is drained and not among its last.

What is still to be drained follows from the two stores alone: a step of the fast tier that the
second one lacks, or has from an earlier place in the order, and a pin. No list of it can be lost,
and whoever opens the run with both tiers next goes on. Of two states of a step the one with the
later place counts, wherever it is, and only that one is ever drained. Two fast tiers that are used
in turn can give one place to different states: then the second tier's counts, and the other one is
reported and stays where it is.

Three things change both tiers: a drained step, a deleted one and an unpinned one. Each happens
under the second tier's lock of names, and a removal is durable there before it happens on the fast
tier: so a deleted step does not come back from there, and one that is half deleted is whole.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints.errors import (
    BadOption,
    BadOptionError,
    DivergedStepError,
    DrainError,
    NotATrainingError,
    PinnedStepError,
    UnknownStepError,
)
from tensor_dedup.store.checkpoints.retention import Retention
from tensor_dedup.store.checkpoints.runs import (
    Step,
    StepOrder,
    StepPlace,
    check_not_kept,
    check_pin,
    check_replaceable,
    describe_all,
    in_save_order,
    kept_steps,
    manifest_of,
    pin_step,
    step_name,
    step_numbers,
    steps_text,
)
from tensor_dedup.store.checkpoints.transfer import Transfer
from tensor_dedup.store.errors import (
    CorruptTensorError,
    DamagedFileError,
    MissingObjectError,
    NewerFormatError,
    UnknownNameError,
)
from tensor_dedup.store.format.names import file_of
from tensor_dedup.store.index import StoreIndex
from tensor_dedup.store.objects import ContainerId, Objects
from tensor_dedup.store.reading.reader import StoredPieces
from tensor_dedup.store.store import Store
from tensor_dedup.store.writing.hashing import Hasher

_LOG = logging.getLogger("tensor_dedup")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
# How soon a pause ends when the program does.
_POLL_S = 0.5
# What is wrong with this step itself: those behind it are drained all the same.
_OF_THE_STEP = (
    CorruptTensorError,
    MissingObjectError,
    DamagedFileError,
    NewerFormatError,
    DivergedStepError,
)
_T = TypeVar("_T")


class _OutdatedError(Exception):
    """The step was deleted or saved again while it was copied."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the second tier had of the run: its steps, pins, and other names that look like steps"""

    places: dict[int, StepPlace]
    kept: set[int]
    taken: set[int]


class Drain:
    """The two tiers of one handle, and the thread that drains. Safe from any thread.

    The thread ends when nothing is left to drain, and is no daemon: a program ends when its steps
    are drained or, where that fails, after one more attempt. A forked child drains only what it has
    saved itself.
    """

    def __init__(
        self,
        fast: Store,
        second: Store,
        order: StepOrder,
        retention: Retention,
        *,
        wait_for_encoding: Callable[[int, Callable[[], bool]], None],
        keep_fast: int | None,
        backlog: int,
    ) -> None:
        """Read the second tier, and start draining what is on the fast one only.

        `order` is that of the run on the fast tier. `wait_for_encoding` waits until a step takes
        the space that it will take, or a function says that this was long enough.

        Raises:
            StoreError: a store cannot be read.
        """
        with fast._translated(), second._translated():
            _check_options(fast, second, keep_fast, backlog)
        self.second = second
        self._fast, self._run, self._order = fast, order.run, order
        self._there = StepOrder(second._objects, order.run)
        self._retention, self._keep_fast, self._backlog = retention, keep_fast, backlog
        self._wait_for_encoding = wait_for_encoding
        self._settled = set[ContainerId]()
        self._seen = self._read_second()
        with fast._locked():
            self._count_on()
        self._begin()
        _ALL.add(self)
        self.start()

    def _count_on(self) -> None:
        """See that no step gets a place that was given before the fast tier was emptied."""
        last = max((place.sequence for place in self._seen.places.values()), default=0)
        if last > max((place.sequence for place in self._order.places().values()), default=0):
            self._order.at_least(last)
            self._order.next()  # so that the fast tier knows it, and with it its other users

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
        """Begin anew in a forked child, where the thread and the holders of locks do not exist."""
        self._begin()

    # What the two tiers have

    def places(self) -> dict[int, StepPlace]:
        """Return each step of either tier, by number, with the later of its places.

        While the second tier cannot be read, what is known of it counts.
        """
        with self._fast._locked():
            near = self._order.places()
        found = dict(self._look().places)
        for step, place in near.items():
            if _counts(place, found.get(step)):
                found[step] = place
        return {step: found[step] for step in sorted(found)}

    def numbers(self) -> set[int]:
        """Return the numbers that the second tier was seen to have names of."""
        return {*self._seen.places, *self._seen.taken}

    def described(self) -> list[Step]:
        """Describe each step, in order. Raises if the second tier cannot be read."""
        with self.second._locked():
            found = {each.step: each for each in describe_all(self._there_objects, self._run)}
        with self._fast._locked():
            for each in describe_all(self._objects, self._run):
                if _counts(self._order.place(each.step), self._there.place(each.step)):
                    found[each.step] = each
        return [found[step] for step in sorted(found)]

    def read(self, step: int, read: Callable[[Store], _T]) -> _T:
        """Return what `read` makes of the store that has the step; the fast one where both do.

        What is damaged on the fast tier is read from the second one, if it has the same. Raises the
        errors of `read`, and UnknownStepError.
        """
        places = self.places()
        if step not in places:
            has = f"{steps_text(len(places))} on both tiers" if places else "none"
            raise UnknownStepError.of(self._fast.path, self._run, step, has)
        name = step_name(self._run, step)
        with self._fast._locked():
            near = self._order.place(step)
        if near is None or places[step].reference != near.reference:
            return read(self.second)
        try:
            return read(self._fast)
        except UnknownNameError:  # drained and let go of just now
            return read(self.second)
        except _OF_THE_STEP as error:
            if self._manifest(self.second, name) != self._manifest(self._fast, name):
                raise
            _LOG.warning("read %s from %s: %s", name, self.second.path, error)
            return read(self.second)

    def _manifest(self, store: Store, name: str) -> str | None:
        with suppress(StoreError):
            return store.manifest(name)
        return None

    def _look(self) -> _Seen:
        """What the second tier has now, or had when it could be read last."""
        try:
            self._seen = self._read_second()
        except StoreError as error:
            _LOG.warning("going by what was known of %s: %s", self.second.path, error)
        return self._seen

    def _read_second(self) -> _Seen:
        with self.second._locked():
            places = self._there.places()
            taken = {*step_numbers(self._there_objects, self._run)} - places.keys()
            return _Seen(places, kept_steps(self._there_objects, self._run), taken)

    @property
    def _objects(self) -> Objects:
        return self._fast._objects

    @property
    def _there_objects(self) -> Objects:
        return self.second._objects

    # What changes both

    def check_replaceable(self, step: int) -> None:
        """Check that a step may be saved, by what was seen of the second tier; it is not asked.

        Raises:
            PinnedStepError: it is pinned there.
            NotATrainingError: there, a checkpoint that is no step of this run has its name.
        """
        facts = {"run": self._run, "step": step}
        if step in self._seen.kept:
            what = f"the step {step} of {self._run!r} is pinned"
            raise PinnedStepError.at(self.second.path, what, **facts)
        if step in self._seen.taken:
            what = f"{step_name(self._run, step)!r} is no step of this run"
            raise NotATrainingError.at(self.second.path, what, **facts)

    def delete(self, step: int) -> None:
        """Delete a step from both tiers. Raises what CheckpointStore.delete does."""
        with self.second._locked(), self._fast._locked(), self._there_objects.naming():
            for objects in (self._there_objects, self._objects):
                check_not_kept(objects, self._run, step)
                with suppress(DamagedFileError, MissingObjectError, UnknownStepError):
                    manifest_of(objects, self._run, step)
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
        file = file_of(step_name(self._run, step))
        # The second one first: were it the last, a crash in between would leave an earlier state.
        removed = _unlink(self._there_objects, [file])
        self._seen.places.pop(step, None)
        with self._objects.naming():
            if near is None or self._order.status(step) == near.reference:
                return _unlink(self._objects, [file]) or removed
        return removed

    def prune(self, *, dry_run: bool, among: Collection[int] | None) -> list[int]:
        """Delete what CheckpointStore.prune does from both tiers: what no rule keeps and is drained

        Raises if the second tier cannot be reached.
        """
        with self.second._locked(), self._fast._locked():
            dropped, there = self._dropped()
            dropped = [step for step in dropped if among is None or step in among]
            for step in dropped if not dry_run else ():
                self._drop(step, there[step])
        return dropped

    def kept(self) -> set[int]:
        """Return the steps that are pinned on either tier."""
        with self._fast._locked():
            near = kept_steps(self._objects, self._run)
        return near | self._look().kept

    def pin(self, step: int) -> None:
        """Pin a step where it is; a pin on the fast tier is drained too."""
        there = self._look().places.get(step)
        with suppress(UnknownStepError), self._fast._locked():
            if _counts(self._order.place(step), there):
                pin_step(self._objects, self._run, step)
                self.add(step, saved=False)
                return
        with self.second._locked():
            pin_step(self._there_objects, self._run, step)
        self._seen.kept.add(step)

    def unpin(self, step: int) -> None:
        """Unpin a step on both tiers. Raises if the second one cannot be reached."""
        file = file_of(step_name(self._run, step, kept=True))
        with self.second._locked(), self._fast._locked(), self._there_objects.naming():
            check_pin(self._there_objects, self._run, step)
            check_pin(self._objects, self._run, step)
            _unlink(self._there_objects, [file])
            self._seen.kept.discard(step)
            with self._objects.naming():
                _unlink(self._objects, [file])

    # The work

    def undrained(self) -> list[int]:
        """Return the steps that this handle has still to drain, in the order in which it will."""
        with self._changed:
            return [*self._queue, *self._broken]

    @property
    def error(self) -> StoreError | None:
        """What the last attempt failed with; None once one has succeeded."""
        with self._changed:
            return self._error or next(iter(self._broken.values()), None)

    def wait_for_room(self) -> None:
        """Wait while `backlog` steps are undrained, unless the handle is being closed."""
        with self._changed:
            if len(self._queue) < self._backlog or self._closing:
                return
            self._run_thread()
            if not self._waited:  # a slow second tier makes every save wait: saying it once will do
                self._waited = True
                what = "%s: saves of the run %r wait while %s not drained to %s%s"
                many = "a step is" if self._backlog == 1 else f"{self._backlog} steps are"
                why = "" if self._error is None else f": {self._error}"
                _LOG.warning(what, self._fast.path, self._run, many, self.second.path, why)
            self._changed.wait_for(
                lambda: len(self._queue) < self._backlog or self._closing or self._thread is None
            )

    def add(self, step: int, *, saved: bool = True) -> None:
        """Drain a step that has changed on the fast tier; if it was `saved`, after all others."""
        with self._changed:
            if saved:
                self._queue.pop(step, None)
            self._queue[step] = object()
            self._broken.pop(step, None)
            self._run_thread()

    def start(self) -> None:
        """Start draining everything that is undrained, whoever has saved it."""
        found = self._find_undrained()
        with self._changed:
            later = {step: mark for step, mark in self._queue.items() if step not in found}
            self._queue = {step: self._queue.get(step, object()) for step in found} | later
            self._broken.clear()
            if self._queue:
                self._run_thread()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all is drained.

        Raises:
            DrainError: an attempt that began after this call has failed, or `timeout` seconds have
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
            what = f"{many} {are} not drained to {self.second.path}: {why}"
            facts = {"run": self._run, "steps": left, "second": str(self.second.path)}
            raise DrainError.at(self._fast.path, what, **facts) from cause

    def release(self) -> None:
        """Let everybody go on who waits for room: the handle is being closed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all is drained, and end the thread. Raises the errors of `wait`."""
        try:
            self.wait()
        finally:
            self.forsake()
            with self._changed:
                self._closing, thread = False, self._thread
            if thread is not None:
                thread.join()

    def forsake(self) -> None:
        """Make a thread that fails end, since nobody waits for it."""
        with self._changed:
            self._forsaken = True
            self._changed.notify_all()

    def _find_undrained(self) -> list[int]:
        seen = self._look()
        with self._fast._locked():
            near, kept = self._order.places(), kept_steps(self._objects, self._run)
        return [
            step
            for step in in_save_order(near)
            if step not in seen.places
            or _undrained(near[step], seen.places[step])
            or (step in kept - seen.kept and _counts(near[step], seen.places[step]))
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
                _LOG.error("%s: %s is left to drain: %s", self._fast.path, [*self._queue], error)

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
        """Try to drain the first step, and wait a while if that fails; whether to go on."""
        with self._changed:
            if not self._queue:
                self._end()
                return False
            step, mark = next(iter(self._queue.items()))
            self._begun += 1
            self._hurried = False
        self._wait_for_encoding(step, lambda: 2 * len(self._queue) > self._backlog)
        broken: StoreError | None = None
        try:
            self._drain(step)
        except _OutdatedError:
            return True
        except _OF_THE_STEP as error:
            _LOG.error("%s: the step %d is not drained: %s", self._fast.path, step, error)
            broken = error
        except StoreError as error:
            return self._pause(step, error)
        self._tidy()
        with self._changed:
            self._error, self._pauses = None, 0
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
                _LOG.warning(what, self._fast.path, step, self._run, error)
            self._error, self._failed = error, self._begun
            self._pauses += 1
            self._changed.notify_all()
            left = min(_FIRST_PAUSE_S * 2 ** min(self._pauses - 1, 10), _LONGEST_PAUSE_S)
            while left > 0 and not self._hurried:
                if self._forsaken or not threading.main_thread().is_alive():
                    what, many = "%s: %s of the run %r %s left to drain to %s: %s", len(self._queue)
                    steps, are = steps_text(many), "is" if many == 1 else "are"
                    second = self.second.path
                    _LOG.error(what, self._fast.path, steps, self._run, are, second, error)
                    self._end()
                    return False
                self._changed.wait(min(left, _POLL_S))
                left -= _POLL_S
        return True

    def _drain(self, step: int) -> None:
        """Copy one step, as it is now, unless the second tier has it or a later state of it."""
        with self.second._session() as (index, hasher):
            try:
                with self._fast._locked():
                    manifest, _, _ = manifest_of(self._objects, self._run, step)
                    near, place = self._order.place(step), self._there.place(step)
            except (UnknownStepError, NotATrainingError):
                return
            if _diverged(near, place):
                what = f"the step {step} of {self._run!r} is another one in {self.second.path}"
                raise DivergedStepError.at(self._fast.path, what, run=self._run, step=step)
            if _ahead(near, place):
                self._copy(step, index, hasher)
            place = self._there.place(step)
            if place is not None:
                self._seen.places[step] = place
                self._order.at_least(place.sequence)
            self._copy_pin(step, manifest)

    def _copy(self, step: int, index: StoreIndex, hasher: Hasher) -> None:
        objects, name = self._objects, step_name(self._run, step)
        with Transfer(self._there_objects, index, hasher, self._settled) as transfer:
            with self._fast._session(update=False) as (near, _):
                try:
                    manifest, content, _ = manifest_of(objects, self._run, step)
                except (UnknownStepError, NotATrainingError) as error:
                    raise _OutdatedError from error
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
            now = self._objects.ref(step_name(self._run, step))
        except UnknownNameError as error:
            raise _OutdatedError from error
        near = self._order.place(step)
        if now != manifest or not _ahead(near, self._there.place(step)):
            raise _OutdatedError
        check_replaceable(self._there_objects, self._run, step)

    def _copy_pin(self, step: int, manifest: str) -> None:
        name = step_name(self._run, step, kept=True)

        def check() -> None:
            pinned = step in kept_steps(self._objects, self._run)
            if not pinned or self._there_objects.ref(step_name(self._run, step)) != manifest:
                raise _OutdatedError

        there = self._manifest(self.second, step_name(self._run, step))
        # A pin of an earlier state than the second tier's is a pin of nothing that counts.
        if step in kept_steps(self._objects, self._run) and there == manifest:
            check_pin(self._there_objects, self._run, step)
            self._there_objects.set_ref(name, manifest, replace=True, check_name=check)
            self._seen.kept.add(step)

    def _tidy(self) -> None:
        """Apply the retention rules to both tiers, and let go on the fast one of what is drained"""
        try:
            with self.second._locked(), self._fast._locked():
                dropped, there = self._dropped()
                left = self._left_behind()
                if dropped or left:
                    # Who gave a name in the second tier may have died before it was durable.
                    self._there_objects.files.sync_folder(self._there_objects.layout.refs)
                for step in dropped:
                    self._drop(step, there[step])
                for step in left:
                    self._let_go(step)
        except StoreError as error:  # the step is drained: what was to go goes after the next one
            _LOG.warning("%s: no drained step was let go of: %s", self._fast.path, error)

    def _dropped(self) -> tuple[list[int], Mapping[int, StepPlace]]:
        """The steps that no rule keeps, by what is in the second tier: that is what lasts."""
        if not self._retention.any:
            return [], {}
        there = self._there.places(readable=True)
        order = in_save_order(there)
        if not order:
            return [], {}
        metrics: dict[int, dict[str, float]] = {step: {} for step in order}
        if self._retention.best is not None:
            metrics = {s.step: s.metrics for s in describe_all(self._there_objects, self._run)}
        kept = kept_steps(self._there_objects, self._run) | kept_steps(self._objects, self._run)
        return [
            s for s in self._retention.dropped(metrics, kept, order[-1], order) if s in there
        ], there

    def _drop(self, step: int, place: StepPlace) -> None:
        """Delete a step from both, unless it was pinned or saved again."""
        with self._there_objects.naming():
            if self._there.status(step) == place.reference:
                with suppress(PinnedStepError):
                    check_not_kept(self._there_objects, self._run, step)
                    check_not_kept(self._objects, self._run, step)
                    near = self._order.place(step)
                    if not _undrained(near, place):
                        self._remove(step, near)

    def _left_behind(self) -> list[int]:
        """The drained steps on the fast tier that are not among its last."""
        if self._keep_fast is None:
            return []
        near = self._order.places()
        drained = [step for step in in_save_order(near) if self._is_drained(step)]
        return drained[: -self._keep_fast]

    def _is_drained(self, step: int) -> bool:
        there = self._there.place(step)
        near = self._order.place(step)
        return there is not None and there.readable and not _undrained(near, there)

    def _let_go(self, step: int) -> None:
        files = [file_of(step_name(self._run, step))]
        with self._objects.naming():
            if step in kept_steps(self._objects, self._run):
                if step not in kept_steps(self._there_objects, self._run):
                    return  # the pin is still to be drained
                files.insert(0, file_of(step_name(self._run, step, kept=True)))
            if self._is_drained(step):
                _unlink(self._objects, files)


def _check_options(fast: Store, second: Store, keep_fast: int | None, backlog: int) -> None:
    where = f"drain {second.path}"
    one, two = (store._objects.files.status(store.path) for store in (fast, second))
    if one is not None and two is not None and (one.device, one.inode) == (two.device, two.inode):
        raise BadOptionError.of(BadOption.DRAIN, where, "that is the store itself")
    if backlog < 1 or (keep_fast is not None and keep_fast < 1):
        what = f"keep_fast={keep_fast}, drain_backlog={backlog}"
        raise BadOptionError.of(BadOption.FAST, where, what)


def _ahead(one: StepPlace | None, other: StepPlace | None) -> bool:
    """Whether one state of a step counts rather than another: it is there, whole and later."""
    if one is None or not one.readable:
        return False
    return other is None or not other.readable or one.sequence > other.sequence


def _diverged(one: StepPlace | None, other: StepPlace | None) -> bool:
    """Whether two states of a step differ, and neither is later.

    A fast tier may count past a place without a step (a save failed), and die before a later step
    is drained: another one that goes on from the second tier gives that step the same place.
    """
    if one is None or other is None or not (one.readable and other.readable):
        return False
    return one.sequence == other.sequence and one.manifest != other.manifest


def _counts(near: StepPlace | None, there: StepPlace | None) -> bool:
    """Whether the fast tier's state of a step counts: the second one has it too, or none later."""
    return not _ahead(there, near) and not _diverged(near, there)


def _undrained(near: StepPlace | None, there: StepPlace | None) -> bool:
    """Whether the fast tier's state of a step is on that tier only, and not to be lost."""
    return _ahead(near, there) or _diverged(near, there)


def _unlink(objects: Objects, files: Iterable[str]) -> bool:
    """Remove references durably, under the lock of names; return whether any was there."""
    found = False
    for file in files:
        with suppress(FileNotFoundError):
            objects.files.unlink(objects.layout.refs / file)
            found = True
    # Also where another process has removed them: it may have died before that was durable.
    objects.files.sync_folder(objects.layout.refs)
    return found


_ALL: "weakref.WeakSet[Drain]" = weakref.WeakSet()


def _forked() -> None:
    for each in list(_ALL):
        each.forked()


os.register_at_fork(after_in_child=_forked)
