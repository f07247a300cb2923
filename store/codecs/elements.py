"""Bytes as unsigned integers of one width, and those as planes: all first bytes, all second ones.

In blocks that stay in a processor's cache: a pass over fresh memory costs several times a pass over
warm memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tensor_dedup.store.codecs.streams import Bytes

Words: TypeAlias = NDArray[Any]  # of one of UNSIGNED
UNSIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
SIGNED: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}
BLOCK = 128 << 10  # elements


def words(data: memoryview, width: int) -> tuple[Words, Bytes]:
    """The whole words of `data`, sharing its memory, and the bytes left over."""
    flat = np.frombuffer(data, np.uint8)
    body = len(flat) - len(flat) % width
    return flat[:body].view(UNSIGNED[width]), flat[body:]


def split(values: Words) -> list[Bytes]:
    """The planes of words, the lowest bytes first."""
    return [
        np.right_shift(values, values.dtype.type(8 * n)).astype(np.uint8)
        for n in range(values.dtype.itemsize)
    ]


def blocks(count: int) -> Iterator[slice]:
    """Slices that together are `count` elements."""
    return (slice(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK))


def join(
    planes: Sequence[Bytes], out: Words, then: Callable[[Words, slice], None] | None = None
) -> None:
    """Put planes together in `out`; `then` is told of each block while it is warm."""
    for part in blocks(len(out)):
        _join_block([plane[part] for plane in planes], out[part])
        if then is not None:
            then(out[part], part)


def _join_block(parts: list[Words], out: Words) -> None:
    while len(parts) > 2:
        parts = [_pair(low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    if len(parts) == 2:
        _pair(parts[0], parts[1], out=out)
    else:
        out[:] = parts[0]


def _pair(low: Words, high: Words, out: Words | None = None) -> Words:
    """Words of twice the width: those in `high` above those in `low`."""
    wide = UNSIGNED[2 * low.dtype.itemsize]
    if out is None:
        out = np.empty(len(low), wide)
    out[:] = low
    above = high.astype(wide)
    np.left_shift(above, wide.type(8 * low.dtype.itemsize), out=above)
    np.bitwise_or(out, above, out=out)
    return out


def fold(differences: Words) -> Words:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...: small ones of both signs become small numbers."""
    width = differences.dtype.itemsize
    signs = differences.view(SIGNED[width]) >> (8 * width - 1)
    folded: Words = (differences << differences.dtype.type(1)) ^ signs.view(differences.dtype)
    return folded


def unfold(values: Words) -> None:
    """The differences again, in place."""
    one = values.dtype.type(1)
    signs = np.bitwise_and(values, one)
    np.negative(signs, out=signs)
    np.right_shift(values, one, out=values)
    np.bitwise_xor(values, signs, out=values)
