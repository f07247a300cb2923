"""The memory manager as a load sees it: residents other processes hold, and those made for them.

What is borrowed is a resident like any other, in a slab of the manager's; the lease goes when the
resident does. Anything that fails here costs sharing, never a load: it is said once, and the
tensor is kept in this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from blake3 import blake3

from tensor_dedup.loader.residents.resident import Resident, resident_key, tensor_bytes
from tensor_dedup.loader.residents.slab import Slab, SlabUsageError
from tensor_dedup.memory_manager.client import AUTO, Client, Lease, Put, SharedSlab, connect
from tensor_dedup.memory_manager.client.names import printed
from tensor_dedup.memory_manager.errors import ManagerGoneError, MemoryManagerError, RefusedError
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS

if TYPE_CHECKING:
    import torch

    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
_CONTEXT: Final = "tensor-dedup manager key v1"
# Another builder writes one slab under a key, in well under a second; what takes this long is
# stuck in a way that the manager's own time-out has not ended.
_WAIT_S: Final = 60.0
_MAX_ROUNDS: Final = 20


class _Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A layer's record, of one tensor: what its bytes are to be seen as."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class LentResident(Resident):
    """A resident in a slab of the manager's. It holds the lease, every mapping holds it."""

    __slots__ = ("lease",)

    def __init__(self, key: ResidentKey, lease: Lease) -> None:
        """SlabUsageError when the lease is not of a tensor of these bytes and this geometry."""
        if lease.digest != key.digest:
            raise SlabUsageError(
                f"a lease on {lease.digest} for a tensor of {key.digest}", digest=lease.digest
            )
        super().__init__(key, _slab(lease.slab), lease.offset, lease.nbytes)
        self.lease: Final = lease


@dataclass(frozen=True, slots=True)
class ResidentRequest:
    """A tensor to be resident: under this key, with these bytes, which have this digest."""

    key: str
    tensor: torch.Tensor
    digest: str


