"""Slow jobs on threads: allocate slabs, seal and hash them, and check offered ones.

A job consists of short steps, and the jobs of different clients take turns. So a job on gigabytes
delays another client's small job by one step only. Jobs do not call the core. Their outcomes are
queued, and the event loop is woken to fetch them.
"""

import contextlib
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeAlias

from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.memory_manager.backends.base import Backend, Memory, Pieces, Spans
from tensor_dedup.memory_manager.errors import (
    BackendError,
    NoMemoryError,
    NotSealedError,
    StillWritableError,
)
from tensor_dedup.memory_manager.protocol.limits import Code
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser
from tensor_dedup.memory_manager.server.worker_threads import start_threads

_log = logging.getLogger(__name__)
Failure: TypeAlias = tuple[Code, str]
# A GPU's driver is waited for and takes no CPU.
_LEAST_THREADS: Final = 4
_HASH_STEP: Final = 4 * LEAF_BYTES  # about 3 ms
_COMMIT_STEP: Final = 64 << 20  # about 25 ms
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)

_Step: TypeAlias = Callable[[], None]
# None: the steps before must be done before there is another one.
_Steps: TypeAlias = Iterator[_Step | None]


@dataclass(slots=True)
class Outcome:
    """The result of a job on a slab. `memory` is set if the job allocated or reclaimed it.

    `failure` is None, or an error code and a text. `short_of_descriptors` is True if the job failed
    because no descriptor was left; the job can then be tried again. `freed_before` is the value of
    `DescriptorCloser.freed` just before an allocation asked for memory.
    """

    kind: Literal["allocated", "hashed"]
    slab: int
    memory: Memory | None = None
    digests: list[str] | None = None
    failure: Failure | None = None
    short_of_descriptors: bool = False
    freed_before: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A job, of which `running` steps are under way. `fd` is closed unless a step takes it."""

    client: int
    outcome: Outcome
    steps: _Steps = field(default_factory=lambda: iter(()))
    fd: int | None = None
    running: int = 0
    waits: bool = False  # for the steps under way


class SlabJobs:
    """The jobs of one manager, and the threads that run them.

    Call the methods in the event loop's thread; only `ring` is safe from any thread. The parameter
    `client` is the number of a process. All connections of a process share its turns.
    """

    def __init__(self, backend: Backend, closer: DescriptorCloser) -> None:
        """Start the threads, one for each available CPU but at least four.

        Raises:
            NoMemoryError: The system cannot start a thread.
        """
        self._backend = backend
        self._closer = closer
        self._jobs: dict[int, _Job] = {}  # by slab
        self._turns: deque[int] = deque()  # clients that have a job
        self._of_client: dict[int, list[_Job]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self.wake_up, self._bell = socket.socketpair()
        self.wake_up.setblocking(False)
        self._bell.setblocking(False)
        count = max(_LEAST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = start_threads("tensor-dedup-slab", count, self._work)

    def allocate(self, slab: int, client: int, nbytes: int) -> None:
        """Start a job that allocates the memory of a slab."""
        job = _Job(client, Outcome("allocated", slab))
        job.steps = self._allocation(job, nbytes)
        self._start(job)

    def seal_and_hash(self, slab: int, client: int, memory: Memory, pieces: Pieces) -> None:
        """Start a job that seals a slab and then hashes it."""
        job = _Job(client, Outcome("hashed", slab))
        job.steps = self._hashing(job, lambda: self._backend.seal(memory), lambda: memory, pieces)
        self._start(job)

    def reclaim(self, slab: int, client: int, fd: int, nbytes: int, pieces: Pieces) -> None:
        """Start a job that checks and hashes an offered slab. It takes ownership of `fd`."""
        job = _Job(client, Outcome("hashed", slab), fd=fd)

        def check() -> None:
            job.outcome.memory = self._backend.reclaim(fd, nbytes)
            job.fd = None

        job.steps = self._hashing(job, check, lambda: job.outcome.memory, pieces)
        self._start(job)

    def cancel(self, slab: int) -> None:
        """End the job on a slab as failed, after its present step. Its outcome is still queued.

        If the slab has no job, nothing is done.
        """
        with self._changed:
            job = self._jobs.get(slab)
            if job is not None and job.outcome.failure is None:
                self._fail(job, ("stale_put", "whoever asked for it has gone"))

    # What a job does.

    def _allocation(self, job: _Job, nbytes: int) -> _Steps:
        def reserve() -> None:
            job.outcome.freed_before = self._closer.freed
            job.outcome.memory = self._backend.reserve(nbytes)

        def commit(start: int) -> None:
            assert job.outcome.memory is not None
            self._backend.commit(job.outcome.memory, start, min(_COMMIT_STEP, nbytes - start))

        yield reserve
        for start in range(0, nbytes, _COMMIT_STEP):
            yield None  # one after the other: the kernel lets nobody else at that file meanwhile
            yield partial(commit, start)

    def _hashing(
        self, job: _Job, first: _Step, memory: Callable[[], Memory | None], pieces: Pieces
    ) -> _Steps:
        yield first
        yield None
        if not self._backend.capabilities.hashes_itself:
            job.outcome.digests = _announced(pieces)
            return
        leaves: dict[tuple[int, int], list[bytes]] = {}  # by offset and size

        def hash_(spans: Spans) -> None:
            slab = memory()
            assert slab is not None
            leaves.update(zip(spans, self._backend.leaves(slab, spans), strict=True))

        def combine_() -> None:
            job.outcome.digests = [
                combine(nbytes, [leaf for span in _spans(offset, nbytes) for leaf in leaves[span]])
                for offset, nbytes, _ in pieces
            ]

        for spans in _batches(pieces):
            yield partial(hash_, spans)
        yield None
        yield combine_

    # Whose turn it is.

    def _start(self, job: _Job) -> None:
        with self._changed:
            self._jobs[job.outcome.slab] = job
            if job.client not in self._of_client:
                self._of_client[job.client] = []
                self._turns.append(job.client)
            self._of_client[job.client].append(job)
            if self._closing:
                self._fail(job, ("stopping", "the manager is about to end"))
            self._changed.notify_all()

    def _work(self) -> None:
        while (found := self._take()) is not None:
            job, step = found
            failure: BaseException | None = None
            try:
                step()
            except BaseException as error:  # noqa: BLE001  # whatever it is, the core hears of it
                failure = error
            del step, found
            with self._changed:
                job.running -= 1
                if failure is not None and job.outcome.failure is None:
                    self._failed(job, failure)
                if not job.running:
                    if job.outcome.failure is not None:
                        self._end(job)
                    self._changed.notify_all()
            del job, failure

    def _take(self) -> tuple[_Job, _Step] | None:
        """Wait for a step to do, and return it; return None when the manager ends."""
        with self._changed:
            while (found := self._next()) is None:
                if self._closing:
                    return None
                self._changed.wait()
            return found

    def _next(self) -> tuple[_Job, _Step] | None:
        for _ in range(len(self._turns)):
            client = self._turns.popleft()
            for job in list(self._of_client[client]):
                step = self._next_of(job)
                if step is not None:
                    self._turns.append(client)
                    job.running += 1
                    return job, step
            if self._of_client[client]:
                self._turns.append(client)
            else:
                del self._of_client[client]
        return None

    def _next_of(self, job: _Job) -> _Step | None:
        if job.outcome.failure is not None or (job.waits and job.running):
            return None
        job.waits = False
        try:
            for step in job.steps:
                if step is not None:
                    return step
                if job.running:
                    job.waits = True
                    return None
        except Exception as error:  # noqa: BLE001
            self._failed(job, error)
            if not job.running:
                self._end(job)
            return None
        if job.running:
            job.steps, job.waits = iter(()), True  # it ends with the steps under way
        else:
            self._end(job)
        return None

    def _failed(self, job: _Job, error: BaseException) -> None:
        if isinstance(error, BackendError):
            job.outcome.short_of_descriptors = error.facts.get("errno") in _NO_DESCRIPTORS
            job.outcome.failure = _code(error), error.message
        else:
            _log.error("a job failed", exc_info=error)
            job.outcome.failure = "no_memory", "it failed; see the manager's log"

    def _fail(self, job: _Job, failure: Failure) -> None:
        job.outcome.failure = failure
        if not job.running:
            self._end(job)

    def _end(self, job: _Job) -> None:
        """Report a job of which nothing runs any more."""
        slab = job.outcome.slab
        if self._jobs.pop(slab, None) is None:
            return
        self._of_client[job.client].remove(job)
        job.steps = iter(())
        if job.fd is not None:
            self._closer.close_received([job.fd])
        if job.outcome.failure is not None and job.outcome.memory is not None:
            held: list[object] = [job.outcome.memory]
            job.outcome.memory = None
            self._closer.drop(held)
        self._done.put(job.outcome)
        self.ring()

    def ring(self) -> None:
        """Wake the event loop. Safe from any thread and from signal handlers."""
        # Full or closed: the loop is awake already, or gone.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def outcomes(self) -> list[Outcome]:
        """Return the results of the jobs that have ended since the last call."""
        with contextlib.suppress(BlockingIOError):
            while self.wake_up.recv(4096):
                pass
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """End all jobs, each after its present step, and the threads."""
        with self._changed:
            self._closing = True
            for job in list(self._jobs.values()):
                if job.outcome.failure is None:
                    self._fail(job, ("stopping", "the manager is about to end"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.wake_up.close()
        self._bell.close()


def _spans(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the parts in which a tensor is hashed: whole leaves, but for the last."""
    return [
        (offset + start, min(_HASH_STEP, nbytes - start)) for start in range(0, nbytes, _HASH_STEP)
    ]


def _batches(pieces: Pieces) -> Iterator[list[tuple[int, int]]]:
    """Yield the parts of all tensors, in portions that one step hashes."""
    batch: list[tuple[int, int]] = []
    size = 0
    for offset, nbytes, _ in pieces:
        for span in _spans(offset, nbytes):
            if batch and size + span[1] > _HASH_STEP:
                yield batch
                batch, size = [], 0
            batch.append(span)
            size += span[1]
    if batch:
        yield batch


def _announced(pieces: Pieces) -> list[str]:
    """Return the digests that a writer has announced, where the manager cannot hash.

    Raises:
        NotSealedError: One is missing.
    """
    if not all(digest for _, _, digest in pieces):
        raise NotSealedError(
            "this backend does not hash: announce every digest, at the latest when you seal"
        )
    return [digest for _, _, digest in pieces]


def _code(error: BackendError) -> Code:
    if isinstance(error, StillWritableError):
        return "still_writable"
    if isinstance(error, NotSealedError):
        return "not_sealed"
    return "no_memory" if isinstance(error, NoMemoryError) else "mismatch"
