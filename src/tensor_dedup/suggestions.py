"""Which name was perhaps meant."""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 3


def perhaps(name: str, names: Iterable[str]) -> str:
    """What follows the name in a sentence: `, perhaps 'a' or 'b'`, or "" if none is like it."""
    near = nearest(name, names)
    return f", perhaps {' or '.join(map(repr, near))}" if near else ""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The most alike first, three at most."""
    return get_close_matches(name, list(names), _SHOWN)
