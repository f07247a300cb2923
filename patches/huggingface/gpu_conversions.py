"""A conversion that ends on a GPU: what it makes of shared tensors is read-only memory there.

All of a model that goes there is looked up, or made, before the first parameter is converted:
memory of a GPU comes in handles of 2 MiB and more, so small tensors lie in one together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, count
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tensor_dedup.loader.cuda.devices import with_room
from tensor_dedup.loader.cuda.shared import BATCH_BYTES, OWN_SLAB_BYTES, Write
from tensor_dedup.loader.cuda.upload import Uploader
from tensor_dedup.loader.residents.param_data import param_data
from tensor_dedup.loader.residents.registry import registry
from tensor_dedup.loader.residents.resident import ReplicaKey
from tensor_dedup.memory_manager.errors import BackendError, NoMemoryError

if TYPE_CHECKING:
    from torch import nn

    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.shared import SharedGpu

Function = Callable[[torch.Tensor], torch.Tensor]


class PendingTransfer(NamedTuple):
    """A parameter on its way, and what it is to be there."""

    parameter: nn.Parameter
    known: ReplicaKey  # there
    origin: ReplicaKey  # here


class GpuConversion:
    """What a conversion of one model leads to on one GPU. One thread, one conversion.

    `taken`: what other names of the model are there; no two become one.
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
        self._manager: Final = manager
        self._taken = set(taken)
        self.failed: str | None = None

    def bring(
        self, going: Sequence[PendingTransfer], function: Function
    ) -> dict[int, torch.Tensor]:
        """The tensors that the parameters become, by id; without those that cannot be shared."""
        brought: dict[int, torch.Tensor] = {}
        with ExitStack() as stack:
            uploader = _Uploads(self._gpu, stack)
            for batch in _batches(self._chosen(going)):
                try:
                    residents = self._residents(batch, function, uploader)
                    for each, resident in zip(batch, residents, strict=True):
                        brought[id(each.parameter)] = self._views.tensor(resident)
                except BackendError as error:
                    # As torch would have it, if there is room for that.
                    self.failed = self.failed or str(error)
                    if not isinstance(error, NoMemoryError):
                        break  # an old driver; what is smaller may still find room
        return brought

    def _chosen(self, going: Iterable[PendingTransfer]) -> Iterator[PendingTransfer]:
        """Each as the first copy of its content that no other name of the model is."""
        for each in going:
            copies = chain([each.known.copy], count())
            wanted = (ReplicaKey(each.known.key, copy) for copy in copies)
            known = next(known for known in wanted if known not in self._taken)
            self._taken.add(known)
            yield each._replace(known=known)

    def _residents(
        self, batch: Sequence[PendingTransfer], function: Function, uploads: _Uploads
    ) -> list[DeviceResident]:
        found = [self._gpu.lookup(each.known) for each in batch]
        missing = [each for each, one in zip(batch, found, strict=True) if one is None]
        wanted = [
            (each.known, f"content:{each.known.key}", self._writer(each, function, uploads))
            for each in missing
        ]
        made = iter(self._gpu.get_or_build(wanted, self._manager) if wanted else [])
        return [one if one is not None else next(made)[0] for one in found]

    def _writer(self, each: PendingTransfer, function: Function, uploads: _Uploads) -> Write:
        resident = registry.lookup(*each.origin)
        if each.known.key == each.origin.key and resident is not None:
            return uploads.writer(resident.slab.fileno, resident.offset, resident.nbytes)

        def write(address: int) -> None:
            # Cast as torch casts it, into memory that goes when it was copied.
            made = param_data(each.parameter)
            if _changes(each):
                made = with_room(self._gpu.device, lambda: function(each.parameter))
            self._gpu.copy_of(made.detach())(address)

        return write


class _Uploads:
    """Pinned buffers for one conversion, made when the first is needed."""

    def __init__(self, gpu: SharedGpu, stack: ExitStack) -> None:
        self._gpu = gpu
        self._stack = stack
        self._uploader: Uploader | None = None

    def writer(self, fd: int, start: int, nbytes: int) -> Write:
        """Who copies sealed memory of the host there. Its digest is known: nothing is hashed."""

        def write(address: int) -> None:
            if self._uploader is None:
                ordinal = self._gpu.gpu.device.ordinal
                self._uploader = self._stack.enter_context(Uploader(ordinal, self._gpu.kind))
            self._uploader.writer(fd, start, nbytes, hashed=False)(address)

        return write


def _changes(each: PendingTransfer) -> bool:
    return each.known.key != each.origin.key


def _batches(going: Iterable[PendingTransfer]) -> Iterator[list[PendingTransfer]]:
    """Runs that fill a slab each; a large tensor by itself."""
    batch: list[PendingTransfer] = []
    size = 0
    for each in going:
        nbytes = each.parameter.nbytes
        if nbytes >= OWN_SLAB_BYTES:
            yield [each]
            continue
        batch.append(each)
        size += nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
