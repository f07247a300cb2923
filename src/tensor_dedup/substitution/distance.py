"""How far the numbers of two tensors are apart."""

import math
from collections.abc import Iterable

import torch

from tensor_dedup.analyze.difference import ReadRange
from tensor_dedup.dtypes import TORCH_NAMES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.substitution.choice import Pair

# A multiple of every element's size; as float64 it is eight times this.
_PIECE_BYTES = 8 << 20


def distance(pairs: Iterable[Pair], read_tune: ReadRange, read_base: ReadRange) -> float:
    """Return the relative distance of a layer from the base's: |tune - base| / |base|.

    The norm is Frobenius' over all tensors of the layer, in float64. Where the base is all zeros
    and the fine-tune is not, or some number is none, the distance is infinite. Reads both, 8 MiB at
    a time.

    Raises:
        UnsupportedError: a tensor's numbers cannot be compared one by one (packed, quantised).
    """
    apart = size = 0.0
    for tensor, old in pairs:
        kind = getattr(torch, TORCH_NAMES.get(tensor.fingerprint.dtype, ""), None)
        if kind is None or not kind.is_floating_point:
            raise UnsupportedError(
                f"{tensor.name} has the type {tensor.fingerprint.dtype}, whose bytes do not tell "
                "how far two tensors are apart; choose with --layers instead of --budget",
                tensor=tensor.name,
            )
        for start in range(0, tensor.nbytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, tensor.nbytes)
            new = _numbers(read_tune(tensor.name, start, stop), kind)
            was = _numbers(read_base(old.name, start, stop), kind)
            apart += float((new - was).square().sum())
            size += float(was.square().sum())
    if apart == 0:
        return 0.0
    return math.sqrt(apart / size) if size and math.isfinite(apart / size) else math.inf


def _numbers(data: bytes, kind: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=kind).to(torch.float64)
