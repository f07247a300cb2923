"""A load's use of the memory manager of a GPU: the GPU's counterpart of `residents.host_manager`.

The manager lends slabs of GPU memory. To put a tensor there, this process maps a new slab, copies
the tensor on the GPU, waits for the copy, and unmaps and seals the slab. From then on every process
maps the slab read-only. The manager cannot read GPU memory, so it trusts the digests that this
process computed.
"""

from __future__ import annotations

import logging
import os
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from tensor_dedup.loader.cuda.new_slabs import SlabTensor, write_slabs
from tensor_dedup.loader.cuda.openers import MappedExtent, opener_for
from tensor_dedup.loader.cuda.residents import DeviceRequest, DeviceResident, DeviceSlab
from tensor_dedup.loader.residents.lent import record_of
from tensor_dedup.loader.residents.manager import ManagerResidents, ManagerSession, client_of
from tensor_dedup.loader.residents.resident import nbytes_of
from tensor_dedup.loader.residents.slab import SlabUsageError
from tensor_dedup.memory_manager.client import Lease
from tensor_dedup.memory_manager.client.names import checkpoint_name
from tensor_dedup.memory_manager.errors import (
    BackendError,
    MemoryManagerError,
    ProtocolError,
    RefusedError,
)

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.residents.manager import ResidentQuery
    from tensor_dedup.memory_manager.client import Client, Fill, LayerFound, Put, TensorSlot
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
Guard = Callable[[Callable[[], None]], bool]
"""Call a function that asks the manager; return False if the manager refused or does not answer."""


class DeviceMemory:
    """GPU memory that a memory manager lends, which this process fills and maps."""

    namespace: Final = "device"

    def __init__(self, gpu: Gpu, client: Client) -> None:
        """Check that the manager of `client` lends memory of `gpu`.

        Raises:
            UnsupportedError: The manager lends memory of another device.
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
        """The reason why tensors in this memory cannot share parts, or None if they can."""
        return self.opener.whole_only

    def resident(self, key: ResidentKey, lease: Lease) -> DeviceResident:
        """Return the leased tensor as a resident with the dtype, shape and stride of `key`.

        The digest of `key` is ignored; the resident has the digest of the lease.

        Raises:
            BackendError: The lease is on a tensor of another size.
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
        """Return None, because no bytes are sent: the function from `fill` writes the tensor."""

    def fill(self, requests: dict[str, DeviceRequest]) -> Fill:
        """Return a function that writes the tensors of `requests` into a slab of the manager.

        `requests` maps the key under which each tensor is put to its request. The returned function
        returns the tensors' digests.
        """

        def write_all(put: Put, slots: Sequence[TensorSlot]) -> list[str]:
            fd, nbytes, offsets = put.place
            wanted = [requests[key] for key, _ in slots]
            new = [SlabTensor(each.content, each.key, 0, each.nbytes) for each in wanted]
            slab = MappedExtent(fd, nbytes, 0), offsets, new
            [found] = write_slabs(self.gpu, self.opener, [slab], put.progress)
            return [e.written(digest).digest for e, digest in zip(wanted, found, strict=True)]

        return write_all

    def with_room(self, ask: Callable[[], None]) -> None:
        """Call `ask`, which requests memory from the manager.

        If the manager refuses, mappings that nothing refers to any more are unmapped, which ends
        their leases. Then `ask` is called once more.

        Raises:
            RefusedError: There was nothing to free, or the manager refused again.
        """
        self.gpu.with_room(ask, RefusedError)


# One object for each slab of a manager's, so that two mappings of it are known as such.
_slabs: weakref.WeakValueDictionary[tuple[int, int], DeviceSlab] = weakref.WeakValueDictionary()


class LentNewSlab:
    """A new slab of the manager, which this process fills. For one thread.

    Until it is sealed, its put holds a layer key of its own, which nobody else asks for.
    """

    def __init__(self, memory: DeviceMemory, put: Put, guard: Guard) -> None:
        """Describe the slab that was allocated for `put`.

        `guard` calls a function that asks the manager, and returns whether the manager answered.
        """
        fd, nbytes, self.offsets = put.place
        self.opener: Final = memory.opener
        self.extent: Final = MappedExtent(fd, nbytes, 0)
        self._memory, self._put, self._guard = memory, put, guard

    def progress(self) -> None:
        """Tell the manager that this process is still working. Errors are met again in `seal`."""
        with suppress(MemoryManagerError):
            self._put.progress()

    def seal(self, keys: Sequence[ResidentKey]) -> list[tuple[DeviceResident, bool]] | None:
        """Seal the slab; return each tensor, and whether it lies in this slab.

        Returns None if the manager does not take it.
        """
        found: list[tuple[DeviceResident, bool]] = []

        def seal() -> None:
            leases = self._put.seal([key.digest for key in keys])
            for key, lease in zip(keys, leases, strict=True):
                # A manager that has mixed them up must not decide what a parameter holds.
                if lease.digest != key.digest:
                    raise ProtocolError(f"{key.digest} was written, and {lease.digest} is lent")
                found.append((self._memory.resident(key, lease), self._put.has_sealed(lease)))

        done = self._guard(seal)
        self.abandon()  # what was sealed is leased
        return found if done else None

    def abandon(self) -> None:
        """End the put, which frees the slab unless it was sealed."""
        self._put.abandon()


