"""The byte range of each tensor in a file of torch.save.

Each tensor of the pickle is a view of a storage. If the tensor's elements lie in the storage in
order and without gaps, the tensor is a range of bytes. If all tensors of a storage are ranges that
do not overlap, each range is listed as a tensor, and several names of one range are aliases.
Otherwise, as with overlapping or transposed views, the whole storage is listed once, with one
dimension, under the name of its first tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tensor_dedup.formats.errors import PytorchError, PytorchFault
from tensor_dedup.formats.pytorch.archive import Entry
from tensor_dedup.formats.pytorch.values import PickledTensorView, Storage
from tensor_dedup.formats.safetensors import DTYPE_BITS
from tensor_dedup.types import TensorSpec

_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor as the pickle describes it, and the place of its elements in the file.

    * The first element is at offset `start`, and all elements take `nbytes` bytes.
    * `plain` is True if the elements lie in order, without gaps, and need no conversion.
    * `conjugated` and `negated` say that the stored elements have to be conjugated or negated when
      they are read.
    * `held_by` is the name of the TensorSpec whose byte range contains the elements.
    * `stride` is in elements of torch, which packs two F4 numbers into one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    nbytes: int
    plain: bool
    held_by: str
    conjugated: bool = False
    negated: bool = False

    @property
    def lazy(self) -> bool:
        """Whether the stored elements have to be conjugated or negated when they are read."""
        return self.conjugated or self.negated

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape as torch counts elements.

        It differs from `shape` for F4 only, because torch packs two F4 numbers into one element.
        """
        if self.dtype != "F4":
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // 2) if self.stride else ()


def place(
    tensors: Sequence[tuple[str, PickledTensorView]],
    entries: Mapping[str, Entry],
    root: str,
    path: str,
) -> tuple[list[TensorSpec], list[PickledTensor]]:
    """Find the bytes of each tensor in the file.

    Returns the byte ranges that hold tensors, ordered by offset, and all tensors of the pickle.
    `tensors` are the named views in the pickle. `entries` are the entries of the archive, which lie
    in its folder `root`. `path` is used in error messages only.

    Raises:
        PytorchError: A tensor is too large or exceeds its storage, or a storage has no entry of its
            size.
    """
    members: dict[str, list[tuple[str, PickledTensorView, Entry]]] = {}
    for name, tensor in tensors:
        entry = _entry(name, tensor.storage, entries, root, path)
        _check_inside(name, tensor, entry, path)
        members.setdefault(entry.name, []).append((name, tensor, entry))
    specs: list[TensorSpec] = []
    placed: list[PickledTensor] = []
    for group in members.values():
        found = [_pickled(*member) for member in group]
        ranges = _ranges(found) or _whole(found, group[0][2])
        specs += ranges.values()
        placed += [_held(tensor, ranges) for tensor in found]
    return sorted(specs, key=lambda spec: (spec.start, spec.nbytes)), placed


def _entry(
    name: str, storage: Storage, entries: Mapping[str, Entry], root: str, path: str
) -> Entry:
    entry = entries.get(f"{root}/data/{storage.key}")
    if entry is None:
        raise PytorchError.at(
            PytorchFault.STORAGE_MISSING,
            path,
            f"its storage {storage.key[:80]!r} is not in the archive",
            name,
        )
    bits = 8 if storage.type.dtype is None else storage.type.dtype.bits
    if storage.count * bits != entry.nbytes * 8:
        raise PytorchError.at(
            PytorchFault.STORAGE_SIZE,
            path,
            f"its storage {storage.key!r} has {storage.count * bits // 8} bytes, its entry "
            f"{entry.nbytes}",
            name,
            expected=storage.count * bits // 8,
            got=entry.nbytes,
        )
    return entry


def _check_inside(name: str, tensor: PickledTensorView, entry: Entry, path: str) -> None:
    elements = 1
    for size in tensor.shape:
        # Each one that is not 0, so that a 0 does not hide an overflow.
        elements *= size or 1
        if elements >= _LIMIT:
            raise PytorchError.at(
                PytorchFault.GEOMETRY,
                path,
                f"the shape {tensor.shape} does not fit 63 bits",
                name,
                shape=tensor.shape,
            )
    last = tensor.offset + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True) if size
    )
    ends = (last + (0 not in tensor.shape)) * tensor.dtype.bits // 8
    if 0 not in tensor.shape and ends > entry.nbytes:
        raise PytorchError.at(
            PytorchFault.BEYOND_STORAGE,
            path,
            f"ends at {ends} of its storage of {entry.nbytes} bytes",
            name,
            ends=ends,
            nbytes=entry.nbytes,
        )


def _pickled(name: str, tensor: PickledTensorView, entry: Entry) -> PickledTensor:
    empty = 0 in tensor.shape
    # Nobody's bytes: at the beginning it stands in no other's way.
    start = entry.start if empty else entry.start + tensor.offset * tensor.dtype.bits // 8
    shape, stride = tensor.shape, tensor.stride
    lazy = tensor.conjugated or tensor.negated
    plain = empty or (not lazy and _is_dense(shape, stride))
    if tensor.dtype.name == "F4":
        # As safetensors counts: two numbers to a byte, which is one element to torch.
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    nbytes = math.prod(tensor.shape) * tensor.dtype.bits // 8
    kind = tensor.dtype.name
    flags = (tensor.conjugated, tensor.negated)
    return PickledTensor(name, kind, shape, stride, start, nbytes, plain, name, *flags)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _ranges(tensors: Sequence[PickledTensor]) -> dict[object, TensorSpec] | None:
    """Return each range once, under its first name; None when some are no ranges or overlap."""
    if not all(tensor.plain for tensor in tensors):
        return None
    found: dict[object, TensorSpec] = {}
    for tensor in tensors:
        found.setdefault(_range(tensor), _spec(tensor))
    ordered = sorted(found.values(), key=lambda spec: (spec.start, spec.nbytes))
    if any(a.start + a.nbytes > b.start for a, b in pairwise(ordered)):
        return None
    return found


def _range(tensor: PickledTensor) -> object:
    """Return what two names of one range have in common; tensors without bytes have nothing."""
    return (tensor.start, tensor.nbytes) if tensor.nbytes else tensor.name


def _spec(tensor: PickledTensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape, tensor.start, tensor.nbytes)


def _whole(tensors: Sequence[PickledTensor], entry: Entry) -> dict[object, TensorSpec]:
    """Return the storage under the name of its first tensor with bytes, and those without."""
    first = next(tensor for tensor in tensors if tensor.nbytes)
    bits = DTYPE_BITS.get(first.dtype, 0) or 8 * first.nbytes // math.prod(first.shape)
    dtype, count = first.dtype, entry.nbytes * 8 // bits
    if count * bits != entry.nbytes * 8:
        dtype, count = "U8", entry.nbytes
    empty = {_range(tensor): _spec(tensor) for tensor in tensors if not tensor.nbytes}
    whole = TensorSpec(first.name, dtype, (count,), entry.start, entry.nbytes)
    return {**empty, None: whole}


def _held(tensor: PickledTensor, ranges: Mapping[object, TensorSpec]) -> PickledTensor:
    held = ranges[None] if None in ranges and tensor.nbytes else ranges[_range(tensor)]
    return tensor if held.name == tensor.name else replace(tensor, held_by=held.name)
