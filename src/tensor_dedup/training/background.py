"""Save in the background: the training thread waits at most until a step has been captured.

A step is captured when each of its tensors was hashed or copied before the training changes it
(`capture`).

    save_async     waits until fewer than the allowed number of saves run, takes the model apart,
                   copies small tensors, captures large arrays, and starts to capture large
                   tensors; without a hooked optimizer it also waits until all are captured
    before_update  waits until all tensors are captured
    save thread    captures the remaining tensors, hashes, encodes, writes and commits, and ends;
                   if there is much to capture, helper threads capture while the save thread writes

Steps are committed in the order in which they were saved. If a save fails, the next call raises its
error. The save thread is not a daemon, so a program exits only when its steps are durable. No
thread waits for work between saves, so nothing has to be shut down at exit, and a fork loses
nothing.

Python switches threads every 5 ms, so a thread that starts while the training thread is busy delays
the training by up to 5 ms. The save thread is therefore started first, and waits for its work.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tensor_dedup.errors import StoreError
from tensor_dedup.store.steps.notes import Notes
from tensor_dedup.store.steps.runs import step_name
from tensor_dedup.store.writing.containers import Want
from tensor_dedup.training.capture import (
    CaptureContext,
    CudaDevice,
    HostPool,
    SnapshotDevice,
    StepCapture,
)
from tensor_dedup.training.commit import (
    Saved,
    SaveLock,
    Saver,
    StepSnapshot,
    StepSource,
)
from tensor_dedup.training.errors import BrokenSaveError, ForkedSaveError, NestedSaveError
from tensor_dedup.training.state import StateChunk

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
# From this size on, one more thread is worth its start; each copies faster than any disk writes.
_HELPED_BYTES = 64 << 20
_HELPERS = 4
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ExtractedStep:
    """A step that an adapter has taken apart. The chunks may share the model's memory."""

    notes: Notes
    chunks: Iterable[StateChunk]
    files: Mapping[str, bytes]


@dataclass(slots=True)
class Times:
    """The durations in seconds of the phases of one save.

    * `metadata`: the training thread takes the model apart and copies small tensors.
    * `copy`: large tensors are captured.
    * `write`: the save's own thread commits the step. This phase overlaps with `copy` if the step
      is written while it is captured.
    """

    metadata: float = 0.0
    copy: float = 0.0
    write: float = 0.0


class CapturedStep:
    """A step whose commit begins while some of its large tensors are still being captured."""

    new, background = False, True

    def __init__(self, extracted: ExtractedStep, capture: StepCapture) -> None:
        self.notes, self._files, self._capture = extracted.notes, extracted.files, capture

    @property
    def name(self) -> str:
        # docstring inherited
        return step_name(self.notes.run, self.notes.step)

    def arriving(self) -> Iterator[tuple[bytes, Want]]:
        # docstring inherited
        return self._capture.arriving()

    def whole(self) -> StepSnapshot:
        # docstring inherited
        return self._capture.snapshot(self.notes, self._files).whole()

    def committed(self) -> None:
        # docstring inherited
        self._capture.committed()


