"""Sizes as people give them to options: `64G`, `1.5GiB`, `1048576`."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

import click

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def byte_size(least: int = 0) -> Callable[[str | int], int]:
    """The `type` of an option that is a number of bytes, with a unit or without one."""

    def converted(value: str | int) -> int:
        nbytes = value if isinstance(value, int) else parse_size(value)
        if nbytes is None:
            raise click.BadParameter(f"{value!r} is not a size; write for example 64GiB")
        if nbytes < least:
            raise click.BadParameter(f"{nbytes} bytes are too few, {least} the least")
        return nbytes

    return converted


def parse_size(text: str) -> int | None:
    """Return the bytes that a size stands for, or None if it is no size.

    `64G`, `64Gi` and `64GiB` are powers of 1024, `64GB` is one of 1000.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    base = 1000 if match[2] and match[4] and not match[3] else 1024
    return int(Fraction(match[1]) * base ** _POWERS[match[2].upper()])
