"""Putting layers into the manager's memory: the layers, the right to build them, and their slab.

`Client.put` does all of it. The steps below it, which a put of another shape may use on their own,
are those of PROTOCOL.md: reserve, allocate, write, seal, publish.
"""

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Self

from tensor_dedup.memory_manager.client.connection import Connection
from tensor_dedup.memory_manager.client.leases import Lease
from tensor_dedup.memory_manager.errors import (
    BackendError,
    LeaseClosedError,
    MemoryManagerError,
    ProtocolError,
)
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS
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

_REPORT_EVERY_S: Final = 0.25

Answer = Literal["granted", "building", "ready"]
LeaseAll = Callable[[Sequence[str], str], list[Lease | None]]

TensorSlot = tuple[str, int]
"""One tensor of a put: the key of its layer, and which tensor of that layer it is."""

Fill = Callable[["Put", Sequence[TensorSlot]], Sequence[str]]
"""Write these tensors into a put's slab: the n-th of them at the n-th offset of `Put.place`.

Returns their digests, or nothing where all of them were announced. It calls `Put.progress` where
it takes more than a few seconds, and leaves no writable mapping of the slab.
"""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to put: its size in bytes (at least 1), and its digest if that is known.

    `digest` is "" if it becomes known only while the tensor is written. `data` is what `write_data`
    copies; a `Fill` of another kind may leave it out.
    """

    nbytes: int
    digest: str = ""
    data: "Buffer | None" = None


@dataclass(frozen=True, slots=True)
class NewLayer:
    """A layer to put: its record, which means something to engines only, and its tensors.

    `also`: further keys that are to lead to it.
    """

    record: bytes
    tensors: tuple[NewTensor, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PutLayer:
    """A layer that is now in the manager's memory, and a lease on each of its tensors.

    `written` tells whether this call wrote any of it; otherwise all of it was there already.
    """

    leases: tuple[Lease, ...]
    written: bool


@dataclass(slots=True)
class PutResult:
    """The result of `Client.put`.

    `layers` has the layers that are in the manager's memory; those that it lacks are to be kept in
    private memory. The reasons are `error`, which ended the call, `unusable`: layers of which a
    tensor of another size is resident under the digest, and `still_building`: those that other
    processes had not finished when the time was up.
    """

    layers: dict[str, PutLayer] = field(default_factory=dict)
    error: MemoryManagerError | None = None
    unusable: dict[str, BackendError] = field(default_factory=dict)
    still_building: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The manager's answer for each reserved key, and the put of the granted ones, if any.

    "building": another client builds that layer; wait for it. "ready": it is published; get it.
    """

    answers: dict[str, Answer]
    put: "Put | None"

    def of(self, answer: Answer) -> list[str]:
        """Return the keys that got this answer."""
        return [key for key, given in self.answers.items() if given == answer]


