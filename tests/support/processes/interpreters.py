"""New interpreters that run a function of these packages, and import nothing else before it."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[1])
_PROGRAM = """
import sys
sys.path[0], module, function = sys.argv[1:4]
del sys.argv[1:4]
from importlib import import_module
sys.exit(getattr(import_module(module), function)())
"""


def command(module: str, function: str, *arguments: str) -> list[str]:
    """The command of a process that calls `module.function()` and ends with its result.

    `sys.argv[1:]` are the arguments there.
    """
    return [sys.executable, "-c", _PROGRAM, _SUPPORT, module, function, *arguments]
