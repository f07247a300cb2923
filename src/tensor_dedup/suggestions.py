"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 3


def perhaps(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence: `, perhaps 'a' or 'b'`, or "" if no name is similar."""
    near = nearest(name, names)
    return f", perhaps {' or '.join(map(repr, near))}" if near else ""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar names first, at most three."""
    return get_close_matches(name, list(names), _SHOWN)
