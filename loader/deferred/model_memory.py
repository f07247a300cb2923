"""Give the parameters of a model their memory, shared or private, and record which it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

import torch

from tensor_dedup.loader.cuda.residents import DeviceResident
from tensor_dedup.loader.deferred.parameters import replace_data
from tensor_dedup.loader.deferred.storage import as_view
from tensor_dedup.loader.residents.resident import Resident
from tensor_dedup.loader.residents.slab import SharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensor_dedup.loader.checkpoint_io.sources import SourceTensor
    from tensor_dedup.loader.deferred.evaluate import Evaluator
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.not_shared import LoadLedger
    from tensor_dedup.loader.residents.provider import AnyResident, ResidentProvider


@dataclass(slots=True)
class ModelMemory:
    """The memory of one model that is being loaded. For one thread.

    Its methods give each final tensor memory in the model, and record in the ledger whether the
    memory is shared. `own` has the residents and layer records that this load has made. A tensor
    that uses one of these does not count as shared. `residents` has the resident of each parameter
    that is a mapping of one, by name.
    """

    evaluator: Evaluator
    provider: ResidentProvider
    ledger: LoadLedger
    own: WeakSet[object] = field(default_factory=WeakSet)
    residents: WeakValueDictionary[str, AnyResident] = field(default_factory=WeakValueDictionary)
    _flat: dict[int, torch.Tensor] = field(default_factory=dict)  # private, by id of the storage

    def install(
        self, each: DeferredParameter, resident: AnyResident, *, made: bool = False
    ) -> None:
        """Make the parameter `each` a mapping of `resident`, the shared tensor with its bytes.

        `made` says that this load built the resident for this parameter. If the resident cannot be
        mapped, the parameter gets private memory, and the ledger has the reason.
        """
        try:
            tensor = self.provider.map(resident)
        except SharedMemoryError as error:
            self.keep_private(each, str(error))
            return
        if made:
            self.own.add(resident)
        self.use(each, resident, tensor, made=made)

    def use(
        self,
        each: DeferredParameter,
        resident: AnyResident,
        tensor: torch.Tensor,
        *,
        made: bool = False,
    ) -> None:
        """Give the parameter `each` the memory of `tensor`, which is a mapping of `resident`.

        `made` says that this load built the resident for this parameter.
        """
        self._place(each, tensor)
        self.residents[each.name] = resident
        self.enter(each.name, each.nbytes, resident, made=made, sources=each.sources)

    def keep_private(
        self, each: DeferredParameter, reason: str, content: torch.Tensor | None = None
    ) -> None:
        """Give the parameter `each` private memory with its content, and record `reason`.

        `content` is the content if it was computed already. Otherwise it is computed here.
        Parameters that share a storage still share it.
        """
        view = each.require_view()
        key = id(view.storage)
        if key not in self._flat:
            flat = torch.empty(view.storage.nbytes, dtype=torch.uint8)
            if content is not None:
                as_view(flat, view).copy_(content)
            else:
                self.evaluator.fill(view, flat)
            self._flat[key] = self.provider.private(flat)
        self._place(each, as_view(self._flat[key], view))
        self.ledger.add(each.name, each.nbytes, shared=False, sources=each.sources)
        self.ledger.skip(each.name, reason)

    def enter(
        self,
        name: str,
        nbytes: int,
        used: object,
        *,
        made: bool,
        sources: Iterable[SourceTensor] = (),
    ) -> None:
        """Record the final tensor `name` in the ledger, with its size and source tensors.

        `used` is the resident or layer record whose memory the tensor uses, or None for private
        memory. `made` says that this load has just filled the memory. The tensor counts as shared
        if it uses a resident or record that this load did not build.
        """
        shared = not made and used is not None and used not in self.own
        self.ledger.add(name, nbytes, shared=shared, made=made, sources=sources)
        if made and isinstance(used, Resident | DeviceResident):
            self.ledger.note_leaves(used.leaf_shared_bytes)

    def _place(self, each: DeferredParameter, tensor: torch.Tensor) -> None:
        replace_data(each.parameter, tensor)
        each.installed = True
        if each.view is not None:
            self.evaluator.release(each.view)
