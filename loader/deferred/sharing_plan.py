"""Decide which final tensors of a load are shared, and why the others stay private."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensor_dedup.loader.deferred.recipe import drop_what_is_overwritten, reason_to_keep_private
from tensor_dedup.loader.not_shared import NotShared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensor_dedup.config import TensorDedupConfig
    from tensor_dedup.loader.deferred.evaluate import Evaluator
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.residents.provider import ResidentProvider


@dataclass(slots=True)
class SharingPlan:
    """The decision, for each final tensor of one load, whether it is shared. For one thread."""

    config: TensorDedupConfig
    provider: ResidentProvider
    evaluator: Evaluator
    aliased: set[int] = field(default_factory=set)  # storages that several parameters share

    def expect(self, parameters: Sequence[DeferredParameter]) -> None:
        """Announce `parameters`, all final tensors of the load, before any other call."""
        seen: set[int] = set()
        for each in parameters:
            if each.view is not None:
                storage = id(each.view.storage)
                self.aliased.update({storage} & seen)
                seen.add(storage)
                self.evaluator.expect(each.view)
        drop_what_is_overwritten([each.view for each in parameters if each.view is not None])
        wanted = {id(s) for each in parameters if self.reason(each) is None for s in each.sources}
        every = {id(s) for each in parameters for s in each.sources}
        self.evaluator.unhashed = every - wanted

    def reason(self, each: DeferredParameter) -> str | None:
        """Return why the final tensor `each` stays private, or None if it is shared."""
        view = each.view
        if each.planned:
            return None
        if view is None:
            return NotShared.NOT_DEFERRED
        if not view.is_whole() or id(view.storage) in self.aliased:
            return NotShared.SHARED_STORAGE
        if each.private is not None or not each.sources:
            return each.private or NotShared.NOT_FROM_CHECKPOINT
        smallest = min(source.whole.spec.nbytes for source in each.sources)
        if smallest < self.config.min_tensor_bytes:
            return f"a source of {smallest} bytes is below min_tensor_bytes"
        return reason_to_keep_private(view) or self.provider.reason(each.name)

    def must_be_read(self, each: DeferredParameter) -> bool:
        """Return whether every source tensor of `each` must be read before `each` can be shared.

        The result is True if `each` is to be shared and is not installed yet, and no digest of its
        source tensors is known.
        """
        if each.installed or not each.sources or self.reason(each) is not None:
            return False
        return all(source.digest is None for source in each.sources)
