"""Residents that the models of this process share on one GPU: built once, mapped by each model.

A resident is found by its replica key, which consists of dtype, shape, stride, digest and a number.
Equal tensors of one model have different numbers, and so separate memory.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from tensor_dedup.digest import combine
from tensor_dedup.loader.cuda.blocks import (
    BLOCK_BYTES,
    BlockLog,
    TensorInBlocks,
    block_keys,
    blocks_of,
    bytes_key,
    is_block,
    may_be_in_blocks,
)
from tensor_dedup.loader.cuda.new_slabs import (
    SlabTensor,
    make_resident,
    rounds,
    slabs_of,
    write_slabs,
)
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.residents import (
    DeviceContent,
    DeviceRequest,
    DeviceResident,
    DeviceSlab,
    Views,
)
from tensor_dedup.loader.cuda.transfers import HostContent
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.resident import ReplicaKey, is_of_bytes
from tensor_dedup.loader.torch_dtypes import dtype_name, has_name, torch_dtype
from tensor_dedup.memory_manager.backends.vmm import VmmBackend
from tensor_dedup.memory_manager.errors import BackendError
from tensor_dedup.memory_manager.protocol.layout import offsets_of
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.new_slabs import NewSlab
    from tensor_dedup.loader.cuda.residents import UnreadTensor, Write
    from tensor_dedup.memory_manager.backends.vmm import VmmAllocation

_Place = tuple[tuple[int, ...], int, ResidentKey]  # serials of slabs, the offset, the geometry


class SharedGpu:
    """One GPU and the residents on it that models of this process use. Safe from any thread.

    Residents are referenced weakly, so a resident is freed when the last model that uses it is
    gone.
    """

    def __init__(self, gpu: Gpu, device: torch.device, kind: int) -> None:
        """Wrap `gpu`; `device` is its torch device, and `kind` its DLPack device type.

        Raises:
            DeviceError: Memory of this GPU cannot be passed to other processes.
        """
        self.gpu: Final = gpu
        self.device: Final = device
        self.kind: Final = kind
        self._local = LocalDevice(gpu)
        self._residents: WeakValueDictionary[ReplicaKey, DeviceResident] = WeakValueDictionary()
        self._blocks: WeakValueDictionary[str, DeviceResident] = WeakValueDictionary()  # by digest
        self._named: WeakValueDictionary[str, DeviceResident] = WeakValueDictionary()
        self._leaves: WeakKeyDictionary[DeviceResident, tuple[bytes, ...]] = WeakKeyDictionary()
        self._places: WeakValueDictionary[_Place, DeviceResident] = WeakValueDictionary()
        self._known: WeakKeyDictionary[DeviceResident, ReplicaKey] = WeakKeyDictionary()
        self.recipes: Final[WeakValueDictionary[str, DeviceResident]] = WeakValueDictionary()
        self._views: WeakKeyDictionary[nn.Module, Views] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def lookup(self, known: ReplicaKey) -> DeviceResident | None:
        """Return this process's resident with the replica key `known`, or None."""
        return self._residents.get(known)

    def find(
        self, wanted: Sequence[ReplicaKey], manager: DeviceManagerResidents
    ) -> list[DeviceResident | None]:
        """Look up residents in this process, and the missing ones in the memory manager.

        Returns them in the order of `wanted`, with None for each that was not found. The manager is
        asked only for residents with the replica number 0 and a digest of their bytes, because it
        has no others.
        """
        found = [self._residents.get(each) for each in wanted]
        asked = [
            each
            for each, here in zip(wanted, found, strict=True)
            if here is None and _can_be_lent(each)
        ]
        answers = manager.find([ResidentQuery("", each.key) for each in asked])
        lent = {
            each: self.enter(each, resident)
            for each, resident in zip(asked, answers, strict=True)
            if resident is not None
        }
        return [here or lent.get(each) for each, here in zip(wanted, found, strict=True)]

    def get_or_build(
        self,
        wanted: Sequence[tuple[ReplicaKey, str, HostContent | DeviceContent | Write]],
        manager: DeviceManagerResidents,
        log: BlockLog | None = None,
    ) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each (key, recipe, content), and whether this call wrote it.

        The results are in the order of `wanted`. Missing residents are put into the manager's
        memory or, if it does not take them, into memory of this process.

        A large tensor whose content can be divided is built of blocks (pieces of 16 MiB) where
        possible, and only the missing blocks are written. `log` is the load's `BlockLog`.

        Raises:
            BackendError: The GPU has no room, its driver refuses, or a tensor has changed since it
                was hashed. Keep the tensors private.
        """
        with self._lock:
            found: dict[int, tuple[DeviceResident, bool]] = {}
            missing = []
            in_blocks = self._in_blocks(wanted, manager, BlockLog() if log is None else log)
            for index, (known, recipe, content) in enumerate(wanted):
                resident = self._residents.get(known) if known.key.digest else None
                if index in in_blocks:
                    found[index] = in_blocks[index]
                elif resident is not None:
                    found[index] = resident, False
                else:
                    nbytes = _nbytes(known.key)
                    one = DeviceRequest(recipe, known.key, nbytes, content, known.copy)
                    missing.append((index, one))
            made = self._put([each for _, each in missing], manager)
            for (index, each), (resident, new) in zip(missing, made, strict=True):
                known = ReplicaKey(resident.key, each.copy)
                found[index] = self.enter(known, resident), new
            return [found[index] for index in range(len(wanted))]

    def _put(
        self, wanted: Sequence[DeviceRequest], manager: DeviceManagerResidents
    ) -> list[tuple[DeviceResident, bool]]:
        """Put whole tensors into slabs, the manager's where it takes them."""
        lendable = [each for each in wanted if _can_be_lent(ReplicaKey(each.key, each.copy))]
        lent: dict[int, tuple[DeviceResident, bool] | None] = {}
        for slab in slabs_of(lendable):
            lent.update(zip(map(id, slab), manager.put(slab), strict=True))
        rest = [each for each in wanted if lent.get(id(each)) is None]
        local = iter(self._local.put(rest) if rest else ())
        return [lent.get(id(each)) or next(local) for each in wanted]

    def _in_blocks(
        self,
        wanted: Sequence[tuple[ReplicaKey, str, HostContent | DeviceContent | Write]],
        manager: DeviceManagerResidents,
        log: BlockLog,
    ) -> dict[int, tuple[DeviceResident, bool]]:
        """Return those of `get_or_build`, by number, that are in blocks or need not be built."""
        large = [
            (index, known, recipe, content)
            for index, (known, recipe, content) in enumerate(wanted)
            # Replicas of a tensor must not become one memory.
            if isinstance(content, HostContent | DeviceContent)
            and known.copy == 0
            and may_be_in_blocks(known.key, content.nbytes)
        ]
        if not large or manager.whole_only is not None:
            return {}
        there = self.find([known for _, known, _, _ in large], manager)
        found: dict[int, tuple[DeviceResident, bool]] = {}
        new: dict[int, list[SlabTensor]] = {}
        for (index, known, _, large_one), resident in zip(large, there, strict=True):
            if resident is not None:
                found[index] = resident, False
            elif log.admits(blocks_of(large_one.nbytes) + sum(map(len, new.values()))):
                digests_known = isinstance(large_one, DeviceContent) or not large_one.hashed
                if digests_known:
                    _require_digest(known.key, large_one)
                new[index] = _blocks_of(large_one, large_one.leaves if digests_known else None)
        self._look([one for each in new.values() for one in each if one.key.digest], manager)
        new = {index: blocks for index, blocks in new.items() if _may_be_joined(blocks)}
        if not self._make_resident([one for each in new.values() for one in each], manager, log):
            return found
        for index, blocks in new.items():
            known, recipe, _ = wanted[index]
            content = blocks[0].content
            assert isinstance(content, HostContent | DeviceContent)
            _require_digest(known.key, content)
            first = self._residents.get(known)  # of a tensor that is wanted twice
            if first is not None:
                found[index] = first, False
                continue
            made = self._joined(known.key, blocks, content.leaves, log)
            if made is not None:
                manager.publish_parts(recipe, made)
                found[index] = self.enter(known, made), True
        return found

    def build_unread(
        self, wanted: Sequence[UnreadTensor], manager: DeviceManagerResidents, log: BlockLog
    ) -> list[tuple[DeviceResident, bool]]:
        """Upload tensors whose digests are not known, and return a resident for each.

        The results are in the order of `wanted`; True says that this call made the resident. If a
        resident has the bytes after all, it is used, and the memory of the upload is freed. Errors
        of reading and of `UnreadTensor.learned` are passed on.

        Raises:
            BackendError: The GPU has no room, or its driver refuses. Keep the tensors private.
        """
        with self._lock:
            new = [self._new(each, manager, log) for each in wanted]
            if not self._make_resident([one for each in new for one in each], manager, log):
                new = [self._new(each, manager, log) for each in wanted]  # whole: `log` says so
                self._make_resident([one for each in new for one in each], manager, log)
            return [
                self._learned(each, these, manager, log)
                for each, these in zip(wanted, new, strict=True)
            ]

    def _new(
        self, each: UnreadTensor, manager: DeviceManagerResidents, log: BlockLog
    ) -> list[SlabTensor]:
        blocks = blocks_of(each.content.nbytes)
        if blocks and manager.whole_only is None and log.admits(blocks):
            return _blocks_of(each.content)
        return [SlabTensor(each.content, each.geometry, 0, each.content.nbytes)]

    def _learned(
        self,
        each: UnreadTensor,
        made: Sequence[SlabTensor],
        manager: DeviceManagerResidents,
        log: BlockLog,
    ) -> tuple[DeviceResident, bool]:
        """Return the resident of a tensor that was uploaded, and publish it under its recipe."""
        key = replace(each.geometry, digest=each.content.digest)
        recipe = each.learned()
        known = ReplicaKey(key, 0)
        first = self._residents.get(known)
        if first is not None:
            return first, False
        if made[0].is_block:
            whole = self._joined(key, made, each.content.leaves, log)
            if whole is not None:
                manager.publish_parts(recipe, whole)
                return self.enter(known, whole), True
            # As a block lies in a slab with others: whole, now that its digest is known.
            request = DeviceRequest(recipe, key, each.content.nbytes, each.content)
            [(resident, new)] = self._put([request], manager)
            return self.enter(known, resident), new
        [one] = made
        assert one.resident is not None
        manager.publish_whole(recipe, one.resident)
        return self.enter(known, one.resident), one.written

    def _make_resident(
        self, tensors: Sequence[SlabTensor], manager: DeviceManagerResidents, log: BlockLog
    ) -> bool:
        """Write what has no resident into new slabs, the manager's where it has room.

        Returns False if the manager's memory comes in slabs that are larger than blocks, and blocks
        are wanted.
        """
        has_blocks = any(each.is_block for each in tensors)

        def lent(sizes: Sequence[int]) -> NewSlab | None:
            slab = manager.open_slab(sizes)
            whole = slab is not None and has_blocks and [*sizes] == [BLOCK_BYTES]
            if slab is not None and whole and log.note_larger(slab.extent.nbytes):
                slab.abandon()
                raise _LargerError
            return slab

        try:
            make_resident(
                self.gpu,
                tensors,
                [lent, self._local.open_slab],
                lambda some: self._look(some, manager),
            )
        except _LargerError:
            return False
        return True

    def blocks_named(
        self, names: Sequence[str], manager: DeviceManagerResidents
    ) -> list[tuple[DeviceResident, tuple[bytes, ...]] | None]:
        """Look up blocks by name, in this process and then in the manager.

        `blocks.block_names` returns names. Returns in order each block and its leaf digests, or
        None for each miss.
        """
        with self._lock:
            here = [self._named.get(name) for name in names]
        missing = [name for name, block in zip(names, here, strict=True) if block is None]
        lent = iter(manager.blocks_named(missing))
        return [next(lent) if block is None else (block, self._leaves[block]) for block in here]

    def build_known(
        self,
        key: ResidentKey,
        content: HostContent,
        found: dict[int, DeviceResident],
        manager: DeviceManagerResidents,
        log: BlockLog,
    ) -> TensorInBlocks | None:
        """Build a tensor of which some blocks are resident; upload only the others.

        `found` maps numbers of blocks to residents, whose leaf digests `content` knows. The digest
        of `key` is ignored. Returns the tensor, which nobody else can see yet, or None if it cannot
        consist of blocks.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        with self._lock:
            blocks = _blocks_of(content)
            for number, resident in found.items():
                blocks[number].resident = resident
            if not self._make_resident(blocks, manager, log):
                return None
            key = replace(key, digest=content.digest)
            return self._joined(key, blocks, content.leaves, log)

    def _look(self, tensors: Sequence[SlabTensor], manager: DeviceManagerResidents) -> None:
        """Set `resident` of those tensors that are resident, in this process or the manager."""
        for each in tensors:
            each.resident = self._here(each.key)
        missing = {each.key: None for each in tensors if each.resident is None}
        lent = manager.find([ResidentQuery("", each) for each in missing])
        found = dict(zip(missing, lent, strict=True))
        for each in tensors:
            each.resident = each.resident or found.get(each.key)

    def _here(self, key: ResidentKey) -> DeviceResident | None:
        """Return this process's resident with these bytes, or None: a block, or any other."""
        if key.dtype == "U8" and (block := self._blocks.get(key.digest)) is not None:
            return block
        return self._residents.get(ReplicaKey(key, 0)) or self._local.by_content(key)

    def _joined(
        self,
        key: ResidentKey,
        blocks: Sequence[SlabTensor],
        leaves: Sequence[bytes],
        log: BlockLog,
    ) -> TensorInBlocks | None:
        """Return the tensor that consists of blocks, or None if one of them can be no block."""
        if not _may_be_joined(blocks):
            return None
        found = []
        shared = 0
        for block in blocks:
            resident = block.resident
            assert resident is not None
            if block.written:
                log.built.add(resident)
            if resident not in log.built:
                shared += block.nbytes
            self._blocks.setdefault(resident.key.digest, resident)
            found.append(resident)
        return TensorInBlocks(key, found, leaves, shared)

    def enter(self, known: ReplicaKey, resident: DeviceResident) -> DeviceResident:
        """Register `resident` under the replica key `known`, and return it.

        If another resident is registered under this key already, that one is kept and returned.
        """
        with self._lock:
            first = self._residents.setdefault(known, resident)
            self._known[first] = known
            self._places[_place_of(first)] = first
            if isinstance(first, TensorInBlocks):
                for name, block, leaves in first.named_blocks():
                    self._blocks.setdefault(block.key.digest, block)
                    self._named.setdefault(name, block)
                    self._leaves.setdefault(block, leaves)
            return first

    def block(self, digest: str) -> DeviceResident | None:
        """Return this process's block with this `digest`, or None.

        A block is a piece of 16 MiB of a large tensor.
        """
        return self._blocks.get(digest)

    def views_of(self, model: nn.Module) -> Views:
        """Return the `Views` of `model`: its own mappings of the residents that it uses.

        The first call for a model creates the object, without any mappings.
        """
        with self._lock:
            found = self._views.get(model)
            if found is None:
                found = self._views[model] = Views(self.kind)
            return found

    def holds(self, tensor: torch.Tensor, key: ResidentKey) -> bool:
        """Return whether `tensor` is a mapping of a resident of this GPU with this `key`."""
        known = self.known(param_data(tensor))
        return known is not None and known.key == key

    def known(self, tensor: torch.Tensor) -> ReplicaKey | None:
        """Return the key and replica number of the resident that `tensor` maps.

        Returns None if `tensor` does not map a resident of this GPU.
        """
        resident = self.resident_behind(tensor)
        return None if resident is None else self._known.get(resident)

    def known_as(self, resident: DeviceResident) -> ReplicaKey | None:
        """Return the replica key under which `resident` is registered, or None."""
        return self._known.get(resident)

    def resident_behind(self, tensor: torch.Tensor) -> DeviceResident | None:
        """Return the resident with the memory, dtype, shape and stride of `tensor`, or None."""
        if not _can_be_asked(tensor) or not has_name(tensor.dtype):
            return None
        places = DEVICE_MAPPINGS.ranges(tensor.data_ptr(), tensor.nbytes)
        if not places:
            return None
        key = ResidentKey(dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), "")
        return self._places.get((tuple(each.slab for each in places), places[0].offset, key))

    def mapping_behind(self, tensor: torch.Tensor) -> DeviceMapping | None:
        """Return the shared or private mapping in which `tensor` lies, or None."""
        return self.gpu.mapping_at(tensor.data_ptr()) if _can_be_asked(tensor) else None

    def alive(self) -> list[tuple[ReplicaKey, DeviceResident]]:
        """Return every resident in use, preceded by its replica key."""
        return list(self._residents.items())

    def seen(self, resident: DeviceResident) -> torch.Tensor:
        """Return `resident` as a tensor for inspecting its bytes.

        The tensor is mapped independently of any model.

        Raises:
            BackendError: The resident cannot be mapped.
        """
        return Views(self.kind).tensor(resident)

    def copy_of(self, tensor: torch.Tensor, leaves: Sequence[bytes] = ()) -> DeviceContent:
        """Return the content of a gap-free tensor on this GPU, for `get_or_build`.

        `leaves` are the tensor's leaf digests, if they are known.
        """
        return DeviceContent(tensor, (self.kind, self.gpu.device.ordinal), leaves)


