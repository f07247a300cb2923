"""Residents that the models of this process share on one GPU: built once, mapped by each model.

A resident is found by its replica key, which consists of dtype, shape, stride, digest and a number.
Equal tensors of one model have different numbers, and so separate memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from tensor_dedup.loader.cuda.blocks import (
    TensorInBlocks,
)
from tensor_dedup.loader.cuda.local import LocalDevice
from tensor_dedup.loader.cuda.residents import (
    DeviceContent,
    DeviceResident,
    Views,
)
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.residents.mappings import DEVICE_MAPPINGS
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.resident import ReplicaKey, is_of_bytes
from tensor_dedup.loader.torch_dtypes import dtype_name, has_name
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.loader.cuda.gpu import DeviceMapping, Gpu
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents

_Place = tuple[tuple[int, ...], int, ResidentKey]  # serials of slabs, the offset, the geometry


class SharedGpu:
    """One GPU and the residents on it that models of this process use. Safe from any thread.

    Residents are referenced weakly, so a resident is freed when the last model that uses it is
    gone. `local` has those in memory of this process. `lock` is held while residents are built.
    """

    def __init__(self, gpu: Gpu, device: torch.device, kind: int) -> None:
        """Wrap `gpu`; `device` is its torch device, and `kind` its DLPack device type.

        Raises:
            DeviceError: Memory of this GPU cannot be passed to other processes.
        """
        self.gpu: Final = gpu
        self.device: Final = device
        self.kind: Final = kind
        self.local: Final = LocalDevice(gpu)
        self._residents: WeakValueDictionary[ReplicaKey, DeviceResident] = WeakValueDictionary()
        self._blocks: WeakValueDictionary[str, DeviceResident] = WeakValueDictionary()  # by digest
        self._named: WeakValueDictionary[str, DeviceResident] = WeakValueDictionary()
        self._leaves: WeakKeyDictionary[DeviceResident, tuple[bytes, ...]] = WeakKeyDictionary()
        self._places: WeakValueDictionary[_Place, DeviceResident] = WeakValueDictionary()
        self._known: WeakKeyDictionary[DeviceResident, ReplicaKey] = WeakKeyDictionary()
        self.recipes: Final[WeakValueDictionary[str, DeviceResident]] = WeakValueDictionary()
        self._views: WeakKeyDictionary[nn.Module, Views] = WeakKeyDictionary()
        self.lock: Final = threading.RLock()

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
            if here is None and can_be_lent(each)
        ]
        answers = manager.find([ResidentQuery("", each.key) for each in asked])
        lent = {
            each: self.enter(each, resident)
            for each, resident in zip(asked, answers, strict=True)
            if resident is not None
        }
        return [here or lent.get(each) for each, here in zip(wanted, found, strict=True)]

    def here(self, key: ResidentKey) -> DeviceResident | None:
        """Return this process's resident with these bytes, or None: a block, or any other."""
        block = self._blocks.get(key.digest)
        if block is not None and block.key == key:  # and of no other shape
            return block
        return self._residents.get(ReplicaKey(key, 0)) or self.local.by_content(key)

    def blocks_named(
        self, names: Sequence[str], manager: DeviceManagerResidents
    ) -> list[tuple[DeviceResident, tuple[bytes, ...]] | None]:
        """Look up blocks by name, in this process and then in the manager.

        `blocks.block_names` returns names. Returns in order each block and its leaf digests, or
        None for each miss.
        """
        with self.lock:
            here = [self._named.get(name) for name in names]
        missing = [name for name, block in zip(names, here, strict=True) if block is None]
        lent = iter(manager.blocks_named(missing))
        return [next(lent) if block is None else (block, self._leaves[block]) for block in here]

    def enter(self, known: ReplicaKey, resident: DeviceResident) -> DeviceResident:
        """Register `resident` under the replica key `known`, and return it.

        If another resident is registered under this key already, that one is kept and returned.
        """
        with self.lock:
            first = self._residents.setdefault(known, resident)
            self._known[first] = known
            self._places[_place_of(first)] = first
            if isinstance(first, TensorInBlocks):
                for name, block, leaves in first.named_blocks():
                    self._blocks.setdefault(block.key.digest, block)
                    self._named.setdefault(name, block)
                    self._leaves.setdefault(block, leaves)
            return first

    def enter_block(self, block: DeviceResident) -> None:
        """Register `block`, so that tensors in which it occurs find it by its digest."""
        self._blocks.setdefault(block.key.digest, block)

    def block(self, digest: str) -> DeviceResident | None:
        """Return this process's block with this `digest`, or None.

        A block is a piece of 16 MiB of a large tensor.
        """
        return self._blocks.get(digest)

    def views_of(self, model: nn.Module) -> Views:
        """Return the `Views` of `model`: its own mappings of the residents that it uses.

        The first call for a model creates the object, without any mappings.
        """
        with self.lock:
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


def can_be_lent(known: ReplicaKey) -> bool:
    """Return whether a memory manager can have a resident with this replica key.

    A manager has one of each content, and names bytes.
    """
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
