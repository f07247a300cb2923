"""Value types of the whole package, and the URLs of stored checkpoints and remotes. No torch."""

import re
from dataclasses import dataclass
from os import PathLike
from typing import Final

# A path as the standard library takes it.
StrPath = str | PathLike[str]
# A checkpoint in a store, where a path could stand, too: `store://NAME`.
STORE_SCHEME: Final = "store://"
# A scheme with less than two slashes behind it would else be a folder of that name.
_MISTYPED: Final = re.compile(r"(s3|gs|az|https?|file|oci):(?!//)", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Return whether `text` is meant as a URL and not as a path, even if mistyped (`s3:/...`)."""
    return "://" in text or mistyped_scheme(text) is not None


def mistyped_scheme(text: str) -> str | None:
    """Return the scheme of a URL in which slashes are missing, as `s3:` of `s3:/...`, or None."""
    found = _MISTYPED.match(text)
    return None if found is None else found[0]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name, dtype, shape and place of a tensor in a checkpoint file.

    `dtype` is a safetensors name (`BF16`, `F8_E4M3`) or a GGUF type (`gguf:Q4_K`). `start` is the
    offset of its first byte from the beginning of the file, `nbytes` its size in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a tensor in a file: the same for tensors of equal shape, dtype and bytes."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class ResidentKey:
    """The identity of a tensor in memory: dtype, shape, stride, and the digest of its bytes.

    Shape and stride are in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str
