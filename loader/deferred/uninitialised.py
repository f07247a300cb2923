"""Detect memory that has not been written to since `torch.empty` allocated it.

A model's constructor initialises some parameters, and leaves others uninitialised for the
checkpoint to fill. To tell them apart, the constructor's operations are watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_dedup.loader.deferred.operations import written
from tensor_dedup.loader.residents.param_data import WeakStorage, number_of

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.storage import VirtualStorage

_EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


class UninitialisedStorages:
    """The storages that `torch.empty` or a variant created and that were not written to since.

    Only storages created inside `with self.watching():` are included, and only operations of the
    thread that watches are seen. The object keeps no storage alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, WeakStorage] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: while it is active, this thread's torch operations are watched."""
        with _Mode(self):
            yield

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of `tensor` was created uninitialised and never written to."""
        return number_of(tensor.untyped_storage()) in self._storages

    def made(self, tensor: torch.Tensor) -> None:
        """Record that the storage of `tensor` was created uninitialised."""
        storage = tensor.untyped_storage()
        self._storages[number_of(storage)] = WeakStorage(storage)

    def touched(self, value: Any) -> None:
        """Record a write to `value`, a tensor, or to each tensor in it if it is a list or tuple.

        Other values are ignored.
        """
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            self._storages.pop(number_of(value.untyped_storage()), None)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.touched(each)


def surely_unwritten(storage: VirtualStorage) -> int:
    """Return a lower bound of the number of bytes of `storage` that no recorded write has filled.

    The result is the size of the storage minus the sizes of all writes. If writes overlap, more
    bytes may be unwritten.
    """
    done = sum(write.target.numel * write.target.dtype.itemsize for write in storage.writes)
    return max(0, storage.nbytes - done)


class _Dispatch:
    """The dispatch of the mode, in a class of its own for the same reason as the tracer's."""

    _uninitialised: UninitialisedStorages

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.name in _EMPTY and isinstance(out, torch.Tensor):
            self._uninitialised.made(out)
        for position, name in written(func):
            target = args[position] if position < len(args) else kwargs.get(name)
            self._uninitialised.touched(target)
        return out


class _Mode(_Dispatch, TorchDispatchMode):
    def __init__(self, uninitialised: UninitialisedStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uninitialised = uninitialised
