"""Natural sort order: layer 10 comes after layer 9."""

import re

_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """Return the sort key of a name."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
