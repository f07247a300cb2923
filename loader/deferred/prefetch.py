"""Reading ahead: while one layer is processed, the pool reads and hashes the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tensor_dedup.loader.checkpoint_io.sources import SourceReader
    from tensor_dedup.loader.deferred.evaluate import Evaluator
    from tensor_dedup.loader.deferred.parameters import DeferredParameter
    from tensor_dedup.loader.deferred.scratch import Scratch

# What is larger keeps all threads busy by itself, and twice its memory would be noticed.
MAX_AHEAD_BYTES = 64 << 20


@dataclass(slots=True)
class Prefetcher:
    """At most one final tensor of a load, on its way into borrowed memory. One thread."""

    reader: SourceReader
    scratch: Scratch
    evaluator: Evaluator
    _waiting: deque[DeferredParameter] = field(default_factory=deque)
    _begun: tuple[DeferredParameter, torch.Tensor, int] | None = None

    def plan(self, parameters: Iterable[DeferredParameter]) -> None:
        """Say in which order final tensors will probably be asked for."""
        self._waiting = deque(parameters)

    def has(self, each: DeferredParameter) -> bool:
        """Is this one on its way?"""
        return self._begun is not None and self._begun[0] is each

    def take(self, each: DeferredParameter) -> torch.Tensor | None:
        """The memory that `each` was read into, every byte there; None when it was not begun."""
        if self._begun is None or self._begun[0] is not each:
            return None
        (_, block, mark), self._begun = self._begun, None
        self.reader.settle(mark)
        return block

    def begin(self, needed: Callable[[DeferredParameter], bool]) -> None:
        """Start with the next that is `needed`, whose recipe does nothing but copy sources."""
        if self._begun is not None:
            return
        while self._waiting:
            each = self._waiting.popleft()
            if each.view is None or not 0 < each.nbytes <= MAX_AHEAD_BYTES or not needed(each):
                continue
            nbytes = each.view.storage.nbytes
            block = self.scratch.take(nbytes)
            if self.evaluator.begin(each.view, block[:nbytes]):
                self._begun = each, block, self.reader.begun
            else:
                self.scratch.give_back(block)
            return

    def close(self) -> None:
        """Nothing more will be asked for. Let go of every parameter; the reader waits for reads."""
        self._waiting.clear()
        self._begun = None