class DeviceSession(ManagerSession[DeviceRequest, DeviceResident]):
    """One load's requests to the manager of a GPU, where large tensors consist of blocks.

    A block is a piece of 16 MiB. In the manager, each block is a tensor of its own, with a slab of
    its own. A record lists the blocks of a large tensor. It is found by the tensor's digest and by
    its recipe.
    """

    def by_content(self, keys: Sequence[ResidentKey]) -> list[DeviceResident | None]:
        """Look up residents by digest; return them in order, or None for each miss.

        Tensors in blocks are found, too. They count as misses if this process cannot open a
        descriptor for each of their blocks.
        """
        found = super().by_content(keys)
        missing = [
            n
            for n, (key, each) in enumerate(zip(keys, found, strict=True))
            if each is None and may_be_in_blocks(key, nbytes_of(key))
        ]
        missing = missing[: self._admitted([keys[n] for n in missing])]
        layers = self.client.get([self._content_key(keys[n]) for n in missing], self.checkpoint)
        for number, layer in zip(missing, layers, strict=True):
            found[number] = self._of_layer(layer, keys[number])
        return found

    def by_recipe(self, queries: Sequence[ResidentQuery]) -> list[DeviceResident | None]:
        """Look up residents by recipe; return them in order, or None for each miss.

        A tensor in blocks counts as a miss if this process cannot open a descriptor for each of its
        blocks.
        """
        if self.memory.whole_only is not None:
            return super().by_recipe(queries)
        admitted = self._admitted([each.key for each in queries])
        asked = [
            each
            for number, each in enumerate(queries)
            if number < admitted or not blocks_of(nbytes_of(each.key))
        ]
        found = dict(zip(asked, super().by_recipe(asked), strict=True))
        return [found.get(each) for each in queries]

    def _admitted(self, keys: Sequence[ResidentKey]) -> int:
        """Return of how many of these, from the first on, this process may have all blocks.

        Blocks arrive as descriptors, and a process that has none left can open nothing.
        """
        needed = [*accumulate(blocks_of(nbytes_of(key)) for key in keys)]
        admitted = bisect_right(needed, max(spare_descriptors(), 0))
        if admitted < len(needed) and self.not_by_leaf is None:
            self.not_by_leaf = too_many(needed[-1])
            _log.warning("%s: large tensors stay whole: %s", self.checkpoint, self.not_by_leaf)
        return admitted

    def open_slab(self, sizes: Sequence[int], guard: Guard) -> LentNewSlab:
        """Allocate a slab for tensors of these sizes, whose digests need not be known yet.

        Raises:
            RefusedError: The manager has no room.
        """
        key = f"{self.memory.namespace}-new:{uuid.uuid4().hex}"
        put = self.client.reserve([key], self.checkpoint).put
        assert put is not None, "nobody else has this key"
        try:
            put.allocate(sizes)
            memory = self.memory
            assert isinstance(memory, DeviceMemory)
            return LentNewSlab(memory, put, guard)
        except BaseException:
            put.abandon()
            raise

    def publish_whole(self, recipe: str, resident: DeviceResident) -> None:
        """Have `recipe` lead to `resident`, a whole tensor that the manager lends."""
        if not isinstance(resident.lease, Lease):
            return
        key = resident.key
        try:
            self.client.publish([self._key(recipe)], record_of(key), [key.digest])
        except RefusedError as error:
            # It is found by its digest all the same.
            _log.debug("%s: not found by its recipe: %s", self.checkpoint, str(error))

    def publish_parts(self, recipe: str, resident: DeviceResident) -> None:
        """Publish which blocks `resident` consists of, so that other processes find it.

        A block is a piece of 16 MiB. Others find `resident` by its digest and, if `recipe` is not
        "", by `recipe`. Does nothing unless the manager lends all of the blocks.
        """
        assert isinstance(resident, TensorInBlocks)
        if not all(isinstance(block.lease, Lease) for block in resident.blocks):
            return
        record, digests = record_of_blocks(resident)
        keys = [self._content_key(resident.key), *([self._key(recipe)] if recipe else [])]
        keys += [self._name_key(name) for name, _, _ in resident.named_blocks()]
        try:
            self.client.publish(keys, record, digests)
        except RefusedError as error:
            # Its blocks are found by others all the same.
            _log.debug("%s: not found as a whole: %s", self.checkpoint, str(error))
            return
        self._remember(resident, keys, record, digests)

    def blocks_named(
        self, names: Sequence[str]
    ) -> list[tuple[DeviceResident, tuple[bytes, ...]] | None]:
        """Look up blocks of published tensors by name, in one batch.

        Returns in order each block and its leaf digests, or None for each miss.
        """
        layers = self.client.get([self._name_key(name) for name in names], self.checkpoint)
        return [
            None if layer is None else self._block_named(name, layer)
            for name, layer in zip(names, layers, strict=True)
        ]

    def _block_named(
        self, name: str, layer: LayerFound
    ) -> tuple[DeviceResident, tuple[bytes, ...]] | None:
        composition = blocks_in(layer.record)
        whole = None if composition is None else self._of_layer(layer, composition.key)
        if not isinstance(whole, TensorInBlocks):
            return None
        named = (each for each in whole.named_blocks() if each[0] == name)
        return next(((block, leaves) for _, block, leaves in named), None)

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

    def _name_key(self, name: str) -> str:
        return self._key(f"block:{name}")

    def _content_key(self, key: ResidentKey) -> str:
        return self._key(f"blocks:{key}")


