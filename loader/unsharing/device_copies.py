"""Copies of residents (shared tensors) on devices whose memory cannot be mapped read-only.

All models of this process share one copy. A copy is an ordinary tensor and is not copied on write,
so a model that is about to write to it in place must get private memory first
(`tensor_dedup.loader.unsharing.private`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.loader.residents.param_data import WeakStorage, number_of
from tensor_dedup.loader.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from tensor_dedup.loader.residents.resident import ReplicaKey
    from tensor_dedup.types import ResidentKey


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """The table entry for one copy of a resident (shared tensor) on a device.

    `known` is the replica key of the resident: its key, and a number that tells equal residents
    apart. The entry does not keep the copy alive.
    """

    known: ReplicaKey
    device: torch.device
    reference: WeakStorage

    def tensor(self) -> torch.Tensor | None:
        """Return the copy as a tensor, or None if no model uses it any more."""
        storage = self.reference.storage()
        if storage is None:
            return None
        key = self.known.key
        empty = torch.empty(0, dtype=torch_dtype(key.dtype), device=self.device)
        return empty.set_(storage, 0, key.shape, key.stride)


class DeviceCopies:
    """The table of all device copies, by replica key and device, and by storage.

    It does not keep the copies alive. Safe from any thread and after fork.
    """

    def __init__(self) -> None:
        self._by_key: dict[tuple[ReplicaKey, torch.device], DeviceCopy] = {}
        self._by_storage: dict[int, DeviceCopy] = {}
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        # A thread that does not exist in the child may have held it.
        self._lock = threading.Lock()

    def lookup(self, known: ReplicaKey, device: torch.device) -> torch.Tensor | None:
        """Return the copy on `device` of the resident `known`, or None if no model uses one.

        Keep a reference to the result, because the table keeps none.
        """
        found = self._by_key.get((known, device))
        return None if found is None else found.tensor()

    def publish(self, known: ReplicaKey, tensor: torch.Tensor) -> bool:
        """Register `tensor` as the copy of the resident `known`; return whether it was accepted.

        `tensor` is accepted if it covers its whole storage and has the dtype, shape and stride in
        `known.key`. Its bytes are not checked. An earlier copy of the resident on the same device
        is replaced in the table.
        """
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.nbytes
        if not whole or _geometry(tensor) != _geometry_of(known.key):
            return False
        found = DeviceCopy(known, tensor.device, WeakStorage(storage))
        with self._lock:
            self._forget_the_dead()
            self._by_key[known, tensor.device] = found
            self._by_storage[found.reference.number] = found
        return True

    def known(self, tensor: torch.Tensor) -> DeviceCopy | None:
        """Return the table entry for `tensor` if it is a registered copy, and otherwise None.

        A view of a copy with another dtype, shape, stride or offset is not a registered copy.
        """
        if tensor.device.type == "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
            return None
        found = self._by_storage.get(number_of(tensor.untyped_storage()))
        if found is None or tensor.storage_offset() != 0:
            return None
        return found if _geometry(tensor) == _geometry_of(found.known.key) else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a registered copy or a view of one."""
        if tensor.device.type == "cpu" or tensor.layout is not torch.strided:
            return False
        return number_of(tensor.untyped_storage()) in self._by_storage

    def alive(self) -> Iterator[tuple[DeviceCopy, torch.Tensor]]:
        """Yield the table entry of every registered copy in use, and the copy as a tensor."""
        for found in list(self._by_key.values()):
            tensor = found.tensor()
            if tensor is not None:
                yield found, tensor

    def __len__(self) -> int:
        """Return the number of registered copies that are in use."""
        return sum(not found.reference.expired for found in list(self._by_key.values()))

    def _forget_the_dead(self) -> None:
        for place, found in list(self._by_key.items()):
            if found.reference.expired:
                del self._by_key[place]
        for number, found in list(self._by_storage.items()):
            if found.reference.expired:
                del self._by_storage[number]


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _geometry_of(key: ResidentKey) -> tuple[object, ...]:
    return torch_dtype(key.dtype), tuple(key.shape), tuple(key.stride)


COPIES: Final = DeviceCopies()
