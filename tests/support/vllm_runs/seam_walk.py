"""What this package replaces of the vLLM that is imported, found by looking at both.

    python -c "from vllm_runs import seam_walk; seam_walk.main()"

Nothing here is listed by hand: methods are found in the subclasses of vLLM's classes, and functions
in vLLM's modules once all of this package's patches are installed.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from tensor_dedup.patches import vllm as patches
from tensor_dedup.patches.vllm import plain_loads, seams

_OURS = patches.__name__


def install() -> None:
    """Import every module of the patches, and of vLLM that they patch; install all patches."""
    patches.register()
    for seam in seams.SEAMS:
        importlib.import_module(seam.target.partition(":")[0])
    for found in pkgutil.iter_modules(patches.__path__):
        if found.name != "preload":  # a program
            module = importlib.import_module(f"{_OURS}.{found.name}")
            getattr(module, "install", lambda: None)()
    plain_loads.plain_loader("a class is made by each call")


def overridden() -> set[str]:
    """The methods of vLLM's classes that subclasses in this package define anew."""
    return {
        f"{base.__module__}:{base.__qualname__}.{name}"
        for cls in set(_subclasses(object))
        if _is_in(cls, _OURS)
        for name in _methods(cls)
        if (base := _first_with(name, cls)) is not None
    }


def _subclasses(cls: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(cls)
    for each in found:
        yield each
        yield from _subclasses(each)


def _methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        if inspect.isfunction(value) or type(value) in (staticmethod, classmethod):
            yield name


def _first_with(name: str, cls: type) -> type | None:
    """The class of vLLM whose method a class of this package overrides."""
    theirs = (each for each in cls.__mro__ if not _is_in(each, _OURS))
    first = next((each for each in theirs if name in vars(each)), None)
    return first if first is not None and _is_in(first, "vllm") else None


def _is_in(cls: type, package: str) -> bool:
    module: object = cls.__module__  # which a class may have made anything of
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.")


def replaced() -> dict[str, set[str]]:
    """The functions that vLLM's modules and classes have from this package.

    Each has the names by which it may be recorded: where it was found, and where vLLM defines it.
    """
    from tensor_dedup.patches.vllm.kernels import scales_kept

    found: dict[str, set[str]] = {}
    with scales_kept():
        for holder, where in list(_holders()):
            for name, value in list(vars(holder).items()):
                # By type: modules of vLLM hold objects that answer to any name, or refuse to.
                bound = type(value) in (staticmethod, classmethod)
                function: Any = value.__func__ if bound else value
                if type(function) not in (FunctionType, functools.partial):
                    continue
                # Under a name of ours, a function is added and replaces nothing.
                if _is_ours(function) and not name.startswith("tensor_dedup_"):
                    place = f"{where}{name}"
                    original = getattr(function, "__wrapped__", None)
                    defined = original and f"{original.__module__}:{original.__qualname__}"
                    found[place] = {place, defined or place}
    return found


def _holders() -> Iterator[tuple[ModuleType | type, str]]:
    """vLLM's modules and the classes they define, with how a target there begins."""
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith("vllm.") or not isinstance(module, ModuleType):
            continue
        yield module, f"{name}:"
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield value, f"{name}:{value.__qualname__}."


def _is_ours(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code is not None and "/patches/vllm/" in code.co_filename


def moved(version: str) -> list[str]:
    """How the imported vLLM differs from what the table has of `version`, a major and minor one."""
    strict = (dataclasses.replace(s, optional=False) for s in seams.SEAMS if version in s.versions)
    return [str(found) for seam in strict if (found := seams.compare(seam)) is not None]


def unrecorded() -> list[str]:
    """What is overridden or replaced without its signature in the table."""
    recorded = {s.target for s in seams.SEAMS if s.signature or _is_generated(s)}
    names = [{each} for each in overridden()] + list(replaced().values())
    return sorted(min(each) for each in names if not each & recorded)


def _is_generated(seam: seams.VllmSeam) -> bool:
    """A dataclass's `__init__`, of more fields than any table should have, of which we need few."""
    return bool(seam.needs) and seam.target.endswith("EngineArgs.__init__")


def main() -> None:
    import vllm

    install()
    version = vllm.__version__
    minor = version.rpartition(".")[0]
    found = {"version": version, "moved": moved(minor), "unrecorded": unrecorded()}
    sys.stdout.write(f"{json.dumps(found)}\n")
