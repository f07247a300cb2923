"""Which model a module is a part of.

Parts of a model are converted by themselves, and two names of one model must not become one memory
whichever part they are in; a module does not know its parent.
"""

from typing import Final
from weakref import WeakKeyDictionary, ref

from torch import nn

_wholes: Final[WeakKeyDictionary[nn.Module, ref[nn.Module]]] = WeakKeyDictionary()


def remember(whole: nn.Module) -> None:
    """Note the parts of a model; a model that was one itself may be a part by now."""
    parts = set(whole.modules())
    for part in parts:
        known = _whole(part)
        if known is None or known in parts:
            _wholes[part] = ref(whole)


def root_module(part: nn.Module) -> nn.Module:
    """The model that a module was last seen in; the module itself when in none that lives."""
    known = _whole(part)
    return part if known is None else known


def _whole(part: nn.Module) -> nn.Module | None:
    known = _wholes.get(part)
    return None if known is None else known()
