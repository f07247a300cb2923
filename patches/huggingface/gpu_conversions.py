"""Move shared tensors to a GPU, into read-only memory that models share.

Before the first parameter is converted, all tensors that the conversion moves to the GPU are looked
up there or transferred. GPU memory is allocated in handles of 2 MiB and more, so small tensors in a
model share a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tensor_dedup.loader.cuda.blocks import may_be_in_blocks
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.devices import with_room
from tensor_dedup.loader.cuda.transfers import HostContent, file_part, memory_part
from tensor_dedup.loader.post_load.batch import share_in_rounds
from tensor_dedup.loader.post_load.equal_untied import ReplicaAssigner
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import ReplicaKey
from tensor_dedup.memory_manager.errors import NoMemoryError

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.residents import DeviceResident, Views, Write
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.memory_manager.errors import BackendError

Function = Callable[[torch.Tensor], torch.Tensor]


class PendingTransfer(NamedTuple):
    """A parameter that is to be moved to a GPU.

    `source` is the key of the parameter's resident in host memory, and `target` is the key of the
    resident that the parameter is to use on the GPU.
    """

    parameter: nn.Parameter
    target: ReplicaKey
    source: ReplicaKey

    @property
    def is_cast(self) -> bool:
        """Whether the transfer changes the dtype."""
        return self.target.key != self.source.key


class GpuConversion:
    """The part of a model's conversion that moves its shared tensors to one GPU.

    Equal tensors of the model get separate residents on the GPU, which are called replicas. `taken`
    lists the replicas that the model uses there already. `failed` is the first error as text, or
    None. Use the object in one thread only.
    """

    def __init__(
        self,
        gpu: SharedGpu,
        views: Views,
        manager: DeviceManagerResidents,
        taken: Iterable[ReplicaKey],
    ) -> None:
        self._gpu: Final = gpu
        self._views: Final = views
        self._builds: Final = DeviceBuilds(gpu, manager)
        self._replicas = ReplicaAssigner(taken)
        self.failed: str | None = None

    def transfer(
        self, pending: Sequence[PendingTransfer], function: Function
    ) -> dict[int, torch.Tensor]:
        """Transfer the parameters in `pending` to the GPU, or use shared tensors that are there.

        Return a dict that maps the id of each parameter to its tensor on the GPU. Parameters that
        could not be transferred, for example for lack of memory, are left out of the dict.
        `function` is the converting function, which is used for casts.
        """
        brought: dict[int, torch.Tensor] = {}

        def share(batch: Sequence[PendingTransfer]) -> None:
            for each, resident in zip(batch, self._residents(batch, function), strict=True):
                brought[id(each.parameter)] = self._views.tensor(resident)

        def refuse(_: Sequence[PendingTransfer], error: BackendError) -> bool:
            # As torch would have it, if there is room for that.
            self.failed = self.failed or str(error)
            return isinstance(error, NoMemoryError)  # and not of an old driver

        share_in_rounds(self._with_replicas(pending), _nbytes, share, refuse)
        return brought

    def _with_replicas(self, pending: Iterable[PendingTransfer]) -> Iterator[PendingTransfer]:
        """Yield each with a replica that no other name of the model has, best the same number."""
        for each in pending:
            key, replica = each.target
            if not self._replicas.claim(key, replica):
                replica = self._replicas.claim_first(key)
            yield each._replace(target=ReplicaKey(key, replica))

    def _residents(
        self, batch: Sequence[PendingTransfer], function: Function
    ) -> list[DeviceResident]:
        wanted = [
            (each.target, f"content:{each.target.key}", self._content(each, function))
            for each in batch
        ]
        return [resident for resident, _ in self._builds.get_or_build(wanted)]

    def _content(self, each: PendingTransfer, function: Function) -> HostContent | Write:
        data = param_data(each.parameter).detach()
        if each.is_cast or data.device.type != "cpu":
            return partial(self._make, each, function)
        resident = registry.lookup(*each.source)
        # Its slab rather than its mapping, which has no pages yet where nothing has read it.
        part = (
            file_part(resident.slab.fileno, resident.offset, resident.nbytes)
            if resident is not None and len(resident.extents) == 1
            else memory_part(data)
        )
        # The memory is sealed, and its digest known.
        content = HostContent(data.nbytes, [part], hashed=False)
        if not may_be_in_blocks(each.target.key, data.nbytes):
            return content
        # Whole: blocks would need the digests of its leaves.
        return lambda address: self._gpu.gpu.transfers.upload_range(address, content).wait()

    def _make(self, each: PendingTransfer, function: Function, address: int) -> None:
        """Write the tensor as torch converts it, into memory that goes when it was copied."""
        made = param_data(each.parameter)
        if each.is_cast:
            made = with_room(self._gpu.device, lambda: function(each.parameter))
        self._gpu.copy_of(made.detach())(address)


def _nbytes(each: PendingTransfer) -> int:
    return each.parameter.nbytes
