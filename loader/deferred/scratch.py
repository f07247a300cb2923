"""Reused host memory for one load: what is read passes through it, layer by layer.

Fresh memory costs more than reading a cached file, so blocks are kept and lent again. What is kept
never exceeds the most that was lent at one time, which is the largest layer.
"""

from __future__ import annotations

import torch

# A block much larger than what is asked for stays free for what needs it.
_SLACK = 1 << 20


class Scratch:
    """Lends flat uint8 CPU tensors. One thread. `close` drops what is kept."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent = 0
        self.peak = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Lend at least `nbytes` bytes, content undefined; the caller narrows and gives it back."""
        fitting = [block for block in self._free if nbytes <= block.numel() <= 2 * nbytes + _SLACK]
        if fitting:
            block = min(fitting, key=torch.Tensor.numel)
            self._free = [kept for kept in self._free if kept is not block]
        else:
            self._make_room(nbytes)
            block = torch.empty(nbytes, dtype=torch.uint8)
        self._lent += block.numel()
        self.peak = max(self.peak, self._lent)
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block that `take` lent, whole. Nobody may use its memory any more."""
        self._lent -= block.numel()
        self._free.append(block)

    def forget(self, block: torch.Tensor) -> None:
        """Leave a lent block to whoever uses it."""
        self._lent -= block.numel()

    def close(self) -> None:
        """Drop every block that is not lent."""
        self._free.clear()

    def _make_room(self, nbytes: int) -> None:
        """Drop the smallest blocks until a new one keeps the total within the peak."""
        self._free.sort(key=torch.Tensor.numel)
        while self._free and self._total() + nbytes > max(self.peak, self._lent + nbytes):
            self._free.pop(0)

    def _total(self) -> int:
        return self._lent + sum(block.numel() for block in self._free)