class DeviceManagerResidents(ManagerResidents[DeviceRequest, DeviceResident, DeviceSession]):
    """One load's use of a manager of a GPU, which may be absent or fail. For one thread."""

    @property
    def whole_only(self) -> str | None:
        """The reason why tensors of this manager cannot consist of blocks.

        It is None if they can, or if there is no manager.
        """
        return self.session.memory.whole_only if self.session is not None else None

    def open_slab(self, sizes: Sequence[int]) -> LentNewSlab | None:
        """Allocate a slab for tensors of these sizes, which the caller fills and seals.

        The digests of the tensors need not be known yet. Returns None if there is no manager, or if
        it has no room.
        """
        found: list[LentNewSlab] = []
        self._ask(lambda session: found.append(session.open_slab(sizes, self._answered)))
        return found[0] if found else None

    def _answered(self, ask: Callable[[], None]) -> bool:
        done: list[bool] = []

        def asked(_: DeviceSession) -> None:
            ask()
            done.append(True)

        self._ask(asked)
        return bool(done)

    def publish_whole(self, recipe: str, resident: DeviceResident) -> None:
        """Publish `recipe` as one of `resident`, a tensor that does not consist of blocks.

        Does nothing if this process has allocated the memory.
        """
        self._ask(lambda session: session.publish_whole(recipe, resident))

    def blocks_named(
        self, names: Sequence[str]
    ) -> list[tuple[DeviceResident, tuple[bytes, ...]] | None]:
        """Look up blocks by name; return each with its leaf digests, or None for each miss."""
        found: list[tuple[DeviceResident, tuple[bytes, ...]] | None] = []
        self._ask(lambda session: found.extend(session.blocks_named(names)))
        return found or [None] * len(names)

    def publish_parts(self, recipe: str, resident: DeviceResident) -> None:
        """Publish the list of blocks that `resident`, a large tensor, consists of.

        Blocks are pieces of 16 MiB. Other processes then find the resident by its digest and, if
        `recipe` is not "", by its recipe.
        """
        self._ask(lambda session: session.publish_parts(recipe, resident))


def device_session(client: Client, gpu: Gpu, checkpoint: str) -> DeviceSession:
    """Return a load's session with the manager of `gpu`.

    `checkpoint` names the load to the manager.

    Raises:
        UnsupportedError: The client's manager lends memory of another device.
    """
    return DeviceSession(client, checkpoint, DeviceMemory(gpu, client))


def device_manager_residents(
    where: str | os.PathLike[str] | None, checkpoint: str, gpu: Gpu
) -> DeviceManagerResidents:
    """Connect a load to the memory manager of `gpu`.

    `checkpoint` names the load to the manager. `where` is one of these:

    - The path of the socket of the manager of host memory. The socket of the GPU's manager lies
      beside it.
    - "auto", for the default path. A manager is started if none answers.
    - None, to use no manager.

    If the manager does not answer, the failure is logged, and the load goes on without it. The
    result's `failed` then has the reason.
    """
    if where is None:
        return DeviceManagerResidents()
    try:
        client = client_of(os.fspath(where), gpu.device.uuid)
        return DeviceManagerResidents(device_session(client, gpu, checkpoint_name(checkpoint)))
    except MemoryManagerError as error:
        _log.warning("%s: loading without the GPU's memory manager: %s", checkpoint, str(error))
        return DeviceManagerResidents(failed=str(error))