class Put:
    """The right to build some layers, and the slab for their tensors. One thread at a time.

    `build` does everything; its steps are allocate, write, seal, and publish for each layer. A put
    whose tensors are all resident already only publishes. Leaving the context abandons what was
    not published. Every method raises RefusedError with the code "stale_put" when another client
    has taken the put over because this one was silent for too long: build privately then.
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
        self.number: Final = number
        self.unusable: Final[dict[str, BackendError]] = {}
        self.open_keys: Final = set(keys)
        self._reported = time.monotonic()

    def build(self, layers: Mapping[str, NewLayer], fill: Fill) -> dict[str, PutLayer]:
        """Build and publish these layers, and return a lease on each of their tensors.

        Tensors that are resident already are leased; `fill` writes only the others. A layer is left
        out, and entered into `unusable`, if a tensor of another size is resident under the digest
        of one of its own.

        Raises:
            RefusedError: There is no room, or the bytes do not match the announced digest.
            ProtocolError: The manager lends other bytes than were written.
        """
        tensors = {
            (key, index): tensor
            for key, layer in layers.items()
            for index, tensor in enumerate(layer.tensors)
        }
        leases = self._lease_resident(tensors)
        layers = {key: layer for key, layer in layers.items() if key not in self.unusable}
        missing = [slot for slot in tensors if slot[0] in layers and slot not in leases]
        if missing:
            self.allocate(
                [tensors[slot].nbytes for slot in missing],
                [tensors[slot].digest for slot in missing],
            )
            digests = fill(self, missing)
            leases |= dict(zip(missing, self.seal(digests), strict=True))
            for slot in missing:
                # A manager that has mixed them up must not decide what a parameter holds.
                announced, lent = tensors[slot].digest, leases[slot].digest
                if announced not in ("", lent):
                    raise ProtocolError(f"{announced} was written, and {lent} is lent for it")
        written = {key for key, _ in missing}
        built = {}
        for key, layer in layers.items():
            held = tuple(leases[key, index] for index in range(len(layer.tensors)))
            self.publish(key, layer.record, [lease.digest for lease in held], layer.also)
            built[key] = PutLayer(held, key in written)
        return built

    def _lease_resident(
        self, tensors: "Mapping[TensorSlot, NewTensor]"
    ) -> "dict[TensorSlot, Lease]":
        known = [slot for slot, tensor in tensors.items() if tensor.digest]
        found = self._lease([tensors[slot].digest for slot in known], self._checkpoint)
        leases = {
            slot: lease for slot, lease in zip(known, found, strict=True) if lease is not None
        }
        for slot, lease in leases.items():
            # Of a GPU's memory a digest is its writer's word, and may be another tensor's.
            if lease.nbytes != tensors[slot].nbytes:
                self.unusable[slot[0]] = BackendError(
                    f"a tensor of {tensors[slot].nbytes} bytes where {lease.nbytes} are lent under "
                    "its digest; load it privately",
                    digest=lease.digest,
                )
        return leases

    def allocate(self, sizes: Sequence[int], digests: Sequence[str] | None = None) -> None:
        """Get a slab for tensors of these sizes (in bytes, at least 1; at most MAX_PIECES of them).

        `digests` announces the digests of their bytes, "" for unknown ones; the manager checks them
        when the slab is sealed.

        Raises:
            RefusedError: The code is "no_room" or "no_memory"; build privately.
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
        """The slab's descriptor, its size in bytes, and the offset of each tensor in it.

        It is for writers that map the slab themselves, as those to a GPU do; every writable mapping
        must be gone before `seal`.
        """
        self._check_range(0, 0, 0)
        return self._fd, self._nbytes, self._offsets

    def write(self, index: int, data: "Buffer", at: int = 0) -> None:
        """Copy contiguous bytes into tensor `index`, from offset `at` in the tensor.

        This is the fastest way to fill a slab: it neither zeroes pages nor takes page faults.
        """
        with memoryview(data) as view, view.cast("B") as rest:
            self._check_range(index, at, rest.nbytes)
            done = 0
            while done < rest.nbytes:
                with rest[done:] as piece:
                    done += os.pwrite(self._fd, piece, self._offsets[index] + at + done)

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
        """Report that the build goes on. Call it as often as you like, from any thread.

        A few a second are sent: a manager that does not listen is not waited for each time.
        """
        now = time.monotonic()
        if now - self._reported > _REPORT_EVERY_S:
            self._reported = now
            self._connection.tell(Progress(self.number))

    def seal(self, digests: Sequence[str] = ()) -> list[Lease]:
        """Make the tensors resident; return a lease on each, in the order of `allocate`.

        `digests` has the digests of all tensors, if `allocate` did not announce them. A GPU's
        manager, which cannot hash, needs one or the other. A lease may lead into another slab,
        because another client had equal bytes first.

        Raises:
            RefusedError: "still_writable" (unmap the slab everywhere, then seal again) or
                "mismatch" (the put has ended).
        """
        reply, _ = self._connection.ask(Seal(self.number, list(digests)), Sealed)
        self._forget_slab()
        leases = self._lease(reply.digests, self._checkpoint)
        found = [lease for lease in leases if lease is not None]
        if len(found) != len(self._sizes):
            raise ProtocolError("tensors that were sealed just now are not resident")
        return found

    def publish(
        self, key: str, record: bytes, digests: Sequence[str], also: Sequence[str] = ()
    ) -> None:
        """Publish a layer's record (up to MAX_RECORD bytes); its tensors are leased or sealed.

        The keys in `also` lead to it, too, where they have no record.
        """
        publish(self._connection, self.number, record, digests, [key, *also])
        self.open_keys.discard(key)

    def abandon(self) -> None:
        """Give up the unpublished layers and the memory. Never fails; may be called twice."""
        if not self.open_keys:
            return
        self.open_keys.clear()
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

    def __exit__(self, *_: object) -> None:
        self.abandon()
        self._forget_slab()


def publish(
    connection: Connection,
    put: int,
    record: bytes,
    digests: Sequence[str],
    keys: Sequence[str],
) -> int:
    """Have keys lead to a record, the first of them as one of `put` or, for 0, of none.

    Return how many are new. They go in messages of MAX_KEYS and one.

    Raises:
        RefusedError: The first of a message is being built, or no more can be remembered.
    """
    size = 1 + MAX_KEYS
    new = 0
    for start in range(0, len(keys), size):
        key, *also = keys[start : start + size]
        message = Publish(put if not start else 0, key, record, list(digests), also)
        new += connection.ask(message, Done)[0].count
    return new


def write_data(layers: Mapping[str, NewLayer]) -> Fill:
    """Return the `Fill` that copies the `data` of these layers' tensors."""

    def fill(put: Put, missing: Sequence[TensorSlot]) -> Sequence[str]:
        for position, (key, index) in enumerate(missing):
            data = layers[key].tensors[index].data
            assert data is not None, "a tensor without data needs a fill of its own"
            put.write(position, data)
        return ()

    return fill
