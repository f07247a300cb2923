"""How much the values of a layer's tensors differ between a fine-tune and its base."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from tensor_dedup.analyze.difference import ReadRange
from tensor_dedup.analyze.tensors import AnalyzedTensor
from tensor_dedup.dtypes import TORCH_NAMES
from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.layers.quantisation import decodes, is_quantised, module_of

# A tensor of the fine-tune, and its counterpart in the base.
Pair = tuple[AnalyzedTensor, AnalyzedTensor]

# A multiple of every element's size; as float64 it is eight times this.
_PIECE_BYTES = 8 << 20
# What a weight of FP8 is multiplied by, whatever its name says: that of a layer, of each row, or of
# each block, of 128 by 128 in all models known.
_SCALES: Final = ("_scale", "_scale_inv")
_BLOCK: Final = 128


def distance(pairs: Iterable[Pair], read_tune: ReadRange, read_base: ReadRange) -> float:
    """Return how far a fine-tune's layer is from the base's layer: |tune - base| / |base|.

    `pairs` has each tensor of the fine-tune's layer with its counterpart in the base. `read_tune`
    and `read_base` read ranges of their bytes. The norm is the Frobenius norm over all tensors of
    the layer. FP8 weights are compared with their scales applied. Step counters are ignored.

    The result is infinite if the base is all zeros and the fine-tune is not. It is also infinite if
    the tensors differ and a value is NaN or infinite.

    Raises:
        UnsupportedError: A tensor is packed or quantised in a way that does not let values be
            compared one by one.
    """
    held = {tensor.name: (tensor, old) for tensor, old in pairs}
    if all(tensor.fingerprint == old.fingerprint for tensor, old in held.values()):
        return 0.0  # whatever form the numbers have
    scales = {name: _scale(tensor, held) for name, (tensor, _) in held.items()}
    applied = {scale for scale in scales.values() if scale is not None}
    apart = size = 0.0
    for name, (tensor, old) in held.items():
        if name in applied or not _has_numbers(tensor, old):
            continue
        scale = held[known] if (known := scales[name]) is not None else (None, None)
        new_numbers = _numbers(tensor, scale[0], read_tune)
        old_numbers = _numbers(old, scale[1], read_base)
        for new, was in zip(new_numbers, old_numbers, strict=True):
            apart += float((new - was).square().sum())
            size += float(was.square().sum())
    if apart == 0:
        return 0.0
    return math.sqrt(apart / size) if size and math.isfinite(apart / size) else math.inf


def _has_numbers(tensor: AnalyzedTensor, old: AnalyzedTensor) -> bool:
    """Whether a tensor has numbers to compare; integers that are no weights have none.

    Batch normalisation counts its steps. Positions and masks are those of the base, or tell
    nothing that a distance could say.
    """
    if _kind(tensor).is_floating_point:
        return True
    alike = tensor.fingerprint == old.fingerprint or math.prod(tensor.shape) == 1
    if alike and not is_quantised(tensor):
        return False
    raise _unknown(tensor, f"has the type {tensor.dtype}, whose bytes do not tell")


def _scale(tensor: AnalyzedTensor, held: Mapping[str, Pair]) -> str | None:
    """The name of the scale of a weight of FP8; None for what is no such weight or has none."""
    if not (tensor.dtype.startswith("F8_") and is_quantised(tensor)):
        return None
    for name in (tensor.name + each for each in _SCALES):
        if name in held and _blocks(tensor.shape, held[name][0].shape) is not None:
            return name
    module = module_of(tensor.name)
    beside = (other for other, _ in held.values() if not is_quantised(other))
    # A weight that stands alone was only cast: its codes are its numbers.
    if any(decodes(other.name, module) for other in beside):
        raise _unknown(tensor, "is quantised with scales of an unknown form, so bytes do not tell")
    return None


def _unknown(tensor: AnalyzedTensor, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{tensor.name} {what} how far two tensors are apart; choose with --layers instead of "
        "--budget",
        tensor=tensor.name,
    )


def _kind(tensor: AnalyzedTensor) -> torch.dtype:
    kind = getattr(torch, TORCH_NAMES.get(tensor.dtype, ""), None)
    if not isinstance(kind, torch.dtype):
        raise _unknown(tensor, f"has the type {tensor.dtype}, whose bytes do not tell")
    return kind


def _numbers(
    tensor: AnalyzedTensor, scale: AnalyzedTensor | None, read: ReadRange
) -> Iterator[torch.Tensor]:
    """Yield all numbers in float64, in pieces that are the same for tensors of one form."""
    kind, row = _kind(tensor), 1
    blocks = None if scale is None else _blocks(tensor.shape, scale.shape)
    if scale is not None:
        row = tensor.shape[-1] or 1
        factors = _decoded(read(scale.name, 0, scale.nbytes), _kind(scale))
    step = max(_PIECE_BYTES // row, 1) * row
    for start in range(0, tensor.nbytes, step):
        stop = min(start + step, tensor.nbytes)
        numbers = _decoded(read(tensor.name, start, stop), kind)
        if scale is not None and blocks is not None:
            shape = [*scale.shape, *[1] * len(tensor.shape)][: len(tensor.shape)]
            at = torch.arange(start // row, stop // row)
            places = list[torch.Tensor]()
            for length, block in zip(tensor.shape[-2::-1], blocks[-2::-1], strict=True):
                places.insert(0, at % length // block)
                at //= length
            # A number for each row and block of columns.
            of_rows = factors.reshape(shape)[tuple(places)]
            of_all = of_rows.repeat_interleave(blocks[-1], dim=1)[:, :row]
            numbers = numbers.reshape(-1, row) * of_all
        yield numbers


def _decoded(data: bytes, kind: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=kind).to(torch.float64)


def _blocks(shape: Sequence[int], scale: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of the blocks of a weight that have one scale each; None if that is not known."""
    if math.prod(scale) == 1:
        return tuple(shape)
    if len(scale) > len(shape):
        return None
    found = list[int]()
    for length, count in zip(shape, [*scale, *[1] * len(shape)], strict=False):
        if count not in (1, length) and count == -(-length // _BLOCK):
            found.append(_BLOCK)
        elif count and length % count == 0:
            found.append(length // count)
        else:
            return None
    return tuple(found)
