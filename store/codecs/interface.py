"""What a codec is, and the names of all there are. Loads neither numpy nor zstandard."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from tensor_dedup.digest import LEAF_BYTES

# What is encoded at once: a leaf, so that a range costs the leaves it touches.
CHUNK_BYTES = LEAF_BYTES
Effort: TypeAlias = Literal["entropy", "matches"]
"""What an encoder looks for: how often bytes occur, or also what repeats. Decoders do not care."""


class Codec(Protocol):
    """An encoding of up to CHUNK_BYTES bytes. It holds no state and is safe from any thread.

    The GIL is free during the long parts. All that must hold of a codec is in the contract suite of
    the tests.
    """

    @property
    def name(self) -> str:
        """The name in records on disk."""

    @property
    def width(self) -> int:
        """The bytes of the elements it is made for: 1, 2, 4 or 8. Any bytes can be encoded."""

    @property
    def against_base(self) -> bool:
        """Whether it stores what differs from other bytes, which it needs again to decode."""

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        """Encode `data`. `base` has as many bytes, or is None for a codec without a base."""

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        """Fill `out`, which is as long as the data was. `blob` need not be trusted.

        However wrong `blob` is, no more memory is taken than a few times that of `out`.

        Raises:
            CorruptFrameError: `blob` does not encode so many bytes; `out` may then hold
                anything.
        """


@dataclass(frozen=True, slots=True)
class Family:
    """Codecs that differ only in the width of the words they are made for."""

    against_base: bool
    widths: tuple[int, ...] = (1, 2, 4, 8)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "planes": Family(against_base=False),
        "xor": Family(against_base=True),
        "diff": Family(against_base=True),
        "step": Family(against_base=True, widths=(1, 2)),
        "sparse": Family(against_base=True),
    }
)
AGAINST_BASE: Mapping[str, bool] = MappingProxyType(
    {
        f"{name}{width}": family.against_base
        for name, family in FAMILIES.items()
        for width in family.widths
    }
)
"""Every name a record may have, and whether its base is needed."""
