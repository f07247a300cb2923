"""The codec `parts`: a tensor whose changed leaves are stored as pieces of their own.

The encoded tensor has no bytes for its leaves, only references:

    codec = "parts:" and a hexadecimal number, whose bit n is set if leaf n is a separate piece
    chunk = empty, for every leaf

A leaf whose bit is set is stored as a separate piece, which consists of this leaf alone. Every
other leaf equals the leaf of the base at the same offset. The digest of a separate piece follows
from the digest of its leaf, so the table of a container tells which pieces a tensor needs. Training
steps that have a changed leaf in common refer to the same piece.
"""

import re
from collections.abc import Iterable

from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.store.codecs.interface import PARTS

_NAME = re.compile(rf"{PARTS}:([1-9a-f][0-9a-f]*)")


def codec_of(numbers: Iterable[int]) -> str:
    """Return the codec name for a tensor whose leaves in `numbers` are separate pieces."""
    return f"{PARTS}:{sum(1 << number for number in {*numbers}):x}"


def numbers_in(codec: str) -> list[int] | None:
    """Return the numbers of the leaves that `codec` marks as separate pieces, ascending.

    Return None if `codec` is not the name of a `parts` codec.
    """
    found = _NAME.fullmatch(codec)
    if found is None:
        return None
    bits = f"{int(found[1], 16):b}"
    return [number for number, bit in enumerate(reversed(bits)) if bit == "1"]


def is_part(codec: str, number: int) -> bool:
    """Return whether `codec` marks the leaf `number` as a separate piece.

    The result is False if `codec` is not the name of a `parts` codec.
    """
    found = _NAME.fullmatch(codec)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def leaf_bytes(number: int, nbytes: int) -> int:
    """Return the size in bytes of leaf `number` in a tensor of `nbytes`."""
    return min(LEAF_BYTES, nbytes - number * LEAF_BYTES)


def part_digest(leaf: bytes, nbytes: int) -> bytes:
    """Return the digest of a piece of `nbytes` that consists of the single leaf `leaf`.

    `leaf` is the digest of that leaf.
    """
    return bytes.fromhex(combine(nbytes, [leaf]))
