"""The memory of parameters: where it lies, giving them other memory, and telling storages apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

_reference_to: Final[Any] = reductions.StorageWeakRef  # not annotated


def param_data(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's data as an ordinary tensor, whatever its class makes of operations."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def set_param_data(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer other memory; its object, class and attributes stay."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the tensors whose memory is, in whole or in part, another one's too."""
    ranges = []
    for each in tensors:
        if each.device.type == "cpu" and each.layout is torch.strided and each.nbytes:
            data = param_data(each)
            ranges.append((data.data_ptr(), data.data_ptr() + data.nbytes, id(each)))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(ranges):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found


class WeakStorage:
    """A reference to a tensor's storage that does not keep its memory.

    While it lives, no other storage gets the same `number`, even after the memory is gone.
    """

    __slots__ = ("_reference", "number")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = _reference_to(storage)
        self.number: Final = number_of(storage)

    @property
    def expired(self) -> bool:
        """Whether nobody holds the storage any more."""
        return bool(self._reference.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, held by the caller from now on; None when it has expired."""
        make: Any = torch.UntypedStorage._new_with_weak_ptr
        found: torch.UntypedStorage | None = make(self._reference.cdata)
        return found


def number_of(storage: torch.UntypedStorage) -> int:
    """Return what tells living storages from each other."""
    return int(storage._cdata)
