"""Building a model for a GPU without its weights there: what fits because it shares loads.

Constructors run under the GPU as torch's default device, so buffers and tables are computed there
as in plain loading. Only parameters leave it, each when it is registered: at no time is more than
one of them on the GPU. What a constructor left in one goes along, unless nobody can have written
to that memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from tensor_dedup.loader.deferred.uninitialised import UninitialisedStorages


@contextmanager
def parameters_on_host(device: torch.device, untouched: UninitialisedStorages) -> Iterator[None]:
    """Let parameters that modules register on `device` be in host memory, within the block.

    Modules of the calling thread; for the CPU nothing is done. `untouched` is to watch meanwhile:
    what it holds is not copied, and memory of the host that nobody has touched takes none.
    """
    if device.type == "cpu":
        yield
        return
    original = nn.Module.register_parameter
    thread = threading.get_ident()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        here = threading.get_ident() == thread
        if here and param is not None and param.device.type == device.type:
            param.data = _on_host(param, untouched)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _on_host(parameter: nn.Parameter, untouched: UninitialisedStorages) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        as_it_is = parameter.is_meta or untouched.holds(parameter)
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        host = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="cpu")
        if not as_it_is:
            host.copy_(parameter.detach())
    return host
