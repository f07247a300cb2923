"""Tensors of a file of torch.save that are parts or views of what is read as one source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensor_dedup.formats.pytorch.geometry import PickledTensor
    from tensor_dedup.types import TensorSpec


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor inside a source: `start` in bytes from its first, geometry in elements of `dtype`.

    `lazy`: it is conjugated or negated when it is read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    lazy: bool


def placed(member: PickledTensor, spec: TensorSpec) -> Placed | None:
    """How a member lies in its source; None where it is all of it, in order."""
    start = member.start - spec.start if member.nbytes else 0
    geometry = (member.dtype, member.shape, member.nbytes)
    if member.plain and not start and geometry == (spec.dtype, spec.shape, spec.nbytes):
        return None
    return Placed(member.name, member.dtype, member.shape, member.stride, start, member.lazy)
