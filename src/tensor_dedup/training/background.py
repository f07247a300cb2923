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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tensor_dedup.training.capture import CaptureContext, StepCapture
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.devices import CudaDevice, SnapshotDevice
from tensor_dedup.training.errors import with_notes
from tensor_dedup.training.host_pool import HostPool
from tensor_dedup.training.pending_save import PendingSave
from tensor_dedup.training.reentry import Capturing, SaveLock
from tensor_dedup.training.saver import Saver
from tensor_dedup.training.snapshot import ExtractedStep, StepSource

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
# From this size on, one more thread is worth its start; each copies faster than any disk writes.
_HELPED_BYTES = 64 << 20
_HELPERS = 4
_Result = TypeVar("_Result")


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
                capture, pending = StepCapture(extracted, context), None
            except BaseException:
                base.release()
                raise
            try:
                last, root = self._last(), self._saver.root
                pending = PendingSave(capture, self._commit, last, root, self._capturing)
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
