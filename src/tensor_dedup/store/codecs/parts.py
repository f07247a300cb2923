"""Tensors whose changed leaves are pieces of their own: a record of references, without bytes.

    codec = "parts:" and a hexadecimal number, whose bit n is set where leaf n is a piece
    chunk = nothing, of every leaf

A leaf whose bit is set is the piece that consists of this leaf alone; every other one is that of
the base at the same place. The digest of such a piece follows from that of its leaf, so a table
alone says what a tensor needs, and steps that have a changed leaf in common need the same piece.
"""

import re
from collections.abc import Iterable

from tensor_dedup.digest import LEAF_BYTES, combine
from tensor_dedup.store.codecs.interface import PARTS

_NAME = re.compile(rf"{PARTS}:([1-9a-f][0-9a-f]*)")


def codec_of(numbers: Iterable[int]) -> str:
    """Return the codec of a record in which the leaves of these numbers are pieces."""
    return f"{PARTS}:{sum(1 << number for number in {*numbers}):x}"


def numbers_in(codec: str) -> list[int] | None:
    """Return which leaves are pieces, in order; None where the codec is another one."""
    found = _NAME.fullmatch(codec)
    if found is None:
        return None
    bits = f"{int(found[1], 16):b}"
    return [number for number, bit in enumerate(reversed(bits)) if bit == "1"]


def is_part(codec: str, number: int) -> bool:
    """Return whether this codec says that the leaf of this number is a piece."""
    found = _NAME.fullmatch(codec)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def leaf_bytes(number: int, nbytes: int) -> int:
    """Return the size of a leaf of something of `nbytes`."""
    return min(LEAF_BYTES, nbytes - number * LEAF_BYTES)


def part_digest(leaf: bytes, nbytes: int) -> bytes:
    """Return the digest of the piece whose only leaf has this digest, and `nbytes`."""
    return bytes.fromhex(combine(nbytes, [leaf]))
