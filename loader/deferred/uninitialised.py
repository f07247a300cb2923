"""Detect memory that has not been written to since `torch.empty` allocated it.

A model's constructor leaves some parameters uninitialised, for the checkpoint to fill, and
initialises others. To tell them apart, its operations are watched.
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
    """The storages created by `torch.empty` or a variant while `watching` and not written since.

    It keeps no storage alive. Only operations of the watching thread are seen.
    """

    def __init__(self) -> None:
        self._storages: dict[int, WeakStorage] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's torch operations within the block."""
        with _Mode(self):
            yield

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor was created uninitialised and never written to."""
        return number_of(tensor.untyped_storage()) in self._storages

    def made(self, tensor: torch.Tensor) -> None:
        """Record that the storage of a tensor was created uninitialised."""
        storage = tensor.untyped_storage()
        self._storages[number_of(storage)] = WeakStorage(storage)

    def touched(self, value: Any) -> None:
        """Record a write to a tensor, or to each tensor in a list or tuple."""
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            self._storages.pop(number_of(value.untyped_storage()), None)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.touched(each)


def surely_unwritten(storage: VirtualStorage) -> int:
    """Return a lower bound of the number of bytes that no recorded write has filled.

    Bytes written twice count twice, so the true number may be larger.
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
