"""What a codec is."""

from typing import Literal, Protocol, TypeAlias

from tensor_dedup.digest import LEAF_BYTES

# What is encoded at once: a leaf, so that a range costs the leaves it touches.
CHUNK_BYTES = LEAF_BYTES
Effort: TypeAlias = Literal["entropy", "matches"]
"""What an encoder looks for: how often bytes occur, or also what repeats. Decoders do not care."""


class Codec(Protocol):
    """Turns up to CHUNK_BYTES bytes into others and back. Holds nothing; safe from any thread.

    The GIL is free during the long parts. `contract.CodecTests` says all that must hold.
    """

    @property
    def name(self) -> str:
        """As records on disk have it."""

    @property
    def width(self) -> int:
        """Bytes of the elements it is made for: 1, 2, 4 or 8. Any bytes can be encoded."""

    @property
    def against_base(self) -> bool:
        """Whether it stores what differs from other bytes, which it needs again to decode."""

    def encode(self, data: memoryview, base: memoryview | None, effort: Effort) -> bytes:
        """The encoded form of `data`; `base` has as many bytes, or is None: not `against_base`."""

    def decode(self, blob: memoryview, base: memoryview | None, out: memoryview) -> None:
        """Fill `out`, which is as long as the data was.

        BadEncodingError: `blob` is no encoded form of so many bytes; `out` may then hold anything.
        However wrong `blob` is, no more memory is taken than a few times that of `out`.
        """
