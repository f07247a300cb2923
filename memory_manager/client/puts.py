"""Build layers in the manager's memory.

A layer is a record (bytes that only engines understand) and its tensors, found by a layer key. A
put is the right to build some layers, and has one slab of memory for their tensors. `Client.put`
does everything. Code with other needs can use the single steps, which PROTOCOL.md specifies:
reserve, allocate, write, seal, publish.
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
"""A tensor of a put: the key of its layer, and its index in that layer."""

Fill = Callable[["Put", Sequence[TensorSlot]], Sequence[str]]
"""A function that writes tensors into a put's slab, the n-th at the n-th offset of `Put.place`.

It returns their digests, or () if all of them were known before. It calls `Put.progress` if it
takes more than a few seconds, and leaves no writable mapping of the slab.
"""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written to the manager: its size in bytes (at least 1), and its digest.

    `digest` is "" if it is not known before the tensor is written. `data` has the bytes, which
    `Client.put` copies by default. It can be None if the caller gives its own `fill` function.
    """

    nbytes: int
    digest: str = ""
    data: "Buffer | None" = None


@dataclass(frozen=True, slots=True)
class NewLayer:
    """A layer to be published: its record, and its tensors.

    The manager does not interpret `record`. `also` has further keys for the layer. Further keys
    that cannot be used are skipped, for example because they have a record already.
    """

    record: bytes
    tensors: tuple[NewTensor, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PutLayer:
    """A layer that is now in the manager's memory, with a lease on each of its tensors.

    `written` is True if this call wrote at least one of the tensors.
    """

    leases: tuple[Lease, ...]
    written: bool


@dataclass(slots=True)
class PutResult:
    """The result of `Client.put`.

    * `layers` has the layers that are now in the manager's memory. The caller keeps all other
      layers in private memory.
    * `error` is the error that ended the call, or None.
    * `unusable` has an error for each layer that could not be built because the manager has one of
      its digests for a tensor of another size.
    * `still_building` has the keys that other processes were still building when the time was up.

    A layer is missing from all of these fields in three cases:

    * It was published before, with another record or other digests.
    * This call gave it up after repeated attempts.
    * `error` ended the call before the layer was done.
    """

    layers: dict[str, PutLayer] = field(default_factory=dict)
    error: MemoryManagerError | None = None
    unusable: dict[str, BackendError] = field(default_factory=dict)
    still_building: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The manager's answer for each requested key.

    `put` is the right to build the granted layers, or None if no key was granted. There are three
    answers:

    * "granted": build the layer with `put`.
    * "building": another client builds the layer. Wait for it.
    * "ready": the layer is published. Look it up.
    """

    answers: dict[str, Answer]
    put: "Put | None"

    def of(self, answer: Answer) -> list[str]:
        """Return the requested keys that got this answer."""
        return [key for key, given in self.answers.items() if given == answer]


class Put:
    """The right to build some layers, and the slab (block of memory) for their tensors.

    `build` does everything. Its steps can also be called one by one: `allocate`, `write` and
    `seal`, then `publish` for each layer. If the manager has all tensors already, only `publish` is
    needed. As a context manager, the put gives up unpublished layers at the end of the block. Only
    one thread at a time may use it, but `write` may run in several threads at once.

    `allocate`, `seal`, `publish` and `build` raise RefusedError with the code "stale_put" if this
    put was silent for too long and another client has taken it over. The caller then builds in
    private memory.
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
        self._slab = -1
        self._sizes: tuple[int, ...] = ()
        self._offsets: tuple[int, ...] = ()
        self.number: Final = number
        self.unusable: Final[dict[str, BackendError]] = {}
        self.open_keys: Final = set(keys)
        self._reported = time.monotonic()

    def build(self, layers: Mapping[str, NewLayer], fill: Fill) -> dict[str, PutLayer]:
        """Build and publish `layers`; return each with a lease on each of its tensors.

        Tensors that are resident already are leased; `fill` writes only the missing ones. A layer
        is not built if the manager has one of its digests for a tensor of another size. The error
        is then in `unusable`.

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
        """Allocate a slab for tensors of these `sizes`, in bytes.

        There may be at most MAX_PIECES tensors of at least 1 byte each. `digests` are the digests
        of their bytes, with "" for an unknown one. In `seal`, a manager that can hash this memory
        compares them with the bytes.

        Raises:
            RefusedError: The code is "no_room" or "no_memory"; build in private memory.
        """
        names = digests if digests is not None else [""] * len(sizes)
        pieces = [PutPiece(nbytes, digest) for nbytes, digest in zip(sizes, names, strict=True)]
        reply, [fd] = self._connection.ask(Allocate(self.number, pieces), Allocated)
        self._fd, self._nbytes, self._slab = fd, reply.slab.nbytes, reply.slab.slab
        self._close_fd = weakref.finalize(self, os.close, fd)  # for who forgets the context
        self._close_fd.atexit = False
        self._sizes, self._offsets = tuple(sizes), tuple(reply.offsets)
        if len(self._offsets) != len(self._sizes):
            raise ProtocolError("Allocated has another number of offsets than was asked for")

    @property
    def place(self) -> tuple[int, int, tuple[int, ...]]:
        """The slab's descriptor, its size in bytes, and the offset of each tensor in it.

        Code that writes GPU memory needs this to map the slab. All writable mappings must be
        removed before `seal`.

        Raises:
            LeaseClosedError: There is no slab that can be written; call `allocate` first.
        """
        self._check_range(0, 0, 0)
        return self._fd, self._nbytes, self._offsets

    def write(self, index: int, data: "Buffer", at: int = 0) -> None:
        """Copy contiguous bytes into tensor number `index`, from byte `at` of the tensor.

        Safe from any thread until `seal` or `abandon` is called. This is the fastest way to fill a
        slab in host memory, because no pages are zeroed and there are no page faults.

        Raises:
            LeaseClosedError: There is no slab that can be written, or the bytes do not fit the
                tensor.
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
        """Tell the manager that the build goes on. Safe from any thread.

        It may be called often, because only a few calls in each second send a message. Raises
        ManagerGoneError if the manager does not answer.
        """
        now = time.monotonic()
        if now - self._reported > _REPORT_EVERY_S:
            self._reported = now
            self._connection.tell(Progress(self.number))

    def seal(self, digests: Sequence[str] = ()) -> list[Lease]:
        """Seal the slab, so that its tensors become resident; return a lease on each of them.

        The leases are in the order of `allocate`. `digests` are the digests of all tensors, if they
        were not given to `allocate`. A manager of GPU memory cannot hash, so it needs the digests
        in one of the two calls. If another client has put equal bytes first, a lease may refer to
        that client's slab.

        Raises:
            RefusedError: The code is "still_writable" (unmap the slab everywhere, then seal again)
                or "mismatch" (a digest was wrong; the put has ended).
        """
        reply, _ = self._connection.ask(Seal(self.number, list(digests)), Sealed)
        self._forget_slab()
        leases = self._lease(reply.digests, self._checkpoint)
        found = [lease for lease in leases if lease is not None]
        if len(found) != len(self._sizes):
            raise ProtocolError("tensors that were sealed just now are not resident")
        return found

    def has_sealed(self, lease: Lease) -> bool:
        """Return whether the tensor of `lease`, a result of `seal`, lies in this put's slab.

        Otherwise another client has put equal bytes first.
        """
        return lease.slab.number == self._slab

    def publish(
        self, key: str, record: bytes, digests: Sequence[str], also: Sequence[str] = ()
    ) -> None:
        """Publish a layer: from now on `key` leads to its record and tensors.

        `record` has at most MAX_RECORD bytes. The tensors in `digests` must be leased by this
        client or sealed by this put. `also` has further keys for the record. Further keys that
        cannot be used are skipped, for example because they have a record already.
        """
        publish(self._connection, self.number, record, digests, [key, *also])
        self.open_keys.discard(key)

    def abandon(self) -> None:
        """Give up the unpublished layers; free the slab if it was not sealed. Never fails.

        If all layers are published or given up already, nothing is done.
        """
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
    """Publish one record under several keys; return how many keys got it.

    Keys that have a record already keep it, and are not counted. `put` is the number of the put
    that has reserved the first key, or 0 without a reservation.

    Raises:
        RefusedError: The put was taken over, a tensor is not leased, or the first key in a message
            (of 1 + MAX_KEYS keys) cannot be used. That is so if another put builds its layer, or
            the manager has no memory left.
    """
    size = 1 + MAX_KEYS
    new = 0
    for start in range(0, len(keys), size):
        key, *also = keys[start : start + size]
        message = Publish(put if not start else 0, key, record, list(digests), also)
        new += connection.ask(message, Done)[0].count
    return new


def write_data(layers: Mapping[str, NewLayer]) -> Fill:
    """Return a `Fill` function that writes the `data` of these layers' tensors."""

    def fill(put: Put, missing: Sequence[TensorSlot]) -> Sequence[str]:
        for position, (key, index) in enumerate(missing):
            data = layers[key].tensors[index].data
            assert data is not None, "a tensor without data needs a fill of its own"
            put.write(position, data)
        return ()

    return fill
