"""Element types between safetensors' names and torch's objects."""

from collections.abc import Mapping

import torch

from tensor_dedup.dtypes import SAFETENSORS, TORCH_NAMES
from tensor_dedup.errors import UnsupportedError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in TORCH_NAMES.items()
    if name in SAFETENSORS
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of a safetensors name.

    Raises:
        UnsupportedError: torch has none.
    """
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise UnsupportedError(
            f"torch has no dtype for {name!r}; keep this tensor private", name=name
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch type.

    Raises:
        UnsupportedError: There is none.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise UnsupportedError(
            f"{dtype} has no safetensors name; keep this tensor private", dtype=str(dtype)
        )
    return found


def has_name(dtype: torch.dtype) -> bool:
    """Return whether a torch type has a safetensors name."""
    return dtype in _NAMES