class _LargerError(Exception):
    """The manager's slabs are larger than blocks."""


def _blocks_of(
    content: HostContent | DeviceContent, leaves: Sequence[bytes] | None = None
) -> list[SlabTensor]:
    """Return the blocks of a tensor, with their keys if its leaf digests are known."""
    nbytes = content.nbytes
    places = [(at, min(at + BLOCK_BYTES, nbytes)) for at in range(0, nbytes, BLOCK_BYTES)]
    keys = (
        [bytes_key(end - start, "") for start, end in places]
        if leaves is None
        else block_keys(nbytes, leaves)
    )
    return [
        SlabTensor(content, key, start, end, is_block=True)
        for key, (start, end) in zip(keys, places, strict=True)
    ]


def _may_be_joined(blocks: Sequence[SlabTensor]) -> bool:
    """Return whether none of the blocks that are resident lies in a slab with other tensors."""
    return all(each.resident is None or is_block(each.resident) for each in blocks)


def _require_digest(key: ResidentKey, content: HostContent | DeviceContent) -> None:
    if combine(content.nbytes, content.leaves) != key.digest:
        raise BackendError(
            f"a tensor of {key.digest} has changed since it was hashed; load it privately",
            digest=key.digest,
        )


def _can_be_lent(known: ReplicaKey) -> bool:
    # A manager has one of each content, and names bytes.
    return known.copy == 0 and is_of_bytes(known.key)


