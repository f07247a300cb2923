"""The provider of a vLLM load's shared tensors on a GPU.

Final tensors (the weights as vLLM uses them, after fusing and slicing) are uploaded to the GPU and
mapped read-only into the model. Each final tensor is on the GPU once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.loader.cuda.blocks import may_be_in_blocks
from tensor_dedup.loader.cuda.builds import DeviceBuilds
from tensor_dedup.loader.cuda.known_blocks import KnownBlocks
from tensor_dedup.loader.cuda.new_slabs import BATCH_BYTES, OWN_SLAB_BYTES, ROUND_BYTES
from tensor_dedup.loader.cuda.residents import DeviceContent, DeviceResident, Views
from tensor_dedup.loader.cuda.transfers import HostContent, memory_part
from tensor_dedup.loader.residents.partial import share_in_part
from tensor_dedup.loader.residents.resident import ReplicaKey
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.manager_residents import DeviceManagerResidents
    from tensor_dedup.loader.cuda.residents import UnreadTensor
    from tensor_dedup.loader.cuda.shared import SharedGpu
    from tensor_dedup.loader.residents.manager import ResidentQuery, ResidentRequest
    from tensor_dedup.loader.residents.partial import Content, KnownTensor
    from tensor_dedup.loader.residents.provider import AnyResident
    from tensor_dedup.types import ResidentKey

_log = logging.getLogger(__name__)
# What engines write to while they run, or before they capture graphs: a write to a read-only page
# ends the process's use of the GPU. By the last part of the name, without a leading underscore.
_WRITTEN: Final = frozenset(
    {"k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "expert_map", "k_zero_point"}
)


class GpuProvider:
    """The `ResidentProvider` of one load on a GPU: it finds, uploads and maps residents.

    A resident is an immutable tensor in memory that models share. Tensors that consist of source
    tensors side by side go from their files to the GPU (`build_unread`). All others are computed in
    host memory first. For one thread. With `apart`, tensors of equal bytes have addresses of their
    own, because each may get other contents there.
    """

    own_slab_bytes: Final = OWN_SLAB_BYTES
    batch_bytes: Final = BATCH_BYTES
    round_bytes: Final = ROUND_BYTES
    local: Final = False
    plain: Final = True

    def __init__(
        self, gpu: SharedGpu, manager: DeviceManagerResidents, *, apart: bool = False
    ) -> None:
        self._gpu: Final = gpu
        self._manager: Final = manager
        self._views: Final = Views(gpu.kind, apart=apart)
        self._builds: Final = DeviceBuilds(gpu, manager)

    @property
    def not_lent(self) -> str | None:
        """The reason why the requested memory manager does not hold all residents, or None."""
        return self._manager.not_lent

    @property
    def not_by_leaf(self) -> str | None:
        """The reason why large tensors do not share blocks of 16 MiB on this GPU, or None."""
        return self._builds.log.why_whole or self._manager.not_by_leaf

    def reason(self, name: str) -> str | None:
        """Return why the tensor `name` must stay private, or None if it can be shared.

        Tensors that engines write to stay private, because shared memory on a GPU is read-only.
        """
        if name.rpartition(".")[2].lstrip("_") in _WRITTEN:
            return "engines write to it, and memory shared on a GPU is read-only"
        return None

    def find(
        self, queries: Sequence[ResidentQuery], *, ask_manager: bool = True
    ) -> list[DeviceResident | None]:
        """Look up residents; return them in order, or None for each miss. No tensor data is read.

        This process is searched first. If `ask_manager` is True, the memory manager is then asked
        for what is missing. Keep references to the results, because the tables hold only weak ones.
        """
        found = [self._in_this_process(each) for each in queries]
        if not ask_manager:
            return found
        missing = [each for each, here in zip(queries, found, strict=True) if here is None]
        lent = iter(self._manager.find(missing))
        return [
            self._entered(each, here if here is not None else next(lent))
            for each, here in zip(queries, found, strict=True)
        ]

    def _in_this_process(self, query: ResidentQuery) -> DeviceResident | None:
        found = self._gpu.recipes.get(query.recipe)
        if found is None and query.key.digest:
            found = self._gpu.lookup(ReplicaKey(query.key, 0))
        return found

    def _entered(self, query: ResidentQuery, found: DeviceResident | None) -> DeviceResident | None:
        if found is None:
            return None
        first = self._gpu.enter(ReplicaKey(found.key, 0), found)
        self.note(query.recipe, first)
        return first

    def by_content(self, key: ResidentKey) -> DeviceResident | None:
        """Return this process's resident with this `key`, or None."""
        return self._gpu.lookup(ReplicaKey(key, 0))

    def note(self, recipe: str, resident: AnyResident) -> None:
        """Register `resident` under `recipe`, for as long as the resident lives."""
        assert isinstance(resident, DeviceResident)
        self._gpu.recipes[recipe] = resident

    def get_or_build(
        self, requests: Sequence[ResidentRequest]
    ) -> list[tuple[DeviceResident, bool]]:
        """Return a resident for each request, in order, and whether this call wrote it to the GPU.

        Raises:
            OutOfMemoryError: The GPU has no room, or its driver refuses.
        """
        items = [(ReplicaKey(each.key, 0), each.recipe, self._content(each)) for each in requests]
        with _without_room():
            return self._builds.get_or_build(items)

    def build_unread(self, wanted: Sequence[UnreadTensor]) -> list[tuple[DeviceResident, bool]]:
        """Upload tensors from their files; return the resident of each, and whether it is new.

        The digests of the tensors become known on the way. If a resident has the bytes after all,
        it is used, and the memory of the upload is freed. Errors of reading and of
        `UnreadTensor.learned` are passed on.

        Raises:
            OutOfMemoryError: The GPU has no room, or its driver refuses.
        """
        with _without_room():
            return self._builds.build_unread(wanted)

    def share_known(
        self, tensor: KnownTensor, accept: Callable[[AnyResident], bool]
    ) -> tuple[AnyResident, bool] | None:
        """Build a tensor of which others have blocks, and upload only the other blocks.

        Returns the resident, and whether this call made it. Returns None if no block of it is
        resident or known by its digests, if there is no room, or if it is not accepted. Errors of
        reading and of `accept` are passed on.
        """
        try:
            memory = KnownBlocks(self._gpu, self._manager, self._builds)
            return share_in_part(tensor, memory, accept)
        except BackendError as error:
            _log.debug("%s: not shared in part: %s", tensor.recipe, str(error))
            return None  # met again, and said, on the ordinary way

    def note_contents(self, resident: AnyResident, contents: Sequence[Content]) -> None:
        """Do nothing: a tensor in blocks has its leaf digests."""

    def _content(self, request: ResidentRequest) -> HostContent | DeviceContent:
        tensor = request.tensor
        if tensor.device.type != "cpu":
            return self._gpu.copy_of(tensor, request.leaves)  # processed on the GPU
        if request.leaves:
            return HostContent(tensor.nbytes, [memory_part(tensor)], leaves=request.leaves)
        # Of a large tensor the leaf digests are computed on the way: its blocks need them.
        hashed = may_be_in_blocks(request.key, tensor.nbytes)
        return HostContent(tensor.nbytes, [memory_part(tensor)], hashed=hashed)

    def map(self, resident: AnyResident) -> torch.Tensor:
        """Return `resident` as a read-only tensor, mapped for this load's model.

        Raises:
            OutOfMemoryError: The resident cannot be mapped.
        """
        assert isinstance(resident, DeviceResident)
        with _without_room():
            return self._views.tensor(resident)

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private copy of `tensor`, which lies in host memory, on the GPU.

        Raises:
            torch.OutOfMemoryError: The GPU has no room.
        """
        there = self._gpu.device
        return self._gpu.gpu.with_room(lambda: tensor.to(there, copy=True), torch.OutOfMemoryError)


@contextmanager
def _without_room() -> Iterator[None]:
    """Context manager: raise OutOfMemoryError instead of BackendError."""
    try:
        yield
    except BackendError as error:
        raise OutOfMemoryError(str(error)) from error
