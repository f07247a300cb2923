"""The memory of all slabs, allocated, hashed and freed on other threads than the event loop's."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from tensor_dedup.memory_manager.backends.base import Backend, Memory
from tensor_dedup.memory_manager.core.effects import (
    AllocateSlab,
    CancelJob,
    FreeSlab,
    ReclaimSlab,
    SealAndHash,
)
from tensor_dedup.memory_manager.core.manager_state import ManagerState
from tensor_dedup.memory_manager.server.descriptor_closer import DescriptorCloser
from tensor_dedup.memory_manager.server.slab_jobs import Outcome, SlabJobs
from tensor_dedup.memory_manager.server.systemd_fdstore import hand_over

_log = logging.getLogger(__name__)


class Slabs:
    """The memory of all slabs (blocks of memory), by the core's numbers for them.

    Only the event loop's thread may use this object, except for `ring`.
    """

    def __init__(
        self, backend: Backend, closer: DescriptorCloser, spare_descriptors: Callable[[int], bool]
    ) -> None:
        """Start the threads.

        `spare_descriptors` is called when memory could not be allocated because no descriptor was
        left. Its argument is the value of `closer.freed` just before that attempt. It returns
        whether another attempt is worthwhile, and may evict an unused slab for it.

        Raises:
            NoMemoryError: The system cannot start a thread.
        """
        self._closer = closer
        self._spare_descriptors = spare_descriptors
        self._jobs = SlabJobs(backend, closer)
        self._memories: dict[int, Memory] = {}
        self._inherited: dict[int, int] = {}  # descriptors
        self._asked: dict[int, AllocateSlab] = {}  # while memory is made, unless cancelled
        self._refused: SimpleQueue[Outcome] = SimpleQueue()  # whose next attempt is due

    @property
    def wake_up(self) -> socket.socket:
        """A socket that becomes readable when there are outcomes, or when `ring` was called."""
        return self._jobs.wake_up

    def ring(self) -> None:
        """Wake the event loop. Safe from any thread and from signal handlers."""
        self._jobs.ring()

    def inherit(self, slab: int, fd: int) -> None:
        """Store the descriptor of an inherited slab, for the core's later ReclaimSlab effect."""
        self._inherited[slab] = fd

    def memories(self, slabs: Sequence[int]) -> tuple[Memory, ...]:
        """Return the memory of these slabs."""
        return tuple(self._memories[slab] for slab in slabs)

    def do(
        self,
        effect: AllocateSlab | SealAndHash | ReclaimSlab | CancelJob | FreeSlab,
        arrived: list[int],
    ) -> None:
        """Perform an effect of the core.

        `arrived` has the descriptors that came with the client's message. A ReclaimSlab takes its
        descriptor from there, unless `inherit` has stored one for the slab.
        """
        match effect:
            case AllocateSlab(slab, nbytes, process):
                self._asked[slab] = effect
                self._jobs.allocate(slab, process, nbytes)
            case SealAndHash(slab, pieces, process):
                self._jobs.seal_and_hash(slab, process, self._memories[slab], pieces)
            case ReclaimSlab(slab, nbytes, pieces, process):
                inherited = self._inherited.pop(slab, None)
                fd = arrived.pop() if inherited is None else inherited
                self._jobs.reclaim(slab, process, fd, nbytes, pieces)
            case CancelJob(slab):
                self._asked.pop(slab, None)  # so that there is no other attempt
                self._jobs.cancel(slab)
            case FreeSlab(slab) if slab in self._memories:
                self._closer.drop([self._memories.pop(slab)])

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the results of the jobs that have ended since the last call."""
        for outcome in self._jobs.outcomes():
            if outcome.memory is not None:
                # And nowhere else: what is freed is freed by the closer.
                self._memories[outcome.slab], outcome.memory = outcome.memory, None
            if outcome.kind == "allocated":
                short = outcome.short_of_descriptors and outcome.slab in self._asked
                if short and self._spare_descriptors(outcome.freed_before):
                    self._allocate_later(outcome)
                    continue
                self._asked.pop(outcome.slab, None)
            yield outcome
        while not self._refused.empty():
            refused = self._refused.get()
            if (asked := self._asked.get(refused.slab)) is not None:
                self._jobs.allocate(asked.slab, asked.process, asked.nbytes)
            else:
                yield refused

    def _allocate_later(self, refused: Outcome) -> None:
        """Try again when what is being freed is free, unless that is cancelled meanwhile."""

        def wake() -> None:
            self._refused.put(refused)
            self.ring()

        self._closer.afterwards(wake)

    def close(self, state: ManagerState) -> None:
        """End the threads and free all memory.

        If systemd keeps descriptors for this service, sealed slabs are left with it first.
        """
        self._jobs.close()
        if handed := hand_over(state, self._memories):
            _log.info("handed over slabs=%d", handed)
        while self._memories:
            self._closer.drop([self._memories.popitem()[1]])
