"""Building a model for a GPU without its weights there: what fits because it shares loads.

Constructors run under the GPU as torch's default device, so buffers and tables are computed there
as in plain loading. Only parameters leave it, each when it is registered: at no time is more than
one of them on the GPU. What a constructor left in one goes along, unless nobody can have written
to that memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tensor_dedup.loader.weak_storage import WeakStorage, number_of


class _Untouched(TorchFunctionMode):
    """Knows the storages that `torch.empty` made and no function has been given since."""

    def __init__(self) -> None:
        super().__init__()
        # A weak reference keeps a storage's number from being given to another one.
        self._made: dict[int, WeakStorage] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._made and getattr(func, "__name__", "") != "__get__":
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                    self._made.pop(number_of(each.untyped_storage()), None)
        found = func(*args, **(kwargs or {}))
        if func is torch.empty and not found.is_meta:
            reference = WeakStorage(found.untyped_storage())
            self._made[reference.number] = reference
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is its memory what `torch.empty` made, untouched?"""
        return number_of(tensor.untyped_storage()) in self._made


@contextmanager
def parameters_on_host(device: torch.device) -> Iterator[None]:
    """Let parameters that modules register on `device` be in host memory, within the block.

    Modules of the calling thread; for the CPU nothing is done. Memory of the host that nobody has
    touched takes none.
    """
    if device.type == "cpu":
        yield
        return
    original = nn.Module.register_parameter
    thread = threading.get_ident()
    untouched = _Untouched()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        here = threading.get_ident() == thread
        if here and param is not None and param.device.type == device.type:
            param.data = _on_host(param, untouched)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        with untouched:
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_host(parameter: nn.Parameter, untouched: _Untouched) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        as_it_is = parameter.is_meta or untouched.holds(parameter)
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        host = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="cpu")
        if not as_it_is:
            host.copy_(parameter.detach())
    return host
