"""Encode tensors after a save, so that they take less space a moment later.

A save with much to store writes tensors unencoded to a container. A thread then rewrites the
container (`rewrite`) and removes the old one (`superseded`). A process that is reading the old
container can continue, because it has the file open.

The thread pauses while a save runs. It begins a container when no save has run for several times as
long as encoding takes: what a training that saves more often stores waits, until many steps do, or
until somebody waits for it. The thread ends when nothing is left to encode. If the program ends
without `close`, the remaining tensors stay unencoded.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tensor_dedup.errors import StoreError
from tensor_dedup.store.errors import DamagedFileError, MissingObjectError, UnknownNameError
from tensor_dedup.store.objects import Objects
from tensor_dedup.store.writing.run_cache import LastStep, Rewritten, RunCache
from tensor_dedup.training.encoding.decisions import Decisions
from tensor_dedup.training.encoding.rewrite import ContainerRewrite, EncodingJob, GivenUpError
from tensor_dedup.training.encoding.superseded import SupersededContainers

_log = logging.getLogger(__name__)
# A training that saves often is spared the encoding until more steps than this wait.
_MANY_WAITING = 32
# Steps of background saves that may wait. `close` encodes them.
_MOST_WAITING = 64
# A session that stands still for saves keeps the gc of others waiting.
_PATIENCE_S = 5.0
# How long the last attempt to remove a container waits for those that read or write the store.
_LAST_WAIT_S = 2.0
_POLL_S = 0.2
# How long no save must have run before encoding begins: at least so long,
_REST_S = 0.1
# and so long for so many bytes. Two cores encode them in a fifth of it.
_RESTED_BYTES_PER_S = 40e6
# After so many interrupted attempts a step stays as it was saved.
_ATTEMPTS = 3


class BackgroundEncoder:
    """Encodes the tensors that saves of one CheckpointStore have stored unencoded.

    `last` returns the step that was saved last. `moved` is called after a container was replaced.
    `superseded` has the containers that are replaced, but not removed yet. Safe from any thread.
    """

    def __init__(
        self,
        objects: Objects,
        workers: int,
        decisions: Decisions,
        last: Callable[[], LastStep],
        moved: Callable[[Rewritten], None],
    ) -> None:
        self._objects, self._workers = objects, workers
        self._decisions, self._last = decisions, last
        self.superseded = SupersededContainers(objects, moved)
        self._state = threading.Condition()
        self._waiting: deque[EncodingJob] = deque()
        self._thread: threading.Thread | None = None
        self._current = ""
        self._saving = self._awaited = 0
        self._saved_at = 0.0
        self._dropping = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager: while it is active, the encoding pauses.

        A save then has all processors.
        """
        with self._state:
            self._saving += 1
        try:
            yield
        finally:
            with self._state:
                self._saving -= 1
                self._saved_at = time.monotonic()
                self._state.notify_all()

    def add(self, job: EncodingJob) -> None:
        """Queue `job`, the encoding of tensors of a committed step, and start the thread."""
        with self._state:
            self._waiting.append(job)
            old = [each for each in self._waiting if each.background]
            if len(old) > _MOST_WAITING:
                self._waiting.remove(old[0])
            self._start()

    def _start(self) -> None:
        """Start the thread unless it runs; the caller holds the lock."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="tensor-dedup-encode")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the program is ending
            self._thread = None
            self._waiting.clear()
            self._state.notify_all()

    @property
    def busy(self) -> bool:
        """Whether the encoding thread is running."""
        return self._thread is not None

    def finish(self) -> None:
        """Wait until all jobs are done, and replaced containers are removed if that is possible."""
        with self._state, self._hurried():
            if self.superseded:
                self._start()
            self._state.wait_for(lambda: self._thread is None)

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Let the thread begin at once; the caller holds the lock, and waits for it."""
        self._awaited += 1
        self._state.notify_all()
        try:
            yield
        finally:
            self._awaited -= 1

    def wait_for(self, name: str, enough: Callable[[], bool]) -> None:
        """Wait until no job for the step `name` is left, or until `enough` returns True.

        `enough` is called again and again during the wait.
        """
        with self._state, self._hurried():
            while self._thread is not None and not enough():
                if name not in {each.name for each in self._waiting} and self._current != name:
                    return
                self._state.wait(_POLL_S)

    def drop(self) -> None:
        """Discard all jobs, and wait until the thread has ended. The tensors stay unencoded."""
        with self._state:
            self._dropping = True
            self._waiting.clear()
            self._state.notify_all()
            self._state.wait_for(lambda: self._thread is None)
            self._dropping = False

    def _run(self) -> None:
        cache = RunCache(self._objects, self._workers)
        try:
            while (job := self._next()) is not None:
                self._do(cache, job)
                with self._state:
                    self._current = ""
                    self._state.notify_all()
            if not self._given_up():
                self.superseded.remove(_LAST_WAIT_S)
        finally:
            with suppress(StoreError, OSError):
                cache.close()
            with self._state:
                self._thread, self._current = None, ""
                if self._waiting and not self._given_up():  # added since
                    self._start()
                self._state.notify_all()

    def _next(self) -> EncodingJob | None:
        with self._state:
            while not self._given_up() and (rest := self._rest()) != 0:
                self._state.wait(rest)
            if self._given_up() or not self._waiting:
                return None
            job = self._waiting.popleft()
            self._current = job.name
            return job

    def _rest(self) -> float | None:
        """How many seconds to wait before work begins; None for as long as a save runs."""
        if self._saving:
            return None
        if self._awaited or not self._waiting:
            return 0
        rest = _REST_S
        if len(self._waiting) <= _MANY_WAITING:
            rest = max(rest, self._waiting[0].file_bytes / _RESTED_BYTES_PER_S)
        return max(0, self._saved_at + rest - time.monotonic())

    def _given_up(self) -> bool:
        return self._dropping or not threading.main_thread().is_alive()

    def _stand_still(self) -> None:
        """Wait while a save runs; not for ever, since the caller holds a session."""
        with self._state:
            free = self._state.wait_for(lambda: not self._saving or self._given_up(), _PATIENCE_S)
        if not free or self._given_up():
            raise GivenUpError

    def _do(self, cache: RunCache, job: EncodingJob) -> None:
        try:
            done = self._rewrite(cache, job)
            if done is not None:
                self.superseded.add(done)
        except GivenUpError:
            with self._state:
                if not self._given_up() and job.attempts + 1 < _ATTEMPTS:
                    self._waiting.appendleft(replace(job, attempts=job.attempts + 1))
        except (MissingObjectError, UnknownNameError):
            pass  # deleted meanwhile
        except StoreError as error:
            _log.warning("%s is not encoded, and stays as it was saved: %s", job.name, str(error))
        self.superseded.remove(0)

    def _rewrite(self, cache: RunCache, job: EncodingJob) -> Rewritten | None:
        """Rewrite a container, if the step is still there and the disk has room for a second."""
        objects, container = self._objects, job.container
        with cache.session() as (index, hasher):
            if not self._in_use(job) or container.name in objects.bad_containers():
                return None
            path = objects.layout.container(container.name, container.kind)
            records = objects.containers.table(container).records
            status = objects.files.status(path)
            room = 0 if status is None else 2 * status.size
            free = objects.files.free_bytes(objects.layout.root)
            if free < room or not self.superseded.can_remove():
                return None
            source = objects.files.open(path, "read")
            try:
                decisions, pause = self._decisions, self._stand_still
                work = ContainerRewrite(objects, index, hasher, decisions, self.superseded, pause)
                return work.run(job, source, records)
            finally:
                objects.files.close(source)

    def _in_use(self, job: EncodingJob) -> bool:
        """Whether the step is there, or the last one still refers to what it has stored."""
        if job.container in self._last().containers:
            return True
        with suppress(UnknownNameError, DamagedFileError):
            return self._objects.ref(job.name) == job.manifest
        return False
