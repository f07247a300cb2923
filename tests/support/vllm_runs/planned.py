"""Loads that follow a load plan: which did, and what their models hold.

The environment that `plain` asks for applies.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tensor_dedup.patches.vllm.planned import Planning
from vllm_runs import engines

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The keys of the plans that loads in the block follow."""
    found: list[str] = []
    original = Planning.find

    def find(self: Planning, *args: Any) -> Any:
        plan = original(self, *args)
        if plan is not None:
            found.append(plan[0].plan.key)
        return plan

    with patch.object(Planning, "find", find):
        yield found


@contextmanager
def once_found(act: Callable[[], object]) -> Iterator[None]:
    """While active, `act` is called each time that a load has found a plan."""
    original = Planning.find

    def find(self: Planning, *args: Any) -> Any:
        plan = original(self, *args)
        if plan is not None:
            act()
            gc.collect()
        return plan

    with patch.object(Planning, "find", find):
        yield


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of modules whose plain attributes, parameters or buffers are not the same."""
    theirs = dict(other.named_modules())
    names = [name for name, module in one.named_modules() if _held(module) != _held(theirs[name])]
    return names if len(theirs) == len(dict(one.named_modules())) else ["<all>"]


def _held(module: nn.Module) -> tuple[Any, ...]:
    own = [(key, value) for key, value in vars(module).items() if type(value) in _PLAIN]
    own = [(key, value) for key, value in own if key != "training"]
    helper = getattr(module, "quant_method", None)
    if helper is not None:
        own += [(key, value) for key, value in vars(helper).items() if type(value) in _PLAIN]
    tensors = [
        (key, type(each), each.dtype, each.shape, each.stride(), engines.fingerprint(each))
        for held in (module._parameters, module._buffers)
        for key, each in held.items()
        if each is not None
    ]
    return own, tensors, sorted(vars(module))
