"""Names of element types: safetensors' vocabulary on one side, torch's on the other."""

from collections.abc import Mapping

import torch

from tensor_dedup.errors import UnsupportedError

# F4 is missing on purpose: torch packs two to an element and counts the pairs, safetensors counts
# the numbers, so one name would stand for two geometries.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of a safetensors name. UnsupportedError when torch has none."""
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise UnsupportedError(
            f"torch has no dtype for {name!r}; keep this tensor private", name=name
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch type. UnsupportedError when there is none."""
    found = _NAMES.get(dtype)
    if found is None:
        raise UnsupportedError(
            f"{dtype} has no safetensors name; keep this tensor private", dtype=str(dtype)
        )
    return found


def has_name(dtype: torch.dtype) -> bool:
    """Whether `dtype_name` would answer."""
    return dtype in _NAMES
