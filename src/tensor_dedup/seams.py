"""Functions of a framework that we wrap or rely on, and what is installed in their place.

A signature is compared by names, kinds and defaults of its parameters; annotations may change.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplacedSeam:
    """One function we replace: `target` is "module:qualified name".

    `signature` is the whole recorded one; `reason` says why it is replaced, `without` what a load
    does when it is not what was recorded, `versions` against which versions it was checked.
    """

    target: str
    signature: str
    reason: str
    without: str
    versions: str


@functools.cache
def usable(seam: ReplacedSeam) -> bool:
    """Is the installed function what was recorded? Otherwise logged once in this process."""
    try:
        found = plain(inspect.signature(resolve(seam.target)))
    except (ImportError, AttributeError) as error:
        found = f"missing ({error})"
    if found != seam.signature:
        _log.warning(
            "%s is %s, in %s it was %s: %s",
            *(seam.target, found, seam.versions, seam.signature, seam.without),
        )
    return found == seam.signature


def resolve(target: str) -> Callable[..., Any]:
    """The function of that name. ImportError or AttributeError when it is gone."""
    holder, name = holder_of(target)
    return cast("Callable[..., Any]", getattr(holder, name))


def holder_of(target: str) -> tuple[Any, str]:
    """The module or class that a function is an attribute of, and its name there."""
    module, _, qualified = target.partition(":")
    *path, name = qualified.split(".")
    found: Any = importlib.import_module(module)
    for part in path:
        found = getattr(found, part)
    return found, name


def plain(signature: inspect.Signature) -> str:
    """A signature as text, without annotations."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


class Replacements:
    """Functions in place of others for a while; a context manager. One thread."""

    def __init__(
        self, wanted: Iterable[tuple[ReplacedSeam, Callable[[Callable[..., Any]], Any]]]
    ) -> None:
        """`wanted`: a seam, and what makes the function to put there of the one that is there."""
        self._wanted = list(wanted)
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for seam, make in self._wanted:
            if usable(seam):
                holder, name = holder_of(seam.target)
                original = getattr(holder, name)
                self._before.append((holder, name, original))
                setattr(holder, name, functools.wraps(original)(make(original)))

    def __exit__(self, *error: object) -> None:
        while self._before:
            setattr(*self._before.pop())
