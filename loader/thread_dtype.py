"""A default dtype for one thread: torch's own holds for the whole process.

A model is loaded while torch's default dtype is the model's. In a process whose other threads
compute meanwhile, that would change what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

# Functions whose result is of the default dtype if its numbers are not whole ones.
_FACTORIES: Final = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.scalar_tensor,
        torch.tensor,
        torch.zeros,
    }
)
_NUMBERS: Final = (bool, int, float, list, tuple)


class ThreadDtype(TorchFunctionMode):
    """Context manager: while it is active, tensors that this thread creates are of `dtype`.

    That is, where the default dtype would be taken. `torch.get_default_dtype` is not changed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and convert what it creates of the default dtype."""
        options = kwargs or {}
        made = func(*args, **options)
        if func not in _FACTORIES or options.get("dtype") is not None:
            return made
        if func is torch.tensor and not isinstance(args[0] if args else None, _NUMBERS):
            return made  # of an array, whose dtype it has
        return made.to(self._dtype) if made.dtype is torch.get_default_dtype() else made