class Capturing(threading.local):
    """A flag for each thread that is set while the thread captures or commits a step.

    A signal handler may interrupt that work. If the handler waited for a save, and the save for the
    interrupted work, neither would ever end. The flag makes the wait an error instead.
    """

    _here = False

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work`, which captures or commits, with the flag set; return its result."""
        before, self._here = self._here, True
        try:
            return work()
        finally:
            self._here = before

    def check(self, root: Path) -> None:
        """Check that the calling thread may wait for saves to the store in the folder `root`.

        Raises:
            NestedSaveError: The calling thread is capturing or committing a step.
        """
        if self._here:
            what = "a save was begun or waited for in the middle of another one"
            raise NestedSaveError.at(root, what)


class PendingSave:
    """A step that is being saved in the background.

    Safe from any thread in the process that has started the save.
    """

    def __init__(
        self,
        extracted: ExtractedStep,
        capture: StepCapture,
        commit: Callable[[StepSource], Saved],
        previous: "PendingSave | None",
        root: Path,
        capturing: Capturing,
    ) -> None:
        self.step = extracted.notes.step
        self.root = root
        self.name = step_name(extracted.notes.run, extracted.notes.step)
        self.times = Times()
        self.reported = False
        self.streams = False
        """Whether it may be written while others capture it."""
        self._extracted, self._capture = extracted, capture
        self._commit, self._previous, self._capturing = commit, previous, capturing
        self._owner, self._began = os.getpid(), time.perf_counter()
        self._captured, self._done = threading.Event(), threading.Event()
        self._saved: Saved | None = None
        self._error: StoreError | None = None

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "committed" if self._saved else "failed"
        return f"PendingSave({self.name!r} in {str(self.root)!r}, {state})"

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> Saved:
        """Wait until the step is committed and durable, and return the result of the save.

        Raises:
            StoreError: The save failed; the exception is the error of the save.
            ForkedSaveError: This process was forked after the save had begun.
            NestedSaveError: The calling thread is capturing or committing a step of the same
                CheckpointStore.
        """
        self.finish()
        if self._saved is None:
            self.reported = True
            raise self._error or self._broken("it ended")
        return self._saved

    @property
    def failed(self) -> StoreError | None:
        """The error of the save, or None if the save has succeeded or is still running."""
        return self._error if self._done.is_set() else None

    def finish(self) -> None:
        """Wait until the save has ended, successfully or not.

        Raises:
            ForkedSaveError: This process was forked after the save had begun.
            NestedSaveError: The calling thread is capturing or committing a step of the same
                CheckpointStore.
        """
        if self._owner != os.getpid():
            what = f"the save of {self.name} goes on in the parent process"
            raise ForkedSaveError.at(self.root, what, name=self.name)
        if not self.done():
            self._capturing.check(self.root)
        self.make_room()

    def make_room(self) -> None:
        """Wait until the save has ended and returned its memory to the pool."""
        self._done.wait()

    def hold(self) -> None:
        """Wait until the model may be changed.

        Raises:
            NestedSaveError: The calling thread is capturing or committing a step of the same
                CheckpointStore.
        """
        self._capturing.check(self.root)
        self.capture_now()
        if self._capture.lacks_room():
            self._captured.wait()  # there may have been room since
            if self._capture.lacks_room():
                self.finish()

    def capture_now(self) -> None:
        """Capture all remaining tensors, except for those for which the pool has no room."""
        self._capturing.run(self._capture.hold)

    def run(self) -> None:
        """Capture and commit the step. The save's own thread calls this method."""
        try:
            step = self._step()
            began = time.perf_counter()
            self._saved = self._commit(step)
            self.times.write = time.perf_counter() - began
        except StoreError as error:
            self._error = error
        except BaseException as error:  # of a provider's `make`, for one
            self._error = self._broken("it ended with an error that is none of the store's")
            self._error.__cause__ = error
            raise
        finally:
            try:
                self._capture.settle()
                self.times.copy = (self._capture.ended or self._began) - self._began
            finally:
                self._end()

    def _step(self) -> StepSource:
        """Return what is to be committed: all of it, unless others capture while it is written."""
        if self.streams and (self._previous is None or self._previous.done()):
            self._captured.set()  # no room will be made by another save
            return CapturedStep(self._extracted, self._capture)
        self._finish_capture()
        snapshot = self._capture.snapshot(self._extracted.notes, self._extracted.files)
        if self._previous is not None:
            self._previous.finish()
        return replace(snapshot, background=True)

    def _broken(self, what: str) -> BrokenSaveError:
        return BrokenSaveError.at(self.root, f"the save of {self.name}: {what}", name=self.name)

    def _finish_capture(self) -> None:
        try:
            self._capture.work()
            if self._previous is not None and self._capture.lacks_room():
                self._previous.finish()  # it gives back what it has copied
                self._capture.retry()
        finally:
            self._captured.set()

    def _end(self) -> None:
        if self._saved is None:
            if self._error is None:
                self._error = self._broken("it ended")
            self._error.add_note(f"while {self.name} was saved in the background to {self.root}")
        self._capture.release()
        del self._extracted, self._previous  # the model is not kept, nor all saves before,
        del self._commit  # nor the handle, which tells of what failed when it goes
        self._done.set()


class _Standby:
    """A thread that waits for its work until the block is left; without work it ends."""

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensor-dedup-save", daemon=False)

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except BaseException:  # an interrupt, for one: it may have started, and waits
            self._go.set()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()

    def _run(self) -> None:
        self._go.wait()
        if self.work is not None:
            self.work()


class Hook:
    """A hook that makes an optimizer wait, before each step, until the model may be changed."""

    def __init__(self, handle: Any, forget: Callable[[], None]) -> None:
        self._handle, self._forget = handle, forget

    def remove(self) -> None:
        """Remove the hook from the optimizer.

        When no optimizer is hooked any more, `save_async` waits for the copies itself.
        """
        self._handle.remove()
        self._forget()


class Saves:
    """The background saves of one CheckpointStore. Safe from any thread."""

    def __init__(
        self,
        commit: Callable[[StepSource], Saved],
        saver: Saver,
        pool: HostPool,
        *,
        in_flight: int,
        threads: int,
    ) -> None:
        self._commit, self._saver = commit, saver
        self._pool, self._in_flight = pool, in_flight
        self._helpers = min(_HELPERS, threads) - 1
        self._devices: list[SnapshotDevice] = [CudaDevice()]
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changing: set[str] = set()
        self._pending: list[PendingSave] = []
        self._begin()
        _ALL.add(self)
        # When the handle goes, or the program ends, which waits for its saves first.
        weakref.finalize(self, _log_failures, self._pending)

    def _begin(self) -> None:
        self._turn, self._lock = SaveLock(), threading.Lock()
        self._capturing = Capturing()
        self._pending.clear()

    def forked(self) -> None:
        """Reset the state in a forked child, where the parent's saves and threads do not exist.

        Locks are replaced, because a thread of the parent may have held them during the fork.
        """
        self._begin()
        self._pool.reset()
        self._saver.reset()

    def start(self, extract: Callable[[], ExtractedStep], *, lazy: bool | None) -> PendingSave:
        """Start to save the step that `extract` returns.

        `lazy` has the same meaning as for `CheckpointStore.save_async`. If the allowed number of
        saves is running, the method first waits until one of them has ended. If the error of an
        earlier save was not raised yet, that error is raised, and nothing is saved.
        """
        self._turn.check(self._saver.root)
        self.check()
        with self._turn:
            self._wait_until_fewer_than(self._in_flight)
            pending, held = self._capturing.run(lambda: self._begin_save(extract, lazy))
        if held:
            pending.hold()
        return pending

    def _begin_save(
        self, extract: Callable[[], ExtractedStep], lazy: bool | None
    ) -> tuple[PendingSave, bool]:
        """Start the thread of a save; return the save, and whether to `hold` it at once."""
        with _Standby() as thread:
            began = time.perf_counter()
            extracted = extract()
            base = self._saver.base()
            context = CaptureContext(
                self._pool,
                self._devices,
                self._changing,
                base.pieces,
                self._finish_one,
                base.release,
            )
            try:
                capture, pending = StepCapture(extracted.chunks, context), None
            except BaseException:
                base.release()
                raise
            try:
                last, root = self._last(), self._saver.root
                pending = PendingSave(extracted, capture, self._commit, last, root, self._capturing)
                pending.times.metadata = time.perf_counter() - began
                eager = not (bool(self._hooked) if lazy is None else lazy)
                safe = eager or capture.guard()
                pending.streams = self._help(capture) or not capture.large_bytes
                if eager:
                    pending.capture_now()
                with self._lock:
                    self._pending.append(pending)
                thread.work = pending.run
            except BaseException:
                if thread.work is None:  # nobody else ends it
                    with self._lock:
                        self._pending[:] = [each for each in self._pending if each is not pending]
                    capture.settle()
                    capture.release()
                raise
        return pending, eager or not safe

    def _help(self, capture: StepCapture) -> bool:
        """Start threads that capture, if that pays; return whether there are some.

        Where the system has none to give, the save's own thread captures alone.
        """
        helpers = self._helpers if capture.large_bytes >= _HELPED_BYTES else 0
        for number in range(helpers):
            try:
                threading.Thread(target=capture.work, name="tensor-dedup-capture").start()
            except RuntimeError:
                return number > 0
        return helpers > 0

    def _last(self) -> PendingSave | None:
        with self._lock:
            return self._pending[-1] if self._pending else None

    def _wait_until_fewer_than(self, count: int) -> None:
        while True:
            with self._lock:
                self._raise_one()
                running = [each for each in self._pending if not each.done()]
            if len(running) < count:
                return
            running[0].finish()

    def _raise_one(self) -> None:
        """Raise what saves failed with, unless somebody was told; forget those that have ended.

        The first error is raised, the others become notes on it.
        """
        ended = [each for each in self._pending if each.done()]
        self._pending[:] = [each for each in self._pending if each not in ended]
        failed = [each for each in ended if not each.reported]
        errors = [each.failed for each in failed if each.failed is not None]
        for each in failed:
            each.reported = True
        for error in errors[1:]:
            errors[0].add_note(f"and another step was not saved: {with_notes(error)}")
        if errors:
            raise errors[0]

    def before_update(self) -> None:
        """Wait until the model may be changed.

        The error of a failed save is raised after the wait, so the model may be changed in either
        case.
        """
        with self._lock:
            running = [each for each in self._pending if not each.done()]
        for each in running:
            each.hold()
        with self._lock:
            self._raise_one()

    def check(self) -> None:
        """Check that the calling thread may start a save or wait for one.

        Raises:
            NestedSaveError: The calling thread is capturing or committing a step.
        """
        self._capturing.check(self._saver.root)

    def run(self, commit: Callable[[], _Result]) -> _Result:
        """Call `commit`, a function that commits a step, and return its result.

        Until the function returns, a wait for a save in the same thread raises NestedSaveError,
        because that save would wait for this commit.
        """
        return self._capturing.run(commit)

    def wait(self) -> None:
        """Wait until every save has ended.

        Raises:
            StoreError: A save has failed; the exception is the error of the save.
            NestedSaveError: The calling thread is capturing or committing a step.
        """
        self.check()
        self._wait_until_fewer_than(1)

    def finish(self) -> None:
        """Wait until every save has ended, successfully or not.

        The error of a failed save is raised by the next call of `start`, `before_update` or `wait`.

        Raises:
            NestedSaveError: The calling thread is capturing or committing a step.
        """
        self.check()
        with self._lock:
            running = list(self._pending)
        for each in running:
            each.finish()

    def _finish_one(self) -> bool:
        """Wait until the oldest save has ended; return False if there is none."""
        with self._lock:
            running = [each for each in self._pending if not each.done()]
        for each in running[:1]:
            each.make_room()
        return bool(running)

    def close(self) -> None:
        """Wait until every save has ended, and free the unused memory in the pool.

        The error of a failed save is raised by the next call of `start`, `before_update` or `wait`.
        """
        self.finish()
        self._pool.clear()

    def hook(self, optimizer: "torch.optim.Optimizer") -> Hook:
        """Make `optimizer` call `before_update` before each of its steps."""
        handle = optimizer.register_step_pre_hook(lambda *_: self.before_update())
        self._hooked.add(optimizer)
        return Hook(handle, lambda: self._hooked.discard(optimizer))


def with_notes(error: StoreError) -> str:
    """Return the text of `error` and the texts of its notes on one line."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _log_failures(pending: list[PendingSave]) -> None:
    """Log what failed, when nobody asked and nobody can any more."""
    for each in pending:
        if each.failed is not None and not each.reported:
            _log.error("%s: %s was not saved: %s", each.root, each.name, str(each.failed))


_ALL: "weakref.WeakSet[Saves]" = weakref.WeakSet()


def _forked() -> None:
    for each in list(_ALL):
        each.forked()


os.register_at_fork(after_in_child=_forked)
