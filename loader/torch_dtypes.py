"""Convert between the dtype names of safetensors ("BF16") and torch's dtypes."""

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
    """Return the torch dtype with the safetensors name `name`.

    Raises:
        UnsupportedError: No torch dtype has this name.
    """
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise UnsupportedError(
            f"torch has no dtype for {name!r}; keep this tensor private", name=name
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of `dtype`, a torch dtype.

    Raises:
        UnsupportedError: The dtype has no safetensors name.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise UnsupportedError(
            f"{dtype} has no safetensors name; keep this tensor private", dtype=str(dtype)
        )
    return found


def has_name(dtype: torch.dtype) -> bool:
    """Return whether `dtype`, a torch dtype, has a safetensors name."""
    return dtype in _NAMES
