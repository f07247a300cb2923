"""Slow jobs on threads: allocating, sealing and hashing slabs, and checking offered ones.

A job never touches the core: its outcome is queued, and the event loop is woken to fetch it.
"""

import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeAlias

from tensor_dedup.memory_manager.backends.base import Backend, Memory, Pieces
from tensor_dedup.memory_manager.errors import (
    BackendError,
    NoMemoryError,
    NotSealedError,
    StillWritableError,
)
from tensor_dedup.memory_manager.protocol.limits import Code

log = logging.getLogger("tensor_dedup.memory_manager")
Failure: TypeAlias = tuple[Code, str]
# Jobs wait for the backend's own threads most of the time.
_JOBS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job on a slab. `memory` is set if the job allocated or reclaimed one."""

    kind: Literal["allocated", "hashed"]
    slab: int
    memory: Memory | None = None
    digests: list[str] | None = None
    failure: Failure | None = None


class SlabJobs:
    """The jobs of one manager. Start them, and call `outcomes`, in the loop's thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pool = ThreadPoolExecutor(_JOBS_AT_ONCE, "tensor-dedup-slab")
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self.wake_up, self._bell = socket.socketpair()
        self.wake_up.setblocking(False)
        self._bell.setblocking(False)

    def allocate(self, slab: int, nbytes: int) -> None:
        """Start allocating memory for a slab."""
        self._start(lambda: Outcome("allocated", slab, self._backend.reserve(nbytes)), slab)

    def seal_and_hash(self, slab: int, memory: Memory, pieces: Pieces) -> None:
        """Start sealing a slab, and then hashing it."""

        def job() -> Outcome:
            self._backend.seal(memory)
            return Outcome("hashed", slab, None, self._backend.digests(memory, pieces))

        self._start(job, slab, "hashed")

    def reclaim(self, slab: int, fd: int, nbytes: int, pieces: Pieces) -> None:
        """Start checking and hashing an offered slab. Takes ownership of the descriptor."""

        def job() -> Outcome:
            memory = self._backend.reclaim(fd, nbytes)
            return Outcome("hashed", slab, memory, self._backend.digests(memory, pieces))

        self._start(job, slab, "hashed")

    def _start(
        self,
        job: Callable[[], Outcome],
        slab: int,
        kind: Literal["allocated", "hashed"] = "allocated",
    ) -> None:
        def run() -> None:
            # Whatever happens, the core hears of it: or this slab would be busy for ever.
            outcome = Outcome(kind, slab, failure=("no_memory", "it failed; see the manager's log"))
            try:
                outcome = job()
            except BackendError as error:
                outcome = Outcome(kind, slab, failure=(_code(error), error.message))
            except InterruptedError:
                outcome = Outcome(kind, slab, failure=("stopping", "the manager is about to end"))
            finally:
                self._done.put(outcome)
                self.ring()

        self._pool.submit(run).add_done_callback(_log_failure)

    def ring(self) -> None:
        """Wake the event loop. Safe from any thread and from signal handlers."""
        # Full or closed: the loop is awake already, or gone.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        with contextlib.suppress(BlockingIOError):
            while self.wake_up.recv(4096):
                pass
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """End all jobs: those that run stop soon, because the backend is closed."""
        self._backend.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.wake_up.close()
        self._bell.close()


def _log_failure(job: "Future[None]") -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        log.error("a job failed", exc_info=error)


def _code(error: BackendError) -> Code:
    if isinstance(error, StillWritableError):
        return "still_writable"
    if isinstance(error, NotSealedError):
        return "not_sealed"
    return "no_memory" if isinstance(error, NoMemoryError) else "mismatch"
