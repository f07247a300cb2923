"""Residents that the models of this process share on one GPU: built once, mapped by each model.

A resident is found by its replica key, which consists of dtype, shape, stride, digest and a number.
Equal tensors of one model have different numbers, and so separate memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from tensor_dedup.digest import combine
from tensor_dedup.loader.cuda.blocks import (
    BLOCK_BYTES,
    BlockLog,
    TensorInBlocks,
    TensorWriter,
    block_keys,
    is_block,
    may_be_in_blocks,
)
from tensor_dedup.loader.cuda.openers import MappedExtent
from tensor_dedup.loader.cuda.residents import (
    DeviceRequest,
    DeviceResident,
    DeviceSlab,
    Views,
    Write,
)
from tensor_dedup.loader.cuda.tensors import tensor_at
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
    from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents

_Place = tuple[tuple[int, ...], int, ResidentKey]  # serials of slabs, the offset, the geometry
# A slab is a handle of the driver, in whole granules of 2 MiB, and is freed whole: tensors from the
# first size on have their own, smaller ones lie in one together, and larger ones in `blocks`.
OWN_SLAB_BYTES: Final = 16 << 20
BATCH_BYTES: Final = 64 << 20


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
        wanted: Sequence[tuple[ReplicaKey, str, Write]],
        manager: DeviceManagerResidents,
        log: BlockLog | None = None,
    ) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each (key, recipe, writer), and whether this call wrote it.

        The results are in the order of `wanted`. Missing residents are put into the manager's
        memory or, if it does not take them, into memory of this process.

        If the writer of a large tensor is a `TensorWriter`, the tensor is built of blocks (pieces
        of 16 MiB) where possible. Only the missing blocks are written. `log` is the load's
        `BlockLog`.

        Raises:
            BackendError: The GPU has no room, its driver refuses, or a tensor has changed since it
                was hashed. Keep the tensors private.
        """
        with self._lock:
            found: dict[int, tuple[DeviceResident, bool]] = {}
            written: set[int] = set()
            missing = []
            in_blocks = self._in_blocks(wanted, manager, BlockLog() if log is None else log)
            for index, (known, recipe, write) in enumerate(wanted):
                resident = self._residents.get(known) if known.key.digest else None
                if index in in_blocks:
                    found[index] = in_blocks[index]
                elif resident is not None:
                    found[index] = resident, False
                else:
                    noted = _noting(write, written, index)
                    one = DeviceRequest(recipe, known.key, _nbytes(known.key), noted, known.copy)
                    missing.append((index, one))
            lendable = [item for item in missing if _can_be_lent(wanted[item[0]][0])]
            lent = manager.put([each for _, each in lendable])
            made = {i: r[0] for (i, _), r in zip(lendable, lent, strict=True) if r is not None}
            rest = [(i, each) for i, each in missing if i not in made]
            if rest:
                local = self._local.put([each for _, each in rest])
                made |= dict(zip((i for i, _ in rest), local, strict=True))
            for index, resident in made.items():
                known = ReplicaKey(resident.key, wanted[index][0].copy)
                found[index] = self.enter(known, resident), index in written
            return [found[index] for index in range(len(wanted))]

    def _in_blocks(
        self,
        wanted: Sequence[tuple[ReplicaKey, str, Write]],
        manager: DeviceManagerResidents,
        log: BlockLog,
    ) -> dict[int, tuple[DeviceResident, bool]]:
        """Return those of `get_or_build`, by number, that are in blocks or need not be built."""
        large = [
            (index, known, recipe, write)
            for index, (known, recipe, write) in enumerate(wanted)
            # Replicas of a tensor must not become one memory.
            if isinstance(write, TensorWriter)
            and known.copy == 0
            and may_be_in_blocks(known.key, write.tensor.nbytes)
        ]
        if not large or manager.whole_only is not None:
            return {}
        there = self.find([known for _, known, _, _ in large], manager)
        found: dict[int, tuple[DeviceResident, bool]] = {}
        for (index, known, recipe, write), resident in zip(large, there, strict=True):
            first = resident or self._residents.get(known)  # of a tensor that is wanted twice
            if first is not None:
                found[index] = first, False
                continue
            made = self._built_in_blocks(known.key, write, manager, log)
            if made is not None:
                manager.publish_parts(recipe, made)
                found[index] = self.enter(known, made), True
        return found

    def _built_in_blocks(
        self,
        key: ResidentKey,
        write: TensorWriter,
        manager: DeviceManagerResidents,
        log: BlockLog,
    ) -> TensorInBlocks | None:
        """Return a tensor in blocks, of which those that nobody has were written; or None.

        Raises:
            BackendError: As `get_or_build`, or the tensor has changed since it was hashed.
        """
        nbytes = write.tensor.nbytes
        if not log.admits(-(-nbytes // BLOCK_BYTES)):
            return None
        leaves = write.leaves()
        if combine(nbytes, leaves) != key.digest:
            raise BackendError(
                f"a tensor of {key.digest} has changed since it was hashed; load it privately",
                digest=key.digest,
            )
        keys = block_keys(nbytes, leaves)
        there = self._find_blocks(keys, manager)
        if there is None:
            return None
        blocks, at, shared = [], 0, 0
        for each in keys:
            end = at + _nbytes(each)
            block = there.get(each.digest)
            if block is None:
                written: set[int] = set()
                part = _noting(write.part(at, end), written, at)
                block = self._put_block(each, part, manager)
                if not is_block(block):
                    log.note_larger(block)  # or it lies in a slab with others
                    return None
                there[each.digest] = self._blocks[each.digest] = block
                if written:  # and not put by somebody else meanwhile
                    log.built.add(block)
            if block not in log.built:
                shared += end - at
            blocks.append(block)
            at = end
        return TensorInBlocks(key, blocks, leaves, shared)

    def _find_blocks(
        self, keys: Sequence[ResidentKey], manager: DeviceManagerResidents
    ) -> dict[str, DeviceResident] | None:
        """Return the blocks that are resident, by digest: in this process, or in the manager.

        None if one of them lies in a slab with other tensors, so that it cannot be a block.
        """
        found = {
            each.digest: self._blocks.get(each.digest) or self._local.by_content(each)
            for each in keys
        }
        missing = {each: None for each in keys if found[each.digest] is None}
        lent = manager.find([ResidentQuery("", each) for each in missing])
        found.update((each.digest, block) for each, block in zip(missing, lent, strict=True))
        there = {digest: block for digest, block in found.items() if block is not None}
        return there if all(map(is_block, there.values())) else None

    def _put_block(
        self, key: ResidentKey, write: Write, manager: DeviceManagerResidents
    ) -> DeviceResident:
        """Put one block into a slab of its own, the manager's where it has room."""
        request = DeviceRequest(f"content:{key}", key, _nbytes(key), write)
        [lent] = manager.put([request])
        return self._local.put([request])[0] if lent is None else lent[0]

    def enter(self, known: ReplicaKey, resident: DeviceResident) -> DeviceResident:
        """Register `resident` under the replica key `known`, and return it.

        If another resident is registered under this key already, that one is kept and returned.
        """
        with self._lock:
            first = self._residents.setdefault(known, resident)
            self._known[first] = known
            self._places[_place_of(first)] = first
            if isinstance(first, TensorInBlocks):
                for block in first.blocks:
                    self._blocks.setdefault(block.key.digest, block)
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

    def copy_of(self, tensor: torch.Tensor, leaves: Sequence[bytes] = ()) -> TensorWriter:
        """Return a writer that copies a gap-free tensor from any device to an address of this GPU.

        `leaves` are the tensor's leaf digests, if they are known.
        """
        return TensorWriter(tensor, self._copy_of, leaves)

    def _copy_of(self, tensor: torch.Tensor) -> Write:
        geometry = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        place = self.kind, self.gpu.device.ordinal

        def write(address: int) -> None:
            # By torch, in the order of its stream: what made the tensor may be under way there.
            tensor_at(address, geometry, place, None).copy_(tensor)

        return write


def _noting(write: Write, written: set[int], index: int) -> Write:
    def noted(address: int) -> str | None:
        written.add(index)
        return write(address)

    return noted


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
        self._opener = gpu.vmm()
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

    def put(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident]:
        """Return a resident for each request of `wanted`, in order.

        All missing residents are written into one new slab.

        Raises:
            BackendError: The GPU has no room, or its driver refuses.
        """
        with self._lock:
            found = {
                index: resident
                for index, each in enumerate(wanted)
                if each.key.digest
                and (resident := self.by_content(each.key, each.copy)) is not None
            }
            missing = [index for index in range(len(wanted)) if index not in found]
            made = self._write([wanted[index] for index in missing]) if missing else []
            found |= dict(zip(missing, made, strict=True))
            return [found[index] for index in range(len(wanted))]

    def _write(self, wanted: Sequence[DeviceRequest]) -> list[DeviceResident]:
        layout = self._backend.capabilities.layout
        offsets, nbytes = offsets_of((max(each.nbytes, 1) for each in wanted), layout)
        memory = self.gpu.with_room(lambda: self._backend.reserve(nbytes))
        keys: list[ResidentKey] = []

        def write(address: int) -> None:
            for each, offset in zip(wanted, offsets, strict=True):
                keys.append(each.written(each.write(address + offset)))

        self.gpu.fill(MappedExtent(memory.fileno, nbytes, 0), self._opener, write)
        slab = DeviceSlab(self.gpu, self._opener, memory, nbytes)
        made = [
            DeviceResident(key, [slab], offset) for key, offset in zip(keys, offsets, strict=True)
        ]
        # Equal bytes of one slab: the first that has them is what others find, in their geometry.
        return [
            _as(each.key, self._residents.setdefault((each.key.digest, its.copy), each))
            for each, its in zip(made, wanted, strict=True)
        ]


def _as(key: ResidentKey, found: DeviceResident) -> DeviceResident:
    """Return a resident of the same bytes in this geometry."""
    if found.key == key:
        return found
    return DeviceResident(key, found.slabs, found.offset, found)  # which holds the first
