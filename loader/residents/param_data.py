"""Where tensors lie in memory, and giving parameters other memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def param_data(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's data as an ordinary tensor, whatever its class makes of operations."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def set_param_data(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer other memory; its object, class and attributes stay."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of those whose memory is, in whole or in part, that of another one."""
    ranges = []
    for each in tensors:
        if each.device.type == "cpu" and each.layout is torch.strided and each.nbytes:
            data = param_data(each)
            ranges.append((data.data_ptr(), data.data_ptr() + data.nbytes, id(each)))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(ranges):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found
