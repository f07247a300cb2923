"""Sharing the parameters that a loader has put straight onto a GPU, or that were moved there.

They are hashed there, or fetched for it where that cannot be; what becomes a resident is copied on
the GPU, a slab's worth at a time, and the private memory goes back to torch's allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.manager_residents import (
    DeviceManagerResidents,
    device_manager_residents,
)
from tensor_dedup.loader.cuda.shared import BATCH_BYTES, OWN_SLAB_BYTES, SharedGpu
from tensor_dedup.loader.deferred.session import SHARED_STORAGE
from tensor_dedup.loader.post_load import root_module
from tensor_dedup.loader.post_load.parameter_classes import NamedParameter, reason_of_class
from tensor_dedup.loader.residents.compare import is_forgeable
from tensor_dedup.loader.residents.param_data import number_of, param_data, set_param_data
from tensor_dedup.loader.residents.resident import ReplicaKey, digest_of, sharable_anywhere
from tensor_dedup.loader.torch_dtypes import dtype_name
from tensor_dedup.memory_manager.errors import BackendError
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.post_load.batch import DedupContext

_COMPARED: Final = "on a GPU nothing is compared byte by byte: it stays private with verify_bytes"


class GpuShare(NamedTuple):
    """A parameter that is shared on a GPU now. `made`: for it; `before`: resident before."""

    made: bool
    before: bool


class GpuAdoption:
    """Shares the parameters of one model that are on GPUs. One thread, under the load lock.

    `shares` and `reasons` are by id of the parameter. Nobody may write to them meanwhile.
    """

    def __init__(self, model: nn.Module, terms: DedupContext) -> None:
        self._model = model
        self._terms = terms
        self._taken: set[ReplicaKey] = set()
        self.shares: dict[int, GpuShare] = {}
        self.reasons: dict[int, str] = {}

    def adopt(self, named: Sequence[NamedParameter]) -> None:
        """Share these of the model's; those that are on no GPU are passed over."""
        here = [(gpu, item) for item in named if (gpu := DEVICES.at(item[1].device)) is not None]
        here = [(gpu, item) for gpu, item in here if item[1].device.type != "cpu"]
        if not here:
            return
        whole = list(root_module.root_module(self._model).parameters())
        held = Counter(number_of(param_data(each).untyped_storage()) for _, (_, each) in here)
        self._taken = {k for each in whole if (k := DEVICES.known(param_data(each))) is not None}
        by_gpu: dict[SharedGpu, list[NamedParameter]] = {}
        for gpu, item in here:
            if self._is_new(item[1], held):
                by_gpu.setdefault(gpu, []).append(item)
        for gpu, items in by_gpu.items():
            self._adopt(gpu, items)

    def _is_new(self, parameter: nn.Parameter, held: Counter[int]) -> bool:
        data = param_data(parameter)
        if DEVICES.known(data) is not None:
            self.shares[id(parameter)] = GpuShare(made=False, before=True)
            return False
        reason = reason_of_class(parameter)
        if reason is None and not sharable_anywhere(data):
            reason = "its type or layout cannot be shared"
        if reason is None and held[number_of(data.untyped_storage())] > 1:
            reason = SHARED_STORAGE
        if reason is None and data.nbytes < self._terms.config.min_tensor_bytes:
            reason = "it is below min_tensor_bytes"
        if reason is None and self._terms.config.verifies_bytes:
            reason = _COMPARED
        if reason is not None:
            self.reasons[id(parameter)] = reason
        return reason is None and data.nbytes > 0

    def _adopt(self, gpu: SharedGpu, items: Sequence[NamedParameter]) -> None:
        where, name = self._terms.config.memory_manager, type(self._model).__name__
        manager = device_manager_residents(where, name, gpu.gpu)
        for batch in _batches(items):
            try:
                self._share(gpu, batch, manager)
            except BackendError as error:
                self.reasons.update((id(each), str(error)) for _, each in batch)

    def _share(
        self, gpu: SharedGpu, batch: Sequence[NamedParameter], manager: DeviceManagerResidents
    ) -> None:
        known = [self._known(parameter) for _, parameter in batch]
        held = [gpu.lookup(each) is not None for each in known]
        wanted = [
            (each, f"content:{each.key}", gpu.copy_of(param_data(parameter)))
            for each, (_, parameter) in zip(known, batch, strict=True)
        ]
        views = gpu.views_of(root_module.root_module(self._model))
        made = gpu.get_or_build(wanted, manager)
        for (_, parameter), (resident, new), before in zip(batch, made, held, strict=True):
            set_param_data(parameter, views.tensor(resident))
            self.shares[id(parameter)] = GpuShare(new, before or not new)

    def _known(self, parameter: nn.Parameter) -> ReplicaKey:
        """What it is, as the first copy of its content that no other name of the model is."""
        data = param_data(parameter)
        digest = digest_of(data, self._terms.config.hash_algorithm)
        assert not is_forgeable(digest)  # those algorithms verify bytes
        self._terms.bytes_hashed += data.nbytes
        key = ResidentKey(dtype_name(data.dtype), tuple(data.shape), tuple(data.stride()), digest)
        wanted = (ReplicaKey(key, copy) for copy in count())
        known = next(known for known in wanted if known not in self._taken)
        self._taken.add(known)
        return known


def _batches(items: Iterable[NamedParameter]) -> Iterator[list[NamedParameter]]:
    batch: list[NamedParameter] = []
    size = 0
    for item in items:
        if item[1].nbytes >= OWN_SLAB_BYTES:
            yield [item]
            continue
        batch.append(item)
        size += item[1].nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
