"""Value types and the scheme of stored checkpoints, which every layer uses. No torch here."""

from dataclasses import dataclass
from os import PathLike
from typing import Final

# A path as the standard library takes it.
StrPath = str | PathLike[str]
# A checkpoint in a store, where a path could stand, too: `store://NAME`.
STORE_SCHEME: Final = "store://"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a file of a checkpoint.

    `dtype` is a safetensors name (`BF16`, `F8_E4M3`) or `gguf:Q4_K` and so on; `start` is the
    offset of its first byte from the beginning of the file; `nbytes` its size in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties that two source tensors share if their bytes are equal."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class ResidentKey:
    """Identity of a tensor in memory: its dtype, geometry (in elements) and storage digest."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str
