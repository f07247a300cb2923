"""Saving in the background: the thread that trains is stopped while a step is pinned down, if then.

    save_async     waits for its turn, takes the model apart, copies what is small or could change
                   unnoticed, begins with the rest; waits for that too, unless an optimizer is
                   hooked
    before_update  waits until all is pinned down that is not yet
    a thread       pins what is left, hashes, encodes, writes and commits; it ends with its save

Steps are committed in the order in which they were saved. What fails is raised by the next call.
The thread is no daemon, so a program ends when its steps are durable, and no thread is idle: there
is nothing to end when a program does, and nothing to lose when it forks.

Threads of Python take turns of 5 ms. So the save's thread is started first, and waits: a thread
that is started, or works beside, while the other one does keeps it from its work for that long.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tensor_dedup.errors import StoreError
from tensor_dedup.store.checkpoints.capture import (
    Context,
    CudaDevice,
    HostPool,
    SnapshotDevice,
    StepCapture,
)
from tensor_dedup.store.checkpoints.commit import Saved, Saver, StepSnapshot
from tensor_dedup.store.checkpoints.errors import BrokenSaveError, ForkedSaveError
from tensor_dedup.store.checkpoints.notes import Notes
from tensor_dedup.store.checkpoints.runs import step_name

if TYPE_CHECKING:
    import torch

    from tensor_dedup.store.checkpoints.state import Value

_LOG = logging.getLogger("tensor_dedup")
# From here on one thread more is worth its start; each copies faster than any disk writes.
_HELPED_BYTES = 64 << 20
_HELPERS = 4


@dataclass(frozen=True, slots=True)
class ExtractedStep:
    """A step as an adapter took it apart: its values may be the memory of the model."""

    notes: Notes
    values: "Mapping[str, Value]"
    files: Mapping[str, bytes]


@dataclass(slots=True)
class Times:
    """Seconds of one save: taking the model apart and copying what is small, pinning down the
    rest, and committing. The first is in the thread that trains, the last never.
    """

    metadata: float = 0.0
    copy: float = 0.0
    write: float = 0.0


class PendingSave:
    """A step that is being saved in the background. Any thread, in the process that began it."""

    def __init__(
        self,
        taken: ExtractedStep,
        pinning: StepCapture,
        commit: Callable[[StepSnapshot], Saved],
        previous: "PendingSave | None",
        root: Path,
    ) -> None:
        self.step = taken.notes.step
        self.root = root
        self.name = step_name(taken.notes.run, taken.notes.step)
        self.times = Times()
        self.reported = False
        self._taken, self._pinning = taken, pinning
        self._commit, self._previous = commit, previous
        self._owner, self._began = os.getpid(), time.perf_counter()
        self._pinned, self._done = threading.Event(), threading.Event()
        self._awaited = threading.Event()
        self._saved: Saved | None = None
        self._error: StoreError | None = None

    def done(self) -> bool:
        """Whether it has ended: committed, or failed."""
        return self._done.is_set()

    def wait(self) -> Saved:
        """Return when the step is committed and durable. What its save failed with is raised."""
        self.finish()
        if self._saved is None:
            self.reported = True
            raise self._error or self._broken("it ended")
        return self._saved

    @property
    def failed(self) -> StoreError | None:
        """What it failed with; None as long as it has not."""
        return self._error if self._done.is_set() else None

    def hurry(self) -> None:
        """Return when it has ended, soon: a training stands still. ForkedSaveError."""
        self._awaited.set()
        self._hurry_those_before()
        self.finish()

    def _hurry_those_before(self) -> None:
        """Who waits for this one waits for them."""
        previous = getattr(self, "_previous", None)  # let go of when this one has ended
        if previous is not None:
            previous._awaited.set()
            previous._hurry_those_before()

    def finish(self) -> None:
        """Return when it has ended. ForkedSaveError."""
        if self._owner != os.getpid():
            what = f"the save of {self.name} goes on in the parent process"
            raise ForkedSaveError.at(self.root, what, name=self.name)
        self._done.wait()

    def hold(self) -> None:
        """Return when the model may be changed."""
        self.pin()
        if self._pinning.crowded():
            self._hurry_those_before()
            self._pinned.wait()  # there may have been room since
            if self._pinning.crowded():
                self.hurry()

    def pin(self) -> None:
        """The same, apart from what there is no room for."""
        self._pinning.hold()
        self.times.copy = self.times.copy or time.perf_counter() - self._began

    def run(self) -> None:
        """Pin, commit and end, in a thread of its own."""
        try:
            self._pin()
            self.times.copy = self.times.copy or time.perf_counter() - self._began
            snapshot = self._pinning.snapshot(self._taken.notes, self._taken.files)
            if self._previous is not None:
                self._previous.finish()
            began = time.perf_counter()
            self._saved = self._commit(replace(snapshot, awaited=self._awaited.is_set))
            self.times.write = time.perf_counter() - began
        except StoreError as error:
            self._error = error
        finally:
            self._end()

    def _broken(self, what: str) -> BrokenSaveError:
        return BrokenSaveError.at(self.root, f"the save of {self.name}: {what}", name=self.name)

    def _pin(self) -> None:
        try:
            self._pinning.work()
            if self._previous is not None and self._pinning.crowded():
                self._previous.finish()  # it gives back what it has copied
                self._pinning.again()
        finally:
            self._pinned.set()

    def _end(self) -> None:
        if self._saved is None:
            if self._error is None:
                self._error = self._broken("it ended with an error that is none of the store's")
            self._error.add_note(f"while {self.name} was saved in the background to {self.root}")
        self._pinning.release()
        del self._taken, self._previous  # the model is not kept, nor all saves before,
        del self._commit  # nor the handle, which tells of what failed when it goes
        self._done.set()


class _Standby:
    """A thread that waits for its work until this is left; without any it ends."""

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensor-dedup-save", daemon=False)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()

    def _run(self) -> None:
        self._go.wait()
        if self.work is not None:
            self.work()


class Hook:
    """What makes an optimizer wait before each of its steps."""

    def __init__(self, handle: Any, forget: Callable[[], None]) -> None:
        self._handle, self._forget = handle, forget

    def remove(self) -> None:
        """The optimizer waits no longer, and `save_async` does again."""
        self._handle.remove()
        self._forget()


class Saves:
    """The saves of one handle that go on in the background. Any thread."""

    def __init__(
        self,
        commit: Callable[[StepSnapshot], Saved],
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
        self._moving: set[str] = set()
        self._pending: list[PendingSave] = []
        self._begin()
        _ALL.add(self)
        # When the handle goes, or the program ends, which waits for its saves first.
        weakref.finalize(self, _tell, self._pending)

    def _begin(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._pending.clear()

    def forked(self) -> None:
        """As new, in a forked child: the parent's saves are the parent's, and so are its threads,
        which may hold any lock.
        """
        self._begin()
        self._pool.reset()
        self._saver.reset()

    def start(self, take: Callable[[], ExtractedStep], *, lazy: bool | None) -> PendingSave:
        """Save what `take` gives. Raises what an earlier save failed with, and saves nothing."""
        with self._turn, _Standby() as thread:
            self._wait_until_fewer_than(self._in_flight, PendingSave.hurry)
            began = time.perf_counter()
            taken = take()
            context = Context(self._pool, self._devices, self._moving, self._saver.large())
            pinning = StepCapture(taken.values, context)
            pending = PendingSave(taken, pinning, self._commit, self._last(), self._saver.root)
            pending.times.metadata = time.perf_counter() - began
            eager = not (bool(self._hooked) if lazy is None else lazy)
            safe = eager or pinning.guard()
            self._help(pinning)
            if eager:
                pending.pin()
            with self._lock:
                self._pending.append(pending)
            thread.work = pending.run
        if eager or not safe:
            pending.hold()
        return pending

    def _help(self, pinning: StepCapture) -> None:
        if pinning.large_bytes >= _HELPED_BYTES:
            for _ in range(self._helpers):
                threading.Thread(target=pinning.work, name="tensor-dedup-pin").start()

    def _last(self) -> PendingSave | None:
        with self._lock:
            return self._pending[-1] if self._pending else None

    def _wait_until_fewer_than(
        self, count: int, wait: Callable[[PendingSave], None] = PendingSave.finish
    ) -> None:
        while True:
            with self._lock:
                self._raise_one()
                running = [each for each in self._pending if not each.done()]
            if len(running) < count:
                return
            wait(running[0])

    def _raise_one(self) -> None:
        """Raise what saves failed with, if nobody was told yet; forget those that have ended.

        The first is raised, the others are notes on it.
        """
        ended = [each for each in self._pending if each.done()]
        self._pending[:] = [each for each in self._pending if each not in ended]
        failed = [each for each in ended if not each.reported]
        errors = [each.failed for each in failed if each.failed is not None]
        for each in failed:
            each.reported = True
        for error in errors[1:]:
            errors[0].add_note(f"and another step was not saved: {told(error)}")
        if errors:
            raise errors[0]

    def before_update(self) -> None:
        """Return when the model may be changed. Raises what a save failed with, after that: whoever
        handles the error may change the model.
        """
        with self._lock:
            running = [each for each in self._pending if not each.done()]
        for each in running:
            each.hold()
        with self._lock:
            self._raise_one()

    def settle(self) -> None:
        """Return when all that was begun has ended. Raises what a save failed with."""
        self._wait_until_fewer_than(1)

    def finish(self) -> None:
        """The same, and what failed is raised later."""
        with self._lock:
            running = list(self._pending)
        for each in running:
            each.finish()

    def close(self) -> None:
        """Wait for all, and let go of the pool. What failed is raised later."""
        self.finish()
        self._pool.clear()

    def hook(self, optimizer: "torch.optim.Optimizer") -> Hook:
        """Have an optimizer wait before each of its steps."""
        handle = optimizer.register_step_pre_hook(lambda *_: self.before_update())
        self._hooked.add(optimizer)
        return Hook(handle, lambda: self._hooked.discard(optimizer))


def told(error: StoreError) -> str:
    """An error with its notes, in one line."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _tell(pending: list[PendingSave]) -> None:
    """Nobody asked, and nobody can any more: log what failed."""
    for each in pending:
        if each.failed is not None and not each.reported:
            _LOG.error("%s: %s was not saved: %s", each.root, each.name, each.failed)


_ALL: "weakref.WeakSet[Saves]" = weakref.WeakSet()


def _forked() -> None:
    for each in list(_ALL):
        each.forked()


os.register_at_fork(after_in_child=_forked)