def _can_be_asked(tensor: torch.Tensor) -> bool:
    return (
        len(DEVICE_MAPPINGS) > 0
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.nbytes > 0
    )


def _place_of(resident: DeviceResident) -> _Place:
    key = resident.key
    geometry = ResidentKey(key.dtype, tuple(key.shape), tuple(key.stride), "")
    return tuple(each.serial for each in resident.slabs), resident.offset, geometry


def _nbytes(key: ResidentKey) -> int:
    nbytes = torch_dtype(key.dtype).itemsize
    for size in key.shape:
        nbytes *= size
    return nbytes


class LocalDevice:
    """Residents that this process builds on one GPU without a memory manager.

    After it is written, a resident is mapped read-only. Its memory is freed when the last mapping
    ends. Safe from any thread; calls of `put` run one at a time. After a BackendError, load the
    tensors privately.
    """

    def __init__(self, gpu: Gpu) -> None:
        """Prepare to allocate memory of `gpu`.

        Raises:
            DeviceError: The driver cannot allocate shareable memory on this GPU.
        """
        self.gpu: Final = gpu
        self._backend = VmmBackend(gpu.driver, gpu.device.uuid)
        self.opener: Final = gpu.vmm()
        self._residents: WeakValueDictionary[tuple[str, int], DeviceResident] = (
            WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def by_content(self, key: ResidentKey, copy: int = 0) -> DeviceResident | None:
        """Return the resident with this `key` and the replica number `copy`, or None.

        Keep a reference to the result, because the table keeps none.
        """
        found = self._residents.get((key.digest, copy))
        return None if found is None else _as(key, found)

    def put(self, wanted: Sequence[DeviceRequest]) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each request of `wanted`, in order, and whether it is new.

        Large tensors get a slab each, and small ones share slabs. They are written in rounds of 256
        MiB, with one wait for the GPU each.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        with self._lock:
            found = {
                index: (resident, False)
                for index, each in enumerate(wanted)
                if each.key.digest
                and (resident := self.by_content(each.key, each.copy)) is not None
            }
            missing = [index for index in range(len(wanted)) if index not in found]
            made = self._write([wanted[index] for index in missing]) if missing else []
            found |= dict(zip(missing, made, strict=True))
            return [found[index] for index in range(len(wanted))]

    def open_slab(self, sizes: Sequence[int]) -> LocalNewSlab:
        """Allocate a slab for tensors of these sizes, which the caller fills and seals.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        layout = self._backend.capabilities.layout
        offsets, nbytes = offsets_of((max(each, 1) for each in sizes), layout)
        memory = self.gpu.with_room(lambda: self._backend.reserve(nbytes))
        return LocalNewSlab(self, memory, offsets)

    def enter(
        self, slab: LocalNewSlab, keys: Sequence[ResidentKey], copies: Sequence[int] = ()
    ) -> list[tuple[DeviceResident, bool]]:
        """Make residents of the tensors of a slab, which are written.

        Returns, in order, each resident with one of the `keys` and a replica number of `copies`, by
        default 0, and whether it lies in this slab.
        """
        shared = DeviceSlab(self.gpu, self.opener, slab.memory, slab.memory.nbytes)
        made = [
            DeviceResident(key, [shared], offset)
            for key, offset in zip(keys, slab.offsets, strict=True)
        ]
        # Equal bytes of one slab: the first that has them is what others find, in their geometry.
        first = [
            self._residents.setdefault((each.key.digest, copy), each)
            for each, copy in zip(made, copies or [0] * len(made), strict=True)
        ]
        return [
            (_as(each.key, found), found.slabs[0] is shared)
            for each, found in zip(made, first, strict=True)
        ]

    def _write(self, wanted: Sequence[DeviceRequest]) -> list[tuple[DeviceResident, bool]]:
        made: dict[int, tuple[DeviceResident, bool]] = {}
        for slabs in rounds(slabs_of(wanted)):
            opened = [self.open_slab([each.nbytes for each in these]) for these in slabs]
            places = [
                (
                    slab.extent,
                    slab.offsets,
                    [SlabTensor(each.content, each.key, 0, each.nbytes) for each in these],
                )
                for slab, these in zip(opened, slabs, strict=True)
            ]
            written = write_slabs(self.gpu, self.opener, places)
            for slab, these, digests in zip(opened, slabs, written, strict=True):
                keys = [each.written(one) for each, one in zip(these, digests, strict=True)]
                entered = self.enter(slab, keys, [each.copy for each in these])
                made.update((id(e), (r, True)) for e, (r, _) in zip(these, entered, strict=True))
        return [made[id(each)] for each in wanted]


class LocalNewSlab:
    """A slab of this process's own, which is to be filled. For one thread."""

    def __init__(self, local: LocalDevice, memory: VmmAllocation, offsets: Sequence[int]) -> None:
        self.memory: Final = memory
        self.offsets: Final = offsets
        self.opener: Final = local.opener
        self.extent: Final = MappedExtent(memory.fileno, memory.nbytes, 0)
        self._local = local

    def progress(self) -> None:
        """Do nothing, because nobody waits for this slab."""

    def seal(self, keys: Sequence[ResidentKey]) -> list[tuple[DeviceResident, bool]]:
        """Make residents of the tensors, and return each, and whether it lies in this slab."""
        return self._local.enter(self, keys)

    def abandon(self) -> None:
        """Do nothing: the slab is freed with this object."""


def _as(key: ResidentKey, found: DeviceResident) -> DeviceResident:
    """Return a resident of the same bytes in this geometry."""
    if found.key == key:
        return found
    return DeviceResident(key, found.slabs, found.offset, found)  # which holds the first
