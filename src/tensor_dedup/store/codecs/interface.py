"""The protocol of a codec, and the names of all codecs. Loads neither numpy nor zstandard."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from tensor_dedup.digest import LEAF_BYTES

# What is encoded at once: a leaf, so that a range costs the leaves it touches.
CHUNK_BYTES = LEAF_BYTES
# What is encoded at all must save a tenth: else it is not worth being decoded.
WORTH = 0.9
Effort: TypeAlias = Literal["entropy", "matches"]
"""What an encoder looks for: how often bytes occur, or also what repeats. Decoders do not care."""


class Codec(Protocol):
    """A lossless encoding of up to CHUNK_BYTES bytes.

    A codec has no state and is safe from any thread. It releases the GIL during long computations.
    """

    @property
    def name(self) -> str:
        """The name of this codec in the tables of containers."""

    @property
    def width(self) -> int:
        """The element size in bytes that the codec is designed for: 1, 2, 4 or 8.

        Data of any other element size can be encoded, too.
        """

    @property
    def against_base(self) -> bool:
        """Whether the codec stores the difference from a base, which `decode` needs again."""

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        """Return `data` in encoded form, compressed with `effort`.

        `base` has the same size as `data`, or is None if `against_base` is False.
        """

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        """Decode `blob` into `out`, which has the size of the decoded data.

        `base` is the same as for `encode`. Even if `blob` is malformed, decoding takes at most a
        few times the memory of `out`. After an error, the content of `out` is undefined.

        Raises:
            CorruptFrameError: `blob` does not decode to exactly the size of `out`.
        """


@dataclass(frozen=True, slots=True)
class Family:
    """A group of codecs that differ only in their element size; `widths` are in bytes."""

    against_base: bool
    widths: tuple[int, ...] = (1, 2, 4, 8)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "planes": Family(against_base=False),
        "xor": Family(against_base=True),
        "diff": Family(against_base=True),
        "nibble": Family(against_base=True, widths=(1, 2)),
        "step": Family(against_base=True, widths=(1, 2)),
        "sparse": Family(against_base=True),
    }
)
LEAVES = "leaves"
"""The codec of `tensor_dedup.store.codecs.leaves`, which keeps each leaf in a way of its own."""
PARTS = "parts"
"""What the codecs of `tensor_dedup.store.codecs.parts` begin with, which have no bytes at all."""
AGAINST_BASE: Mapping[str, bool] = MappingProxyType(
    {
        f"{name}{width}": family.against_base
        for name, family in FAMILIES.items()
        for width in family.widths
    }
    | {LEAVES: True}
)
"""Every name a record may have but those of PARTS, and whether its base is needed."""
