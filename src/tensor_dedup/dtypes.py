"""Element types: their names in this package, their sizes in bits, and torch's names for them.

A type has the name that safetensors uses, if safetensors has the type. Each file format accepts
only some of the types. This module does not import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
        "C128": 128,
    }
)

# Attributes of the module `torch`. F4 is missing on purpose: torch packs two to an element and
# counts the pairs, safetensors counts the numbers, so one name would stand for two geometries.
TORCH_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C128": "complex128",
        "C64": "complex64",
        "C32": "complex32",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }
)

SAFETENSORS: Final = frozenset(BITS.keys() - {"C32", "C128"})
