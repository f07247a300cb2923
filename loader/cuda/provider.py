"""The final tensors of a vLLM load on a GPU: built in borrowed host memory, uploaded, mapped.

Nothing of them stays in host memory, and nothing is on the GPU twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from tensor_dedup.loader.cuda.residents import DeviceResident, Views
from tensor_dedup.loader.cuda.shared import BATCH_BYTES, OWN_SLAB_BYTES, SharedGpu, Write
from tensor_dedup.loader.cuda.upload import Uploader
from tensor_dedup.loader.residents.resident import ReplicaKey, key_anywhere
from tensor_dedup.loader.residents.slab import OutOfMemoryError
from tensor_dedup.memory_manager.errors import BackendError

if TYPE_CHECKING:
    from tensor_dedup.loader.cuda.manager_residents import Borrowing
    from tensor_dedup.loader.residents.manager import ResidentRequest
    from tensor_dedup.loader.residents.provider import AnyResident
    from tensor_dedup.types import ResidentKey

# What engines write to while they run, or before they capture graphs: a write to a read-only page
# ends the process's use of the GPU. By the last part of the name, without a leading underscore.
_WRITTEN: Final = frozenset(
    {"k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "expert_map", "k_zero_point"}
)


class GpuProvider:
    """See Home. A context manager: it has pinned buffers."""

    own_slab_bytes: Final = OWN_SLAB_BYTES
    batch_bytes: Final = BATCH_BYTES
    local: Final = False
    plain: Final = True

    def __init__(self, gpu: SharedGpu, borrowing: Borrowing) -> None:
        self._gpu: Final = gpu
        self._borrowing: Final = borrowing
        self._views: Final = Views(gpu.kind)
        self._uploader: Uploader | None = None

    def close(self) -> None:
        """Let the buffers go."""
        if self._uploader is not None:
            self._uploader.__exit__(None, None, None)
            self._uploader = None

    @property
    def not_lent(self) -> str | None:
        """See Home."""
        return self._borrowing.failed or self._borrowing.refused

    def reason(self, name: str) -> str | None:
        """See Home."""
        if name.rpartition(".")[2].lstrip("_") in _WRITTEN:
            return "engines write to it, and memory shared on a GPU is read-only"
        return None

    def by_recipe(self, recipe: str, wanted: ResidentKey) -> DeviceResident | None:
        """See Home."""
        found = self._gpu.recipes.get(recipe)
        if found is None and wanted.digest:
            found = self._gpu.lookup(ReplicaKey(wanted, 0), self._borrowing)
        elif found is None:
            lent = self._borrowing.by_recipe(recipe, wanted)
            found = None if lent is None else self._gpu.enter(ReplicaKey(lent.key, 0), lent)
        if found is not None:
            self.note(recipe, found)
        return found

    def by_content(self, key: ResidentKey) -> DeviceResident | None:
        """See Home."""
        return self._gpu.lookup(ReplicaKey(key, 0))

    def note(self, recipe: str, resident: AnyResident) -> None:
        """See Home."""
        assert isinstance(resident, DeviceResident)
        self._gpu.recipes[recipe] = resident

    def get_or_build(self, wanted: Sequence[ResidentRequest]) -> list[tuple[DeviceResident, bool]]:
        """See Home."""
        items = [
            (
                ReplicaKey(key_anywhere(each.tensor, each.digest), 0),
                each.key,
                self._writer(each.tensor),
            )
            for each in wanted
        ]
        try:
            return self._gpu.get_or_build(items, self._borrowing)
        except BackendError as error:
            raise OutOfMemoryError(str(error)) from error

    def _writer(self, tensor: torch.Tensor) -> Write:
        if tensor.device.type != "cpu":
            return self._gpu.copy_of(tensor)  # processed on the GPU

        def write(address: int) -> str | None:
            if self._uploader is None:
                self._uploader = Uploader(self._gpu.gpu.device.ordinal, self._gpu.kind)
            return self._uploader.sender(tensor)(address)

        return write

    def map(self, resident: AnyResident) -> torch.Tensor:
        """See Home."""
        assert isinstance(resident, DeviceResident)
        try:
            return self._views.tensor(resident)
        except BackendError as error:
            raise OutOfMemoryError(str(error)) from error

    def private(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Home."""
        there = self._gpu.device
        return self._gpu.gpu.with_room(lambda: tensor.to(there), torch.OutOfMemoryError)
