"""What the functions of allowed.py would make of their arguments, as inert values."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tensor_dedup.formats.pytorch.values import (
    Dtype,
    Function,
    Inert,
    PickledTensorView,
    PlainDict,
    Storage,
)

# PyTorch's own limit is 64 in most operations.
MAX_DIMENSIONS = 64
_LIMIT = 1 << 63

Arguments = tuple[Any, ...]


class Misuse(Exception):
    """Arguments that torch.save never writes; machine.py says where, as a ForbiddenCallError."""


def call(name: str, arguments: Arguments) -> object:
    """The value of a call of the allowed function `name`. Misuse."""
    made = _CALLS[name](arguments) if name in _CALLS else _inert(name, arguments)
    if made is None:
        shown = ", ".join(type(argument).__name__ for argument in arguments[:9])
        raise Misuse(f"{name} is called with ({shown})")
    return made


def _inert(name: str, arguments: Arguments) -> Inert | None:
    return Inert(name) if len(arguments) <= 2 else None


def _ordered_dict(arguments: Arguments) -> PlainDict | None:
    match arguments:
        case ():
            return PlainDict(ordered=True)
        case (list(items),) if all(
            isinstance(item, list | tuple) and len(item) == 2 for item in items
        ):
            return PlainDict([(key, value) for key, value in items], ordered=True)
    return None


def _size(arguments: Arguments) -> tuple[object, ...] | None:
    return tuple(arguments[0]) if len(arguments) == 1 and _sizes(arguments[0]) else None


def _sizes(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < _LIMIT for size in value)
    )


def _tensor(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride)"""
    if len(arguments) != 4 or not isinstance(arguments[0], Storage):
        return None
    storage = arguments[0]
    return _view(arguments, storage.type.dtype, lazy=False)


def _tensor_v2(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks[, metadata])"""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        return None
    return _view(arguments[:4], arguments[0].type.dtype, lazy=_is_lazy(arguments[6:]))


def _tensor_v3(arguments: Arguments) -> PickledTensorView | None:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])"""
    if len(arguments) not in (7, 8) or not isinstance(arguments[6], Dtype):
        return None
    return _view(arguments[:4], arguments[6], lazy=_is_lazy(arguments[7:]))


def _view(arguments: Arguments, dtype: Dtype | None, *, lazy: bool) -> PickledTensorView | None:
    storage, offset, shape, stride = arguments
    if not isinstance(storage, Storage) or dtype is None or not _sizes((offset,)):
        return None
    if not _sizes(shape) or not _sizes(stride) or len(shape) != len(stride):
        return None
    return PickledTensorView(storage, dtype, offset, tuple(shape), tuple(stride), lazy)


def _is_lazy(metadata: Arguments) -> bool:
    """Whether the metadata says that elements are conjugated or negated only when read."""
    return any(
        value is not False
        for found in metadata
        if isinstance(found, PlainDict)
        for _, value in found.pairs
    )


def _parameter(arguments: Arguments) -> PickledTensorView | None:
    """(data, requires_grad, hooks[, state])"""
    fits = len(arguments) in (3, 4) and isinstance(arguments[0], PickledTensorView)
    return arguments[0] if fits else None


def _sparse(arguments: Arguments) -> tuple[object, ...] | None:
    """(layout, (indices, values, size, ...)): its parts, as tensors of their own."""
    fits = len(arguments) == 2 and isinstance(arguments[1], tuple)
    return arguments[1] if fits else None


def _with_attributes(arguments: Arguments) -> object | None:
    """(function, class, its arguments, attributes)"""
    match arguments:
        case (Function(name), Inert(), tuple(inner), _) if name in _REBUILT:
            return call(name, inner)
    return None


_CALLS: Mapping[str, Callable[[Arguments], object | None]] = MappingProxyType(
    {
        "collections.OrderedDict": _ordered_dict,
        "torch.Size": _size,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
    }
)
_REBUILT = frozenset(name for name in _CALLS if "_rebuild_tensor" in name)
