"""Building layers: a reservation, its slab, the records that come of it."""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.client.leases import Lease
from tensor_dedup.memory_manager.errors import (
    LeaseClosedError,
    MemoryManagerError,
    NoMemoryError,
    ProtocolError,
)
from tensor_dedup.memory_manager.protocol.messages import (
    Abandon,
    Allocate,
    Allocated,
    Done,
    Progress,
    Publish,
    PutPiece,
    Seal,
    Sealed,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Answer = Literal["granted", "building", "ready"]
LeaseAll = Callable[[Sequence[str], str], list[Lease | None]]


@dataclass(frozen=True, slots=True)
class Reservation:
    """What became of a wish to build: key by key, and the put of what was granted (or None).

    "building": somebody else does, wait for it. "ready": somebody has, look it up.
    """

    answers: dict[str, Answer]
    put: "Put | None"

    def of(self, answer: Answer) -> list[str]:
        """The keys that got this answer."""
        return [key for key, given in self.answers.items() if given == answer]


class Put:
    """The right to build some layers, and the slab for their tensors. One thread at a time.

    allocate -> write or view -> seal -> publish each layer; a put whose tensors are all resident
    already needs publish only. Leaving the context abandons what was not published. RefusedError
    with the code "stale_put" when it took too long and was taken over: build privately then.
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        keys: Sequence[str],
        checkpoint: str,
        lease: LeaseAll,
    ) -> None:
        self._connection = connection
        self._lease = lease
        self._checkpoint = checkpoint
        self._fd = -1
        self._close_fd: weakref.finalize[[int], Put] | None = None
        self._nbytes = 0
        self._sizes: tuple[int, ...] = ()
        self._offsets: tuple[int, ...] = ()
        self._views: list[mmap.mmap] = []
        self.number: Final = number
        self.open_keys: Final = set(keys)

    def allocate(self, sizes: Sequence[int], digests: Sequence[str] | None = None) -> None:
        """Get a slab for tensors of these sizes (bytes, at least 1; at most MAX_PIECES of them).

        `digests`: what their bytes will be, "" where not known; checked when sealed. RefusedError:
        "no_room", "no_memory": build privately.
        """
        names = digests if digests is not None else [""] * len(sizes)
        pieces = [PutPiece(nbytes, digest) for nbytes, digest in zip(sizes, names, strict=True)]
        reply, [fd] = self._connection.ask(Allocate(self.number, pieces), Allocated)
        self._fd, self._nbytes = fd, reply.slab.nbytes
        self._close_fd = weakref.finalize(self, os.close, fd)  # for who forgets the context
        self._close_fd.atexit = False
        self._sizes, self._offsets = tuple(sizes), tuple(reply.offsets)
        if len(self._offsets) != len(self._sizes):
            raise ProtocolError("Allocated has another number of offsets than was asked for")

    @property
    def place(self) -> tuple[int, int, tuple[int, ...]]:
        """The slab's descriptor and size, and where each tensor goes in it.

        For who writes by other means, to a GPU: all of it must be unmapped again before `seal`.
        """
        self._check_range(0, 0, 0)
        return self._fd, self._nbytes, self._offsets

    def write(self, index: int, data: "Buffer", at: int = 0) -> None:
        """Copy contiguous bytes into tensor `index`, `at` bytes from its beginning.

        The fastest way to fill a slab: it neither zeroes nor faults pages.
        """
        with memoryview(data) as view, view.cast("B") as rest:
            self._check_range(index, at, rest.nbytes)
            done = 0
            while done < rest.nbytes:
                with rest[done:] as piece:
                    done += os.pwrite(self._fd, piece, self._offsets[index] + at + done)

    def view(self, index: int) -> memoryview:
        """A writable view of tensor `index`. All views must be released before `seal`."""
        self._check_range(index, 0, 0)
        if not self._views:
            try:
                self._views.append(mmap.mmap(self._fd, self._nbytes))
            except OSError as error:
                raise NoMemoryError(
                    f"mapping {self._nbytes} bytes: {error.strerror}; use write(), or raise "
                    "vm.max_map_count",
                    errno=error.errno,
                ) from error
            # A forked child must not keep it: sealing would fail until that child ends.
            self._views[0].madvise(mmap.MADV_DONTFORK)
        start = self._offsets[index]
        return memoryview(self._views[0])[start : start + self._sizes[index]]

    def _check_range(self, index: int, at: int, nbytes: int) -> None:
        if self._fd < 0:
            raise LeaseClosedError("this put has no writable slab; allocate one")
        if at < 0 or at + nbytes > self._sizes[index]:
            raise LeaseClosedError(
                f"bytes {at} to {at + nbytes} of a tensor of {self._sizes[index]}",
                index=index,
                nbytes=self._sizes[index],
            )

    def progress(self) -> None:
        """Say that the build goes on: at least every few seconds of a long one."""
        self._connection.tell(Progress(self.number))

    def seal(self, digests: Sequence[str] = ()) -> list[Lease]:
        """Make the tensors resident; a lease on each, in the order of `allocate`.

        `digests`: of all of them, where `allocate` did not say. On a GPU, where the manager cannot
        hash, one or the other must.

        A lease may lead into another slab: somebody had equal bytes first. RefusedError:
        "still_writable" (release every view, then seal again), "mismatch" (the put has ended).
        """
        self._unmap()
        reply, _ = self._connection.ask(Seal(self.number, list(digests)), Sealed)
        self._forget_slab()
        leases = self._lease(reply.digests, self._checkpoint)
        found = [lease for lease in leases if lease is not None]
        if len(found) != len(self._sizes):
            raise ProtocolError("tensors that were sealed just now are not resident")
        return found

    def _unmap(self) -> None:
        while self._views:
            try:
                self._views[-1].close()
            except BufferError as error:
                raise LeaseClosedError(
                    "views of this put's slab are in use; release them, then seal again"
                ) from error
            self._views.pop()

    def publish(self, key: str, record: bytes, digests: Sequence[str]) -> None:
        """Enter a layer's record (at most MAX_RECORD bytes), whose tensors are leased or sealed."""
        self._connection.ask(Publish(self.number, key, record, list(digests)), Done)
        self.open_keys.discard(key)

    def abandon(self) -> None:
        """Give up what was not published, and the memory. Never fails; a second time is nothing."""
        if not self.open_keys:
            return
        self.open_keys.clear()
        self._views.clear()
        self._forget_slab()
        try:
            self._connection.ask(Abandon(self.number), Done)
        except MemoryManagerError:
            return  # the manager is gone, and the put with it

    def _forget_slab(self) -> None:
        self._fd = -1
        if self._close_fd is not None:
            self._close_fd()  # at most once

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()
        self._forget_slab()
