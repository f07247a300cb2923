"""Arithmetic on shapes and strides. No torch."""

from collections.abc import Sequence


def dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one range of memory without gap or overlap, in any order.

    Both in elements, of equal length. Strides of dimensions of length 1 do not matter; a tensor
    without elements is dense.
    """
    if 0 in shape:
        return True
    step = 1
    for size, distance in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if distance != step:
            return False
        step *= size
    return True
