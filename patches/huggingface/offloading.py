"""Keep host memory shared when Diffusers offloads groups of layers.

Diffusers copies a group to a device before each use, and then back into new private host memory.
Here, parameters that were not changed on the device get their shared mapping back instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import wrapt
from torch.utils.weak import WeakTensorKeyDictionary

from tensor_dedup.loader.residents.compare import same_bytes
from tensor_dedup.loader.residents.param_data import param_data, set_param_data
from tensor_dedup.loader.unsharing.lookup import is_mapped
from tensor_dedup.seams import Seam, usable

if TYPE_CHECKING:
    from types import ModuleType

    import torch

_WITHOUT: Final = "pipelines with group offloading have host memory of their own"
_VERSIONS: Final = "diffusers 0.42"
ONLOAD: Final = Seam(
    "diffusers.hooks.group_offloading:ModuleGroup._transfer_tensor_to_device",
    _WITHOUT,
    "a parameter goes to the device here; its mapping is kept meanwhile",
    "(self, tensor, source_tensor, default_stream)",
    versions=(_VERSIONS,),
)
OFFLOAD: Final = Seam(
    "diffusers.hooks.group_offloading:ModuleGroup._offload_to_memory",
    _WITHOUT,
    "parameters come back here, and would be copied into private memory",
    "(self)",
    versions=(_VERSIONS,),
)


# The mapping of each parameter that is on a device.
_away: Final[MutableMapping[torch.Tensor, torch.Tensor]] = WeakTensorKeyDictionary()


@functools.cache
def install() -> None:
    """Wrap the functions of Diffusers that move groups of layers between devices. Idempotent.

    If Diffusers is not imported yet, the functions are wrapped when it is imported.
    """
    wrapt.when_imported("diffusers.hooks.group_offloading")(_patch)


def _patch(module: ModuleType) -> None:
    if usable(ONLOAD) and usable(OFFLOAD):
        group: Any = module.ModuleGroup
        group._transfer_tensor_to_device = onloading(group._transfer_tensor_to_device)
        group._offload_to_memory = offloading(group._offload_to_memory)


def onloading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `original`, the function of Diffusers that moves a parameter to a device.

    The wrapper remembers the parameter's shared host memory, so that `offloading` can restore it.
    """

    @functools.wraps(original)
    def transfer(self: Any, tensor: Any, source_tensor: Any, default_stream: Any) -> Any:
        # With streams Diffusers keeps what it copies, and gives that back itself.
        held = source_tensor if self.stream is None and is_mapped(source_tensor) else None
        result = original(self, tensor, source_tensor, default_stream)
        if held is not None and not is_mapped(tensor):
            _away[tensor] = held
        return result

    return transfer


def offloading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `original`, the function of Diffusers that moves a group to host memory.

    If a parameter did not change on the device, the wrapper first restores its shared host memory.
    So Diffusers does not copy the parameter.
    """

    @functools.wraps(original)
    def offload(self: Any) -> Any:
        if len(_away) and self.offload_device.type == "cpu":
            modules = (module.parameters() for module in self.modules)
            for parameter in chain(*modules, self.parameters):
                _come_back(parameter)
        return original(self)

    return offload


def _come_back(parameter: torch.Tensor) -> None:
    mapping = _away.pop(parameter, None)
    if mapping is not None and _is_as(param_data(parameter), mapping):
        set_param_data(parameter, mapping)


def _is_as(there: torch.Tensor, mapping: torch.Tensor) -> bool:
    """Return whether the bytes are equal; torch does not count writes through `.data`.

    Plain Diffusers copies as much.
    """
    if (there.dtype, there.shape) != (mapping.dtype, mapping.shape):
        return False
    if there.stride() != mapping.stride():
        return False
    return same_bytes(there.to(mapping.device), param_data(mapping))
