"""Sizes as people write them: `64G`, `1.5GiB`, `1048576`."""

import re
from fractions import Fraction
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int | None:
    """Return the bytes that a size stands for, or None if it is no size.

    `64G`, `64Gi` and `64GiB` are powers of 1024, `64GB` is one of 1000.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    base = 1000 if match[2] and match[4] and not match[3] else 1024
    return int(Fraction(match[1]) * base ** _POWERS[match[2].upper()])
