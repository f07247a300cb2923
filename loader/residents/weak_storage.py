"""A reference to a tensor's storage that does not keep it."""

from typing import Any, Final

import torch
from torch.multiprocessing import reductions

_reference_to: Final[Any] = reductions.StorageWeakRef  # not annotated


class WeakStorage:
    """While this lives the storage's `number` is given to no other one, be its memory long gone."""

    __slots__ = ("_reference", "number")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = _reference_to(storage)
        self.number: Final = number_of(storage)

    @property
    def expired(self) -> bool:
        """Does nobody hold the storage any more?"""
        return bool(self._reference.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, held by the caller from now on."""
        make: Any = torch.UntypedStorage._new_with_weak_ptr
        found: torch.UntypedStorage | None = make(self._reference.cdata)
        return found


def number_of(storage: torch.UntypedStorage) -> int:
    """What tells storages that are alive from each other."""
    return int(storage._cdata)
