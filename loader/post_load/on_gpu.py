"""Share the parameters that a loader has put directly on a GPU, or that were moved there.

The parameters are hashed on their way through page-locked buffers. Those without an equal resident
(shared tensor) are then copied on the GPU into shared memory, 256 MiB at a time. The private memory
of all shared parameters returns to torch's allocator.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from tensor_dedup.loader.cuda.blocks import BlockLog
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.device_digests import hash_on_gpu
from tensor_dedup.loader.cuda.devices import DEVICES
from tensor_dedup.loader.cuda.manager_residents import (
    DeviceManagerResidents,
    device_manager_residents,
)
from tensor_dedup.loader.not_shared import NotShared
from tensor_dedup.loader.post_load.batch import NamedParameter, reason_of_class, share_in_rounds
from tensor_dedup.loader.post_load.equal_untied import ReplicaAssigner, root_module
from tensor_dedup.loader.residents.compare import is_forgeable
from tensor_dedup.loader.residents.param_data import number_of, param_data, set_param_data
from tensor_dedup.loader.residents.resident import (
    ReplicaKey,
    digest_of,
    key_anywhere,
    sharable_anywhere,
)
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.post_load.batch import DedupContext


class GpuShare(NamedTuple):
    """The account of one parameter that is now shared on a GPU.

    - `made` is True if the resident (shared tensor) was built for this parameter.
    - `before` is True if the resident existed already.
    - `leaf_shared_bytes` is the number of bytes of a new resident that lie in GPU memory of older
      residents.
    """

    made: bool
    before: bool
    leaf_shared_bytes: int = 0


class _Hashed(NamedTuple):
    """The digest of a tensor and, where blocks need them, its leaf digests."""

    digest: str
    leaves: Sequence[bytes] = ()


class GpuModuleDedup:
    """The deduplication of one model's parameters on GPUs. For one thread that holds the load lock.

    `shares` maps the id of a shared parameter to its `GpuShare`. `reasons` maps the id of a
    parameter that stays private to the reason.
    """

    def __init__(self, model: nn.Module, context: DedupContext) -> None:
        self._model = model
        self._context = context
        self._replicas = ReplicaAssigner()
        self.shares: dict[int, GpuShare] = {}
        self.reasons: dict[int, str] = {}
        self._blocks = BlockLog()
        self._names: dict[int, tuple[ReplicaKey, Sequence[bytes]]] = {}

    def share(self, named: Sequence[NamedParameter]) -> None:
        """Share those parameters in `named` that are on a GPU, and ignore the others.

        The results are in `shares` and `reasons`. No thread may write to the parameters meanwhile.
        """
        here = [(gpu, item) for item in named if (gpu := DEVICES.at(item[1].device)) is not None]
        here = [(gpu, item) for gpu, item in here if item[1].device.type != "cpu"]
        if not here:
            return
        root = root_module(self._model)
        whole = [param_data(each) for each in chain(root.parameters(), root.buffers())]
        held = Counter(
            number_of(each.untyped_storage())
            for each in whole
            if each.layout is torch.strided and each.device.type not in ("cpu", "meta")
        )
        self._replicas = ReplicaAssigner(k for d in whole if (k := DEVICES.known(d)) is not None)
        whole.clear()  # or their memory would stay until all are shared
        by_gpu: dict[SharedGpu, list[NamedParameter]] = {}
        for gpu, item in here:
            if self._is_candidate(item[1], held):
                by_gpu.setdefault(gpu, []).append(item)
        for gpu, items in by_gpu.items():
            self._share_on(gpu, items)
        self._names.clear()

    def _is_candidate(self, parameter: nn.Parameter, held: Counter[int]) -> bool:
        data = param_data(parameter)
        if DEVICES.known(data) is not None:
            self.shares[id(parameter)] = GpuShare(made=False, before=True)
            return False
        reason = reason_of_class(parameter)
        if reason is None and not sharable_anywhere(data):
            reason = NotShared.UNSHARABLE_LAYOUT
        if reason is None and held[number_of(data.untyped_storage())] > 1:
            reason = NotShared.SHARED_STORAGE
        if reason is None and data.nbytes < self._context.config.min_tensor_bytes:
            reason = NotShared.BELOW_MIN_BYTES
        if reason is None and self._context.config.verifies_bytes:
            reason = NotShared.COMPARED_ON_GPU
        if reason is not None:
            self.reasons[id(parameter)] = reason
        return reason is None and data.nbytes > 0

    def _share_on(self, gpu: SharedGpu, items: Sequence[NamedParameter]) -> None:
        where, name = self._context.config.memory_manager, type(self._model).__name__
        manager = device_manager_residents(where, name, gpu.gpu)

        def refuse(batch: Sequence[NamedParameter], error: BackendError) -> bool:
            self.reasons.update((id(each), str(error)) for _, each in batch)
            return True

        try:
            with gpu.gpu.entered():
                gpu.gpu.driver.synchronize()  # what loaded them may be under way
        except BackendError as error:
            refuse(items, error)
            return

        share_in_rounds(
            items, lambda item: item[1].nbytes, lambda each: self._share(gpu, each, manager), refuse
        )

    def _share(
        self, gpu: SharedGpu, batch: Sequence[NamedParameter], manager: DeviceManagerResidents
    ) -> None:
        self._name(gpu, batch)
        wanted = []
        for _, parameter in batch:
            known, leaves = self._names[id(parameter)]
            content = gpu.copy_of(param_data(parameter), leaves)
            wanted.append((known, f"content:{known.key}", content))
        views = gpu.views_of(root_module(self._model))
        found = DeviceBuilds(gpu, manager, self._blocks).get_or_build(wanted)
        # All are shared, or none. Not as a comprehension: it would end tensors, which calls Python,
        # while its error is on its way.
        mapped: list[torch.Tensor] = []
        for resident, _ in found:
            mapped.append(views.tensor(resident))
        for (_, parameter), tensor, (resident, made) in zip(batch, mapped, found, strict=True):
            set_param_data(parameter, tensor)
            shared = resident.leaf_shared_bytes if made else 0
            self.shares[id(parameter)] = GpuShare(made, not made, shared)

    def _name(self, gpu: SharedGpu, batch: Sequence[NamedParameter]) -> None:
        """Hash the parameters of `batch`, unless that was done, and give each its replica key.

        It is the first replica that no other name of the model has.
        """
        new = [each for _, each in batch if id(each) not in self._names]
        tensors = [param_data(each) for each in new]
        for each, tensor, hashed in zip(new, tensors, self._hashed(gpu, tensors), strict=True):
            key = key_anywhere(tensor, hashed.digest)
            known = ReplicaKey(key, self._replicas.claim_first(key))
            self._names[id(each)] = known, hashed.leaves

    def _hashed(self, gpu: SharedGpu, tensors: Sequence[torch.Tensor]) -> list[_Hashed]:
        algorithm = self._context.config.hash_algorithm
        began = time.perf_counter()
        if algorithm == "blake3":
            found = [_Hashed(each.digest, each.leaves) for each in hash_on_gpu(gpu.gpu, tensors)]
        else:
            found = [_Hashed(digest_of(each, algorithm)) for each in tensors]
            assert not any(is_forgeable(each.digest) for each in found)  # those verify bytes
        self._context.hash_seconds += time.perf_counter() - began
        self._context.bytes_hashed += sum(each.nbytes for each in tensors)
        return found
