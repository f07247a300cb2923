"""Access and replace the memory of parameters, and tell storages apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

_reference_to: Final[Any] = reductions.StorageWeakRef  # not annotated


def param_data(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's data as a plain tensor, even if its class overrides operations."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def set_param_data(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer the memory of `tensor`; the parameter remains the same object."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def memory_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written in place through torch, or gets other memory."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the `id` of each CPU tensor whose memory overlaps that of another one of `tensors`.

    Tensors on other devices, empty tensors and tensors that are not strided are ignored.
    """
    ranges = []
    with torch._C.DisableTorchFunctionSubclass():
        for each in tensors:
            if each.is_cpu and each.layout is torch.strided and (nbytes := each.nbytes):
                start = each.data_ptr()
                ranges.append((start, start + nbytes, id(each)))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(ranges):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found


class WeakStorage:
    """A weak reference to a tensor's storage.

    `number` identifies the storage. As long as this reference exists, no other storage gets the
    same number, even after the storage is gone.
    """

    __slots__ = ("_reference", "number")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = _reference_to(storage)
        self.number: Final = number_of(storage)

    @property
    def expired(self) -> bool:
        """Whether the storage is gone."""
        return bool(self._reference.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it is gone."""
        make: Any = torch.UntypedStorage._new_with_weak_ptr
        found: torch.UntypedStorage | None = make(self._reference.cdata)
        return found


def number_of(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies `storage` among all storages that exist now."""
    return int(storage._cdata)
