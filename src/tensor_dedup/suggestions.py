"""Suggestions for misspelt names, and for what is not installed."""

from collections.abc import Iterable
from difflib import get_close_matches


def perhaps(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence: `, perhaps 'a' or 'b'`, or "" if no name is similar."""
    near = nearest(name, names)
    return f", perhaps {' or '.join(map(repr, near))}" if near else ""


def install_hint(extra: str) -> str:
    """Return what to run for an extra of this package.

    The name of the package is not published: whoever registers it could run code of theirs on the
    machine of everybody who follows a hint that names it.
    """
    return f"in your clone of tensor-dedup, run `pip install '.[{extra}]'`"


def nearest(name: str, names: Iterable[str], *, most: int = 3, alike: float = 0.6) -> list[str]:
    """Return the most similar names first; `alike` is the least similarity, of 0.0 to 1.0."""
    return get_close_matches(name, list(names), most, alike)
