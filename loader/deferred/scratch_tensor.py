"""A final tensor that was computed and is nowhere shared yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class ScratchTensor:
    """A final tensor computed into borrowed memory: valid until the block is given back.

    `escaped`: somebody keeps using the memory, so it is never lent again.
    """

    block: torch.Tensor
    tensor: torch.Tensor
    escaped: bool = False
