"""The memory manager of a GPU as a load sees it: residents of other processes, and those put there.

What is put is written by the GPU's own copies, waited for and unmapped; then it is sealed, and from
then on mapped read-only everywhere, here too. The manager cannot read it: the digest is ours.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from blake3 import blake3

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.opening import MappedExtent, opener_for
from tensor_dedup.loader.cuda.residents import DeviceRequest, DeviceResident, DeviceSlab
from tensor_dedup.loader.residents.manager import client_of
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import BackendError, MemoryManagerError, RefusedError
from tensor_dedup.memory_manager.protocol.limits import MAX_KEYS

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.memory_manager.client import Client, Lease, Put
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CONTEXT: Final = "tensor-dedup manager key v1"
_WAIT_S: Final = 60.0
_MAX_ROUNDS: Final = 20


class _Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class DeviceManagerResidents:
    """One load's use of the manager of one GPU. One thread.

    MemoryManagerError from every method: load the rest privately.
    """

    def __init__(self, client: Client, gpu: Gpu, checkpoint: str) -> None:
        """Raise UnsupportedError when the manager lends memory of something else."""
        welcome = client.welcome
        if welcome.device != gpu.device.uuid:
            raise UnsupportedError(
                f"a manager of {welcome.device or 'ordinary memory'} for {gpu.device.uuid}; "
                "connect with device=",
                device=welcome.device,
            )
        self._client = client
        self.gpu: Final = gpu
        self._checkpoint = checkpoint
        self._opener = opener_for(welcome.backend, gpu.driver, gpu.device)

    def by_content(self, key: ResidentKey) -> DeviceResident | None:
        """The resident with these bytes."""
        return self.all_by_content([key])[0]

    def all_by_content(self, keys: Sequence[ResidentKey]) -> list[DeviceResident | None]:
        """The residents with these bytes, in order, asked for at once."""
        leases = self._client.lease([key.digest for key in keys], self._checkpoint)
        return [
            None if lease is None else self._resident(key, lease)
            for key, lease in zip(keys, leases, strict=True)
        ]

    def by_recipe(self, recipe: str, geometry: ResidentKey) -> DeviceResident | None:
        """The resident that this recipe leads to; of `geometry` the digest does not count."""
        return self._found(_key(recipe), geometry)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident | None]:
        """A resident for each, written here or by whoever was first; None: keep it private."""
        waiting = {_key(each.recipe): each for each in wanted if each.nbytes}
        found: dict[str, DeviceResident] = {}
        deadline = time.monotonic() + _WAIT_S
        for _ in range(_MAX_ROUNDS):
            if not waiting:
                break
            found |= self._round(dict(list(waiting.items())[:MAX_KEYS]), deadline)
            waiting = {key: each for key, each in waiting.items() if key not in found}
        return [found.get(_key(each.recipe)) for each in wanted]

    def _round(
        self, wanted: dict[str, DeviceRequest], deadline: float
    ) -> dict[str, DeviceResident]:
        """Build what is granted, then wait for what others build: never the other way round."""
        reservation = self._client.reserve(list(wanted), self._checkpoint)
        found: dict[str, DeviceResident] = {}
        if reservation.put is not None:
            with reservation.put as put:
                found = self._fill(put, {key: wanted[key] for key in reservation.of("granted")})
                for key, resident in found.items():
                    put.publish(key, _record(resident.key), [resident.key.digest])
        for key in reservation.of("building"):
            self._client.wait(key, max(0.0, deadline - time.monotonic()))
        for key in (*reservation.of("ready"), *reservation.of("building")):
            lent = self._found(key, wanted[key].key)
            if lent is not None:
                found[key] = lent
        return found

    def _fill(self, put: Put, granted: dict[str, DeviceRequest]) -> dict[str, DeviceResident]:
        """Lease what is resident already; write the rest into one slab and seal it."""
        leases: dict[str, Lease | None] = dict.fromkeys(granted)
        known = {key: each.key.digest for key, each in granted.items() if each.key.digest}
        held = self._client.lease(list(known.values()), self._checkpoint)
        leases |= dict(zip(known, held, strict=True))
        missing = [key for key, lease in leases.items() if lease is None]
        if missing:
            rest = [granted[key] for key in missing]
            leases |= dict(zip(missing, self._write(put, rest), strict=True))
        return {
            key: self._resident(granted[key].key, lease) for key, lease in leases.items() if lease
        }

    def _write(self, put: Put, wanted: Sequence[DeviceRequest]) -> list[Lease]:
        put.allocate([each.nbytes for each in wanted], [each.key.digest for each in wanted])
        fd, nbytes, offsets = put.place

        digests = []

        def write(address: int) -> None:
            for each, offset in zip(wanted, offsets, strict=True):
                digests.append(each.written(each.write(address + offset)).digest)
                put.progress()

        self.gpu.fill(MappedExtent(fd, nbytes, 0), self._opener, write)
        return put.seal(digests)

    def _found(self, key: str, wanted: ResidentKey) -> DeviceResident | None:
        [layer] = self._client.get([key], self._checkpoint)
        if layer is None or len(layer.leases) != 1:
            return None
        [lease] = layer.leases
        if layer.record != _record(wanted) or wanted.digest not in ("", lease.digest):
            return None
        return self._resident(wanted, lease)

    def _resident(self, key: ResidentKey, lease: Lease) -> DeviceResident:
        place = id(lease.slab), id(self.gpu)
        slab = _slabs.get(place)
        if slab is None:
            slab = DeviceSlab(self.gpu, self._opener, lease.slab, lease.slab.nbytes)
            _slabs[place] = slab  # which holds both, so that the ids stay theirs
        try:
            return DeviceResident(replace(key, digest=lease.digest), [slab], lease.offset, lease)
        except SlabUsageError as error:
            # A digest is its writer's word here, and this one's was another tensor's.
            raise BackendError(
                f"{error.message}; load it privately", digest=lease.digest
            ) from error


# One object for each slab of a manager's, so that two mappings of it are known as such.
_slabs: weakref.WeakValueDictionary[tuple[int, int], DeviceSlab] = weakref.WeakValueDictionary()


def _key(recipe: str) -> str:
    return f"device:{blake3(recipe.encode(), derive_key_context=_CONTEXT).hexdigest()}"


def _record(key: ResidentKey) -> bytes:
    return msgspec.msgpack.encode(_Geometry(key.dtype, tuple(key.shape), tuple(key.stride)))


class Borrowing:
    """See the module. One thread. `failed`: why nothing is asked of a manager, or not any more.

    Without a manager, and none asked for, it finds nothing and has no reason.
    """

    def __init__(
        self, lender: DeviceManagerResidents | None = None, failed: str | None = None
    ) -> None:
        self._lender: Final = lender
        self.failed = failed
        self.refused: str | None = None  # why the first that it had no room for was made here

    def by_content(self, keys: Sequence[ResidentKey]) -> list[DeviceResident | None]:
        """The residents with these bytes, where there are any."""
        nothing: list[DeviceResident | None] = [None] * len(keys)
        return self._ask(lambda lender: lender.all_by_content(keys), nothing) if keys else nothing

    def by_recipe(self, recipe: str, geometry: ResidentKey) -> DeviceResident | None:
        """The resident that a recipe leads to; of `geometry` the digest does not count."""
        return self._ask(lambda lender: lender.by_recipe(recipe, geometry), None)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident | None]:
        """A resident for each; None: make it here."""
        nothing: list[DeviceResident | None] = [None] * len(wanted)
        return self._ask(lambda lender: lender.put(wanted), nothing) if wanted else nothing

    def _ask(self, ask: Callable[[DeviceManagerResidents], _T], nothing: _T) -> _T:
        if self._lender is None or self.failed is not None:
            return nothing
        lender = self._lender
        try:
            # What nobody here refers to any more is leased until it is unmapped.
            return lender.gpu.with_room(lambda: ask(lender), RefusedError)
        except RefusedError as error:
            # No room for these: what is resident can still be borrowed.
            self.refused = self.refused or str(error)
            _log.warning("not all of it can be lent: %s", str(error))
        except MemoryManagerError as error:
            self.failed = str(error)
            _log.warning("going on without the GPU's memory manager: %s", str(error))
        return nothing


def borrowing_from(where: str | os.PathLike[str] | None, checkpoint: str, gpu: Gpu) -> Borrowing:
    """What a load of `checkpoint` uses of the manager of `gpu` at, or beside, `where`."""
    if where is None:
        return Borrowing()
    try:
        client = client_of(os.fspath(where), gpu.device.uuid)
        return Borrowing(DeviceManagerResidents(client, gpu, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without the GPU's memory manager: %s", checkpoint, str(error))
        return Borrowing(failed=str(error))
