"""`.to(dtype)`, `.half()` and the like in host memory: what was shared before is shared after.

A cast gives every model a private copy, and the same one to each. They are hashed as they are: a
cast and the way back meet the original where the cast lost nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tensor_dedup.loader.adoption import Adoption, Terms
from tensor_dedup.loader.lender import lender_for
from tensor_dedup.loader.mappings import MAPPINGS
from tensor_dedup.loader.placing import data_of
from tensor_dedup.loader.supply import Supply
from tensor_dedup.patches.signatures import Seam, usable

if TYPE_CHECKING:
    from tensor_dedup.config import TensorDedupConfig

APPLY: Final = Seam(
    "torch.nn.modules.module:Module._apply",
    "(self, fn, recurse=True)",
    "every conversion of a module's parameters goes through it",
    "a module that is converted gets private weights",
    "torch 2.13",
)
# The functions of torch that give a parameter the same values in another form. Others move
# memory to where it must stay (share_memory), or have no values (to_empty).
_CONVERSIONS: Final = frozenset(
    [
        "Module.to.<locals>.convert",
        *(f"Module.{name}.<locals>.<lambda>" for name in ("float", "double", "half", "bfloat16")),
    ]
)


Guard = Callable[[], AbstractContextManager[bool]]


class _Moves(threading.local):
    """Whether a conversion is under way in this thread: those of its parts belong to it."""

    busy = False


class _Watch:
    """How what is converted is shared: as what was loaded last."""

    config: TensorDedupConfig | None = None


_moves: Final = _Moves()
_watch: Final = _Watch()


def watch(config: TensorDedupConfig, alone: Guard) -> None:
    """Keep what is shared shared when it is converted; until nothing is mapped any more.

    `alone()` is a context in which no other thread loads; it yields False during a load of this
    one, which shares by itself.
    """
    _watch.config = config
    if not usable(APPLY) or hasattr(nn.Module._apply, "_tensor_dedup"):
        return
    original: Callable[..., Any] = nn.Module._apply

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if not len(MAPPINGS) and nn.Module._apply is _apply:
            nn.Module._apply = original  # type: ignore[method-assign]
        if _moves.busy or getattr(fn, "__qualname__", "") not in _CONVERSIONS:
            return original(self, fn, recurse)
        with _converting(self, alone):
            return original(self, fn, recurse)

    _apply._tensor_dedup = True  # type: ignore[attr-defined]
    nn.Module._apply = _apply  # type: ignore[method-assign]


@contextmanager
def _converting(model: nn.Module, alone: Guard) -> Iterator[None]:
    # Layerwise casting converts before and after every use of a layer: hashing would never end.
    hooked = hasattr(model, "_diffusers_hook")
    before = {} if hooked else {id(p): p for p in model.parameters() if _is_mapped(p)}
    _moves.busy = True
    try:
        yield
    finally:
        _moves.busy = False
    if any(each.device.type == "cpu" and not _is_mapped(each) for each in before.values()):
        with alone() as nothing_loads:
            if nothing_loads:
                _share_again(model, before.keys())


def _share_again(model: nn.Module, parameters: Container[int]) -> None:
    config = _watch.config
    assert config is not None
    lender = lender_for(config.memory_manager, type(model).__name__)
    Adoption(model, Terms(config, Supply(lender, as_aligned=True))).share_again(parameters)


def _is_mapped(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
        return False
    return MAPPINGS.find(data_of(tensor).data_ptr(), tensor.nbytes) is not None