@dataclass(slots=True)
class ManagerResidents:
    """One load's use of a manager. One thread; the client may serve several."""

    client: Client
    checkpoint: str
    failed: str | None = None  # nothing more is asked of the manager
    refused: str | None = None  # why the first tensor that it had no room for stays here

    def by_recipe(self, recipe: str, wanted: ResidentKey) -> Resident | None:
        """The resident that this recipe leads to; of `wanted` the geometry counts, no digest."""
        if self.failed is not None:
            return None
        try:
            return self._found(_manager_key(recipe), wanted)
        except MemoryManagerError as error:
            self._fail(error)
            return None

    def by_content(self, key: ResidentKey) -> Resident | None:
        """The resident with these bytes."""
        if self.failed is not None:
            return None
        try:
            [lease] = self.client.lease([key.digest], self.checkpoint)
        except MemoryManagerError as error:
            self._fail(error)
            return None
        return None if lease is None else LentResident(key, lease)

    def put(self, wanted: Sequence[ResidentRequest]) -> list[tuple[Resident, bool] | None]:
        """A resident for each, and whether it was written here; None: keep that one private.

        While another process builds one of them, this waits for it and uses what it made.
        """
        found: dict[str, tuple[Resident, bool]] = {}
        waiting = {_manager_key(each.key): each for each in wanted if each.tensor.nbytes}
        deadline = time.monotonic() + _WAIT_S
        rounds = 0
        try:
            while waiting and self.failed is None and rounds < _MAX_ROUNDS:
                rounds += 1
                found |= self._build(dict(list(waiting.items())[:MAX_KEYS]), deadline)
                waiting = {key: each for key, each in waiting.items() if key not in found}
        except RefusedError as error:
            # No room for this one: what is resident can still be borrowed.
            self._note(error)
        except MemoryManagerError as error:
            self._fail(error)
        return [found.get(_manager_key(each.key)) for each in wanted]

    def _build(
        self, wanted: dict[str, ResidentRequest], deadline: float
    ) -> dict[str, tuple[Resident, bool]]:
        """Build what is granted, then wait for what others build: never the other way round."""
        reservation = self.client.reserve(list(wanted), self.checkpoint)
        found: dict[str, tuple[Resident, bool]] = {}
        if reservation.put is not None:
            granted = {key: wanted[key] for key in reservation.of("granted")}
            with reservation.put as put:
                found = self._fill(put, granted)
                for key, (resident, _) in found.items():
                    record = msgspec.msgpack.encode(_geometry(resident.key))
                    put.publish(key, record, [resident.key.digest])
        for key in reservation.of("building"):
            if self.client.wait(key, max(0.0, deadline - time.monotonic())) == "building":
                self._fail(f"another process has been building {key} for {_WAIT_S:.0f} s")
                return found
        for key in (*reservation.of("ready"), *reservation.of("building")):
            each = wanted[key]
            lent = self._found(key, resident_key(each.tensor, each.digest))
            if lent is not None:
                found[key] = lent, False
        return found

    def _fill(
        self, put: Put, granted: dict[str, ResidentRequest]
    ) -> dict[str, tuple[Resident, bool]]:
        """Lease what is resident already; write the rest into one slab and seal it."""
        leases = self.client.lease([each.digest for each in granted.values()], self.checkpoint)
        made: dict[str, Lease | None] = dict(zip(granted, leases, strict=True))
        found = {
            key: (self._resident(granted[key], lease), False)
            for key, lease in made.items()
            if lease is not None
        }
        missing = [key for key, lease in made.items() if lease is None]
        if missing:
            tensors = [granted[key].tensor for key in missing]
            digests = [granted[key].digest for key in missing]
            put.allocate([tensor.nbytes for tensor in tensors], digests)
            for index, tensor in enumerate(tensors):
                put.write(index, tensor_bytes(tensor))
            for key, lease in zip(missing, put.seal(), strict=True):
                found[key] = self._resident(granted[key], lease), True
        return found

    def _resident(self, wanted: ResidentRequest, lease: Lease) -> Resident:
        return LentResident(resident_key(wanted.tensor, wanted.digest), lease)

    def _found(self, key: str, wanted: ResidentKey) -> Resident | None:
        [layer] = self.client.get([key], self.checkpoint)
        if layer is None or len(layer.leases) != 1:
            return None
        try:
            recorded = msgspec.msgpack.decode(layer.record, type=_Geometry)
        except msgspec.MsgspecError:
            return None  # a record of another kind or version
        if recorded != _geometry(wanted):
            return None
        [lease] = layer.leases
        if wanted.digest not in ("", lease.digest):
            return None
        return LentResident(replace(wanted, digest=lease.digest), lease)

    def announce_to_next_manager(self, recipe: str, resident: Resident) -> None:
        """While this one is in use here, the manager that comes after this one is told of the key.

        Of what the registry holds, not of an equal one that goes at once.
        """
        if isinstance(resident, LentResident):
            key, record = _manager_key(recipe), msgspec.msgpack.encode(_geometry(resident.key))
            if self.client.remember(key, record, [resident.key.digest]):
                weakref.finalize(resident, self.client.forget, key).atexit = False

    def _note(self, why: object) -> None:
        """Say once why something was not lent."""
        if self.refused is None:
            self.refused = str(why)
            _log.warning("%s: not all of it can be lent: %s", self.checkpoint, why)

    def _fail(self, why: object) -> None:
        self.failed = str(why)
        _log.warning(
            "%s: loading without the memory manager from here on: %s", self.checkpoint, why
        )


_clients: dict[tuple[int, str, str], Client] = {}
_clients_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_clients_lock=threading.Lock()))


def client_of(where: str, device: str = "") -> Client:
    """This process's connection to a manager, of the machine's memory or of a GPU's, by its UUID.

    MemoryManagerError.
    """
    with _clients_lock:
        key = os.getpid(), where, device
        client = _clients.get(key)
        if client is None or client.closed:
            client = connect(where, name=_program(), device=device)
            _clients[key] = client
        elif not client.connected:
            _reconnect(client, where, device)
        return client


def _program() -> str:
    """What this process is, for people; its number the manager knows."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    program = "python" if program in ("", "-c", "-m") else program
    process = multiprocessing.current_process().name
    return printed(program if process == "MainProcess" else f"{program} {process}")


def _reconnect(client: Client, where: str, device: str) -> None:
    """What is held here is offered to the manager there is now, or to one that is started."""
    try:
        client.reconnect()
    except ManagerGoneError:
        if where != AUTO:
            raise
        connect(AUTO, name="starting", keep_connected=False, device=device).close()
        client.reconnect()


_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


def _slab(shared: SharedSlab) -> Slab:
    """One slab object for each of the manager's, so that two mappings of it are known as such."""
    slab = _slabs.get(id(shared))
    if slab is None:
        slab = _slabs[id(shared)] = Slab(shared, shared.nbytes)  # holds it, so the id stays its own
    return slab


def _manager_key(key: str) -> str:
    return f"tensor:{blake3(key.encode(), derive_key_context=_CONTEXT).hexdigest()}"


def _geometry(key: ResidentKey) -> _Geometry:
    return _Geometry(key.dtype, tuple(key.shape), tuple(key.stride))
