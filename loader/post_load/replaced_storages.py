"""Parameters that had one memory before one of them was shared.

While a model loads, its parameters are shared as they come. A later one may be a view of memory
that an earlier one had (files of `torch.save` keep such ties): then neither is shared, so that they
stay what plain loading makes of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tensor_dedup.loader.residents.param_data import (
    WeakStorage,
    number_of,
    param_data,
    set_param_data,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ReplacedView:
    """What a parameter was before: a view of a storage, from byte `start` to byte `end`."""

    parameter: nn.Parameter
    start: int
    end: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Make the parameter that view again."""
        dtype = param_data(self.parameter).dtype
        data = torch.empty(0, dtype=dtype, device=storage.device)
        set_param_data(self.parameter, data.set_(storage, self.offset, self.shape, self.stride))


@dataclass(slots=True)
class _Storage:
    """The parts of one storage that parameters had, in order; none overlaps another."""

    reference: WeakStorage  # keeps its number from being given to another storage
    formers: list[ReplacedView] = field(default_factory=list)


class ReplacedStorages:
    """What the shared parameters of one model were before. One thread."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def enter(self, parameter: nn.Parameter) -> None:
        """Note what a gap-free parameter is, just before it gets other memory."""
        data = param_data(parameter)
        storage = data.untyped_storage()
        found = self._storages.get(number_of(storage))
        if found is None:
            found = self._storages[number_of(storage)] = _Storage(WeakStorage(storage))
        start = int(data.storage_offset()) * data.itemsize
        former = ReplacedView(
            parameter,
            start,
            start + data.nbytes,
            int(data.storage_offset()),
            tuple(data.shape),
            tuple(data.stride()),
        )
        found.formers.insert(bisect_left(found.formers, start, key=_start), former)

    def overlapping(self, parameter: torch.Tensor) -> list[ReplacedView]:
        """Those that had a byte of the memory this parameter has now."""
        data = param_data(parameter)
        if data.layout is not torch.strided or data.is_meta or not data.nbytes:
            return []
        found = self._storages.get(number_of(data.untyped_storage()))
        if found is None:
            return []
        start = int(data.storage_offset()) * data.itemsize
        end = start + _span(data)
        first = bisect_left(found.formers, start, key=_end_before)
        after = bisect_left(found.formers, end, key=_start)
        return found.formers[first:after]


def _start(former: ReplacedView) -> int:
    return former.start


def _end_before(former: ReplacedView) -> int:
    return former.end - 1


def _span(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize
