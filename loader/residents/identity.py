"""What a shared tensor is, wherever it is: a resident's key, and the number of the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tensor_dedup.loader.torch_dtypes import dtype_name
from tensor_dedup.types import ResidentKey

if TYPE_CHECKING:
    import torch

# A cast of a cast of a cast is followed no further.
_MAX_CASTS: Final = 3
_CAST: Final = "cast:"
_LOSSLESS: Final = frozenset(
    {("F16", "F32"), ("BF16", "F32"), ("F16", "F64"), ("BF16", "F64"), ("F32", "F64")}
)


class ReplicaKey(NamedTuple):
    """What a tensor is: a resident's key, and the number of the copy."""

    key: ResidentKey
    copy: int


def cast_key(key: ResidentKey, dtype: torch.dtype) -> ResidentKey | None:
    """The key of what a cast makes of a resident, by what it follows from; None: not followed.

    A cast that lost nothing and the way back lead to the key that they began with.
    """
    name = dtype_name(dtype)
    if name == key.dtype:
        return key
    before, _, origin = key.digest.removeprefix(_CAST).partition(":")
    is_cast = key.digest.startswith(_CAST)
    if is_cast and before == name and (before, key.dtype) in _LOSSLESS:
        return ResidentKey(name, key.shape, key.stride, origin)
    if key.digest.count(_CAST) >= _MAX_CASTS:
        return None
    return ResidentKey(name, key.shape, key.stride, f"{_CAST}{key.dtype}:{key.digest}")


def is_of_bytes(key: ResidentKey) -> bool:
    """Does the key name bytes, and not what they follow from?"""
    return not key.digest.startswith(_CAST)
