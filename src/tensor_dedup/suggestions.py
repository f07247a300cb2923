"""Suggestions in error messages: similar names, and how to install an optional package."""

from collections.abc import Iterable
from difflib import get_close_matches


def perhaps(name: str, names: Iterable[str]) -> str:
    """Return those of `names` that are similar to `name`, as the end of a sentence.

    The end has the form `, perhaps 'a' or 'b'`. It is "" if no name is similar.
    """
    near = nearest(name, names)
    return f", perhaps {' or '.join(map(repr, near))}" if near else ""


def install_hint(extra: str) -> str:
    """Return a sentence that says how to install the optional extra `extra` of this package.

    The command installs from a clone, because this package is not published under its name.
    """
    return f"in your clone of tensor-dedup, run `pip install '.[{extra}]'`"


def nearest(name: str, names: Iterable[str], *, most: int = 3, alike: float = 0.6) -> list[str]:
    """Return up to `most` of the `names` that are similar to `name`, the most similar first.

    `alike` is the least similarity that counts, from 0.0 to 1.0.
    """
    return get_close_matches(name, list(names), most, alike)
