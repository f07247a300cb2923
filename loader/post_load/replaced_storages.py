"""The memory that parameters had before they were shared.

While a model loads, its parameters are shared one after the other. A later parameter may turn out
to be a view of the memory that an earlier parameter had, as files of `torch.save` allow. The
earlier parameter then gets that memory back, and neither is shared.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from tensor_dedup.loader.residents.param_data import (
    WeakStorage,
    number_of,
    param_data,
    set_param_data,
)

if TYPE_CHECKING:
    from torch import nn


class ReplacedView(NamedTuple):
    """The memory that `parameter` had before sharing: a part of a torch storage.

    The part consists of the bytes from `start` to `end` of the storage. `offset`, `shape` and
    `stride` are those of the parameter's tensor in the storage, in elements.
    """

    parameter: nn.Parameter
    start: int
    end: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Give the parameter its former memory back. `storage` must be its former storage."""
        dtype = param_data(self.parameter).dtype
        data = torch.empty(0, dtype=dtype, device=storage.device)
        set_param_data(self.parameter, data.set_(storage, self.offset, self.shape, self.stride))


@dataclass(slots=True)
class _Storage:
    """The former views of one storage, sorted; none overlaps another."""

    reference: WeakStorage  # keeps its number from being given to another storage
    views: list[ReplacedView] = field(default_factory=list)


class ReplacedStorages:
    """The table of the memory that parameters of one model had before they were shared.

    The table does not keep that memory alive. For one thread.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def enter(self, parameter: nn.Parameter) -> None:
        """Record the memory of `parameter`, which must have no gaps, just before it is shared."""
        data = param_data(parameter)
        storage = data.untyped_storage()
        found = self._storages.get(number_of(storage))
        if found is None:
            found = self._storages[number_of(storage)] = _Storage(WeakStorage(storage))
        start = int(data.storage_offset()) * data.itemsize
        view = ReplacedView(
            parameter,
            start,
            start + data.nbytes,
            int(data.storage_offset()),
            tuple(data.shape),
            tuple(data.stride()),
        )
        found.views.insert(bisect_left(found.views, start, key=_start), view)

    def overlapping(self, tensor: torch.Tensor) -> list[ReplacedView]:
        """Return the recorded views whose memory overlaps that of `tensor`."""
        data = param_data(tensor)
        if data.layout is not torch.strided or data.is_meta or not data.nbytes:
            return []
        found = self._storages.get(number_of(data.untyped_storage()))
        if found is None:
            return []
        start = int(data.storage_offset()) * data.itemsize
        end = start + _span(data)
        first = bisect_left(found.views, start, key=_last)
        after = bisect_left(found.views, end, key=_start)
        return found.views[first:after]


def _start(view: ReplacedView) -> int:
    return view.start


def _last(view: ReplacedView) -> int:
    return view.end - 1


def _span(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize
