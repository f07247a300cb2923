"""Where tensors lie in memory, and giving parameters other memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import nn

_MAPS: Final = Path("/proc/self/maps")


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's data as an ordinary tensor, whatever its class makes of operations."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def replace(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a parameter or buffer other memory; its object, class and attributes stay."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def overlapping(parameters: Iterable[nn.Parameter]) -> set[int]:
    """The ids of those whose memory is, in whole or in part, that of another one."""
    ranges = []
    for each in parameters:
        if each.device.type == "cpu" and each.layout is torch.strided and each.nbytes:
            data = data_of(each)
            ranges.append((data.data_ptr(), data.data_ptr() + data.nbytes, id(each)))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(ranges):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found


class Mappings:
    """Some mappings of this process, as of when this was made."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(ranges)
        self._starts = [start for start, _ in ordered]
        self._ends = [end for _, end in ordered]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Does the memory of this tensor begin in one of them?"""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.nbytes:
            return False
        address = data_of(tensor).data_ptr()
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


def files_and_common() -> tuple[Mappings, Mappings]:
    """Mappings of files that are this process's own, and those that others can write to.

    Memory files, as residents are, are in neither. Both are empty when /proc cannot be read: then
    files stay mapped.
    """
    files, common = [], []
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
        start, _, end = fields[0].partition("-")
        where = int(start, 16), int(end, 16)
        if fields[1].endswith("s") and "w" in fields[1]:
            common.append(where)
        elif fields[4] != "0" and not fields[-1].startswith("/memfd:"):
            files.append(where)
    return Mappings(files), Mappings(common)
