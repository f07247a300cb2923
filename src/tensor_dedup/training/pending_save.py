"""One save in the background, whose thread captures and commits a step (`PendingSave.run`).

The thread that starts the save has captured small tensors. The save's own thread, its helpers and,
before it changes the model, the training thread capture the others (`capture`).
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensor_dedup.errors import StoreError
from tensor_dedup.training.capture import StepCapture
from tensor_dedup.training.commit import Saved
from tensor_dedup.training.errors import BrokenSaveError, ForkedSaveError
from tensor_dedup.training.reentry import Capturing
from tensor_dedup.training.snapshot import StepSource


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


class PendingSave:
    """A step that is being saved in the background.

    Safe from any thread in the process that has started the save.
    """

    def __init__(
        self,
        capture: StepCapture,
        commit: Callable[[StepSource], Saved],
        previous: "PendingSave | None",
        root: Path,
        capturing: Capturing,
    ) -> None:
        self.step, self.name, self.root = capture.notes.step, capture.name, root
        self.times = Times()
        self.reported = False
        self.streams = False
        """Whether it may be written while others capture it."""
        self._capture, self._capturing = capture, capturing
        self._commit, self._previous = commit, previous
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
            step = self._captured_step()
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

    def _captured_step(self) -> StepSource:
        """Return what is to be committed: all of it, unless others capture while it is written."""
        if self.streams and (self._previous is None or self._previous.done()):
            self._captured.set()  # no room will be made by another save
            return self._capture
        self._finish_capture()
        snapshot = self._capture.snapshot()
        if self._previous is not None:
            self._previous.finish()
        return snapshot

    def _finish_capture(self) -> None:
        try:
            self._capture.work()
            if self._previous is not None and self._capture.lacks_room():
                self._previous.finish()  # it gives back what it has copied
                self._capture.retry()
        finally:
            self._captured.set()

    def _broken(self, what: str) -> BrokenSaveError:
        return BrokenSaveError.at(self.root, f"the save of {self.name}: {what}", name=self.name)

    def _end(self) -> None:
        if self._saved is None:
            if self._error is None:
                self._error = self._broken("it ended")
            self._error.add_note(f"while {self.name} was saved in the background to {self.root}")
        self._capture.release()
        del self._previous  # all saves before are not kept,
        del self._commit  # nor the handle, which tells of what failed when it goes
        self._done.set()
