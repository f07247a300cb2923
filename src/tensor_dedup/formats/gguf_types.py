"""The types of tensors in GGUF: how each is called here, and how many bytes a block takes.

Numbers, names and sizes are those of the `gguf` package (GGMLQuantizationType, GGML_QUANT_SIZES),
which a test compares with this table; at run time the package, and the numpy it needs, is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """`block_elements` neighbours are stored together in `block_bytes`."""

    dtype: str
    block_elements: int
    block_bytes: int


# Plain little-endian numbers, the same bytes as in safetensors, and so called the same.
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_PLAIN_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1}
_BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

DTYPES: Mapping[int, BlockLayout] = MappingProxyType(
    {
        **{kind: BlockLayout(name, 1, _PLAIN_BYTES[name]) for kind, name in _PLAIN.items()},
        **{kind: BlockLayout(f"gguf:{name}", *sizes) for kind, (name, *sizes) in _BLOCKS.items()},
    }
)
# Numbers that were given once: nobody can say any more how large such a tensor is.
REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
