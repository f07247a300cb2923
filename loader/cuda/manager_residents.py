"""The memory manager of a GPU as a load uses it: the device half of `residents.manager`.

A tensor that is put is written by copies on the GPU, which are waited for; the slab is then
unmapped and sealed, and from then on mapped read-only everywhere, also here. The manager cannot
read GPU memory, so the digests are those that this process computed.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.loader.cuda.blocks import (
    TensorInBlocks,
    blocks_in,
    blocks_of,
    bytes_key,
    may_be_in_blocks,
    record_of_blocks,
    spare_descriptors,
    too_many,
)
from tensor_dedup.loader.cuda.openers import MappedExtent, opener_for
from tensor_dedup.loader.cuda.residents import DeviceRequest, DeviceResident, DeviceSlab
from tensor_dedup.loader.residents.manager import ManagerResidents, ManagerSession, client_of
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.loader.torch_dtypes import torch_dtype
from tensor_dedup.memory_manager.client import Lease
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import BackendError, MemoryManagerError, RefusedError

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.residents.manager import ResidentQuery
    from tensor_dedup.memory_manager.client import Client, Fill, LayerFound, Put, TensorSlot
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
DeviceManagerResidents = ManagerResidents[DeviceRequest, DeviceResident]


class DeviceMemory:
    """The memory of one GPU that a manager lends."""

    namespace: Final = "device"

    def __init__(self, gpu: Gpu, client: Client) -> None:
        """Check that the manager is one of this GPU.

        Raises:
            UnsupportedError: The manager lends memory of something else.
        """
        welcome = client.welcome
        if welcome.device != gpu.device.uuid:
            raise UnsupportedError(
                f"a manager of {welcome.device or 'ordinary memory'} for {gpu.device.uuid}; "
                "connect with device=",
                device=welcome.device,
            )
        self.gpu: Final = gpu
        self.opener: Final = opener_for(welcome.backend, gpu.driver, gpu.device)

    @property
    def whole_only(self) -> str | None:
        """The reason why no tensor can have leaves of another, or None."""
        return self.opener.whole_only

    def resident(self, key: ResidentKey, lease: Lease) -> DeviceResident:
        """Return the resident that a lease is on.

        Raises:
            BackendError: The lease is not of a tensor of this geometry.
        """
        place = id(lease.slab), id(self.gpu)
        slab = _slabs.get(place)
        if slab is None:
            slab = DeviceSlab(self.gpu, self.opener, lease.slab, lease.slab.nbytes)
            _slabs[place] = slab  # which holds both, so that the ids stay theirs
        try:
            return DeviceResident(replace(key, digest=lease.digest), [slab], lease.offset, lease)
        except SlabUsageError as error:
            # A digest is its writer's word here, and this one's was another tensor's.
            raise BackendError(
                f"{error.message}; load it privately", digest=lease.digest
            ) from error

    def data(self, request: DeviceRequest) -> None:
        """Return None, because `fill` writes the tensor."""

    def fill(self, requests: dict[str, DeviceRequest]) -> Fill:
        """Return the function that writes these layers' tensors into a slab and hashes them."""

        def write_all(put: Put, slots: Sequence[TensorSlot]) -> list[str]:
            fd, nbytes, offsets = put.place
            digests: list[str] = []

            def write(address: int) -> None:
                for (key, _), offset in zip(slots, offsets, strict=True):
                    each = requests[key]
                    digests.append(each.written(each.write(address + offset)).digest)
                    put.progress()

            self.gpu.fill(MappedExtent(fd, nbytes, 0), self.opener, write)
            return digests

        return write_all

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask`; if the manager refuses, unmap unused mappings and call it again.

        Memory that nothing here refers to any more is leased until it is unmapped.
        """
        self.gpu.with_room(ask, RefusedError)


# One object for each slab of a manager's, so that two mappings of it are known as such.
_slabs: weakref.WeakValueDictionary[tuple[int, int], DeviceSlab] = weakref.WeakValueDictionary()


class DeviceSession(ManagerSession[DeviceRequest, DeviceResident]):
    """One load's requests to the manager of a GPU, where large tensors consist of blocks.

    Each block is a tensor of the manager with a slab of its own. Which of them a tensor consists of
    is a record, found by the tensor's digest and by its recipe.
    """

    def by_content(self, keys: Sequence[ResidentKey]) -> list[DeviceResident | None]:
        """Return the residents with these bytes, also those in blocks."""
        found = super().by_content(keys)
        missing = [
            n
            for n, (key, each) in enumerate(zip(keys, found, strict=True))
            if each is None and may_be_in_blocks(key, _nbytes(key))
        ]
        missing = missing[: self._admitted([keys[n] for n in missing])]
        layers = self.client.get([self._content_key(keys[n]) for n in missing], self.checkpoint)
        for number, layer in zip(missing, layers, strict=True):
            found[number] = self._of_layer(layer, keys[number])
        return found

    def by_recipe(self, queries: Sequence[ResidentQuery]) -> list[DeviceResident | None]:
        """Return the residents that these recipes lead to, but none that needs too many blocks."""
        if self.memory.whole_only is not None:
            return super().by_recipe(queries)
        admitted = self._admitted([each.key for each in queries])
        asked = [
            each
            for number, each in enumerate(queries)
            if number < admitted or not blocks_of(_nbytes(each.key))
        ]
        found = dict(zip(asked, super().by_recipe(asked), strict=True))
        return [found.get(each) for each in queries]

    def _admitted(self, keys: Sequence[ResidentKey]) -> int:
        """Return of how many of these, from the first on, this process may have all blocks.

        Blocks arrive as descriptors, and a process that has none left can open nothing.
        """
        needed = [*accumulate(blocks_of(_nbytes(key)) for key in keys)]
        admitted = bisect_right(needed, max(spare_descriptors(), 0))
        if admitted < len(needed) and self.not_by_leaf is None:
            self.not_by_leaf = too_many(needed[-1])
            _log.warning("%s: large tensors stay whole: %s", self.checkpoint, self.not_by_leaf)
        return admitted

    def publish_parts(self, recipe: str, resident: DeviceResident) -> None:
        """Have others find a tensor in blocks, if all of these are the manager's.

        They find it by its bytes and, unless that is "", by its recipe.
        """
        assert isinstance(resident, TensorInBlocks)
        if not all(isinstance(block.lease, Lease) for block in resident.blocks):
            return
        record, digests = record_of_blocks(resident)
        keys = [self._content_key(resident.key), *([self._key(recipe)] if recipe else [])]
        try:
            self.client.publish(keys, record, digests)
        except RefusedError as error:
            # Its blocks are found by others all the same.
            _log.debug("%s: not found as a whole: %s", self.checkpoint, str(error))
            return
        self._remember(resident, keys, record, digests)

    def _of_layer(self, layer: LayerFound | None, key: ResidentKey) -> DeviceResident | None:
        """Return the resident of a layer: a whole tensor, or one in blocks."""
        composition = None if layer is None else blocks_in(layer.record)
        if layer is None or composition is None:
            return super()._of_layer(layer, key)
        found, leaves, blocks = composition
        if replace(found, digest=key.digest) != key or key.digest not in ("", found.digest):
            return None
        try:
            leases = [layer.leases[number] for number in blocks]
            return TensorInBlocks(
                found,
                [self.memory.resident(bytes_key(e.nbytes, e.digest), e) for e in leases],
                leaves,
            )
        except (IndexError, SlabUsageError, BackendError) as error:
            self._note_unusable(f"what is lent for {found.digest} is not that tensor: {error}")
            return None

    def _content_key(self, key: ResidentKey) -> str:
        return self._key(f"blocks:{key}")


def _nbytes(key: ResidentKey) -> int:
    return math.prod(key.shape) * torch_dtype(key.dtype).itemsize


def device_session(client: Client, gpu: Gpu, checkpoint: str) -> DeviceSession:
    """Return a load's session with the manager of one GPU.

    Raises:
        UnsupportedError: The client's manager lends memory of something else.
    """
    return DeviceSession(client, checkpoint, DeviceMemory(gpu, client))


def device_manager_residents(
    where: str | os.PathLike[str] | None, checkpoint: str, gpu: Gpu
) -> DeviceManagerResidents:
    """Return a load's view of the manager of `gpu` at, or beside, `where`.

    With `where` None, no manager is used. If the manager does not answer, that is logged and
    `failed` tells why.
    """
    if where is None:
        return ManagerResidents()
    try:
        client = client_of(os.fspath(where), gpu.device.uuid)
        return ManagerResidents(device_session(client, gpu, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without the GPU's memory manager: %s", checkpoint, str(error))
        return ManagerResidents(failed=str(error))
