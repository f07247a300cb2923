"""Look up residents by recipe, before any tensor data of the checkpoint is read.

A resident is a shared tensor in memory. A recipe describes how a tensor is computed from the
checkpoint's tensors, which it names by digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tensor_dedup.loader.deferred.layer_key import process_state, version_state
from tensor_dedup.loader.deferred.recipe import only_moves, whole_source
from tensor_dedup.loader.residents.manager import ResidentQuery
from tensor_dedup.loader.torch_dtypes import has_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.recipe import RecipeBook
    from tensor_dedup.loader.deferred.sharing_plan import SharingPlan
    from tensor_dedup.loader.residents.provider import AnyResident, ResidentProvider


@dataclass(slots=True)
class RecipeLookup:
    """The look-up of residents by the recipes of one load. For one thread.

    Residents that `find` has found are kept alive until `take` returns them, or until `close`.
    """

    plan: SharingPlan
    provider: ResidentProvider
    book: RecipeBook
    _state: str = field(default_factory=process_state)
    _versions: str = field(default_factory=version_state)
    _hits: dict[int, AnyResident] = field(default_factory=dict)  # by id of the parameter

    def key(self, each: DeferredParameter) -> str:
        """Return the key under which the recipe of the parameter `each` is looked up.

        All source tensors of the parameter must have their digests. What is computed has the
        settings of the process in its key. What is only moved has not: frameworks change settings
        while they run. vLLM's monitor of kernels sets TRITON_PRINT_AUTOTUNING when the first engine
        on a GPU is warm.
        """
        view = each.require_view()
        state = self._versions if only_moves(view) else self._state
        return f"recipe:{self.plan.config.hash_algorithm}:{state}:{self.book.digest(view)}"

    def find(self, parameters: Iterable[DeferredParameter]) -> None:
        """Look up the residents for the recipes of `parameters`, in one batch.

        Residents that are found are kept alive until `take` returns them. Parameters that stay
        private, or whose sources have no digests yet, are skipped. Pass many parameters at once,
        because a memory manager is asked once for each batch.
        """
        wanted = [
            (each, query)
            for each in parameters
            if id(each) not in self._hits and (query := self._query(each)) is not None
        ]
        found = self.provider.find([query for _, query in wanted])
        for (each, _), resident in zip(wanted, found, strict=True):
            if resident is not None:
                self._hits[id(each)] = resident

    def take(self, each: DeferredParameter) -> AnyResident | None:
        """Return the resident for the parameter `each`, or None if there is none.

        The resident was found by `find`, or has been registered in this process since then. From
        now on the caller must keep the resident alive.
        """
        return self._hits.pop(id(each), None) or self._made_meanwhile(each)

    def _made_meanwhile(self, each: DeferredParameter) -> AnyResident | None:
        query = self._query(each)
        if query is None:
            return None
        return self.provider.find([query], ask_manager=False)[0]

    def _query(self, each: DeferredParameter) -> ResidentQuery | None:
        """Return what to look for, or None if it is not known yet or not shared."""
        if each.installed or self.plan.reason(each) is not None:
            return None
        if not has_name(each.parameter.dtype) or not each.known:
            return None
        source = whole_source(each.require_view())
        content = source.digest if source is not None else None
        return ResidentQuery(self.key(each), replace(each.geometry, digest=content or ""))

    def note(self, each: DeferredParameter, resident: AnyResident) -> None:
        """Register `resident` under the recipe of the parameter `each`.

        The entry lasts as long as the resident lives.
        """
        self.provider.note(self.key(each), resident)

    def close(self) -> None:
        """Release the residents that `find` has found and `take` has not returned."""
        self._hits.clear()
