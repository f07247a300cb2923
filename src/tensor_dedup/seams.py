"""Functions and classes of a framework that this package replaces or relies on, called seams.

Each seam is recorded with its signature, which is compared with the installed framework. The
comparison covers the names, kinds and defaults of parameters; annotations may change. If a function
differs, `Replacements` does not replace it. For vLLM, a difference turns off the whole feature that
needs the function (`tensor_dedup.patches.vllm.seams`).
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seam:
    """A function, class or attribute of a framework that this package depends on.

    `target` is "module:qualified name", and `reason` says why the target matters. `part` says what
    a load does without the target. The installed framework must have the target, and:

    * with `has`, the target must have attributes of these names;
    * with `signature`, it must have this signature, or one of `earlier`, of older versions;
    * with `needs`, it must take parameters of these names.

    With `has`, the other two are not compared. If `optional` is True, the target may be missing.
    `versions` are the framework versions in which it was seen, oldest first.
    """

    framework: ClassVar[str] = ""  # what stands before a version in a message

    target: str
    part: str
    reason: str
    signature: str = ""
    needs: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    optional: bool = False
    versions: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The framework's name and the newest version in which the target was seen, as text."""
        return f"{self.framework}{self.versions[-1]}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference between `seam` and the installed framework; `found` says what is installed."""

    seam: Seam
    found: str

    def __str__(self) -> str:
        seam = self.seam
        names = ", ".join(seam.needs or seam.has)
        kind = "parameters" if seam.needs else "attributes"
        wanted = seam.signature or (f"{kind} {names}" if names else "it")
        return f"{seam.target} is {self.found}, {seam.version} had {wanted}"


def compare(seam: Seam) -> Mismatch | None:
    """Return how the installed framework differs from what `seam` records, or None if it agrees.

    The framework's module is imported. If the seam is optional, a missing name is no difference.
    """
    try:
        found = resolve(seam.target)
    except (ImportError, AttributeError) as error:
        return None if seam.optional else Mismatch(seam, f"missing ({error})")
    if seam.has:
        return _lacking(seam, [name for name in seam.has if not _has(found, name)])
    if not seam.signature and not seam.needs:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:  # no function any more, or none of Python
        return Mismatch(seam, f"without a signature ({error})")
    if seam.signature and _plain(signature) not in (seam.signature, *seam.earlier):
        return Mismatch(seam, _plain(signature))
    return _lacking(seam, [name for name in seam.needs if name not in signature.parameters])


def _lacking(seam: Seam, absent: list[str]) -> Mismatch | None:
    return Mismatch(seam, f"without {', '.join(absent)}") if absent else None


def _has(found: Any, name: str) -> bool:
    """Return whether it has an attribute, or, as a class, annotates it for its objects."""
    classes = found.__mro__ if isinstance(found, type) else ()
    return hasattr(found, name) or any(name in vars(c).get("__annotations__", {}) for c in classes)


def _plain(signature: inspect.Signature) -> str:
    """Return a signature as text, without annotations."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def resolve(target: str) -> Callable[..., Any]:
    """Return the object that `target`, "module:qualified name", names.

    Raises:
        ImportError, AttributeError: There is no such object.
    """
    holder, name = holder_of(target)
    return cast("Callable[..., Any]", getattr(holder, name))


def holder_of(target: str) -> tuple[Any, str]:
    """Return the module or class that has `target` as an attribute, and the attribute's name.

    `target` is "module:qualified name".

    Raises:
        ImportError, AttributeError: There is no such module or class.
    """
    module, _, qualified = target.partition(":")
    *path, name = qualified.split(".")
    found: Any = importlib.import_module(module)
    for part in path:
        found = getattr(found, part)
    return found, name


@functools.cache
def usable(seam: Seam) -> bool:
    """Return whether the installed framework agrees with what `seam` records.

    A difference is logged once in this process.
    """
    mismatch = compare(seam)
    if mismatch is not None:
        _log.warning(
            "%s is %s, in %s it was %s: %s",
            *(seam.target, mismatch.found, seam.version, seam.signature, seam.part),
        )
    return mismatch is None


class Replacements:
    """A context manager that replaces functions of a framework while it is active.

    `wanted` has pairs of a `Seam`, which names a function and its signature, and a callable. The
    callable gets the original function and returns the replacement. An installed function with
    another signature is not replaced. The replacements take effect in all threads. The context
    manager itself is for one thread.
    """

    def __init__(self, wanted: Iterable[tuple[Seam, Callable[[Callable[..., Any]], Any]]]) -> None:
        """Take seams, each with a function that makes the replacement from the original."""
        self._wanted = list(wanted)
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for seam, make in self._wanted:
            if usable(seam):
                holder, name = holder_of(seam.target)
                original = getattr(holder, name)
                self._originals.append((holder, name, original))
                setattr(holder, name, functools.wraps(original)(make(original)))

    def __exit__(self, *error: object) -> None:
        while self._originals:
            setattr(*self._originals.pop())
