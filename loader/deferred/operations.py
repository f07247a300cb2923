"""Classify torch's operations by how the tracer treats them if an argument is a deferred tensor."""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

aten = torch.ops.aten


class Op(enum.Enum):
    """The tracer's reaction to an operation on deferred tensors."""

    VIEW = 0  # nothing: the result tells by itself what it is a view of
    COPY = 1  # record `copy_`
    MUTATE = 2  # record another write
    FRESH = 3  # record a new storage
    EMPTY = 4  # record a new storage without content
    DATA = 5  # answer with real data
    REFUSED = 6


OVERWRITERS = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_EMPTY = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# They replace or grow the memory itself; their content is not a function of what was written.
_REFUSED = {"aten::resize_", "aten::set_", "aten::resize_as_", "aten::set_data"}
_DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Threads add in the order in which they come, and floats added in another order differ.
_UNORDERED = {
    "aten::index_add", "aten::index_add_", "aten::index_reduce", "aten::index_reduce_",
    "aten::put", "aten::put_", "aten::scatter_add", "aten::scatter_add_",
    "aten::scatter_reduce", "aten::scatter_reduce_",
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)


@functools.cache
def kind_of(func: torch._ops.OpOverload) -> Op:
    """Return the `Op` that tells how the tracer treats `func`, judged by its schema and tags."""
    schema = func._schema
    if schema.name in _REFUSED:
        return Op.REFUSED
    if _DATA_TAGS & set(func.tags) or schema.name == "aten::is_nonzero":
        return Op.DATA
    if func is aten.copy_.default:
        return Op.COPY
    if torch.Tag.inplace_view in func.tags:
        return Op.VIEW
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return Op.MUTATE
    if func in _EMPTY:
        return Op.EMPTY
    aliases = [r.alias_info is not None for r in schema.returns]
    return Op.VIEW if aliases and all(aliases) else Op.FRESH


@functools.cache
def written(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and name of every argument that `func` writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def is_random(func: torch._ops.OpOverload) -> bool:
    """Return whether `func` draws from a random number generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def varies(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `func` is non-deterministic: the same input may give other bytes."""
    name = func._schema.name
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return name in _UNORDERED


def needs_data(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether this call of `func`, which is of the kind `Op.DATA`, needs the tensors' data.

    Indexing needs the data only if an index is a mask. Other operations always need it.
    """
    if func is not aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])
