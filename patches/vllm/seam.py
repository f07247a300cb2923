"""What one seam is, and how it is compared with the installed vLLM.

A signature is compared by names, kinds and defaults of its parameters; annotations may change
freely. No vllm and no torch until something is compared.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Literal

# Versions of vLLM under which this package was tried, oldest first.
RECORDED_VERSION = "0.32"
EVERY = ("0.26", "0.28", RECORDED_VERSION)

Part = Literal["arguments", "loader", "reload", "updates", "profile"]
# What a load does without that part; one sentence, so that the log can say it.
WITHOUT: dict[Part, str] = {
    "arguments": "`tensor_dedup=` loads weights plainly and `--tensor-dedup` is not offered",
    "loader": "weights are loaded plainly, without sharing",
    "reload": "weights are loaded plainly, because a reload might reach other models",
    "updates": "a weight update keeps the memory that was shared before it, as long as the model",
    "profile": "on a GPU it may count shared weights otherwise than once",
}


@dataclass(frozen=True, slots=True)
class Seam:
    """One name we rely on: `target` is "module:qualified name".

    `signature` is the whole recorded signature; or `needs` the parameters that matter (a generated
    `__init__` with hundreds of them grows with every release); or `has` the attributes, fields
    included, of a class or an object; or none of them, where it only has to be there.
    `earlier`: signatures of older versions that serve as well. `optional`: where it is missing a
    load does without, as `reason` says. `versions`: in which it was seen.
    """

    target: str
    part: Part
    reason: str
    signature: str = ""
    needs: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    optional: bool = False
    versions: tuple[str, ...] = EVERY


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A seam that is not what was recorded; `found` says what is there instead."""

    seam: Seam
    found: str

    def __str__(self) -> str:
        seam = self.seam
        names = ", ".join(seam.needs or seam.has)
        kind = "parameters" if seam.needs else "attributes"
        wanted = seam.signature or (f"{kind} {names}" if names else "it")
        return f"{seam.target} is {self.found}, vLLM {seam.versions[-1]} had {wanted}"


def compare(seam: Seam) -> Mismatch | None:
    """The difference between one seam and the installed vLLM, or None."""
    try:
        found = _resolve(seam.target)
    except (ImportError, AttributeError) as error:
        return None if seam.optional else Mismatch(seam, f"missing ({error})")
    if seam.has:
        return _without(seam, [name for name in seam.has if not _has(found, name)])
    if not seam.signature and not seam.needs:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:  # no function any more, or none of Python
        return Mismatch(seam, f"without a signature ({error})")
    if seam.signature and _plain(signature) not in (seam.signature, *seam.earlier):
        return Mismatch(seam, _plain(signature))
    return _without(seam, [name for name in seam.needs if name not in signature.parameters])


def _without(seam: Seam, absent: list[str]) -> Mismatch | None:
    return Mismatch(seam, f"without {', '.join(absent)}") if absent else None


def _has(found: Any, name: str) -> bool:
    """Has it this attribute, or, a class, will its objects have it by its annotations?"""
    classes = found.__mro__ if isinstance(found, type) else ()
    return hasattr(found, name) or any(name in vars(c).get("__annotations__", {}) for c in classes)


def _resolve(target: str) -> Any:
    module, _, qualified = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualified.split("."):
        found = getattr(found, name)
    return found


def _plain(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
